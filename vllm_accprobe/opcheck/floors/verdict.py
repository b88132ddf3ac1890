"""Whether a captured output is what a right kernel gives, when its inputs are known exactly.

The problem: limits can be tight because inputs are known to the bit; yet a kernel may round intermediates, and nothing
is called wrong by chance. The idea: two named floors (judge/statistic.py). Proved: |mine - exact| <= 2 (bound + half a
step) [N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 2.2, section 3.1]; twice, because a
kernel that rounds in another direction than to nearest may be off by a whole step each time. Beyond chance: an error
has mean 0 and the variance step**2 / 12 + noise**2 [B. Widrow and I. Kollar, Quantization Noise, 2008, chapter 5]. The
sums of squares of a row, and of a column of at least eight rows, are compared with the chi-square's quantile; a row's
gain sum y d / sum y y and an element with the normal's. Each has a quarter of the output's chance, divided by how many
rows, columns, elements there are. Errors that rows or heads share are not averaged away (``common``, ``groups``,
``shared``, `keys_of`). With torch alone: copied with the tests that gentest writes.
Elsewhere: where y comes from (references/), many calls together (pooled.py), other measures (measures.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

try:
    import numpy
except ImportError:  # torch alone
    numpy = None  # type: ignore[assignment]

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.judge.statistic import BEYOND_CHANCE, CHANCE, PROVED, chi_square, deviations_of, normal, tail
from vllm_accprobe.kernels.float_formats import smallest

ROW, GAIN, COLUMN, ELEMENT = "row", "gain", "column", "element"
MODEL = 1.25
"""Measured: scripts/opcheck_floors.py; variance of a right kernel over that of its reference's model, of taps of 74
clean runs with AVX-512, trained weights among them. These runs were examined while it was chosen."""
BIAS = 0.1
"""Measured: scripts/opcheck_floors.py, 0.10 to 0.11 (SiluAndMul); units of the last rounding: a scale that a right
kernel leaves."""
CONSTANT = 3.0
"""Derived: (step / 2)**2 over step**2 / 12. A column whose values vary by less than a step (a trained bias, an outlier
channel) has one rounding error in all rows, which may be half a step."""
_MIN_ROWS = 8
"""Chosen: in fewer rows a column says no more than its elements do."""
_WORK = 2.0**-18
"""Chosen: 64 roundings of float32 besides the last one, of an element, and of its row's root mean square where a sum
cancels: far below the last rounding, and a result near the middle of two numbers may go either way for it."""
_SECOND = 2.0**-6
"""Derived: what first-order bounds leave out. Bounds are sums of some ten relative roundings of 2**-8 at most, whose
products are (10 * 2**-8)**2 / 2 < 2**-10 of the value, below 2**-6 of a bound of several roundings."""
_NOTHING = 1e-300
Tensor = Any  # a torch.Tensor

SQUARE, VARIANCE, POWER, PRODUCT, WEIGHTED, SPREAD, ERROR, NOISE = range(8)
"""What verdict.ErrorSums adds up, of each element with error d and variance v: d d, v, y y, y d, y y v, v v, d,
noise**2."""


class WorstFound(NamedTuple):
    """value, limit: in standard deviations of a right error; deviations, tests: how far out a normal number would be,
    one of how many."""

    measure: str
    value: float
    limit: float
    row: int
    column: int
    deviations: float
    tests: int


def _most(value: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Where value / floor [calls, n], neither below 0, is largest in each call, and what it is there."""
    ratio = value / floor.clamp(min=_NOTHING)
    at = ratio.argmax(1)
    return at, ratio.gather(1, at.unsqueeze(1)).squeeze(1)


def _beyond(over: Tensor, at: Tensor, value: Tensor, floor: Callable[[], Tensor]) -> Tensor:
    """``at``, and where ``value`` over ``floor`` is largest in the calls ``over`` [calls]."""
    return torch.where(over, _most(value, floor())[0], at) if bool(over.any()) else at


def _lines(s: Tensor, at: Tensor) -> Iterator[tuple[int, list[float]]]:
    """Of each call: a line's number, and its eight sums."""
    return zip(at.tolist(), s[torch.arange(len(s)), :, at].tolist(), strict=True)


def worst_rows(s: Tensor, groups: float | None, common: float, chance: float, width: int) -> list[WorstFound]:
    """Of each call. s: [calls, 8, rows]."""
    tests = s.shape[2]
    z = normal(chance, tests, 1)

    def freedom(square: Any, spread: Any, noise: Any) -> Any:
        return square / (spread + noise * noise / groups if groups else spread)

    def limits() -> Tensor:
        v = s[:, VARIANCE]
        squares = MODEL * v * chi_square(freedom(v * v, s[:, SPREAD], s[:, NOISE]).clamp_(min=1.0), z)
        return (squares.sqrt() + common * s[:, POWER].sqrt()) ** 2

    at, ratio = _most(s[:, SQUARE], s[:, VARIANCE])
    # else no row is above its limit: fewer degrees widen it
    at = _beyond(ratio > MODEL * chi_square(float(width), z), at, s[:, SQUARE], limits)
    found = []
    for row, sums in _lines(s, at):
        square, v, power, spread, noise = (sums[k] for k in (SQUARE, VARIANCE, POWER, SPREAD, NOISE))
        own = max(1.0, freedom(v * v, spread, noise)) if spread else 1.0
        extra, error = common * power**0.5, square**0.5
        limit = (MODEL * v * chi_square(own, z)) ** 0.5 + extra
        found.append(_squares(ROW, error, limit, error - extra, v, own, tests, row=row))
    return found


def _squares(
    measure: str, value: float, limit: float, far: float, variance: float, freedom: float, tests: int, row: int = -1,
    column: int = -1,
) -> WorstFound:  # fmt: skip
    floor = math.sqrt(variance)
    beyond = deviations_of(far * far / (MODEL * variance), freedom) if far > 0 and variance else 0.0
    return WorstFound(measure, *in_deviations(value, limit, floor), row, column, beyond, tests)


def in_deviations(value: float, limit: float, floor: float) -> tuple[float, float]:
    """Both in units of ``floor``; 0 of 1 where there is neither error nor floor."""
    if not limit:
        return (math.inf if value else 0.0), 1.0
    return (value / floor, limit / floor) if floor else (value / limit, 1.0)


def worst_gains(s: Tensor, groups: float | None, common: float, u: float, chance: float) -> list[WorstFound]:
    """|sum y d|, the part of a row's error that is a scale, of each call. s: [calls, 8, rows]."""
    variance = s[:, WEIGHTED] + s[:, POWER] * s[:, NOISE] / groups if groups else s[:, WEIGHTED]
    tests = s.shape[2]
    z, part = normal(chance, tests), common + BIAS * u
    at, squared = _most(s[:, PRODUCT].square(), variance)
    at = _beyond(squared > z * z * MODEL, at, s[:, PRODUCT].abs(),
                 lambda: z * (MODEL * variance).sqrt() + part * s[:, POWER])  # fmt: skip
    found = []
    for (row, sums), one in zip(_lines(s, at), variance[torch.arange(len(s)), at].tolist(), strict=True):
        value, floor, bias = abs(sums[PRODUCT]), (MODEL * one) ** 0.5, part * sums[POWER]
        beyond = (value - bias) / floor if floor else 0.0
        found.append(WorstFound(GAIN, *in_deviations(value, z * floor + bias, floor), row, -1, beyond, tests))
    return found


def worst_columns(s: Tensor, shared: bool, common: float, chance: float, rows: int) -> list[WorstFound]:
    """Of each call. s: [calls, 8, width]."""
    if rows < _MIN_ROWS:
        return [WorstFound(COLUMN, 0.0, 1.0, -1, -1, 0.0, 1)] * len(s)
    v, tests = s[:, VARIANCE], s.shape[2]
    z = normal(chance, tests, 1)
    squares = s[:, SPREAD] + s[:, NOISE] ** 2 if shared else s[:, SPREAD]

    def limits() -> Tensor:
        freedom = (v * v / squares.clamp(min=_NOTHING)).clamp_(min=1.0)
        return ((MODEL * v * chi_square(freedom, z).clamp(min=CONSTANT)).sqrt() + common * s[:, POWER].sqrt()) ** 2

    at, ratio = _most(s[:, SQUARE], v)
    at = _beyond(ratio > MODEL * CONSTANT, at, s[:, SQUARE], limits)
    found = []
    for (column, sums), square in zip(_lines(s, at), squares[torch.arange(len(s)), at].tolist(), strict=True):
        error, variance = sums[SQUARE] ** 0.5, sums[VARIANCE]
        own, extra = max(1.0, variance * variance / square) if square else 1.0, common * sums[POWER] ** 0.5
        limit = (MODEL * variance * max(CONSTANT, chi_square(own, z))) ** 0.5 + extra
        found.append(_squares(COLUMN, error, limit, error - extra, variance, own, tests, column=column))
    return found


def worst_elements(
    y: Tensor, d: Tensor, half: Tensor, noise: Tensor | None, bound: Tensor | None, common: float, planes: Tensor,
    power: Tensor, chance: float,
) -> list[WorstFound]:  # fmt: skip
    """Each against what chance allows, or against what is proved where that is less; of each call. y, d, half, noise,
    bound: [calls, rows, width]; power: [calls, rows], sums of squares of y."""
    size, (calls, rows, width) = d.abs(), d.shape
    tests = rows * width
    z = normal(chance, tests) * MODEL**0.5
    at, steps = _most(size.flatten(1), half.flatten(1))
    limits = 2.0 * (1.0 + _SECOND) * _of_each(half, at)
    some = (steps > 2.0).nonzero().flatten()  # the others' are within a whole step, which is never too much
    if len(some):
        y, h, power, sizes = (x if len(some) == calls else x[some] for x in (y, half, power, size))
        noise, bound = (None if x is None else x[some] for x in (noise, bound))
        allowed = 2.0 * (1.0 + _SECOND) * h + _work(y, power)
        if common:
            allowed += common * y.abs()
        if noise is not None:
            allowed += z * noise.abs()
        if bound is not None:
            allowed = torch.minimum(allowed, proved(y, h, bound, power))
        at[some], _ = _most(sizes.flatten(1), allowed.flatten(1))
        limits[some] = _of_each(allowed, at[some])
    found = []
    for k, value, limit, noises, variance in zip(
        *(x.tolist() for x in (at, _of_each(size, at), limits, _of_each(planes[:, NOISE], at),
                               _of_each(planes[:, VARIANCE], at))), strict=True,
    ):  # fmt: skip
        one = MODEL**0.5 * noises**0.5
        beyond = (value - limit) / one + normal(chance, tests) if one else math.inf
        shown = in_deviations(value, limit, variance**0.5)
        found.append(WorstFound(ELEMENT, *shown, k // width, k % width, beyond, tests))
    return found


def _of_each(x: Tensor, at: Tensor) -> Tensor:
    """[calls]: of [calls, rows, width] the elements ``at`` [calls], counted through."""
    return x[torch.arange(len(x)), at // x.shape[2], at % x.shape[2]]


def proved(y: Tensor, half: Tensor, bound: Tensor, power: Tensor) -> Tensor:
    """What is proved of each element's error: it holds for any direction of rounding."""
    return 2.0 * (1.0 + _SECOND) * (half + bound) + _work(y, power)


def _beyond_proof(size: Tensor, limit: Tensor, variance: Tensor) -> WorstFound | None:
    """The element of ``size`` [rows, width] that is furthest beyond its proved ``limit``; None where none is."""
    times = torch.where(size > limit, size / limit, 0.0)  # NaN is no proof
    if not bool(times.any()):
        return None
    row, column = divmod(int(times.argmax()), size.shape[1])
    value, most, floor = (float(x[row, column]) for x in (size, limit, variance))
    return WorstFound(ELEMENT, *in_deviations(value, most, floor**0.5), row, column, math.inf, size.numel())


def _work(y: Tensor, power: Tensor) -> Tensor:
    return _WORK * (y.abs() + (power / y.shape[-1]).sqrt().unsqueeze(-1))


EXACT, NONFINITE = "exact", "nonfinite"
_GRID = 2.0**-12
"""Units from this on are those of a grid of 16 bits or fewer, whose last rounding is half a step; below, the order of
summation decides, and the unit is a standard error (judge/rounding_unit.py: 64 roundings)."""
_LINES = 4096
"""Chosen: rows or columns beyond their limits whose equal numbers are found."""
_EXPONENT = 0x7FF0_0000_0000_0000


@dataclass(frozen=True)
class ErrorSums:
    """What pooled.py adds up over calls. planes: float64 [8, rows, width], the eight of each element; by_row [8, rows],
    by_column [8, width]: their sums; unit: of the last rounding; common, groups, shared: of Expected; keys: `keys_of`
    where the same errors of the same numbers come again and again, and count once (in these sums: once in a row, and in
    a column)."""

    planes: Tensor
    by_row: Tensor
    by_column: Tensor
    unit: float
    common: float
    groups: float | None
    shared: bool
    keys: Tensor | None = None

    @property
    def few(self) -> bool:
        return self.keys is not None


@dataclass(frozen=True)
class Verdict:
    """measure: that is furthest beyond, or nearest to, its limit; value, limit: a standard deviation of a right error
    is 1 (counts for exact and nonfinite); row, column: where, in the [rows, width] view, -1 where it is nowhere;
    nonfinite, nonfinite_mismatch: positions that are not finite, and of them those that differ; worst_row_rel_l2:
    largest relative error of a row; rounding: how mine was rounded where that is not to nearest (rounding.py), else "";
    tier: PROVED or BEYOND_CHANCE where it did not pass; chance: then, that a right output shows as much; ratios:
    value / limit of each measure; beyond_proof: the element that is furthest beyond what is proved, None where none is;
    sums: for pooled.py."""

    passed: bool
    measure: str
    value: float
    limit: float
    row: int
    column: int
    nonfinite: int
    nonfinite_mismatch: int
    worst_row_rel_l2: float
    rounding: str = ""
    tier: str = ""
    chance: float = 0.0
    ratios: tuple[tuple[str, float], ...] = ()
    beyond_proof: WorstFound | None = field(default=None, compare=False, repr=False)
    sums: ErrorSums | None = field(default=None, compare=False, repr=False)

    @property
    def severity(self) -> float:
        """value / limit; inf where the limit is 0 and the value is not."""
        return self.value / self.limit if self.limit else (math.inf if self.value else 0.0)


def judge(
    reference: Tensor, mine: Tensor, dtype: str, chance: float = CHANCE, *, noise: Tensor | None = None,
    bound: Tensor | None = None, **more: Any,
) -> Verdict:  # fmt: skip
    """`judge_each` of one call. reference, mine: [rows, width]; noise, bound: broadcastable."""
    return judge_each(reference[None], mine[None], dtype, chance, noise=of_one(noise, reference),
                      bound=of_one(bound, reference), **more)[0]  # fmt: skip


def of_one(error: Tensor | None, reference: Tensor) -> Tensor | None:
    """``error``, broadcastable to [rows, width] of one call, as of several."""
    return None if error is None else error.expand(reference.shape)[None]


def judge_each(
    references: Tensor, mine: Tensor, dtype: str, chance: float = CHANCE, *,
    noise: Tensor | None = None, bound: Tensor | None = None, last: float | None = None, common: float = 0.0,
    groups: float | None = None, shared: bool = False,
) -> list[Verdict]:  # fmt: skip
    """Of each call, whatever the others are. references: float64 or integers [calls, rows, width]; mine: the captured
    numbers, float64 or int64, same shape; dtype: mine's, torch's name; chance: that a right output fails; noise, bound:
    float64, same shape, standard error and bound before the last rounding; last: the last rounding's relative error if
    it is not dtype's; common: relative error that a row may share; groups, shared: of Expected. Raises ValueError for
    numbers beyond 1e154: no limit can be computed."""
    u = unit(dtype) if last is None else last
    y, d = references, mine - references
    (calls, n, width), counts, differ = y.shape, [0] * len(y), [0] * len(y)
    wrong = d != 0
    if not math.isfinite(float(d.sum())):  # which is so wherever one of them is not
        finite = torch.isfinite(references) & torch.isfinite(mine)
        different = ~finite & ~((references == mine) | (torch.isnan(references) & torch.isnan(mine)))
        counts, differ = ((x.flatten(1).sum(1)).tolist() for x in (~finite, different))
        y, d = torch.where(finite, references, 0), torch.where(finite, d, 0)
        wrong = torch.where(torch.tensor(differ).view(-1, 1, 1) > 0, different, d != 0)
        noise, bound = (None if x is None else torch.where(finite, x, 0.0) for x in (noise, bound))
    y, d = y.double(), d.double()
    none = [k for k in range(calls) if differ[k] or not u or not n * width]
    equal = {k: _equal(y[k], d[k], counts[k], differ[k], wrong[k]) for k in none}
    if len(equal) == calls:
        return list(equal.values())
    planes = torch.empty(calls, 8, n, width, dtype=torch.float64)
    squares, v, powers, products, weighted, spread, errors, noises = planes.unbind(1)
    on_grid = u >= _GRID
    least = 0.5 * smallest(dtype)  # below that nothing can be relatively exact
    half = ((y.view(torch.int64) & _EXPONENT).view(torch.float64) * u if on_grid else u * y.abs()).clamp_(min=least)
    torch.mul(half, half, out=v)
    if on_grid:
        v /= 3.0
    if noise is None:
        noises.zero_()
    else:
        noises.copy_(noise).mul_(noises)
        v += noises
    errors.copy_(d)
    torch.mul(d, d, out=squares)
    torch.mul(y, y, out=powers)
    torch.mul(y, d, out=products)
    torch.mul(powers, v, out=weighted)
    torch.mul(v, v, out=spread)
    by_row, by_column = planes.sum(3), planes.sum(2)
    for k, finite in enumerate(by_row[:, VARIANCE : POWER + 1].isfinite().flatten(1).all(1).tolist()):
        if not finite and k not in equal:
            raise ValueError("a reference or its noise is so large that float64 cannot hold its square")
    power = by_row[:, POWER].clone()
    worst = (by_row[:, SQUARE] / power.clamp(min=1e-300)).max(1).values.tolist()
    few = repeated(y, d)
    keys: dict[int, Tensor] = {}
    if some := [k for k in range(calls) if few[k]]:
        repeats, theirs = planes[some], keys_of(planes[some].unbind(1), u)
        keys = dict(zip(some, theirs, strict=True))
        by_row[some] = (repeats * first_of(theirs, torch.arange(n).unsqueeze(1)).unsqueeze(1)).sum(3)
        by_column[some] = (repeats * first_of(theirs, torch.arange(width)).unsqueeze(1)).sum(2)
    q = chance / 4.0

    def in_rows(s: Tensor) -> list[list[WorstFound]]:
        return [worst_rows(s, groups, common, q, width), worst_gains(s, groups, common, u, q)]

    def in_columns(s: Tensor) -> list[list[WorstFound]]:
        return [worst_columns(s, shared, common, q, n)]

    elements = worst_elements(y, d, half, noise, bound, common, planes, power, q)
    each = zip(*in_rows(by_row), *in_columns(by_column), elements, strict=True)
    of_calls = enumerate(zip(planes.unbind(), by_row.unbind(), by_column.unbind(), strict=True))
    sums = (ErrorSums(p, r, c, u, common, groups, shared, keys.get(k)) for k, (p, r, c) in of_calls)
    verdicts = []
    for k, ((*found, element), own) in enumerate(zip(each, sums, strict=True)):
        if k in equal:
            verdicts.append(equal[k])
            continue
        if not few[k] and any(f.value > f.limit for f in found):
            for part, lines, of_lines, measures in (
                (slice(0, 2), own.planes, own.by_row, in_rows),
                (slice(2, 3), own.planes.transpose(1, 2), own.by_column, in_columns),
            ):
                if any(f.value > f.limit for f in found[part]):
                    once = _once_each(lines, of_lines.clone(), u, measures)
                    found[part] = [min(two, key=lambda f: f.value / f.limit)
                                   for two in zip(found[part], once, strict=True)]  # fmt: skip
        found.append(element)
        f = max(found, key=lambda f: f.value / f.limit)
        passed = f.value <= f.limit
        beyond: WorstFound | None = None
        if not passed and bound is not None:
            beyond = _beyond_proof(d[k].abs(), proved(y[k], half[k], bound[k], power[k]), v[k])
        verdicts.append(Verdict(
            passed, f.measure, f.value, f.limit, f.row, f.column, counts[k], differ[k],
            worst[k]**0.5 if worst[k] < 1e150 else math.inf, tier="" if passed else PROVED if beyond else BEYOND_CHANCE,
            chance=0.0 if passed or beyond else min(1.0, 4.0 * tail(f.deviations, f.tests)),
            ratios=tuple((x.measure, x.value / x.limit) for x in found), beyond_proof=beyond,
            sums=own,
        ))  # fmt: skip
    return verdicts


_LOOKED, _NEW = 4096, 0.9
"""Chosen: elements that are examined, evenly spread, and the part of them that has an error of its own. Of 20,000
different ones that come equally often, 0.9 of 4,096 are met once or first."""
_ODD = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
"""Chosen: Knuth's multiplier (2**64 over the golden ratio, odd), which spreads 64 bits."""


def repeated(y: Tensor, d: Tensor) -> list[bool]:
    """Of each call (the first dimension), whether many elements are the same number with the same error: pixels have
    256 values, an activation of bfloat16 some thousands. An elementwise operator rounds equal numbers alike: such
    errors are one, and not many independent ones that average out."""
    y, d = y.flatten(1), d.flatten(1)
    if y.shape[1] < _LOOKED // 16:
        return [False] * len(y)
    if y.shape[1] > _LOOKED:
        at = torch.linspace(0, y.shape[1] - 1, _LOOKED).long()
        y, d = y[:, at], d[:, at]
    off = d != 0
    pairs = torch.where(off, y.view(torch.int64) * _ODD + d.view(torch.int64), 0)
    each = sorted_lines(pairs)
    # 0 stands for what is right, unless an error has it
    right = (~off).any(1) & ~((pairs == 0) & off).any(1)
    different, n = (each[:, 1:] != each[:, :-1]).sum(1) + 1 - right.long(), off.sum(1)
    return ((n > 0) & (different < _NEW * n)).tolist()


def sorted_lines(keys: Tensor, places: bool = False) -> Tensor:
    """The lines of [lines, n] in order, or the places in that order; of equal ones in any. By numpy where there is one:
    ten times as fast as torch."""
    if numpy is None:
        return keys.argsort(1) if places else keys.sort(1).values
    return torch.from_numpy((numpy.argsort if places else numpy.sort)(keys.numpy(), 1))


def keys_of(planes: Sequence[Tensor] | Tensor, u: float) -> Tensor:
    """int64, the shape of one of the eight ``planes``: equal for elements whose numbers are within 2**-16 steps of each
    other, but for a sign, and whose errors are alike to 2**-10 units, and but for chance only for these. By their first
    bits: a pair on two sides of such a cell's edge is two."""
    power, product = planes[POWER], planes[PRODUCT]
    number = power.contiguous().view(torch.int64) >> max(37 - round(-math.log2(u)), 0)
    error = torch.where(power > 0, product / power.clamp(min=_NOTHING) * (1024.0 / u), planes[ERROR])
    return number * _ODD + (error.round() + 0.0).contiguous().view(torch.int64)


def first_of(keys: Tensor, within: Tensor | None = None) -> Tensor:
    """bool, the shape of ``keys``: of each call (the first dimension) the first of each that is equal to others, of
    those with the same ``within`` (int64, broadcastable)."""
    flat = (keys if within is None else keys + (within + 1) * _ODD).flatten(1)
    order = sorted_lines(flat, places=True)
    each = flat.gather(1, order)
    new = torch.ones(flat.shape, dtype=torch.bool)
    new[:, 1:] = each[:, 1:] != each[:, :-1]
    group = new.reshape(-1).cumsum(0) - 1
    places = (order + torch.arange(len(flat)).unsqueeze(1) * flat.shape[1]).reshape(-1)
    first = torch.full((int(group[-1]) + 1 if len(group) else 0,), len(group)).scatter_reduce_(0, group, places, "amin")
    return torch.zeros(len(group), dtype=torch.bool).index_fill_(0, first, True).reshape(keys.shape)


def _equal(y: Tensor, d: Tensor, count: int, differ: int, wrong: Tensor) -> Verdict:
    """Of what must be equal to the bit, and of non-finite numbers on one side alone."""
    if not bool(wrong.any()):
        first = 0 if wrong.numel() else -1
        return Verdict(True, EXACT, 0.0, 0.0, first, first, count, differ, 0.0)
    errors, powers = (d * d).sum(1), (y * y).sum(1)
    rel = torch.where(errors == 0, 0.0, errors / powers).sqrt()
    worst = float(rel.max()) if len(rel) else 0.0
    at = int(wrong.sum(1).argmax()) if wrong.numel() else -1
    value = float(wrong.sum())
    column = int(wrong[at].int().argmax()) if at >= 0 and not differ else -1
    measure, tier = NONFINITE if differ else EXACT, PROVED if value else ""
    return Verdict(not value, measure, value, 0.0, at, column, count, differ, worst, tier=tier)


def _once_each(
    planes: Tensor, sums: Tensor, u: float, test: Callable[[Tensor], list[list[WorstFound]]]
) -> list[WorstFound]:  # fmt: skip
    """What ``test`` finds in ``sums`` [8, lines], where the same error of nearly the same number counts once in a line:
    line by line, as long as a new one is beyond its limit; the sums are changed. planes: [8, lines, ...]."""
    known: set[int] = set()
    while True:
        found = [f for (f,) in test(sums[None])]
        new = {max(f.row, f.column) for f in found if f.value > f.limit} - known
        if not new or len(known) > _LINES:
            return found
        known |= new
        for k in new:
            sums[:, k] = (planes[:, k] * first_of(keys_of(planes[:, k], u)[None])[0]).sum(1)
