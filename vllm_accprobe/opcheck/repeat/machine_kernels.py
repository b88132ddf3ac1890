"""A call as this machine's own kernel runs it, outputs by role.

The problem: repeating says something of a kernel only if that kernel runs, from fresh copies of the very inputs,
because operators write into their arguments. The idea: an operator runs itself, a module is what `--rerun` and
`--against device` make of it, and a function that was named by hand is called. Libraries that register operators are
imported first (`--load`). What cannot be run here is declined with the reason.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.case import closed, mapped
from vllm_accprobe.opcheck.calls.views import laid_out
from vllm_accprobe.opcheck.kit.bench import loaded
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import aten
from vllm_accprobe.opcheck.references.parts import on
from vllm_accprobe.opcheck.run.rerun import accelerator, forward_native
from vllm_accprobe.opcheck.run.result_row import Unavailable

FUNCTION = "function"
"""In Call.extra: ``package.module:name`` of the Python function that is the kernel."""
FRESH = "fresh"
"""In Call.extra: places of the arguments that are only written to, whose earlier values do not matter."""
_VLLM = ("torch.ops._C.", "torch.ops.vllm.", "torch.ops._moe_C.", "torch.ops._C_cache_ops.")

_UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "empty_permuted")


class NotLoaded(Unavailable):
    """A library or a function that was named cannot be had; one line."""


class MachineKernels:
    """The kernels of one device of this machine. device: torch's name, "" for the accelerator or else the CPU; load:
    modules to import first. Raises NotLoaded."""

    def __init__(self, references: References, device: str = "", load: Iterable[str] = ()):
        self.references = references
        self.device = torch.device(device or accelerator() or "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, os.cpu_count() or 1))
        for name in load:
            load_module(name, "--load")

    def described(self) -> str:
        """What runs, in words."""
        if self.device.type == "cpu":
            return f"run here on this machine's CPU, torch with {torch.get_num_threads()} threads"
        return f"run here on this machine's {self.device.type}"

    def ready(self, call: Call) -> Call:
        """``call`` on the device, with all that it needs in itself."""
        return on(closed(call, self.references), self.device)

    def here(self, call: Call) -> Call:
        """The same on the CPU, for a reference."""
        return on(closed(call, self.references), "cpu")

    def run(self, call: Call, fill: int | None = None) -> Mapping[str, Any] | Declined:
        """Outputs by role, on the CPU, of a call that is `ready`. fill: a byte for the arguments that are only written
        to. Inputs are copied, in their captured layout: no run sees what another one wrote."""
        fresh = call.extra.get(FRESH, ())
        args = tuple(_copied(v, fill if k in fresh else None) for k, v in enumerate(call.args))
        kwargs = {k: _copied(v, fill if k in fresh else None) for k, v in call.kwargs.items()}
        again = replace(call, args=args, kwargs=kwargs, inputs={k: _copied(v, None) for k, v in call.inputs.items()})
        with torch.no_grad():
            found = self._made(laid_out(again))
        if isinstance(found, Declined):
            return found
        roles = [r for r in call.outputs if r in found] or [r for r in found if r.startswith("output.")]
        roles = roles or [f"inplace.input.{k}" for k in _mutated(call)]
        roles += [f"inplace.input.{k}" for k in fresh if f"inplace.input.{k}" in found]
        made = {r: found[r].detach().to("cpu") for r in dict.fromkeys(roles) if r in found}
        return made or Declined("nothing comes out of it")

    def _made(self, call: Call) -> Mapping[str, Any] | Declined:
        if FUNCTION in call.extra:
            try:
                return aten.outputs_by_role(
                    function(call.extra[FUNCTION])(*call.args, **call.kwargs), call.args, call.kwargs
                )
            except Exception as error:  # whatever a stranger's kernel raises is its result
                text = " ".join(str(error).split())[:120]
                return Declined(f"{call.cls} raised {type(error).__name__}: {text}", True)
        if call.cls.startswith(_VLLM):
            load_vllm()
        if (why := _undefined(call)) is not None:
            return Declined(why)
        found = forward_native(call) if self.device.type == "cpu" else None
        if found is not None:
            return found
        made = self.references.run(call)
        if isinstance(made, Declined) and "refuses" not in made.reason and call.cls.startswith(_VLLM):
            return Declined(f"{made.reason}: is the library that has it installed? --load names one", made.failed)
        return made


def _mutated(call: Call) -> list[int]:
    """Places of the arguments that an operator changes, by its schema."""
    try:
        operator = aten.of(call.cls)
    except Declined:
        return []
    overload = operator if hasattr(operator, "_schema") else getattr(operator, operator.overloads()[0])
    return [k for k, a in enumerate(overload._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def _undefined(call: Call) -> str | None:
    """Why two runs of an operator are not to be equal; None where they are."""
    try:
        operator = aten.of(call.cls)
    except Declined:  # a module's class; or unknown, which running it says
        return None
    overloads = [operator] if hasattr(operator, "tags") else [getattr(operator, n) for n in operator.overloads()]
    if any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads):
        return "an operator that draws random numbers"
    name = call.cls.removeprefix("torch.ops.").split(".")[1]
    return "an operator whose result has no defined values" if name in _UNDEFINED else None


def _copied(value: Any, fill: int | None) -> Any:
    def copy(t: Any) -> Any:
        if fill is None:
            return t.clone()
        return torch.full((t.numel() * t.element_size(),), fill, dtype=torch.uint8, device=t.device).view(
            t.dtype).view(t.shape) if t.numel() else t.clone()  # fmt: skip

    return mapped(value, copy)


@functools.cache
def function(name: str) -> Any:
    """The function of ``package.module:name`` or ``path/to/file.py:name``. Raises NotLoaded."""
    module, _, attribute = name.rpartition(":")
    found = getattr(load_module(module, "--op"), attribute, None)
    if not callable(found):
        raise NotLoaded(f"--op {name}: {module} has no function {attribute}")
    return found


@functools.cache
def load_module(name: str, option: str) -> Any:
    """A module by its name or by the path of its file. Raises NotLoaded."""
    try:
        return loaded(name)
    except ValueError as why:
        raise NotLoaded(f"{option} {name}: {why}") from None


@functools.cache
def load_vllm() -> None:
    """vLLM's kernels, where it is installed; where they cannot be had, the operator is missing and says so."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        importlib.import_module("vllm._custom_ops")
    except Exception:  # another version, another machine
        pass
    finally:
        logging.disable(before)
