"""What is known of an operator before it is called: its schema, whether it is left out, whether its kernel is Python.

The problem: a dispatch mode is told a function and nothing else, thousands of times per step. The idea: what its schema
says (which arguments it writes to, whether what comes out may be a view) and what the settings say is worked out once
and kept. A kernel that is a Python function (vLLM's opaque operators, a vendor's wrappers) is found in the dispatcher's
own table, so that it can be run with the mode still on and what it calls be seen. Not here: calls (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_accprobe.capture.ops.choice import FRESH, Choice
from vllm_accprobe.capture.ops.op_tensors import address

_OVERWRITING = ("aten.copy_.", "aten.fill_.", "aten.zero_.")


class Operator:
    """One overload of an operator.

    denied: why no call is captured, or None. view: what comes out may share memory with what goes in, and nothing is
    written. overwrites: earlier values of a written argument do not matter. fresh: gives memory nobody has written to.
    kernels: dispatch keys whose kernel is a Python function. taps: by module, the tap's name and whether it is wanted.
    """

    __slots__ = (
        "_arguments",
        "_writes",
        "denied",
        "fresh",
        "kernels",
        "name",
        "overwrites",
        "skip_tap",
        "taps",
        "view",
    )

    def __init__(self, func: Any, choice: Choice):
        self.name = str(func)
        self.skip_tap = f"::{self.name}"
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        written = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self._arguments = tuple(a.name for a in arguments)
        self.denied = choice.denied(self.name) if schema is not None else "a higher-order operator"
        self._writes = frozenset(role for i, a in written for role in (f"input.{i}", f"input.{a.name}"))
        # PyTorch's convention: what is written and can only be given by name is an output buffer.
        self.overwrites = self.name.startswith(_OVERWRITING) or any(a.kwarg_only for _, a in written)
        self.view = not written and schema is not None and any(r.alias_info is not None for r in schema.returns)
        self.fresh = self.name.startswith(FRESH)
        self.kernels = python_kernels(self.name) if schema is not None else frozenset()
        self.taps: dict[str | None, tuple[str, bool]] = {}

    @property
    def writes(self) -> bool:
        """Whether its schema lets it write to an argument."""
        return bool(self._writes)

    def written(self, role: str) -> bool:
        """Whether the tensor in ``role`` (``input.0``, or ``input.0.1`` in a list) is in a written argument."""
        if not self._writes:
            return False
        return role in self._writes or ".".join(role.split(".")[:2]) in self._writes

    def names_of(self, tensors: Sequence[tuple[str, Any]]) -> dict[str, str]:
        """By role, the names of the arguments that tensors are: ``slot_mapping``, ``indices.0`` in a list."""
        names = {}
        for role, _ in tensors:
            _, place, *rest = role.split(".")
            name = place
            if place.isdecimal() and int(place) < len(self._arguments):
                name = self._arguments[int(place)]
            names[role] = ".".join((name, *rest))
        return names

    def integers_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The arguments that are whole numbers, by name."""
        found = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        return {name: value for name, value in found.items() if type(value) is int}

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The dispatch key of the Python kernel that PyTorch would choose for these arguments, or None."""
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if first is None:
            return None
        for name in (torch._C._dispatch_key_for_device(first.device.type), "CompositeExplicitAutograd"):
            key = getattr(torch._C.DispatchKey, name, None)
            if key is not None and func.has_kernel_for_dispatch_key(key):
                return key if name in self.kernels else None
        return None


def python_kernels(name: str) -> frozenset[str]:
    """Names of the dispatch keys under which the kernel of operator ``name`` (``vllm.x.default``) is Python."""
    namespace, _, rest = name.partition(".")
    if namespace in ("aten", "prim", "prims"):
        return frozenset()
    base, _, overload = rest.rpartition(".")
    try:
        table = torch._C._dispatch_dump(f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}"))
    except (RuntimeError, AttributeError):
        return frozenset()
    # "CPU: registered at /.../library.py:12 :: ..." after three lines about the schema
    return frozenset(line.partition(":")[0].partition("[")[0] for line in table.splitlines()[3:] if ".py:" in line)


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """All tensors in what an operator returned."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors_in(item)


def shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether the first thing that came out lies in the memory of the first tensor that went in: a view, then."""
    out = next(tensors_in(result), None)
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if out is None or first is None:
        return True
    where = address(out)
    return where == address(first) if where else out.numel() == 0
