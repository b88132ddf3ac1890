"""Captures the operators that a function calls, and replays them on the very storages of the capture, without a card.

The problem: a CUDA graph is a list of kernels with fixed addresses. Its replay runs no Python, reads inputs where they
lay at capture, and writes outputs where they lay at capture; what goes wrong with graphs (a stale input, a recycled
buffer, padding that is read) goes wrong because of that. A CPU has no such thing. The idea: a TorchDispatchMode sees
each operator with its tensors; the list of these calls is the graph. Replaying a call computes it again and copies
what it returns into the tensors that it returned at capture. Three sorts of calls are no kernels, and do nothing at
replay: views, allocations without content (``torch.empty``: its memory keeps what the last replay left there, as on a
card), and operators without tensors. An operator whose result's shape depends on data cannot be captured, as on a card.

Not here: when vLLM captures and replays (captured_wrapper.py); whether inputs lie where they lay (vLLM's own check).
Unlike on a card, a capture also computes; no memory is recycled within a graph or between graphs unless somebody asks
(``share``), and code that does not go through torch's dispatcher (what inductor generates) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


class CaptureError(RuntimeError):
    """Something was called during a capture that a card could not capture either."""


def tensors(nest: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def memory(tensor: torch.Tensor) -> int:
    """What identifies the tensor's storage: two tensors with the same number share memory."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Call:
    """One operator call: ``run(*args, **kwargs)`` is computed at each replay, and its tensors are copied over those in
    ``outputs`` that are ``fresh`` (True: this call made its memory; False: it returned an argument's)."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...] = ()
    fresh: tuple[bool, ...] = ()

    def replay(self) -> None:
        """Raises RuntimeError where an output has another shape than at capture."""
        made = tensors(self.run(*self.args, **self.kwargs))
        for new, old, fresh in zip(made, self.outputs, self.fresh, strict=True):
            if fresh:
                old.copy_(new)

    def moved(self, where: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The same call on other tensors."""
        args, kwargs, outputs = (
            tree_map(lambda x: where(x) if isinstance(x, torch.Tensor) else x, nest)
            for nest in (self.args, self.kwargs, self.outputs)
        )
        return replace(self, args=args, kwargs=kwargs, outputs=outputs)


class CallGraph:
    """A captured list of calls, with the interface of ``torch.cuda.CUDAGraph`` that vLLM uses.

    calls: may be changed, to plant a fault. replays: how often it was replayed.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.replays = 0

    def replay(self) -> None:
        """Computes all calls again, on the storages of the capture. Like a card, it asks for no mode of torch's."""
        with torch.inference_mode():
            for call in self.calls:
                call.replay()
        self.replays += 1

    def share(self, old: torch.Tensor, new: torch.Tensor) -> int:
        """From now on ``new``'s memory stands for ``old``'s in all calls. Returns in how many calls it does.

        old, new: of the same dtype; new's storage is at least as large as what is used of old's, or ValueError."""
        storage, source = new.untyped_storage(), memory(old)

        def where(tensor: torch.Tensor) -> torch.Tensor:
            if memory(tensor) != source:
                return tensor
            return torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )

        if storage.nbytes() < old.untyped_storage().nbytes():
            raise ValueError(f"{storage.nbytes()} bytes cannot stand for {old.untyped_storage().nbytes()}")
        touched = [any(memory(t) == source for t in tensors((c.args, c.kwargs, c.outputs))) for c in self.calls]
        self.calls = [c.moved(where) if yes else c for c, yes in zip(self.calls, touched, strict=True)]
        return sum(touched)


class capture(TorchDispatchMode):  # called like torch.cuda.graph, for which it stands
    """``with capture(graph):`` computes and records what is called inside. The further arguments of torch.cuda.graph
    (pool, stream) say nothing here. fill: what allocations of floating point without content are filled with, once, at
    capture; None leaves what stands there by chance.

    Raises:
        CaptureError: an operator whose outputs' shapes depend on data, or that reads a number out of a tensor.
    """

    def __init__(self, graph: CallGraph, pool: Any = None, stream: Any = None, *, fill: float | None = None) -> None:
        super().__init__()
        self.graph = graph
        self.fill = fill

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _depends_on_data(func, args):
            raise CaptureError(f"{func} cannot be captured: what it returns depends on data")
        result = func(*args, **kwargs)
        if _name(func) in ALLOCATIONS:
            if self.fill is not None and result.is_floating_point():
                result.fill_(self.fill)
        else:
            self.graph.calls.extend(_kernels(func, args, kwargs, result))
        return result


def _name(func: Any) -> str:
    """``empty`` of ``aten::empty``."""
    return func._schema.name.split("::")[-1]


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    if _name(func) == "index":  # by a mask, but not by numbers
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1]))
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _kernels(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[Call]:
    """The call, unless it is a view or about no tensors."""
    outputs = tensors(result)
    given = {memory(t) for t in tensors((args, kwargs))}
    fresh = tuple(memory(t) not in given for t in outputs)
    view = bool(outputs) and not any(fresh) and not func._schema.is_mutable
    if not view and (outputs or given):
        yield Call(func._schema.name, func, args, kwargs, tuple(outputs), fresh)
