"""What references of several families need of a call and of a device.

The problem: operators of one kernel library get their arguments by place or by name, write their results into one of
them, and work on runs of rows of several requests; references decline in the same words where something is missing. The
idea: `Arguments` gives an operator's arguments by the names of its signature, `RowResults` collects what each run of
rows gave, and the rest requires parameters, other ranks, and what was captured inside a block. A device kernel
(``@device_kernel``) is a class of modules in a few torch operators, in the captured dtype, on the device of the call's
tensors; a vendor's kernel of the same name is taken where it is registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.calls.case import mapped
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if


class Arguments(dict[str, Any]):
    """An operator's arguments, or a module's inputs, by ``names``, those of its signature in order; None: missing."""

    def __init__(self, call: Call, names: str):
        self._call, self._order = call, names.split()
        super().__init__(dict.fromkeys(self._order))
        self.update(zip(self._order, call.args, strict=False))
        for place, name in enumerate(self._order) if call.kwargs or call.inputs else ():
            if name in call.kwargs:
                self[name] = call.kwargs[name]
            elif name in call.inputs or str(place) in call.inputs:
                self[name] = call.inputs.get(name, call.inputs.get(str(place)))

    def wide(self, *names: str) -> list[Any]:
        """These tensors in float64. Raises Declined where one is no tensor."""
        for name in names:
            if not isinstance(self[name], torch.Tensor):
                raise Declined(f"argument {name} is no tensor")
        return [self[name].double() for name in names]

    def wide_or_none(self, name: str) -> Any | None:
        """This tensor in float64; None for anything else."""
        return self[name].double() if isinstance(self[name], torch.Tensor) else None

    def role(self, name: str) -> str:
        """The role of this argument after the call: ``inplace.input.0``, or ``inplace.input.state`` by keyword."""
        return f"inplace.input.{name if name in self._call.kwargs else self._order.index(name)}"


class RowResults:
    """(value, noise, bound, ...) of the rows of a batch, put together from the runs of its requests. rows: how many;
    shape: of a row, for a batch of which no run has a result."""

    def __init__(self, rows: int, *shape: int):
        self.known = torch.zeros(rows, dtype=torch.bool)
        self.parts: list[Any] = [torch.zeros(rows, *shape, dtype=torch.float64) for _ in range(3)] if shape else []

    def put(self, at: Any, found: Sequence[Any]) -> None:
        """Results of the rows ``at``, a slice or indices."""
        if not self.parts:
            self.parts = [torch.zeros(len(self.known), *t.shape[1:], dtype=t.dtype, device=t.device) for t in found]
        for whole, part in zip(self.parts, found, strict=True):
            whole[at] = part
        self.known[at.cpu() if isinstance(at, torch.Tensor) else at] = True

    def rows(self) -> Any | None:
        """bool [rows], which have a result; None for all."""
        return None if bool(self.known.all()) else self.known

    def expected(self, like: Any, groups: int | None = None, reason: str = "no row of a request") -> Expected:
        """In the shape of ``like``; rows of padding may follow those of the batch. Raises Declined for another one."""
        value, noise, bound = self.parts
        count = like.numel() // max(value[0].numel(), 1) if len(value) else 0
        if like.numel() != count * value[:1].numel() or count < len(value):
            raise Declined(f"an output {list(value.shape)} where {list(like.shape)} was captured")
        if count > len(value):
            value, noise, bound = (torch.cat((t, t.new_zeros(count - len(t), *t.shape[1:]))) for t in self.parts)
            self.known = torch.cat((self.known, self.known.new_zeros(count - len(self.known))))
        decline_if(self.rows() is not None and len(like) != count, "some of its rows belong to no request")
        return Expected(value, noise, bound=bound, rows=self.rows(), reason=reason, groups=groups).map(
            lambda t: t.reshape(like.shape)
        )


def runs(cu_seqlens: Any | None, tokens: int) -> list[tuple[int, int]]:
    """(begin, end) of each sequence. Raises Declined where they are not those of ``tokens`` rows."""
    if cu_seqlens is None:
        return [(0, tokens)]
    ends = [int(e) for e in cu_seqlens]
    if not ends or ends[0] != 0 or ends[-1] > tokens or sorted(ends) != ends:
        raise Declined("its sequences' bounds do not fit its rows")
    return list(pairwise(ends))


def slots(indices: Any | None, count: int, states: int, null: int | None = None) -> Iterator[int | None]:
    """The place of each sequence's state, None for padding: below 0, or ``null``. Raises Declined."""
    for n in range(count):
        at = n if indices is None else int(indices.reshape(len(indices), -1)[n, 0])
        if indices is not None and (at < 0 or at == null):
            yield None
        elif indices is not None and at >= states:
            raise Declined("a state's index lies outside of the states that were captured")
        else:
            yield at


def within(index: Any, size: int, reason: str = "an index lies outside of what it is an index of") -> Any:
    """Indices as int64; raises Declined where one lies outside of ``size``."""
    found = index.long()
    decline_if(found.numel() and (int(found.min()) < 0 or int(found.max()) >= size), reason)
    return found


def on(call: Call, device: Any) -> Call:
    """``call`` with all its tensors on ``device``; one without values (torch's device meta, an output) stays."""
    moved: Call = mapped(call, lambda t: t if t.is_meta else t.to(device))
    return moved


def vendor(name: str) -> Any | None:
    """torch.ops._C.<name> where it is registered in this process, else None."""
    return getattr(torch.ops._C, name, None)


def weight_here(call: Call) -> Any:
    """The parameter ``weight`` in its own dtype, where it lies. Raises Declined: missing, packed or quantised."""
    call.param("weight")  # raises Declined where it is missing or packed
    found = call.params["weight"]
    if not found.is_floating_point() or found.element_size() < 2:
        raise Declined("a quantised weight: what its kernel does is not torch's")
    return found


def param_if(call: Call, name: str) -> Any | None:
    """A parameter in float64; None where the module has none of this name. Raises Declined where it was packed."""
    return call.param(name) if name in call.params else None


def unit_of(*tensors: Any) -> float:
    """One rounding of the coarsest of these tensors' dtypes."""
    return max(unit(str(t.dtype).removeprefix("torch.")) for t in tensors)


def as_captured(t: Any) -> Any:
    """``t`` as `Expected.value`: float64, or int64 for integers and booleans."""
    return t.double() if t.is_floating_point() else t.long()


def equal(t: Any, **more: Any) -> Expected:
    """What is moved and not computed: equal to the bit. more: further fields of the Expected."""
    return Expected(as_captured(t), unit=0.0, **more)


def reshaped(y: Expected, shape: Sequence[int]) -> Expected:
    """``y`` in the shape that was captured."""
    return y.map(lambda t: t.reshape(shape))


def ranks_of(call: Call, size: int) -> list[Call]:
    """The same call on all ``size`` ranks, whose results are added up. Raises Declined."""
    found: list[Call] = list(call.extra.get("ranks", ()))
    decline_if(len(found) != size, "adds up over ranks, and not all of them were captured")
    return found
