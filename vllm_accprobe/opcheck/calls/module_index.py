"""A dump's module calls by where they stand, and a call from its records.

The problem: a dump is a list of records, and a call is found by rank, tap, step and ordinal, together with its
module's attributes, its parameters and the model's configuration. The idea: one pass over the records, and then
dictionaries. Everything becomes a torch tensor of the captured dtype. Not here: a module's parameters (parameters.py),
in which order calls are taken (records.py), what other records tell about a call (neighbours.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import is_operator
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, OpCall, Record
from vllm_accprobe.formats.atb import AtbDump
from vllm_accprobe.opcheck.calls.parameters import ModuleParameters, model_config
from vllm_accprobe.opcheck.calls.views import same_bits, span, view_of
from vllm_accprobe.opcheck.reference import BACKWARD, Call, MemoryLayout

_TRIED = 3
"""Chosen: earlier outputs of a view's row length that are read to find its memory."""
_SMALL, _KEPT, _ITSELF = 64 << 10, 64 << 20, 1 << 10
"""Chosen: bytes of a tensor that is kept for other calls, whose reading takes as long as its bytes; bytes of all; what
one takes beside them, of which a dump may have a million."""
_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def to_torch(array: np.ndarray, dtype: str) -> Any:
    """Stored bits of torch dtype ``dtype`` as a tensor that shares their memory. Raises ValueError for one that this
    torch does not have."""
    target = getattr(torch, dtype, None)
    if not isinstance(target, torch.dtype):
        raise ValueError(f"this torch has no dtype {dtype}")
    array = np.ascontiguousarray(array)
    if dtype in ("bool", "complex64", "complex128"):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_BITS[array.dtype.itemsize])).view(target)


class ModuleIndex:
    """model: directory with config.json and, if any, the checkpoint; None: nothing of it.

    by_tap: (rank, tap) → (step, ordinal) → the call's records by role; ops, op_records: the same of operators, whose
    step may be None; children: (rank, tap) → taps below; problems: sentences on what was requested and is missing;
    unrounded: (rank, tap) of calls that may have read more of their inputs than was captured (neighbours.py)."""

    def __init__(self, dump: Dump, model: Path | None):
        self.dump = dump
        self.problems: list[str] = []
        self.unrounded: set[tuple[int, str]] = set()
        self.modules = {rank: {m.tap: m for m in modules} for rank, modules in dump.modules.items()}
        self.by_tap: dict[tuple[int, str], dict[tuple[int, int], dict[str, Record]]] = {}
        self.ops: dict[tuple[int, str], list[OpCall]] = {}
        self.op_records: dict[tuple[int, str], dict[tuple[int | None, int], dict[str, Record]]] = {}
        self.inside: dict[tuple[int, int | None, str, str, int], list[OpCall]] = {}
        for op in dump.ops:
            self.ops.setdefault((op.rank, op.tap), []).append(op)
            if op.inside is not None and op.module is not None:
                place = op.rank, op.step, op.inside, op.module, op.module_call
                self.inside.setdefault(place, []).append(op)
        for r in dump.records:
            if is_operator(r.tap) or (r.rank, r.tap) in self.ops:
                self.op_records.setdefault((r.rank, r.tap), {}).setdefault((r.step, r.call), {})[r.role] = r
            elif r.step is not None:
                self.by_tap.setdefault((r.rank, r.tap), {}).setdefault((r.step, r.call), {})[r.role] = r
        self.children: dict[tuple[int, str], list[str]] = {}
        for rank, tap in self.by_tap:
            parent = tap
            if tap != ROOT_TAP:
                self.children.setdefault((rank, ROOT_TAP), []).append(tap)
            while "." in parent:
                parent = parent.rpartition(".")[0]
                self.children.setdefault((rank, parent), []).append(tap)
        self._made: dict[tuple[Any, ...], list[Record]] | None = None
        self._read: dict[tuple[Any, ...], Any] | None = None
        self._room = _KEPT
        self._constants: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Any]]] = {}
        self.config = model_config(model)
        parts = {part: self.config.get(part) for part in ("vision_config", "text_config")}
        self._configs = {part: {**self.config, **inner} if isinstance(inner, dict) else self.config
                         for part, inner in parts.items()}  # fmt: skip
        self.parameters = ModuleParameters(dump, model, self.modules, self.read)
        if self.parameters.problem:
            self.problems.append(self.parameters.problem)

    def records_of(self, rank: int, tap: str, step: int, n: int) -> Mapping[str, Record]:
        """By role; {} where there is no such call."""
        return self.by_tap.get((rank, tap), {}).get((step, n), {})

    def cls_of(self, rank: int, tap: str) -> str:
        """The class of a tap that was called; of a backward run with ``backward.`` before it."""
        cls = next(iter(next(iter(self.by_tap[rank, tap].values())).values())).cls
        return BACKWARD + cls if tap.startswith(BACKWARD) else cls

    @contextlib.contextmanager
    def reads_kept(self) -> Iterator[None]:
        """What one module gave others read, and a dump has once: inside, small tensors are read once, and none may be
        changed."""
        self._read, self._room = {}, _KEPT
        try:
            yield
        finally:
            self._read = None

    def read(self, record: Record) -> Any:
        at = record.payload
        if self._read is None or at is None or at.seg < 0 or at.nbytes > _SMALL:  # negative: of no file of the dump
            return to_torch(self.dump.read(record), record.dtype)
        place = record.rank, at.seg, at.off, record.shape, record.dtype
        found = self._read.get(place)
        if found is None:
            found = to_torch(self.dump.read(record), record.dtype)
            size = at.nbytes + _ITSELF
            if size > self._room:
                self._read.clear()
                self._room = _KEPT
            self._read[place] = found
            self._room -= size
        return found

    def read_rows(self, record: Record, rows: slice) -> Any:
        """Some rows of a tensor whose rows lie along the first dimension."""
        return to_torch(self.dump.read_rows(record, rows), record.dtype)

    def call(
        self, rank: int, tap: str, cls: str, records: Mapping[str, Record], read: Callable[[Record], Any] | None = None
    ) -> Call:  # fmt: skip
        """A module's call from its records. read: gives a record's tensor, if not `read` does."""
        read = read or self.read
        if (rank, tap) not in self._constants:
            self._constants[rank, tap] = self._constants_of(rank, tap)
        attrs, parent = self._constants[rank, tap]
        entered = {r.removeprefix("input."): x for r, x in records.items() if r.startswith("input.")}
        of_atb = isinstance(self.dump, AtbDump)
        if isinstance(self.dump, AtbDump) and (step := next((r.step for r in records.values()), None)) is not None:
            entered |= self.dump.call_inputs(rank, step, tap)  # weights among them
            attrs = {**attrs, **self.dump.call_attributes(rank, step, tap)}
        return Call(
            name=tap,
            cls=cls,
            views=self._views(entered, whole=read == self.read),
            inputs={name: read(x) for name, x in entered.items()},
            params={} if of_atb else self.parameters.of(rank, tap),
            attrs=attrs,
            parent=parent,
            config=self._config(tap),
            outputs={r: read(x) for r, x in records.items() if r.startswith(("output.", "inplace."))},
        )

    def _constants_of(self, rank: int, tap: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a module, and the one that holds it, have besides tensors: the same objects for all of its calls."""
        modules = self.modules.get(rank, {})
        module, (above, _, last) = modules.get(tap), tap.rpartition(".")
        parent = modules.get(above)
        if last.isdigit() and (parent is None or not parent.attrs):  # a list of modules, which says nothing
            parent = modules.get(above.rpartition(".")[0])
        return dict(module.attrs) if module else {}, dict(parent.attrs) if parent else {}

    def _views(self, entered: Mapping[str, Record], whole: bool) -> dict[str, MemoryLayout]:
        """Layouts of the inputs that were not contiguous. whole: all rows of them are taken, and their memory may be
        known."""
        if all(r.stride is None for r in entered.values()):
            return {}
        found = {
            f"inputs.{name}": view_of(r.shape, r.stride, r.offset, partial(self._memory, r) if whole else None)
            for name, r in entered.items() if r.stride is not None
        }  # fmt: skip
        return {name: view for name, view in found.items() if view is not None}

    def _memory(self, record: Record) -> Any | None:
        """The output of an earlier tap of the step that this input is a view of, flat; None where there is none."""
        stride, row, space = record.stride, 0, None
        if record.step is not None and record.rows is not None:
            space = self.dump.rows.get((record.rank, record.step, record.rows))
        if space is None or stride is None or record.row_dim != 0:
            return None
        for segment in space.segments:  # rows that were left out lie in the memory between the others
            if segment.row != row:
                return None
            row += segment.n
        if self._made is None:
            self._made = {}
            for r in self.dump.records:
                if r.role.startswith("output.") and r.payload is not None and r.step is not None and r.stride is None:
                    self._made.setdefault((r.rank, r.step, r.shape[:1], math.prod(r.shape[1:])), []).append(r)
        alike = self._made.get((record.rank, record.step, record.shape[:1], stride[0]), [])
        before = [r for r in alike if r.seq < record.seq and r.dtype == record.dtype]
        with contextlib.suppress(DumpError):
            for r in sorted(before, key=lambda r: -r.seq)[:_TRIED]:
                memory, own = self.read(r).reshape(-1), self.read(record)
                if len(memory) >= record.offset + span(record.shape, stride):
                    view = memory.as_strided(record.shape, stride, record.offset)
                    if same_bits(view, own):
                        return memory
        return None

    def _config(self, tap: str) -> Mapping[str, Any]:
        part = "vision_config" if tap.startswith(("visual", "vision", "model.visual")) else "text_config"
        return self._configs[part]
