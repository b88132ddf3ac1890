"""Golden's operators that golden has no call of, checked in the calls of mine.

The problem: a golden of another library (transformers) has the inputs and the output of an attention, and no module
that computed it, so that no replay of golden checks it. A softmax may enlarge what two inputs differ by ten times; mine
is right, and its difference would stay unexplained. The idea: a call of mine with golden's rows in the place of its
own, of the same requests and positions, earlier keys and values among them, is a call of golden; the reference of what
golden read, with mine's parameters and constants, then is golden's output within the rounding of the coarser dtype of
the two, or golden's row is not explained. Rows of which golden lacks a read are NaN there, and are not explained.
Not here: calls that golden has (opcheck/run/pair.py), what is explained of both (explained.py). One rank's whole
tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_accprobe.align.ranks import ONE
from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.comparison.plan.units import Indices, Meeting, Plan
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.rounding_unit import unit as rounding_unit
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.reference_table import References

MOST = 16
"""Chosen: taps that are computed again, in data-flow order; each costs a replay of all its calls."""
_NONE = np.zeros(0, np.int64)


class GoldenReads:
    """model: mine's checkpoint; plan: of both dumps."""

    def __init__(self, golden: Dump, mine: Dump, model: Path | None, references: References, plan: Plan):
        self._references = references
        self._calls = _InMine(golden, mine, model, plan)
        self._known: dict[str, dict[tuple[str, int], list[np.ndarray]]] = {}

    def rows(self, unit: Unit) -> np.ndarray:
        """Keys of the rows of an output whose golden values are what the reference makes of golden's reads."""
        tap, role, call = unit.key
        if not role.startswith(("output", "inplace")):
            return _NONE
        if tap not in self._known and len(self._known) < MOST:
            self._known[tap] = self._computed(tap)
        return np.unique(np.concatenate([_NONE, *self._known.get(tap, {}).get((role, call), [])]))

    def _computed(self, tap: str) -> dict[tuple[str, int], list[np.ndarray]]:
        found: dict[tuple[str, int], list[np.ndarray]] = {}
        for captured in self._calls.of(0, tap) if (0, tap) in self._calls.by_tap else ():
            expected = None if captured.missing else self._references.evaluate(captured.what)
            for role, e in {} if expected is None or isinstance(expected, Declined) else expected.items():
                keys = self._right(captured, role, e)
                if len(keys):
                    found.setdefault((role, captured.call), []).append(keys)
        return found

    def _right(self, captured: Captured, role: str, expected: Expected) -> np.ndarray:
        record, output = captured.records.get(role), captured.what.outputs.get(role)
        met = None if record is None else self._calls.meeting(record)
        if record is None or output is None or met is None or expected.failed or expected.only_measured or (
            expected.unseen or tuple(expected.value.shape) != tuple(output.shape)
        ):  # fmt: skip
            return _NONE
        found = OutputRows.of(expected, output, record.row_dim)
        keep = torch.isfinite(found.reference.double()).all(1) & torch.isin(found.at, torch.from_numpy(met.row))
        at = found.at[keep]
        if not len(at):
            return _NONE
        taken: dict[str, Any] = {n: None if (x := getattr(found, n)) is None else x[keep]
                                 for n in ("reference", "mine", "noise", "bound", "exact")}  # fmt: skip
        coarser = max(record.dtype, self._calls.dtype(record), key=rounding_unit)
        if not replace(found, at=at, **taken).judge(coarser).passed:
            return _NONE
        return np.asarray(met.rows.keys[np.isin(met.row, at.numpy())])


class _InMine(Calls):
    """The calls of mine with golden's rows in the place of their own."""

    def __init__(self, golden: Dump, mine: Dump, model: Path | None, plan: Plan):
        super().__init__(mine, model)
        self._loader = Loader(golden)
        self._indices = Indices((plan.tokens.golden, plan.tokens.mine))
        self._of: dict[tuple[int, int | None, int], tuple[Group, Mapping[Any, Group]]] = {}
        for unit in plan.units:
            if not unit.is_param:
                groups = {g.where: g for g in unit.golden if g.where is not None and g.readable and _whole(g)}
                for group in unit.mine:
                    if group.where is not None and _whole(group):
                        self._of[_place(group.first)] = group, groups

    def meeting(self, record: Record) -> Meeting | None:
        """The rows of a tensor of mine that golden has, too."""
        group, golden = self._of.get(_place(record), (None, {}))
        if group is None or group.where is None or not golden:
            return None
        return self._indices.meet(group.where, tuple(golden))

    def dtype(self, record: Record) -> str:
        """Golden's dtype of the same tensor; mine's where golden has none."""
        _, golden = self._of.get(_place(record), (None, {}))
        return next((g.first.dtype for g in golden.values()), record.dtype)

    def read(self, record: Record) -> Any:
        """Golden's rows in mine's order; NaN where golden has none. Parameters and integers (positions) are mine's."""
        if record.role.startswith("param.") or DTYPES[record.dtype].kind != "float":
            return super().read(record)
        met = self.meeting(record)
        if met is None:
            return torch.full(record.shape, torch.nan)
        golden = self._of[_place(record)][1]
        wheres = tuple(golden)
        moved = [record.shape[record.row_dim], *(n for i, n in enumerate(record.shape) if i != record.row_dim)]
        out = np.full((moved[0], int(np.prod(moved[1:], dtype=np.int64))), np.nan)
        for number in met.used:
            at = np.flatnonzero(met.number == number)
            try:
                block = self._loader.load(golden[wheres[number]])
            except Unread as why:
                raise DumpError(str(why)) from None
            rows = np.asarray(widen(block.data, block.dtype, as_float=True), np.float64)
            if rows.shape[1] != out.shape[1]:
                raise DumpError(f"golden's {record.tap} has rows of another width")
            out[met.row[at]] = rows[met.other[at]]
        value = torch.from_numpy(np.moveaxis(out.reshape(moved), 0, record.row_dim).copy())
        return value if self.dtype(record) == "float64" else value.float()


def _whole(group: Group) -> bool:
    return group.merge is not None and group.merge.kind == ONE


def _place(record: Record) -> tuple[int, int | None, int]:
    return record.rank, record.step, record.seq
