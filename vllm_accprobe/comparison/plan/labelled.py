"""Which labels are pairs, and how both sides of one become a unit of an ordinary comparison.

The problem: a label is a tensor of the dump or a file that a library wrote, and the two of a pair need not have one
shape or dtype. The idea: what has one id, step, rank and place in the order of calls is a pair; a `LabelView` gives
both sides as tensors of one dump, as rows along the last dimension, or as one row where the shapes differ; row i of one
meets row i of the other. So golden and mine are two views of one dump, which the engine measures like any others.
Not here: where a library has put a file (dump/label_files.py), measuring (measure/), the verdict (labelled_pairs.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_accprobe.align.ranks import ONE, MergePlan
from vllm_accprobe.align.tokens import Rows, SideRows, Space
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.comparison.plan.units import Indices
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.label_files import ACL, LABEL_TAP, PTA, Label, label_file, locate
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import REPLICATED, Record, rank_dir, segment_name
from vllm_accprobe.formats import open_dump

PairKey = tuple[int, int, str, int]
"""Step, rank, id and call."""
SideKey = tuple[int, int, str, int, str]
"""The same and the role: `PTA`, which is golden, or `ACL`, which is mine."""
_MAX_ROWS = 1 << 20
"""Rows of a row table; a tensor with more is measured as one row."""


@dataclass(frozen=True)
class LabelSide:
    """One side of a pair: its path for the table, dtype and shape ("" and () while unknown), where to read it."""

    path: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    dump: Dump | None = None
    record: Record | None = None
    missing: str = ""
    """Why it cannot be read, or ""."""


def places(dump: Dump) -> dict[SideKey, Record | Label]:
    """What was labelled; a file counts where both a value and a file are there."""
    found: dict[SideKey, Record | Label] = {}
    labelled: list[Record | Label] = [*dump.records, *dump.labels.values()]
    for one in labelled:
        if one.tap.startswith(LABEL_TAP) and one.step is not None and one.role in (PTA, ACL):
            found[one.step, one.rank, one.tap[len(LABEL_TAP) :], one.call, one.role] = one
    return found


def sides_of(dump: Dump, roots: Sequence[Path]) -> dict[SideKey, LabelSide]:
    """Every label of ``dump``. roots: directories in which a labelled file may lie."""
    return {
        key: _in_file(dump, one, roots) if isinstance(one, Label) else _stored(dump, one)
        for key, one in places(dump).items()
    }


def _stored(dump: Dump, r: Record) -> LabelSide:
    if r.payload is None:
        why = "only statistics were kept of it (VLLM_ACCPROBE_TASK=stats, or the payload is lost)"
        return LabelSide(f"{rank_dir(r.rank)}/{r.step}|{r.tap}|{r.role}|{r.call}", r.dtype, r.shape, dump, r, why)
    path = f"{rank_dir(r.rank)}/{segment_name(r.payload.seg)}:{r.step}|{r.tap}|{r.role}|{r.call}"
    return LabelSide(path, r.dtype, r.shape, dump, r)


def _in_file(dump: Dump, label: Label, roots: Sequence[Path]) -> LabelSide:
    if label.file is not None:
        inside = Path(rank_dir(label.rank)) / label_file(label.file, label.ending)
        file, shown, missing = dump.path / inside, f"{inside}", ""
        if file.is_symlink() or not file.is_file():
            return LabelSide(shown, missing="its file is missing in the dump")
    else:
        found, missing = locate(label, roots)
        if found is None:
            why = label.reason if label.reason and missing == "its file was not found" else missing
            return LabelSide(label.path, missing=f"{why}; --acl DIR names a directory to look in")
        file, shown = found, str(found)
    try:
        opened = open_dump(file)
    except DumpError as error:
        return LabelSide(shown, missing=str(error))
    records = [r for r in opened.records if r.payload is not None]
    if len(records) != 1:
        return LabelSide(shown, missing=f"its file holds {len(records)} tensors, not one")
    return LabelSide(shown, records[0].dtype, records[0].shape, opened, records[0])


@dataclass
class LabelView:
    """All labels as one dump: records by `unit_of`, read from wherever they lie. Serves as golden and as mine.

    failed: why a side of a pair could not be read; problems, unread: what whoever reads a dump notes in it."""

    sides: dict[SideKey, LabelSide]
    failed: dict[PairKey, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def read(self, record: Record, out: np.ndarray | None = None) -> np.ndarray:
        """The stored bits in the record's shape. Raises DumpError."""
        assert record.step is not None
        pair = record.step, record.rank, record.tap, record.call
        side = self.sides[(*pair, record.role)]
        assert side.dump is not None
        assert side.record is not None
        try:
            return side.dump.read(side.record, out).reshape(record.shape)
        except (DumpError, OSError, ValueError) as error:
            self.failed[pair] = " ".join(str(error).split())
            raise DumpError(self.failed[pair]) from None

    def unit_of(self, pair: PairKey) -> Unit:
        """A pair whose sides have a payload and as many elements, above 0."""
        step, rank, name, call = pair
        golden, mine = (self.sides[(*pair, role)] for role in (PTA, ACL))
        shape = _rows_of(golden.shape, mine.shape)
        where = (0, 0, f"{LABEL_TAP}{shape[0]}") if shape[0] > 1 else None

        def alone(role: str, side: LabelSide) -> list[Group]:
            rows, payload = where and where[2], None if side.record is None else side.record.payload
            known = rank, step, name, "", role, call, 0, side.dtype, shape, rows, 0, None, None, REPLICATED, payload
            return [Group((Record(*known),), (0, None), where, MergePlan(ONE, (0,), shape))]

        return Unit((name, ACL, call), (name, PTA, call), "", "", 0, 1, alone(PTA, golden), alone(ACL, mine))


def _rows_of(golden: tuple[int, ...], mine: tuple[int, ...]) -> tuple[int, int]:
    """(rows, width)."""
    size = math.prod(golden)
    width = golden[-1] if golden == mine and len(golden) > 1 else size
    return (size // width, width) if size // width <= _MAX_ROWS else (1, size)


def meeting(units: Iterable[Unit]) -> Indices:
    """Row i meets row i. Units with as many rows share one space of them."""
    rows: dict[Space, Rows] = {}
    for group in (u.mine[0] for u in units):
        if group.where is not None and group.where not in rows:
            n = group.first.shape[0]
            rows[group.where] = Rows(np.arange(n), np.ones(n, bool), np.zeros(n, bool))
    side = SideRows(rows, {})
    return Indices((side, side))
