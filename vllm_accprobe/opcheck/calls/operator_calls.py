"""From a dump's operator calls to calls that can be run again.

The problem: an operator's arguments stand in a journal line, its tensors in records, a parameter's under another tap,
an output buffer that was not written yet is kept nowhere; and of a cache only the blocks that the call touches are
kept. The idea: the line's VALUES become Python values in the order of the operator's signature. The blocks that there
are become the whole cache, and block tables, slots and indices are renumbered for it (`Renumbered`), so that the call
is complete in itself. What was not kept makes a call that says so. The class of such a call is the operator's name.
Elsewhere: which blocks a call touches (capture/ops/op_tensors.py), the words of the line (dump/journal.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.dump.journal import inputs, tensors
from vllm_accprobe.dump.journal_writer import digest
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.opcheck.calls.views import span, view_of
from vllm_accprobe.opcheck.reference import Call, MemoryLayout, Params


class Renumbered:
    """Numbers of blocks times ``unit``, for the cache that blocks ``ids`` [n] make."""

    def __init__(self, ids: Any, unit: int):
        self._sorted, self._places = torch.sort(ids.long().reshape(-1), stable=True)
        self._unit = unit

    def __call__(self, numbers: Any) -> Any:
        """An integer tensor's values renumbered, its dtype as it is."""
        if numbers.dtype not in (torch.int32, torch.int64) or not len(self._sorted):
            return numbers
        wide = numbers.long()
        blocks = wide.div(self._unit, rounding_mode="floor")
        at = torch.searchsorted(self._sorted, blocks).clamp(max=len(self._sorted) - 1)
        there = self._sorted[at] == blocks
        found = self._places[at] * self._unit + wide % self._unit
        return torch.where(wide < 0, wide, torch.where(there, found, -1)).to(numbers.dtype)


def numbered(op: OpCall, records: Mapping[str, Record], read: Callable[[Record], Any]) -> dict[str, Renumbered]:
    """By role, how the arguments of ``op`` that name blocks are to be written; {} for nearly every call."""
    found: dict[str, Renumbered] = {}
    for t in inputs(op):
        blocks = t.get("blocks")
        if not blocks:
            continue
        record = records.get(blocks["ids"])
        if record is None or record.payload is None:
            continue
        for role, unit in blocks["by"]:
            found.setdefault(role, Renumbered(read(record), unit))
    return found


Records = Mapping[str, Record]
_MOST = 1 << 28
"""Elements of an output buffer that is made again: a dump may come from a stranger."""


class NotKept(Exception):
    """An argument is not in the dump; the reason is the message."""


STATISTICS = "only statistics were captured"
LOST = "its values are lost: their file is not there, or damaged"
FINGERPRINT = "a parameter, kept as a fingerprint"
"""How an argument's reason ends (capture/ops) that is a parameter of which no payload was kept."""


def op_call(
    op: OpCall, records: Records, read: Callable[[Record], Any], param: Callable[[str], Record | None],
    draw: Callable[[Mapping[str, Any]], Any] | None = None, shared: Params | None = None,
) -> Call:  # fmt: skip
    """``op`` as a Call. records: of this call, by role; read: a record's tensor; param: the record of
    ``<tap>/param.<name>``; draw: makes a tensor that was not kept, from its VALUE; shared: of the operator's tap, where
    parameters among the arguments are kept, and which becomes the call's params. Raises NotKept."""
    maker = _Maker(records, read, param, draw, numbered(op, records, read), shared)
    args = tuple(maker.value(v) for v in op.args)
    kwargs = {k: maker.value(v) for k, v in op.kwargs.items()}
    made = {r: x for r, x in records.items() if r.startswith(("output.", "inplace."))}
    outputs = {r: read(x) for r, x in made.items() if x.payload is not None or draw is not None}
    if draw is not None:  # statistics of an operator stand in its line alone
        outputs = {str(t["role"]): _like(t) for t in tensors(op.outputs)} | outputs
    fresh = [k for k, v in enumerate(op.args) if isinstance(v, Mapping) and _fresh(v.get("tensor"))]
    return Call(op.tap, op.op, args=args, kwargs=kwargs, outputs=outputs, extra={"fresh": fresh} if fresh else {},
                params={} if shared is None else shared, views=_views(op, maker.numbers))  # fmt: skip


def _views(op: OpCall, numbers: Mapping[str, Any]) -> dict[str, MemoryLayout]:
    """Layouts of the arguments that were not contiguous; none of caches, of which some blocks are here."""
    found: dict[str, MemoryLayout] = {}
    for t in inputs(op):
        place = str(t["role"]).removeprefix("input.")
        view = None if t.get("blocks") or t["role"] in numbers else view_of(t.get("shape", ()), t.get("stride"))
        if view is not None:
            found[f"args.{place}" if place[:1].isdigit() else f"kwargs.{place}"] = view
    return found


def _like(t: Mapping[str, Any]) -> Any:
    """Shape and dtype of a VALUE's tensor, without memory. Raises NotKept."""
    dtype = getattr(torch, str(t["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise NotKept(f"this torch has no dtype {t['dtype']}")
    return torch.empty(tuple(t.get("shape", ())), dtype=dtype, device="meta")


def _fresh(tensor: Any) -> bool:
    """Whether it was uninitialised memory before the operator."""
    return isinstance(tensor, Mapping) and bool(tensor.get("fresh"))


def _as_passed(
    found: Any, t: Mapping[str, Any], shape: tuple[int, ...], stride: tuple[int, ...] | None
) -> Any:
    """The argument of VALUE ``t`` from its own record, or, with a stride, from that of the parameter it is a view of:
    a transposed one, a part of one. Where a view begins is not recorded, so its hash must agree. Raises NotKept."""
    if stride is None:
        return found.reshape(shape)
    whole = math.prod(shape)
    if len(stride) == len(shape) and whole <= max(found.numel(), _EXPANDED) and span(shape, stride) <= found.numel():
        found = found.contiguous().as_strided(shape, stride)
    elif found.numel() == whole:
        found = found.reshape(shape)
    if found.shape != shape:
        raise NotKept(f"argument {t['role']} was not kept: an unknown part of a parameter")
    known, dense = t.get("hash"), found.contiguous()
    if found.shape != shape or (known is not None and known != digest([(dense.data_ptr(), dense.nbytes)])):
        raise NotKept(f"argument {t['role']} was not kept: an unknown part of a parameter")
    return found


_EXPANDED = 1 << 24
"""Chosen: elements of an expanded parameter (a bias); a stride of 0 in a stranger's journal is unbounded."""


@dataclass(frozen=True)
class _Maker:
    """Python values of a line's VALUES; fields as of `op_call`; numbers: of `numbered`."""

    records: Records
    read: Callable[[Record], Any]
    param: Callable[[str], Record | None]
    draw: Callable[[Mapping[str, Any]], Any] | None
    numbers: Mapping[str, Renumbered]
    shared: Params | None

    def value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "tensor" in value:
            return self.tensor(value["tensor"])
        if "list" in value:
            return [self.value(v) for v in value["list"]]
        if "float" in value:
            return float(value["float"])
        if "complex" in value:
            return complex(*(float(self.value(p)) for p in value["complex"]))
        if "skipped" in value:
            if self.draw is not None and value.get("param") and "dtype" in value:
                return self.tensor(value)  # a parameter of which a fingerprint was kept
            what = f"argument {value['role']}" if value.get("role") else "an argument"
            raise NotKept(f"{what} was not kept: {value['skipped']}")
        kind, word = next(iter(value.items()))
        if kind == "slice":
            return slice(*word)
        if kind == "ellipsis":
            return ...
        if kind == "device":
            return torch.device("cpu")  # where it ran is no part of what it computes
        found = getattr(torch, str(word), None)
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise NotKept(f"this torch has no {kind} {word}")
        return found

    def tensor(self, t: Mapping[str, Any]) -> Any:
        role = str(t["role"])
        record = self.records.get(role)
        own = record is not None and record.payload is not None
        if not own and t.get("param"):
            record = self.param(str(t["param"]))
        if record is not None and record.payload is not None:
            if t.get("blocks"):
                return self.read(record)
            shape, stride = tuple(t.get("shape", record.shape)), None if own else tuple(t.get("stride", ()))
            if t.get("param") and self.shared is not None and role not in self.numbers:
                lies = record.rank, record.payload, record.dtype, shape, stride
                return self.shared.share(lies, lambda: _as_passed(self.read(record), t, shape, stride))
            found = _as_passed(self.read(record), t, shape, stride)
            return self.numbers[role](found) if role in self.numbers else found
        if record is not None and record.lost:
            raise NotKept(f"argument {role}: {LOST}")
        shape, dtype = tuple(t.get("shape", ())), getattr(torch, str(t["dtype"]), None)
        if (t.get("fresh") or 0 in shape) and isinstance(dtype, torch.dtype) and math.prod(shape) <= _MOST:
            return torch.zeros(shape, dtype=dtype)
        if self.draw is not None and isinstance(dtype, torch.dtype) and math.prod(shape) <= _MOST:
            return self.draw(t)
        has_statistics = t.get("hash") is not None or t.get("min") is not None
        if t.get("count") is not None and all(r.payload is None for r in self.records.values()):
            has_statistics = True  # another tool's statistics of a boolean are its count alone
        raise NotKept(STATISTICS if has_statistics else f"argument {role} was not kept")
