"""All calls of a tap together, the same tap in sibling layers, and the smallest error that the limits would have found.

The problem: a scale that is a third of a rounding off, a column that is a little too large, or errors that are a little
too many hide in each row, and are a fault none the less; and a reference's model of rounding may be twice too large for
a kernel. The idea: the errors of some hundred rows average out as independent roundings do, and a fault does not.
`Pool`: what `verdict.ErrorSums` has of the rows is added up for each output of a tap; at the tap's end five statistics
are compared with what chance allows, each with a fifth of the chance, divided by the columns where it tests columns.
Rows that were met before count once. `unlike`: in sibling layers the same kernel has the same error of the model; the
logarithm of variance over the model's is compared by a moderated t. `of_each`, `of_pool`: each limit turned round.
Elsewhere: the rows' own limits (verdict.py), what is computed from coverage (proof/make_proof.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from vllm_accprobe.judge.distributions import t_at_most
from vllm_accprobe.judge.statistic import Budget, chi_square, deviations_of, normal, tail
from vllm_accprobe.opcheck.floors.verdict import (
    _GRID,
    _MIN_ROWS,
    _SECOND,
    BEYOND_CHANCE,
    BIAS,
    CONSTANT,
    ERROR,
    MODEL,
    NOISE,
    POWER,
    PRODUCT,
    SPREAD,
    SQUARE,
    VARIANCE,
    WEIGHTED,
    ErrorSums,
    Verdict,
    first_of,
    in_deviations,
    keys_of,
    sorted_lines,
)
from vllm_accprobe.opcheck.run.result_row import FAIL, CheckResult

Tensor = Any  # a torch.Tensor


class Smallest(NamedTuple):
    """Relative errors. row: of each row; column: of one column, in all rows; one_row: of one row alone."""

    row: float
    column: float
    one_row: float


EQUAL = Smallest(0.0, 0.0, 0.0)
"""Of what must be equal to the bit."""


def of_each(sums: Sequence[ErrorSums], chance: float) -> list[Smallest | None]:
    """Of each call; all have one shape, unit and model of noise. chance: that a right output fails, as verdict.judge's.
    None where no row has a size."""
    s, (rows, width), q = sums[0], sums[0].planes.shape[1:], chance / 4.0
    by_row, by_column = (torch.stack([getattr(x, name) for x in sums]) for name in ("by_row", "by_column"))
    v, power = by_row[:, VARIANCE], by_row[:, POWER]
    spread = by_row[:, SPREAD] + (by_row[:, NOISE].square() / s.groups if s.groups else 0.0)
    squares = MODEL * v * chi_square(_freedom(v, spread), normal(q, rows, 1))
    found, beyond = left(squares, v, power, s.common), _beyond_elements(s, squares, v)
    v, powers = by_column[:, VARIANCE], by_column[:, POWER]
    columns, sizes, of_elements = torch.full_like(v, math.inf), of_columns(powers), torch.ones_like(beyond)
    if rows >= _MIN_ROWS:
        spread = by_column[:, SPREAD] + (by_column[:, NOISE].square() if s.shared else 0.0)
        squares = MODEL * v * chi_square(_freedom(v, spread), normal(q, width, 1)).clamp(min=CONSTANT)
        columns, of_elements = left(squares, v, powers, s.common, sizes), beyond | _beyond_elements(s, squares, v)
    if bool(of_elements.any()):
        allowed = _allowed(sums, q).square()
        for lines, which, dim, size in ((found, beyond, 2, power), (columns, of_elements, 1, sizes)):
            element = (allowed.sum(dim) / size.clamp(min=1e-300)).sqrt()
            lines.copy_(torch.where(which.unsqueeze(1), torch.minimum(lines, element), lines))
    real = power > 0
    least, most = torch.where(real, found, math.inf).amin(1), torch.where(real, found, -math.inf).amax(1)
    each = zip(real.any(1).tolist(), *(x.tolist() for x in (least, columns.amax(1), most)), strict=True)
    return [Smallest(*sizes) if any_size else None for any_size, *sizes in each]


def of_pool(columns: Tensor, variance: float, freedom: float, s: ErrorSums, chance: float) -> Smallest | None:
    """Of all calls of a tap together, which examine no single row. columns: float64 [8, width], pooled.Pool's sums;
    variance, freedom: of all errors together; s: what unit, common and shared are; chance: that right rows give a
    breach, of one of the pool's statistics. None where nothing has a size."""
    power = columns[POWER]
    total = float(power.sum())
    if not total > 0:
        return None
    squares = MODEL * variance * float(chi_square(freedom, normal(chance, 1, 1)))
    row, column = math.sqrt(max(squares - variance, 0.0) / total), math.inf
    if len(power) > 1:
        v = columns[VARIANCE] * (1.0 + 4.0 * (s.common / s.unit) ** 2)
        spread = columns[SPREAD] + (columns[NOISE].square() if s.shared else 0.0)
        most = MODEL * v * chi_square(_freedom(v, spread), normal(chance, len(power), 1)).clamp(min=CONSTANT)
        column = float(left(most, v, power, 0.0, of_columns(power)).max())
    return Smallest(row, column, math.inf)


def left(squares: Tensor, variance: Tensor, power: Tensor, common: float, sizes: Tensor | None = None) -> Tensor:
    """What an error must be, relative to ``sizes`` (squares; ``power`` where there are none), for its squares and
    ``variance`` to reach the limit: ``squares``, and ``common`` of the size with it."""
    limit = (squares.sqrt() + common * power.sqrt()).square()
    return ((limit - variance).clamp(min=0.0) / (power if sizes is None else sizes).clamp(min=1e-300)).sqrt()


def of_columns(power: Tensor) -> Tensor:
    """The squares that a column's error is measured by. power: [..., width]."""
    return torch.maximum(power, power.mean(-1, keepdim=True))


def _freedom(v: Tensor, spread: Tensor) -> Tensor:
    return torch.where(spread > 0, v * v / spread.clamp(min=1e-300), 1.0).clamp_(min=1.0)


def _beyond_elements(s: ErrorSums, squares: Tensor, variance: Tensor) -> Tensor:
    """bool [calls]: whether elements' limits may be below those of lines. Squares of theirs over their variances are
    this or more: 2 half steps, of a variance of a third."""
    return (squares > (13.0 if s.unit >= _GRID else 5.0) * variance).any(1)


def _allowed(sums: Sequence[ErrorSums], q: float) -> Tensor:
    """[calls, rows, width]: each element's limit, by chance (error_limits.worst_element)."""
    noise, variance = (torch.stack([s.planes[k] for s in sums]) for k in (NOISE, VARIANCE))
    half = ((variance - noise).clamp(min=0.0) * (3.0 if sums[0].unit >= _GRID else 1.0)).sqrt_()
    return half.mul_(2.0 * (1.0 + _SECOND)).add_(noise.sqrt(), alpha=normal(q, noise[0].numel()) * math.sqrt(MODEL))


LEAST = 3
"""Chosen: of two peers, either may be the outlier."""
PRIOR_SPREAD, PRIOR_FREEDOM = 0.25, 4.0
"""Chosen: standard deviation of the logarithm of such a ratio over right layers, and how many layers that is worth."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """All rows of one output of a tap. ratio: variance of the errors over the model's; freedom: of that ratio; scale,
    error: sum y d / sum y y and its standard error; rows: different ones; seq: of its first call, its place in the
    order of execution; created: relative L2 error; smallest: what would have been found at least (`of_pool`), row
    and column."""

    tap: str
    cls: str
    role: str
    rank: int
    dtype: str
    ratio: float
    freedom: float
    scale: float
    error: float
    rows: int
    seq: int
    created: float
    smallest: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class OutlierLayer:
    """An outlier among sibling layers. times: its errors over theirs (root of the ratios' quotient); chance: that among
    the layers of a correct model any is so far out; peers: how many it was compared with."""

    pooled: Pooled
    times: float
    chance: float
    peers: int


def unlike(golden: Iterable[Pooled], mine: Iterable[Pooled], rate: float) -> list[OutlierLayer]:
    """Those of mine that are outliers among sibling layers at ``rate`` for all of them together, by Bonferroni."""
    groups: dict[tuple[str, str, str], list[Pooled]] = defaultdict(list)
    theirs: dict[tuple[str, str, str], list[Pooled]] = defaultdict(list)
    for by_kind, side in ((groups, mine), (theirs, golden)):
        for p in side:
            if p.ratio > 0:
                by_kind[p.cls, p.role, p.dtype].append(p)
    tests = sum(len(g) for g in groups.values() if len(g) > LEAST)
    found = []
    for key, group in groups.items():
        if len(group) <= LEAST:
            continue
        own = {p.tap: p.ratio for p in theirs.get(key, ())}
        for p in group:
            # where golden has the same tap, what right layers differ by is taken off: its own ratio there
            paired = all(q.tap in own for q in group)
            x = {id(q): math.log(q.ratio) - (math.log(own[q.tap]) if paired else 0.0) for q in group}
            others = [x[id(q)] for q in group if q is not p]
            times, chance = _stands_out(x[id(p)], others, p.freedom)
            chance = min(1.0, chance * max(tests, 1))
            if chance < rate and times > 1:
                found.append(OutlierLayer(p, times, chance, len(others)))
    return found


def _stands_out(x: float, others: list[float], freedom: float) -> tuple[float, float]:
    """(root of the ratio over the siblings' mean, probability of as much above it)."""
    n = len(others)
    mean = sum(others) / n
    squares = sum((o - mean) ** 2 for o in others)
    own = 2.0 / max(freedom, 1.0)  # variance of the logarithm of a chi-square over its degrees, to first order
    t, degrees = moderated_t(x - mean, n, squares, PRIOR_SPREAD**2, PRIOR_FREEDOM, own)
    return math.exp((x - mean) / 2.0), t_at_most(degrees, -t)


def moderated_t(
    off: float, siblings: int, squares: float, known: float, known_freedom: float, own: float = 0.0
) -> tuple[float, float]:  # fmt: skip
    """(Student's t, its degrees of freedom) of a number that is ``off`` from the mean of so many siblings, 2 or more,
    whose squares about that mean have this sum, where a variance is ``known`` as if from ``known_freedom`` degrees:
    s^2 = (d0 s0^2 + d s^2) / (d0 + d) with d = siblings - 1 [G. Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004) 3, eq.
    3.2], and the difference has the variance s^2 (1 + 1 / siblings). own: a further variance of each, from the counting
    noise of what was measured."""
    freedom = known_freedom + (siblings - 1)
    variance = (known_freedom * known + squares) / freedom
    scale = math.sqrt((variance + own) * (1.0 + 1.0 / siblings))
    return (off / scale if scale else 0.0), freedom


TOGETHER, SCALE, COLUMN, COLUMN_SCALE, COLUMN_MEAN = (
    "all rows", "scale of all rows", "column of all rows", "scale of a column", "mean of a column",
)  # fmt: skip
MEASURES = (TOGETHER, SCALE, COLUMN, COLUMN_SCALE, COLUMN_MEAN)
TRUNCATED = 0.75
"""Units: a scale that is left where a machine truncates what it computes on the way. Derived: 2/3 in the mean where
significands are distributed as 1 / m, which rounding.py takes off only where a row shows it; measured:
scripts/opcheck_floors.py, 0.63 (attention of Llama with kernels for AVX2)."""
_COLUMN = 1.0
"""Derived: units of a column's scale that rounding alone may leave: half a step is at most a unit, and a column whose
values vary by less than a step has the same rounding error in all rows."""
MOST_WIDTH = 1 << 16
"""Chosen: columns that are kept apart, 4 MiB of sums; of wider outputs (logits of large vocabularies) only the
total."""


_KEPT = 1 << 20
"""Chosen: errors that are remembered, 8 MiB; more of them are independent enough."""


@dataclass(frozen=True, slots=True)
class Breach:
    """What all rows show. measure: one of MEASURES; value, limit: in standard errors, or of the expected; column: -1
    where it is of all; chance: that right rows show as much; words: for people."""

    measure: str
    value: float
    limit: float
    column: int
    chance: float
    words: str

    @property
    def severity(self) -> float:
        return self.value / self.limit


class Pool:
    """The sums of one output of a tap."""

    def __init__(self) -> None:
        self.rows = self.seen = 0
        self._met: set[float] = set()
        self._errors: list[torch.Tensor] = []  # each sorted, of twice as many as the next or more: sorting costs little
        self._columns: torch.Tensor | None = None
        self._grouped = self._grouped_squares = self._common = 0.0
        self._first: ErrorSums | None = None
        self.usable, self._truncated = True, False

    def add(self, calls: Sequence[ErrorSums], truncated: bool = False) -> None:
        """The rows of calls, in their order; truncated: one does not round to nearest. Calls of other widths, units or
        models of noise cannot be added up: then there is no result."""
        self._truncated |= truncated
        some = [(s, new) for s in calls if (new := self._new_rows(s))]
        begin = 0 if self._errors else next((k for k, (s, _) in enumerate(some) if s.few), len(some))
        planes = [s.planes if len(new) == s.planes.shape[1] else s.planes[:, new] for s, new in some]
        masks = self._new_errors([keys_of(p, self.unit) if s.keys is None else s.keys if p is s.planes else s.keys[new]
                                  for (s, new), p in zip(some[begin:], planes[begin:], strict=True)])  # fmt: skip
        for (s, new), own, mask in zip(some, planes, [None] * begin + masks, strict=True):
            by_row, by_column = s.by_row, s.by_column
            if mask is not None:
                once = own * mask
                by_row, by_column = once.sum(2), once.sum(1)
            elif own is not s.planes:
                by_row, by_column = by_row[:, new], own.sum(1)
            self._sum(s, by_row, by_column)

    def _new_rows(self, s: ErrorSums) -> list[int]:
        """Which rows of a call were not met before; none where it cannot be added."""
        first, width = self._first, s.planes.shape[2]
        if first is None:
            nothing = torch.empty(0)
            self._first = first = replace(s, planes=nothing, by_row=nothing, by_column=nothing, keys=None)
            self._columns = torch.zeros(8, width if width <= MOST_WIDTH else 1, dtype=torch.float64)
        assert self._columns is not None
        self.usable &= (s.unit, s.common, s.groups, s.shared) == (first.unit, first.common, first.groups, first.shared)
        self.usable &= self._columns.shape[1] == (1 if width > MOST_WIDTH else width)
        if not self.usable:
            return []
        powers, new = s.by_row[POWER].tolist(), []
        self.seen += len(powers)
        for k, power in enumerate(powers):
            if power and power not in self._met:
                self._met.add(power)
                new.append(k)
        self.rows += len(new)
        return new

    def _sum(self, s: ErrorSums, by_row: Tensor, by_column: Tensor) -> None:
        self._columns += by_column.sum(1, keepdim=True) if s.planes.shape[2] > MOST_WIDTH else by_column
        if s.groups:
            self._grouped += float((by_row[POWER] * by_row[NOISE]).sum()) / s.groups
            self._grouped_squares += float(by_row[NOISE].square().sum()) / s.groups
        if s.common:
            self._common += float(by_row[POWER].square().sum()) * s.common**2 / 3.0

    def _new_errors(self, calls: Sequence[Tensor]) -> list[Tensor]:
        """Of each call's keys, which errors were not met before (verdict.repeated), in its rows or in earlier ones."""
        if not calls:
            return []
        keys = torch.cat([k.reshape(-1) for k in calls])
        kept, (new,) = self._errors, first_of(keys[None])
        for known in kept:
            new &= known[torch.searchsorted(known, keys).clamp_(max=len(known) - 1)] != keys
        more, room = keys[new], _KEPT - sum(map(len, kept))
        if len(more) > room and len(calls) > 1:  # what is not remembered is new again
            return [new for k in calls for new in self._new_errors([k])]
        more = more[:room]
        if len(more):
            while kept and len(kept[-1]) < 2 * len(more):
                more = torch.cat((kept.pop(), more))
            kept.append(sorted_lines(more[None])[0])
        return [n.view(k.shape) for n, k in zip(new.split([k.numel() for k in calls]), calls, strict=True)]

    def pooled(self) -> tuple[float, float, float, float] | None:
        """(variance over expected, degrees of freedom, scale, its standard error); None where nothing is known."""
        if not self.usable or self._first is None or not self.rows or self._columns is None:
            return None
        t = self._columns.sum(1).tolist()
        first = self._first
        variance = t[VARIANCE] + (first.common**2 + self._left()) * t[POWER]
        if not (variance > 0 and t[POWER] > 0 and math.isfinite(variance) and math.isfinite(t[SQUARE])):
            return None
        squares, noise = t[SPREAD] + self._grouped_squares, t[WEIGHTED] + self._grouped + self._common
        if first.shared:
            squares += t[NOISE] ** 2 / (first.groups or 1.0)
            noise += t[POWER] * t[NOISE] / (first.groups or 1.0)
        freedom = max(1.0, t[VARIANCE] ** 2 / squares) if squares else 1.0
        return t[SQUARE] / variance, freedom, t[PRODUCT] / t[POWER], math.sqrt(MODEL * noise) / t[POWER]

    def smallest(self, chance: float) -> Smallest | None:
        """What `measures` would find at least. chance: as theirs."""
        found = self.pooled()
        if found is None or self._first is None or self._columns is None:
            return None
        freedom = found[1]
        total = self._columns.sum(1).tolist()
        variance = total[VARIANCE] + (self._first.common**2 + self._left()) * total[POWER]
        return of_pool(self._columns, variance, freedom, self._first, chance / len(MEASURES))

    @property
    def unit(self) -> float:
        """Of the last rounding."""
        return self._first.unit if self._first is not None else 0.0

    def created(self) -> float:
        """The relative L2 error of all rows."""
        if self._columns is None:
            return 0.0
        t = self._columns.sum(1).tolist()
        return math.sqrt(t[SQUARE] / t[POWER]) if t[POWER] > 0 else 0.0

    def breach(self, chance: float) -> Breach | None:
        """The worst of what is above its limit."""
        beyond = [b for b in self.measures(chance) if b.value > b.limit]
        return max(beyond, key=lambda b: b.severity, default=None)

    def measures(self, chance: float) -> list[Breach]:
        """All five, the worst column of each. chance: that right rows give a breach."""
        found = self.pooled()
        if found is None or self._first is None or self._columns is None:
            return []
        q = chance / len(MEASURES)
        ratio, freedom, scale, error = found
        return [self._together(ratio, freedom, q), self._scale(scale, error, q), *self._by_column(self._columns, q)]

    def _bias(self) -> float:
        return TRUNCATED if self._truncated else BIAS

    def _left(self) -> float:
        """Of the square of y, what the scale that truncation leaves adds to the errors' squares."""
        return (TRUNCATED * self.unit) ** 2 if self._truncated else 0.0

    def _all(self) -> str:
        return f"all {self.rows} {'' if self.rows == self.seen else 'different '}rows together"

    def _together(self, ratio: float, freedom: float, q: float) -> Breach:
        limit = MODEL * chi_square(freedom, normal(q, 1, 1))
        chance = len(MEASURES) * tail(deviations_of(ratio / MODEL, freedom), 1, 1)
        words = f"{self._all()}: errors {ratio**0.5:.3g} times rounding alone, allowed {limit**0.5:.3g}"
        return Breach(TOGETHER, ratio**0.5, limit**0.5, -1, min(1.0, chance), words)

    def _scale(self, scale: float, error: float, q: float) -> Breach:
        assert self._first is not None
        bias = self._bias() * self._first.unit
        value, limit = in_deviations(abs(scale), normal(q) * error + bias, error)
        far = (abs(scale) - bias) / error if error else math.inf
        words = f"{self._all()}: a scale of {1.0 + scale:.5g}, {value:.3g} standard errors, allowed {limit:.3g}"
        return Breach(SCALE, value, limit, -1, min(1.0, len(MEASURES) * tail(far)), words)

    def _by_column(self, s: torch.Tensor, q: float) -> list[Breach]:
        first = self._first
        tests = s.shape[1]
        if first is None or tests < 2 or self.rows < 2:
            return []
        # a common error moves y by c y: sum y**4 c**2 / 3 <= 4 (c / u)**2 sum y y v, because v >= (u y)**2 / 12
        share = 4.0 * (first.common / first.unit) ** 2
        variance = s[VARIANCE] * (1.0 + share) + self._left() * s[POWER]
        squares, weighted, means = s[SPREAD], s[WEIGHTED] * (1.0 + share), variance
        if first.shared:  # (sum a b)**2 <= sum a a sum b b
            squares, weighted = squares + s[NOISE] ** 2, weighted + s[POWER] * s[NOISE]
            means = means + self.rows * s[NOISE]
        bias = _COLUMN * first.unit
        freedom = torch.where(squares > 0, variance**2 / squares, 1.0).clamp_(min=1.0)
        sizes, deviations = s[POWER].sqrt(), normal(q, tests)
        found = []
        for measure, value, one, extra in (
            (COLUMN_SCALE, s[PRODUCT].abs(), (MODEL * weighted).sqrt(), bias * s[POWER]),
            (COLUMN_MEAN, s[ERROR].abs(), (MODEL * means).sqrt(), bias * self.rows**0.5 * sizes),
        ):
            limit = deviations * one + extra
            at = int(torch.where(limit > 0, value / limit, 0.0).argmax())
            floor, size, most = float(one[at]), float(value[at]), float(limit[at])
            far = (size - float(extra[at])) / floor if floor else 0.0
            shown = in_deviations(size, most, floor)
            what = "a mean error"
            if measure == COLUMN_SCALE:
                what = f"a scale of {1.0 + float(s[PRODUCT, at]) / max(float(s[POWER, at]), 1e-300):.5g}"
            words = f"{self._all()}: {what} in column {at}, {shown[0]:.3g} standard errors, allowed {shown[1]:.3g}"
            found.append(Breach(measure, *shown, at, min(1.0, len(MEASURES) * tail(far, tests)), words))
        limit = (MODEL * variance * chi_square(freedom, normal(q, tests, 1)).clamp(min=CONSTANT)).sqrt()
        error = s[SQUARE].sqrt()
        at = int(torch.where(limit > 0, error / limit, 0.0).argmax())
        floor = math.sqrt(float(variance[at]))
        shown = in_deviations(float(error[at]), float(limit[at]), floor)
        far = deviations_of(shown[0] ** 2 / MODEL, float(freedom[at])) if floor else 0.0
        words = f"{self._all()}: errors in column {at} {shown[0]:.3g} times rounding alone, allowed {shown[1]:.3g}"
        found.append(Breach(COLUMN, *shown, at, min(1.0, len(MEASURES) * tail(far, tests, 1)), words))
        return found


class Pools:
    """What the calls of one tap add up to, by output."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Pool, CheckResult]] = {}
        self._wrong: set[str] = set()

    def add(self, outputs: Iterable[tuple[CheckResult, Verdict]]) -> None:
        """Outputs with their verdicts, in their order."""
        some: dict[str, list[Verdict]] = {}
        for row, v in outputs:
            if row.status == FAIL:
                self._wrong.add(row.role)
            elif v.sums is not None:
                if row.role not in self._of:
                    self._of[row.role] = Pool(), row
                some.setdefault(row.role, []).append(v)
        for role, verdicts in some.items():
            self._of[role][0].add([v.sums for v in verdicts if v.sums], any(v.rounding for v in verdicts))

    def rows(self, budget: Budget) -> Iterator[CheckResult]:
        """Outputs no call of which failed, and all of which together do."""
        for role, (pool, first) in self._of.items():
            found = pool.breach(budget.tap) if role not in self._wrong else None
            if found is not None:
                yield _together(first, found, pool, budget)

    def pooled(self, budget: Budget) -> Iterator[Pooled]:
        """What is compared with sibling layers."""
        for role, (pool, first) in self._of.items():
            found = pool.pooled() if role not in self._wrong else None
            if found is not None:
                least = pool.smallest(budget.tap)
                yield Pooled(first.tap, first.cls, role, first.rank, first.dtype, *found, pool.rows, first.seq,
                             pool.created(), None if least is None else (least.row, least.column))  # fmt: skip


def _together(first: CheckResult, b: Breach, pool: Pool, budget: Budget) -> CheckResult:
    return replace(
        first, rows=pool.seen, checked=pool.seen, unchecked_because="", created=pool.created(), measure=b.measure,
        measured=b.value, allowed=b.limit, request=None, position=None, column=b.column if b.column >= 0 else None,
        status=FAIL, message=f"{b.severity:.3g}x its limit: {b.words}", measures=None, tier=BEYOND_CHANCE,
        chance=min(1.0, b.chance * budget.taps),
    )  # fmt: skip
