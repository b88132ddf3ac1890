"""Golden's operators that golden has no call of, checked in the calls of mine.

The problem: a golden of another library (transformers) has the inputs and the output of an attention, and no module
that computed it, so that no replay of golden checks it. A softmax may enlarge what two inputs differ by ten times; mine
is right, and its difference would stay unexplained. The idea: a call of mine with golden's rows in the place of its
own, of the same requests and positions, earlier keys and values among them, is a call of golden; the reference of what
golden read, with mine's parameters and constants, then is golden's output within the rounding of the coarser dtype of
the two, or golden's row is not explained. Rows of which golden lacks a read are NaN there, and are not explained; nor
are outputs of integers. It ends with the time of the replay, and what is left then is not explained either.
Not here: calls that golden has (opcheck/run/pair.py), what is explained of both (explained.py). One rank's whole
tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.derived import plain
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.ranks import ONE
from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan.make_plan import Indices, Meeting, Plan
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.block_code import INSIDE
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.rounding_unit import unit as rounding_unit
from vllm_accprobe.opcheck.calls.neighbours import Neighbours
from vllm_accprobe.opcheck.calls.records import Calls, Captured, Chosen, GradientCalls, Place
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references.mixers import KINDS
from vllm_accprobe.opcheck.run.pair import LEFT, MOST

_NONE = np.zeros(0, np.int64)


class GoldenReads:
    """mine: its calls; plan: of both dumps. seconds: how many are left, checked before each part of a call; cost:
    seconds that a call of a tap of mine takes: one that takes more than is left is not begun."""

    def __init__(
        self, golden: Dump, mine: Calls, references: References, plan: Plan,
        seconds: Callable[[], float] = lambda: math.inf, cost: Callable[[str, Place], float] = lambda tap, place: 0.0,
    ):  # fmt: skip
        self._references, self._seconds, self._cost = references, seconds, cost
        self._calls = _InMine(golden, mine, plan)
        self._known: dict[str, Mapping[tuple[str, int], np.ndarray]] = {}
        self._left: set[str] = set()

    def rows(self, unit: Unit) -> tuple[np.ndarray, str]:
        """(keys of the rows of an output whose golden values are what the reference makes of golden's reads, why some
        were not checked or "")."""
        tap, role, call = unit.key
        if not role.startswith("input."):
            return self._of(tap, role, call)
        mixers = (t for t in enclosing(tap) if (0, t) in self._calls.by_tap and self._calls.cls_of(0, t) in KINDS)
        for outer in mixers:  # what a recurrence made is an input of a module inside (references/mixers.py)
            keys, left = self._of(outer, f"{INSIDE}{tap.removeprefix(outer)[1:]}/{role.removeprefix('input.')}", call)
            if len(keys) or left:
                return keys, left
        return _NONE, ""

    def _of(self, tap: str, role: str, call: int) -> tuple[np.ndarray, str]:
        if tap not in self._known:
            self._known[tap] = self._computed(tap) if (0, tap) in self._calls.by_tap else {}
        return self._known[tap].get((role, call), _NONE), LEFT if tap in self._left else ""

    def _computed(self, tap: str) -> Mapping[tuple[str, int], np.ndarray]:
        right: dict[tuple[str, int], list[np.ndarray]] = {}
        wrong: dict[tuple[str, int], list[np.ndarray]] = {}
        every = self._calls.places(0, tap)
        places = {place: runs for place, runs in every.items() if self._cost(tap, place) < self._seconds()}
        complete = len(places) == len(every)
        chosen = Chosen(places, self._references.by_rows, MOST)
        for captured in self._calls.of(0, tap, chosen=chosen) if places else ():
            expected = None if captured.missing else self._references.evaluate(captured.what)
            for role, e in {} if expected is None or isinstance(expected, Declined) else expected.items():
                keys, passed = self._checked(captured, role, e)
                (right if passed else wrong).setdefault((role, captured.call), []).append(keys)
            if self._seconds() <= 0:
                complete = False
                break
        if not complete:
            self._left.add(tap)
        return {of: np.setdiff1d(np.concatenate(keys), np.concatenate([_NONE, *wrong.get(of, ())]))
                for of, keys in right.items()}  # fmt: skip

    def _checked(self, captured: Captured, role: str, expected: Expected) -> tuple[np.ndarray, bool]:
        """(keys of golden's rows that have a reference, whether they are what it says)."""
        record, output = captured.records.get(role), captured.what.outputs.get(role)
        met = None if record is None else self._calls.meeting(record)
        if record is None or output is None or met is None or DTYPES[record.dtype].kind != "float" or (
            expected.failed or expected.only_measured or expected.unseen
            or tuple(expected.value.shape) != tuple(output.shape)
        ):  # fmt: skip
            return _NONE, False
        found = OutputRows.of(expected, output, record.row_dim)
        row = torch.from_numpy(met.row - captured.first)
        keep = torch.isfinite(found.reference.double()).all(1) & torch.isin(found.at, row)
        at = found.at[keep]
        keys = np.asarray(met.rows.keys[torch.isin(row, at).numpy()])
        coarser = max(record.dtype, self._calls.dtype(record), key=rounding_unit)
        taken: dict[str, Any] = {n: None if (x := getattr(found, n)) is None else x[keep]
                                 for n in ("reference", "mine", "noise", "bound", "exact")}  # fmt: skip
        size = max(1, MOST // max(1, found.reference.shape[1]))  # judging takes eight times the memory

        def passed(rows: slice) -> bool:
            piece: dict[str, Any] = {n: None if x is None else x[rows] for n, x in taken.items()}
            return bool(replace(found, at=at[rows], **piece).judge(coarser).passed)

        return keys, all(passed(slice(a, a + size)) for a in range(0, len(at), size))


class _InMine(Calls):
    """The calls of mine with golden's rows in the place of their own."""

    def __init__(self, golden: Dump, mine: Calls, plan: Plan):
        vars(self).update(vars(mine))  # its index, parameters and constants, which took long to make
        # what reads activations reads them here
        self._neighbours, self._gradients, self._keeps = Neighbours(self), GradientCalls(self), None
        self._loader = Loader(golden)
        self._indices = Indices((plan.tokens.golden, plan.tokens.mine))
        self._units = {unit.key: unit for unit in plan.units if not unit.is_param}
        self._known: dict[Key, _Groups] = {}

    def _groups(self, record: Record) -> _Groups:
        key = record.tap, record.role.rpartition("/")[2], record.call  # of a module inside: norm/input.x
        if key not in self._known:
            unit = self._units.get(key)
            self._known[key] = _Groups(unit, self._indices) if unit is not None else _NO_GROUPS
        return self._known[key]

    def meeting(self, record: Record) -> Meeting | None:
        """The rows of a whole tensor of mine that golden has, too. record: of it, or of a part."""
        groups = self._groups(record)
        where = groups.mine.get(_place(record))
        return None if where is None or not groups.golden else groups.meet(where)

    def dtype(self, record: Record) -> str:
        """Golden's dtype of the same tensor; mine's where golden has none."""
        golden = self._groups(record).golden
        return golden[0].first.dtype if golden else record.dtype

    def read(self, record: Record) -> Any:
        """Golden's rows in mine's order; NaN where golden has none. Parameters and integers (positions) are mine's."""
        return self._of_golden(record, slice(None)) if _is_taken(record) else super().read(record)

    def read_rows(self, record: Record, rows: slice) -> Any:
        return self._of_golden(record, rows) if _is_taken(record) else super().read_rows(record, rows)

    def _of_golden(self, record: Record, rows: slice) -> Any:
        met, groups = self.meeting(record), self._groups(record)
        if met is None:
            whole = torch.full(record.shape, torch.nan)
            return whole if rows == slice(None) else whole[rows]
        shape = list(record.shape)
        taken = range(shape.pop(record.row_dim))[rows]
        dtype = np.float64 if self.dtype(record) == "float64" else np.float32
        out = np.full((len(taken), math.prod(shape)), np.nan, dtype)
        here = (met.row >= taken.start) & (met.row < taken.stop)
        for number in met.used:
            at = np.flatnonzero(here & (met.number == number))
            try:
                block = self._loader.load(groups.golden[number]) if len(at) else None
            except Unread as why:
                raise DumpError(str(why)) from None
            if block is None:
                continue
            if block.data.shape[1] != out.shape[1] or met.other[at].max() >= len(block.data):
                raise DumpError(f"golden's {record.tap} has rows of another width, or fewer than its row map")
            out[met.row[at] - taken.start] = widen(block.data[met.other[at]], block.dtype, as_float=True)
        return torch.from_numpy(np.moveaxis(out.reshape(-1, *shape), 0, record.row_dim).copy())


class _Groups:
    """Of one tensor: golden's groups that can be read, and the spaces of mine's by place."""

    def __init__(self, unit: Unit | None, indices: Indices | None):
        found = [] if unit is None else [g for g in unit.golden if g.where is not None and g.readable and _whole(g)]
        self.golden: Sequence[Group] = found
        own = [] if unit is None else [(plain(g.first), g) for g in unit.mine if g.where is not None and _whole(g)]
        self.mine = {_place(r): g.where for r, g in own if r is not None}
        wheres = tuple(g.where for g in found if g.where is not None)
        self.meet: Callable[[Any], Meeting | None] = lambda where: None
        if indices is not None and found:
            self.meet = indices.meetings(wheres)


_NO_GROUPS = _Groups(None, None)


def _is_taken(record: Record) -> bool:
    return not record.role.startswith("param.") and DTYPES[record.dtype].kind == "float"


def _whole(group: Group) -> bool:
    return group.merge is not None and group.merge.kind == ONE


def _place(record: Record) -> tuple[int, int | None, int]:
    return record.rank, record.step, record.seq
