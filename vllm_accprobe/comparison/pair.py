"""One row of compare.csv, how many there are of each kind, and how many times its limit a pair reaches.

The problem: table, page, terminal and exit code must show one status and one factor for a pair. The idea: a frozen
value whose fields are the columns; one place counts them; `severity` divides what decided by its own limit. Not here:
the whole result (result.py), how the numbers come about (engine.py), the words (report/facts.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from vllm_accprobe.dump.record_table import LazyTable

PASS, FAIL, SKIP = "pass", "fail", "skip"
NOT_JUDGED = "not judged: "
"""Begins the message of a pair whose tensors were compared and of which no row is judged."""
NONE_JUDGED = f"{NOT_JUDGED}all rows follow a router's near tie, or rows whose experts were not compared"


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of compare.csv: a tensor of mine against the same rows of the golden.

    golden, mine: each tensor's name in its own dump's spelling (``tap/role#call``); "" where there is no partner.
    step: mine's step, None for a parameter. rank: mine's rank, or None when several ranks were merged.
    shape: of the rows compared, ``[rows, ...]``; the metrics are defined in kernels/definition.py.
    worst_row_norm_ratio: the norm ratio mine/golden furthest from 1. max_abs_index: index within ``shape``.
    status: pass, fail or skip; message: why, in words. order: place in the data flow, small is early.
    rule: how the names were paired. rows: how many rows were compared (None for tensors without rows).
    phase: prefill, decode, mixed or None. worst_request, worst_position: of the worst row.
    limit: what worst_row_rel_l2 was compared with (0.0: exact equality). identical: the numbers compared are equal, in
    whatever dtype and file they lie (NaN equals NaN); bit_identical: so are their stored bits, by hash or by reading.
    Neither where only statistics, checksums or samples were there to compare.
    measure, measured, allowed: which measure decided (judge.tensor_errors.METRICS, or ``created``), its value in the
    row that decided, and its own limit; a norm ratio may be off by ``allowed`` from 1. floor: the worst row that
    rounding alone and batching alone would give, floor_source: how that is known (judge/calibration.py), x_floor:
    worst_row_rel_l2 in units of it. elements, kl: for other tools' standards (kernels.definition.ELEMENT_FIELDS, KL
    divergence); no columns.
    """

    golden: str
    mine: str
    step: int | None
    rank: int | None
    dtype_golden: str | None
    dtype_mine: str | None
    shape: tuple[int, ...]
    cosine: float | None = None
    max_abs_err: float | None = None
    mean_abs_err: float | None = None
    rmse: float | None = None
    rel_l2: float | None = None
    max_rel_err: float | None = None
    worst_row_rel_l2: float | None = None
    worst_row_norm_ratio: float | None = None
    nonfinite: int | None = None
    nonfinite_mismatch: int | None = None
    status: str = SKIP
    message: str = ""
    tap: str = ""
    cls: str = ""
    role: str = ""
    call: int = 0
    order: int = 0
    rule: str = ""
    rows: int | None = None
    phase: str | None = None
    prefill_rel_l2: float | None = None
    decode_rel_l2: float | None = None
    worst_request: str | None = None
    worst_position: int | None = None
    max_abs_index: tuple[int, ...] | None = None
    max_abs_golden: float | None = None
    max_abs_mine: float | None = None
    limit: float | None = None
    identical: bool = False
    bit_identical: bool = False
    measure: str | None = None
    measured: float | None = None
    allowed: float | None = None
    floor: float | None = None
    floor_source: str | None = None
    x_floor: float | None = None
    elements: tuple[float, ...] | None = None
    kl: float | None = None


_FIELDS = tuple(f.name for f in fields(Pair))
COLUMNS: tuple[str, ...] = tuple(name for name in _FIELDS if name not in ("elements", "kl"))
"""Names of compare.csv's columns, in order."""


@dataclass(frozen=True)
class Counts:
    """How many pairs there are of each kind: the only place that counts them, for all that is printed and written.

    total: rows of compare.csv, compared + skipped; compared: passed + failed; identical: of those compared, whichever
    their status; bit_identical: of those identical. skip_reasons: adds up to ``skipped``."""

    passed: int
    failed: int
    skipped: int
    identical: int
    bit_identical: int
    skip_reasons: dict[str, int]

    @property
    def compared(self) -> int:
        return self.passed + self.failed

    @property
    def total(self) -> int:
        return self.compared + self.skipped


def was_compared(pair: Pair) -> bool:
    """Whether its two tensors were compared, also where no row of them is judged."""
    return pair.status != SKIP or pair.worst_row_rel_l2 is not None


def counted(n: int, one: str) -> str:
    """``1 row``, ``1,234 rows``."""
    return f"{n:,} {one}{'s' * (n != 1)}"


class ByPlace(Sequence[Any]):
    """A column of which all pairs of a place have one value: ``values[which]``. which: int64 [n], the same array for
    all such columns of a table, and as many values."""

    def __init__(self, values: Sequence[Any], which: np.ndarray):
        self.values, self.which = values, which

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, at: Any) -> Any:
        return ByPlace(self.values, self.which[at]) if isinstance(at, slice) else self.values[self.which[at]]

    def __iter__(self) -> Iterator[Any]:
        return map(self.values.__getitem__, self.which.tolist())

    def __array__(self, dtype: Any = np.float64, copy: bool | None = None) -> np.ndarray:
        """Of numbers: as float64 where no dtype is given, NaN for None."""
        return np.array(self.values, dtype)[self.which]


class Pairs(LazyTable[Pair]):
    """All pairs of a comparison, none of which changes any more: columns, and a `Pair` where one is needed. What is
    computed of all is made once for all that read it."""

    def __init__(self, pairs: Iterable[Pair] = ()):
        if type(pairs) is LazyTable:
            super().__init__(Pair, len(pairs), pairs._columns, pairs._same)
        else:
            self._made = list(pairs)
            super().__init__(Pair, len(self._made), {})

    @staticmethod
    def joined(tables: Sequence[LazyTable[Pair]]) -> Pairs:
        """The pairs of all, one after the other."""
        first, *others = [t.same for t in tables] or [{}]
        same = {name: v for name, v in first.items() if all(name in o and o[name] is v for o in others)}
        columns: dict[str, Sequence[Any]] = {}
        places = [_places(t) for t in tables]
        begins = np.cumsum([0, *(n for _, n in places)])
        which = np.concatenate([_NO_PLACES, *(own + at for (own, _), at in zip(places, begins, strict=False))])
        for name in (n for n in _FIELDS if n not in same):
            values = [_of_places(t, name, n) for t, (_, n) in zip(tables, places, strict=True)]
            if any(v is None for v in values):
                columns[name] = list(chain.from_iterable(t.column(name) for t in tables))
            else:
                columns[name] = ByPlace(list(chain.from_iterable(v for v in values if v is not None)), which)
        return Pairs(LazyTable(Pair, len(which), columns, same))

    def taken(self, order: np.ndarray) -> Pairs:
        """Those at ``order``, int64 [n]."""
        if len(order) < 2:  # and itemgetter gives no tuple
            return Pairs([self[i] for i in order.tolist()])
        pick = itemgetter(*order.tolist())
        made: dict[int, Any] = {}  # by array or column, which several names may have
        columns: dict[str, Sequence[Any]] = {}
        for name in (n for n in _FIELDS if n not in self.same):
            values = self.column(name)
            if isinstance(values, ByPlace):
                which = made[id(values.which)] = made.get(id(values.which), values.which[order])
                columns[name] = ByPlace(values.values, which)
            else:
                columns[name] = made[id(values)] = made.get(id(values)) or pick(values)
        return Pairs(LazyTable(Pair, len(order), columns, self.same))

    def changed(self, pairs: Mapping[int, Pair]) -> Pairs:
        """With other pairs at some places."""
        if not pairs:
            return self
        columns: dict[str, Sequence[Any]] = {}
        for name in _FIELDS:
            values, others = self.column(name), {i: getattr(pair, name) for i, pair in pairs.items()}
            if any(values[i] is not v for i, v in others.items()):
                columns[name] = values = list(values)
                for i, v in others.items():
                    values[i] = v
            elif name not in self.same:
                columns[name] = values
        return Pairs(LazyTable(Pair, len(self), columns, self.same))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> Sequence[Any]:
        if name not in self._columns and name not in self._same:
            self._columns[name] = list(map(attrgetter(name), self._made))
        return super().column(name)

    def numbers(self, name: str) -> np.ndarray:
        """float64: NaN for None."""
        return np.array(self.column(name), np.float64)

    def missing(self, name: str) -> np.ndarray:
        """bool: whose value is None."""
        column = self.column(name)
        if isinstance(column, ByPlace):
            return np.array([v is None for v in column.values], bool)[column.which]
        return np.array([v is None for v in column], bool)

    def _numbered(self, name: str) -> tuple[list[Any], np.ndarray]:
        """`numbered` of all, in any order."""
        if name not in self._known:
            one, column = name in self.same, self._columns.get(name)
            values = [self.same[name]] if one else column.values if isinstance(column, ByPlace) else self.column(name)
            known = {value: i for i, value in enumerate(set(values))}
            numbers = np.fromiter(map(known.__getitem__, values), np.int32, len(values))
            which = np.zeros(len(self), np.int64) if one else column.which if isinstance(column, ByPlace) else None
            self._known[name] = list(known), numbers if which is None else numbers[which]
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, tuple[list[Any], np.ndarray]]:
        return {}

    def those(self, name: str, fits: Callable[[Any], bool]) -> np.ndarray:
        """bool: whose value ``fits``, which is called once for equal ones."""
        values, which = self._numbered(name)
        return np.array([bool(fits(value)) for value in values], bool)[which]

    def having(self, name: str, value: Any) -> np.ndarray:
        """bool: which have this value."""
        return self.those(name, lambda own: own == value)

    def numbered(self, name: str, at: np.ndarray) -> tuple[list[Any], np.ndarray]:
        """(the different values of the pairs ``at``, as they come; int64 [at], which of them each has)."""
        values, of = self._numbered(name)
        used, first, which = np.unique(of[at], return_index=True, return_inverse=True)
        order = np.argsort(first)
        return [values[i] for i in used[order].tolist()], np.argsort(order)[which]

    @cached_property
    def places_in_order(self) -> list[int]:
        """The places of `ByPlace` columns, as they come."""
        places, first = np.unique(_places(self)[0], return_index=True)
        return places[np.argsort(first)].tolist()

    @cached_property
    def failed(self) -> np.ndarray:
        return self.having("status", FAIL)

    @cached_property
    def severities(self) -> np.ndarray:
        """`severity` of each."""
        return severities(self)

    @cached_property
    def counts(self) -> Counts:
        status, same, bits = map(self.column, ("status", "identical", "bit_identical"))
        n = Counter(status)
        reasons = Counter(compress(self.column("message"), self.having("status", SKIP).tolist()))
        known = Counter(zip(status, map(bool, same), map(bool, bits), strict=True))
        exact, widened = (sum(known[s, True, b] for s in (PASS, FAIL)) for b in (True, False))
        return Counts(n[PASS], n[FAIL], n[SKIP], exact + widened, exact, dict(reasons))


_NO_PLACES = np.zeros(0, np.int64)


def _places(table: LazyTable[Pair]) -> tuple[np.ndarray, int]:
    """(`ByPlace.which` of a table, how many places it has); one place where no column is by place."""
    found = next((c for c in table._columns.values() if isinstance(c, ByPlace)), None)
    return (np.zeros(len(table), np.int64), 1) if found is None else (found.which, len(found.values))


def _of_places(table: LazyTable[Pair], name: str, n: int) -> Sequence[Any] | None:
    """The values of a column of each of ``n`` places; None where they differ within one."""
    if name in table._columns:
        column = table._columns[name]
        return column.values if isinstance(column, ByPlace) else None
    return [table._same[name]] * n if name in table._same else None


_MEASURED = ("row_norm_ratio", "row_rel_l2", "element", "created")


def ratio(value: float | None, limit: float | None) -> float | None:
    """How many times ``limit`` fits into ``value``; infinite over a limit of 0, None where either is missing or NaN."""
    if value is None or limit is None or math.isnan(value) or math.isnan(limit):
        return None
    if limit <= 0:
        return math.inf if value > 0 else None
    return value / limit


def value_of(pair: Pair) -> float | None:
    """The number a pair is judged by: its worst row's relative L2 error or, without rows, the whole tensor's."""
    return pair.rel_l2 if pair.worst_row_rel_l2 is None else pair.worst_row_rel_l2


def severity(pair: Pair) -> float:
    """How bad a pair is: in the measure that decided, value over limit, 1 and more is beyond it; infinite over a limit
    of 0. Non-finite mismatches are infinite, skips -1."""
    return float(severities(Pairs([pair]))[0])


def severities(pairs: Pairs) -> np.ndarray:
    """float64: `severity` of each."""
    over, known = over_limits(pairs)
    failed, skipped = pairs.failed, pairs.having("status", SKIP)
    # A pair that failed on something else than its rows (replicas that differ) is still a failure. What must be equal
    # and passes all the same (another token in a near tie) is not beyond its limit.
    judged = np.where(failed, np.where(over < 1.0, 1.0, over), np.where(np.isfinite(over), over, 1.0))
    found = np.where(known, judged, np.where(failed, np.inf, 0.0))
    found[pairs.those("nonfinite_mismatch", bool)] = np.inf
    found[pairs.those("bit_identical", bool) & pairs.having("status", PASS)] = 0.0
    found[skipped] = -1.0
    return found


def over_limits(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """(how many times its limit each pair reaches, in the measure that decided, infinite over a limit of 0; which have
    a value and a limit)."""
    rows, whole, limits = map(pairs.numbers, ("worst_row_rel_l2", "rel_l2", "limit"))
    values = np.where(pairs.missing("worst_row_rel_l2"), whole, rows)
    decided = pairs.those("measure", _MEASURED.__contains__)
    if decided.any():
        gains, off = pairs.having("measure", "row_norm_ratio"), pairs.numbers("measured")
        values = np.where(decided, np.where(gains, np.abs(off - 1.0), off), values)
        limits = np.where(decided, pairs.numbers("allowed"), limits)
    with np.errstate(all="ignore"):
        over = np.where(limits <= 0, np.inf, values / limits)
    return over, ~(np.isnan(values) | np.isnan(limits)) & ((limits > 0) | (values > 0))
