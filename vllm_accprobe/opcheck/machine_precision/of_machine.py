"""How a machine computes, over all rows of a replay: what every layer does alike is a habit, what one does a fault.

The problem: a kernel that truncates, or adds up in bfloat16, is right if that is how its machine computes and wrong if
it is one layer's alone. The idea: every way of computing an output is a hypothesis that predicts its numbers. How many
each was right about (`Evidence`) is added over calls and layers (`EvidencePool`, `TapPlace`), and two hypotheses are
compared by the numbers that one alone has right: McNemar's test [Q. McNemar, Psychometrika 12 (1947) 153]. A habit is
what all layers and calls that can show it show alike, at two layers at least where it costs anything. A row that failed
and is right with its machine's habit allowed for passes, and says so; one that passed by a habit that its machine does
not have fails. Only the closed list of judge/profile.py is allowed for; `strict` allows for nothing. Of two layers that
disagree, the costlier is wrong (`price_of`).
Elsewhere: the hypotheses and the counting (of_output.py), truncation in one output (floors/rounding.py). No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from vllm_accprobe.dump.decode import DecodeError, exactly, parse
from vllm_accprobe.judge.profile import ACCUMULATOR, FUNCTION, ROUNDING, SPLIT, SUBNORMALS, TWICE, Habit
from vllm_accprobe.kernels.float_formats import FORMATS, half_step
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, CheckResult

NEAREST, ZERO, AWAY = DIRECTIONS = ("nearest", "zero", "away")
BINS = 8
"""Of the fraction between two neighbours of the grid, for stochastic rounding. Chosen: its ends tell most."""
SIGMAS = 4.0
"""Chosen: of McNemar's statistic. Between two hypotheses 1 in 30,000, for a few hundred operators of a model."""
_MOST = 1 << 14
Candidate = tuple[str, str]
"""(way, direction of the last rounding)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """ways: names of the ways that were tried; masks: which candidates were right together, bit 3 * way + direction,
    and how many numbers that was; ups: for each bin of the fraction (numbers, those rounded away from zero), where
    what comes before the last rounding is known to be small; out: numbers that are neither neighbour; subnormals:
    (kept, flushed); functions: name → (rows or numbers, those that are off, sum of squares of what they are off, how
    many of them are above, resolution); would: kind → measured / allowed if that habit is allowed for; terms: of a
    product's sums, 0 for what is none."""

    ways: tuple[str, ...] = ()
    masks: Mapping[int, int] = field(default_factory=dict)
    ups: tuple[tuple[int, int], ...] = ()
    out: int = 0
    subnormals: tuple[int, int] = (0, 0)
    functions: Mapping[str, Annotated[tuple[float, ...], exactly(5)]] = field(default_factory=dict)
    would: Mapping[str, float] = field(default_factory=dict)
    terms: int = 0

    def to_text(self) -> str:
        """One line; "" for what says nothing."""
        plain = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) and v != (0, 0)}
        if "would" in plain:
            plain["would"] = {k: float(f"{v:.4g}") for k, v in self.would.items()}
        return json.dumps(plain, separators=(",", ":")) if plain else ""

    @staticmethod
    def of_text(text: str) -> Evidence:
        """Nothing at all where it is not what `to_text` made: a csv may be anybody's, and evidence only adds."""
        if not text:
            return Evidence()
        try:
            return parse(Evidence, text, _MOST)
        except DecodeError:
            return Evidence()


class EvidencePool:
    """Evidence of several outputs, added up."""

    def __init__(self, evidence: Iterable[Evidence]):
        self.all = list(evidence)
        self.masks: dict[tuple[str, ...], Counter[int]] = {}
        self.ups = [[0, 0] for _ in range(BINS)]
        self.out = self.kept = self.flushed = 0
        self.functions: dict[str, list[float]] = {}
        for e in self.all:
            self.masks.setdefault(e.ways, Counter()).update(e.masks)
            for mine, (n, up) in zip(self.ups, e.ups, strict=False):
                mine[0] += n
                mine[1] += up
            self.out += e.out
            self.kept += e.subnormals[0]
            self.flushed += e.subnormals[1]
            for name, values in e.functions.items():
                before = self.functions.setdefault(name, [0.0] * 5)
                for k, x in enumerate(values[:4]):
                    before[k] += x
                before[4] = max(before[4], values[4])
        self.candidates: list[Candidate] = []
        self._alone, self._hits, self._seen = self._count()

    def _count(self) -> tuple[Any, Any, Any]:
        """Numbers that one candidate alone has rightly, [those, others]; that it has rightly; that it was tried on."""
        self.candidates = list(dict.fromkeys(c for ways in self.masks for c in candidates_of(ways)))
        place = {c: k for k, c in enumerate(self.candidates)}
        n = len(place)
        alone, right, seen = np.zeros((n, n)), np.zeros(n), np.zeros(n)
        for ways, masks in self.masks.items():
            if not masks:
                continue
            at = [place[c] for c in candidates_of(ways)]
            bits, counts = _matrix(masks, len(at)), np.array(list(masks.values()), float)
            alone[np.ix_(at, at)] += (bits * counts[:, None]).T @ (1.0 - bits)
            right[at] += counts @ bits
            seen[at] += counts.sum()
        return alone, right, seen

    def alone(self, a: Candidate, b: Candidate) -> float:
        """Numbers that ``a`` has rightly and ``b`` has not."""
        return float(self._alone[self.candidates.index(a), self.candidates.index(b)])

    def share(self, c: Candidate) -> float:
        """Of the numbers for which it was tried, those that it predicts."""
        k = self.candidates.index(c)
        return float(self._hits[k] / self._seen[k]) if self._seen[k] else 0.0

    @cached_property
    def alive(self) -> list[Candidate]:
        """The candidates that none beats, the best first: nothing else is right alone significantly more often."""
        a = self._alone
        beaten = (a - a.T > SIGMAS * np.sqrt(a + a.T)).any(0)
        left = [c for c, lost, n in zip(self.candidates, beaten, self._seen, strict=True) if n and not lost]
        return sorted(left, key=lambda c: -self.share(c))


def candidates_of(ways: Iterable[str]) -> list[Candidate]:
    """In the order of the bits of `Evidence.masks`."""
    return [(way, d) for way in ways for d in DIRECTIONS]


def hits(e: Evidence) -> dict[Candidate, int]:
    """How many numbers of one output each candidate predicts."""
    candidates = candidates_of(e.ways)
    if not e.masks:
        return dict.fromkeys(candidates, 0)
    found = np.array(list(e.masks.values())) @ _matrix(e.masks, len(candidates))
    return dict(zip(candidates, map(int, found), strict=True))


def _matrix(masks: Iterable[int], n: int) -> Any:
    """Bits as float64 [masks, n]."""
    return np.array([[mask >> k & 1 for k in range(n)] for mask in masks], float)


STOCHASTIC, ONCE = "stochastic", "once"
ROUNDED = {NEAREST: "to nearest", ZERO: "toward zero", AWAY: "away from zero", STOCHASTIC: "at random (stochastic)"}
PRICES = {NEAREST: 0.0, ZERO: 1.0, AWAY: 1.0, STOCHASTIC: 1.0}
_SUMS = re.compile(r"(?P<kind>low|split) (?P<n>\d+)(?P<bias> bias first)?")


def kind_of(way: str) -> str:
    """A habit's kind; ACCUMULATOR also for a product that is rounded once alone."""
    if m := _SUMS.fullmatch(way):
        return ACCUMULATOR if m["kind"] == "low" else SPLIT
    return ROUNDING if way == ONCE else TWICE


def words_of(way: str, dtype: str) -> str:
    """ "" for ONCE."""
    m = _SUMS.fullmatch(way)
    if m and m["kind"] == "split":
        return f"splits its sums into {m['n']} parts, each rounded to {dtype}"
    if m:
        after = "every term" if m["n"] == "1" else f"every {m['n']} terms"
        return f"adds up in {dtype}, rounded after {after}" + (", beginning with the bias" if m["bias"] else "")
    return "" if way == ONCE else f"rounds the {way.replace(' and ', ' and the ')} to {dtype} before the result"


def price_of(way: str, terms: int) -> float:
    """What a habit can do to one result, in roundings of its dtype (a whole step, 2**-8 for bfloat16): rounding once
    more on the way: half of one; a sum of n terms that is rounded after every b: at most n / b halves of the terms'
    sizes [N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2]; parts that are rounded:
    half of one each. terms: of a product's sums."""
    if m := _SUMS.fullmatch(way):
        return 0.5 * (max(terms / int(m["n"]), 1.0) if m["kind"] == "low" else int(m["n"]))
    return 0.0 if way == ONCE else 0.5 * (1 + way.count(" and "))


def allowed_as(way: str) -> str:
    """Under which name `Evidence.would` has it."""
    return way.removesuffix(" bias first")


def rounds(direction: str) -> str:
    return f"rounds {ROUNDED[direction]}"


_SHARE = 0.3
"""Chosen: of an operator's outputs, those that show it. Narrow ones cannot (of truncating ones, 16 to 192 wide, 47 to
100 % did); and where an error is shared by a whole row, some of an operator that rounds to nearest do (up to 11 %)."""
_NO_GRID = ("float32", "float64", "complex64", "complex128", "bool", "int8", "int16", "int32", "int64")
"""Outputs that cannot show it."""
HONEST = "rounding of a machine, allowed for in their limits; opcheck's standard strict fails it"


@dataclass(frozen=True, slots=True)
class Truncating:
    """An operator or a module's class that rounds toward zero. modules: how many of it; outputs: that show it, of how
    many that were judged."""

    cls: str
    modules: int
    outputs: int
    of: int

    def __str__(self) -> str:
        where = f" of {self.modules} {'module' if self.modules == 1 else 'modules'}"
        return f"{self.cls} ({self.outputs:,} of {self.of:,} outputs{where})"


def truncating(rows: Iterable[CheckResult]) -> list[Truncating]:
    """In the order in which they are met."""
    found: dict[str, tuple[set[tuple[int, str]], list[int]]] = {}
    for r in rows:
        if r.status in (PASS, FAIL) and not r.dtype.endswith(_NO_GRID):
            taps, counts = found.setdefault(r.cls, (set(), [0, 0]))
            counts[1] += 1
            if r.rounding:
                counts[0] += 1
                taps.add((r.rank, r.tap))
    return [Truncating(cls, len(t), n, of) for cls, (t, (n, of)) in found.items() if n > _SHARE * of]


def sentence(rows: Iterable[CheckResult], where: str = "") -> str:
    """All of them in one; "" where there is none. where: whose rows, `` in mine``."""
    found = truncating(rows)
    return f"rounds toward zero{where}: {', '.join(map(str, found))}: {HONEST}" if found else ""


_FITS, _PARTLY = 0.9, 0.3
"""Chosen: share of the numbers that a way predicts which is an operator's way; which at least tells how the last
rounding is done, where what comes before is not known in full (experts of vLLM's CPU build: 0.38)."""
_TWICE = 2.0
"""Chosen: there, truncated numbers that tell over those that were rounded to nearest, or the other way round."""
_CHI = 26.0
"""Of the six inner bins of the fraction: chance exceeds it once in 4,600 (derived: chi-squared of 6 degrees)."""
_FRACTIONS, _STRAY = 200, 0.01
_LEAST_OFF, _SHARE_OFF, _BALANCE = 8, 0.2, 0.2
"""Chosen: rows in which a function is off, at least; of all rows; of them those above and below, each."""
_LEAST_SIZE, _MOST_SIZE = 2.0**-16, 2.0**-10
"""Chosen: below the first, an activation's error is that of float32; above the second no hardware's is."""
_LEAST_SUBNORMALS = 8
_ROUNDING_SHOWS = "toward zero"


@dataclass(frozen=True)
class Seen:
    """An output that was examined."""

    row: CheckResult
    evidence: Evidence

    @cached_property
    def hits(self) -> dict[Candidate, int]:
        return hits(self.evidence)

    @property
    def known(self) -> bool:
        """Whether its numbers can tell one direction, or way, from another."""
        return len(set(self.hits.values())) > 1

    def best(self, way: str) -> set[str]:
        """The directions by which a way (the plain one where it was not tried) predicts most."""
        way = way if way in self.evidence.ways else ONCE
        most = max(self.hits[way, d] for d in DIRECTIONS)
        return {d for d in DIRECTIONS if self.hits[way, d] == most}


@dataclass(frozen=True)
class TapPlace:
    """tap: (rank, path); direction: how its results are rounded, "" where that is not known; ways: those that its
    numbers allow, none where no way predicts them."""

    tap: tuple[int, str]
    seen: list[Seen]
    pool: EvidencePool
    direction: str
    ways: frozenset[str]

    @property
    def known(self) -> int:
        """Outputs whose numbers can tell."""
        return sum(s.known for s in self.seen)

    @property
    def share(self) -> float:
        """Of its numbers, those that the best way predicts."""
        return self.pool.share(self.pool.alive[0]) if self.pool.alive else 0.0

    def outputs_of(self, direction: str) -> int:
        """Outputs that show this rounding."""
        if direction == STOCHASTIC or not self.pool.alive:
            return self.known
        way = self.pool.alive[0][0]
        return sum(s.known and direction in s.best(way) for s in self.seen)

    def outputs_way(self, ways: frozenset[str]) -> int:
        """Outputs that one of these ways explains as well as any other, but for chance."""
        found = 0
        for s in self.seen:
            most = max(s.hits.values(), default=0)
            mine = max((n for (way, _), n in s.hits.items() if way in ways), default=-1)
            found += s.known and most - mine <= SIGMAS * math.sqrt(max(most, 1) * 0.1) + 1
        return found

    @property
    def subnormal(self) -> int:
        """Outputs with results that are too small for a normal number."""
        return sum(sum(s.evidence.subnormals) > 0 for s in self.seen)


def place_of(tap: tuple[int, str], seen: list[Seen]) -> TapPlace:
    pool = EvidencePool(s.evidence for s in seen)
    alive = pool.alive
    if not alive:
        return TapPlace(tap, seen, pool, "", frozenset())
    share = pool.share(alive[0])
    if share < _FITS and _stochastic(pool):
        return TapPlace(tap, seen, pool, STOCHASTIC, frozenset())
    directions = {d for _, d in alive}
    ways = {w for w, _ in alive}
    direction = directions.pop() if len(directions) == 1 else ""
    if share < _FITS:
        return TapPlace(tap, seen, pool, direction if _clear(pool, alive[0], seen) else "", frozenset())
    return TapPlace(tap, seen, pool, direction, frozenset(ways) if direction else frozenset())


def _clear(pool: EvidencePool, best: Candidate, seen: list[Seen]) -> bool:
    """Whether the direction of the last rounding shows through what is not known before it. A scale that is a little
    too small resembles truncation: most outputs must have been found to be truncated whatever their scale."""
    way, direction = best
    if direction == AWAY or pool.share(best) < _PARTLY:
        return False
    other = (way, NEAREST if direction == ZERO else ZERO)
    if pool.alone(best, other) < _TWICE * pool.alone(other, best):
        return False
    truncated = sum(s.row.rounding == _ROUNDING_SHOWS for s in seen)
    return truncated * 2 > len(seen) if direction == ZERO else truncated * 2 < len(seen)


def _stochastic(pool: EvidencePool) -> bool:
    """Whether the probability of rounding away from zero is the fraction that is lost, and nothing else."""
    total = sum(n for n, _ in pool.ups)
    if total < _FRACTIONS or pool.out > _STRAY * total:
        return False
    chi = 0.0
    for k in range(1, BINS - 1):
        n, up = pool.ups[k]
        f = (k + 0.5) / BINS
        chi += (up - n * f) ** 2 / (n * f * (1.0 - f)) if n else 0.0
    return chi < _CHI


def flush_of(places: Iterable[TapPlace]) -> bool | None:
    """Whether subnormal results become 0; None where there are too few, or some do and some do not."""
    kept, flushed = (sum(getattr(p.pool, n) for p in places) for n in ("kept", "flushed"))
    if kept + flushed < _LEAST_SUBNORMALS or (kept and flushed):
        return None
    return bool(flushed)


@dataclass(frozen=True, slots=True)
class FunctionHabit:
    """size: relative error that was measured, or, where nothing is off, the least that could have been seen; off: it is
    more than float32's."""

    name: str
    size: float
    off: bool
    words: str


_CALLED = {"rsqrt": "reciprocal square root", "activation": "activation's function"}


def functions_of(places: list[TapPlace], dtype: str) -> Iterator[FunctionHabit]:
    """Functions that are off in all layers alike, or in none."""
    for name in sorted({n for p in places for n in p.pool.functions}):
        found = [p.pool.functions[name] for p in places if name in p.pool.functions]
        if name == "sums":
            n, off = sum(f[0] for f in found), sum(f[1] for f in found)
            if n and not off:
                yield FunctionHabit(name, math.sqrt(sum(f[2] for f in found) / n) * 2.0**-24, False,
                               "adds up in float32 or wider")  # fmt: skip
            continue
        wrong = [f for f in found if _off(f, name, dtype)]
        n = sum(f[0] for f in found)
        size = math.sqrt(sum(f[2] for f in found) / n) if n else 0.0
        called = _CALLED[name]
        if wrong and len(wrong) == len(found) and size <= _MOST_SIZE and _balanced(found, name, dtype):
            yield FunctionHabit(name, size, True, f"approximates its {called}: off by 2^{math.log2(size):.1f}")
        elif not wrong and n:
            least = max(size, min(f[4] for f in found))
            if least:
                yield FunctionHabit(name, least, False, f"{called} right to 2^{math.log2(least):.0f} or better")


def _off(f: Iterable[float], name: str, dtype: str) -> bool:
    n, off, squares, *_ = f
    if name == "activation" and dtype != "float32":
        return off >= _LEAST_OFF and math.sqrt(squares / n) > _LEAST_SIZE
    return off >= _LEAST_OFF and off > _SHARE_OFF * n


def _balanced(found: list[list[float]], name: str, dtype: str) -> bool:
    """An approximation errs to both sides; a wrong constant (an epsilon, a mean over too many) to one."""
    if name == "activation" and dtype != "float32":
        return True  # only sizes are seen there
    off, above = sum(f[1] for f in found), sum(f[3] for f in found)
    return _BALANCE * off < above < (1.0 - _BALANCE) * off


TOWARD_ZERO = "toward zero"
_ALIKE = 0.95
"""Chosen: of a habit's outputs, those that show it; a narrow output may show another thing by chance."""
_LEAST_LAYERS = 2
Key = tuple[str, str, str]
"""(class or operator, dtype, role)."""


@dataclass(frozen=True)
class MachineHabits:
    """What a replay's rows say of a machine. habits: in the order in which operators are met; unknown: sentences on
    what is not known; units: relative errors of functions, as judge/profile.Profile's."""

    habits: tuple[Habit, ...] = ()
    unknown: tuple[str, ...] = ()
    units: dict[str, float] = field(default_factory=dict)


def settle(rows: Sequence[CheckResult], strict: bool = False) -> tuple[list[CheckResult], MachineHabits]:
    """(``rows`` with habits allowed for and departures blamed, the habits). strict: habits are found, nothing is
    allowed for."""
    groups: dict[Key, list[tuple[int, Evidence]]] = {}
    for k, row in enumerate(rows):
        if row.evidence and row.status in (PASS, FAIL):
            groups.setdefault((row.cls, row.dtype, row.role), []).append((k, Evidence.of_text(row.evidence)))
    settled, habits = list(rows), _Habits()
    by_key: dict[Key, list[int]] = {}
    for k, row in enumerate(rows):
        if row.status in (PASS, FAIL):
            by_key.setdefault((row.cls, row.dtype, row.role), []).append(k)
    places = {key: _places(rows, mine) for key, mine in groups.items()}
    for key in sorted(groups, key=lambda key: len(places[key]) < _LEAST_LAYERS):  # who stands alone comes last
        mine = [rows[k] for k in by_key[key]]
        for k, row in _group(key, places[key], mine, by_key[key], habits, strict):
            settled[k] = row
    return settled, _with_truncating(habits.found(list(groups)), settled)


def _with_truncating(found: MachineHabits, rows: Sequence[CheckResult]) -> MachineHabits:
    """Also the operators whose outputs are seen to be truncated (rounding.py) where it is not known what they round
    before their results: each output's own verdict allows for it, layer by layer."""
    known = {(h.operator, h.dtype) for h in found.habits if h.kind == ROUNDING}
    dtypes = {r.cls: r.dtype for r in rows if r.rounding}
    text = "rounds toward zero, its results or what they are made of"
    more = [
        Habit(ROUNDING, t.cls, dtypes[t.cls], text, 1.0, t.outputs, t.of, t.modules)
        for t in truncating(rows)
        if (t.cls, dtypes[t.cls]) not in known
    ]
    new = {(h.operator, h.dtype) for h in more}
    unknown = tuple(u for u in found.unknown if not any(u.startswith(f"{o}, {d}:") for o, d in new))
    return replace(found, habits=(*found.habits, *more), unknown=unknown)


def _places(rows: Sequence[CheckResult], group: Iterable[tuple[int, Evidence]]) -> list[TapPlace]:
    taps: dict[tuple[int, str], list[Seen]] = {}
    for k, e in group:
        taps.setdefault((rows[k].rank, rows[k].tap), []).append(Seen(rows[k], e))
    return [place_of(tap, seen) for tap, seen in taps.items()]


def _group(
    key: Key, places: list[TapPlace], rows: list[CheckResult], at: list[int], habits: _Habits, strict: bool
) -> Iterable[tuple[int, CheckResult]]:  # fmt: skip
    """Finds the habits of one output of one operator, and gives the rows that these change."""
    cls, dtype, _ = key
    direction = _common(Counter(p.direction for p in places if p.direction))
    ways = _common_ways(places)
    changes: dict[int, CheckResult] = {}
    allowed: dict[str, str] = {}
    if direction:
        show = [p for p in places if p.direction == direction]
        alike = _alike(show, places, direction)
        text = rounds(direction) if alike else f"{rounds(direction)} in part"
        habits.add(ROUNDING, key, text, PRICES[direction], show, lambda p: p.outputs_of(direction))
        if direction == AWAY and alike and habits.enough("away", dtype, show):
            allowed["away"] = text
        for p in places:
            if p.direction and PRICES[p.direction] > PRICES[direction]:
                why = f"{rounds(p.direction)}, {_others(places, p, rounds(direction))}"
                changes |= _blamed(p, rows, at, why, TOWARD_ZERO if p.direction == ZERO else "")
    if ways:
        way = min(ways, key=lambda w: price_of(w, 0))
        show = [p for p in places if p.ways & ways]
        terms = max((s.evidence.terms for p in show for s in p.seen), default=0)
        price, kind = price_of(way, terms), kind_of(way)
        if price:
            habits.add(kind, key, words_of(way, dtype), price, show, lambda p: p.outputs_way(ways))
            if _whole(show, places, ways) and habits.enough(allowed_as(way), dtype, show):
                allowed[allowed_as(way)] = words_of(way, dtype)
        elif terms:
            habits.add(ACCUMULATOR, key, "adds up in float32 or wider", 0.0, show, lambda p: p.outputs_way(ways))
        for p in places:
            if p.ways and not p.ways & ways and _costlier(p.ways, ways, terms):
                theirs = min(p.ways, key=lambda w: price_of(w, terms))
                usual = words_of(way, dtype) or ("adds up in float32 or wider" if terms else "rounds once")
                why = f"{words_of(theirs, dtype)}, {_others(places, p, usual)}"
                changes |= _blamed(p, rows, at, why, None)
    if not direction and not ways and dtype != "float32":
        habits.unknown.append(_unknown(key, places))
    flush = flush_of(places)
    if flush is not None:
        words = f"{'gives 0 for' if flush else 'keeps'} results below 2^{FORMATS[dtype][1]}"
        words += ", the smallest normal number" if flush else ""
        habits.add(SUBNORMALS, key, words, 0.0, places, lambda p: p.subnormal)
        if flush and habits.enough("flush", dtype, [p for p in places if p.pool.flushed]):
            allowed["flush"] = words
    for f in functions_of(places, dtype):
        habits.units[f"{cls} {dtype} {f.name}"] = f.size
        if f.off:
            habits.add(FUNCTION, key, f.words, f.size / half_step(dtype), places, lambda p: len(p.seen))
            if habits.enough(f.name, dtype, places):
                allowed[f.name] = f.words
        else:
            habits.add(ACCUMULATOR if f.name == "sums" else FUNCTION, key, f.words, 0.0, places, lambda p: len(p.seen))
    if not strict:
        departing = set(changes)
        changes |= {k: r for k, r in _excused(rows, at, allowed).items() if k not in departing}
    return changes.items()


def _common(found: Counter[str]) -> str:
    """What most places show; of two that are shown equally often the cheaper; "" where nothing is shown."""
    if not found:
        return ""
    most = max(found.values())
    return min((d for d, n in found.items() if n == most), key=lambda d: PRICES[d])


def _common_ways(places: list[TapPlace]) -> frozenset[str]:
    """The ways that most places allow, as far as those agree; one kind of habit alone, else nothing is known."""
    known = [p.ways for p in places if p.ways]
    if not known:
        return frozenset()
    counts = Counter(w for ways in known for w in ways)
    most = max(counts.values())
    best = min((w for w, n in counts.items() if n == most), key=lambda w: price_of(w, 0))
    if sum(best in ways for ways in known) * 2 < len(known):
        return frozenset()
    left = frozenset.intersection(*(ways for ways in known if best in ways))
    return left if len({kind_of(w) for w in left}) == 1 else frozenset()


def _costlier(mine: frozenset[str], usual: frozenset[str], terms: int) -> bool:
    """Sums in fewer bits, or in parts, where the others are not: the rounding of an intermediate result on the way is
    within every reference's noise, and whether it can be seen depends on the weights."""
    kinds = {kind_of(w) for w in mine}
    cost = min(price_of(w, terms) for w in mine), min(price_of(w, terms) for w in usual)
    return cost[0] > cost[1] and not kinds & {ROUNDING, "twice"}


def _alike(show: list[TapPlace], places: list[TapPlace], direction: str) -> bool:
    outputs, of = sum(p.outputs_of(direction) for p in show), sum(p.known for p in show)
    return outputs >= _ALIKE * of and all(p.direction in ("", direction) for p in places)


def _whole(show: list[TapPlace], places: list[TapPlace], ways: frozenset[str]) -> bool:
    """Whether all layers and calls that can show one of ``ways`` do."""
    outputs, of = sum(p.outputs_way(ways) for p in show), sum(p.known for p in show)
    known = [p for p in places if p.ways]
    return len(show) == len(known) and outputs >= _ALIKE * of


def _others(places: list[TapPlace], mine: TapPlace, usual: str) -> str:
    taps = {p.tap[1] for p in places} - {mine.tap[1]}
    layers = {m[0] for t in taps if (m := re.search(r"\d+", t))}
    called = "layer" if len(layers) == len(taps) else "module"
    if len(taps) <= 1:
        return f"where the other {called} {usual}"
    verb, _, rest = usual.partition(" ")
    return f"where the other {len(taps)} {called}s {verb.removesuffix('s')} {rest}"


def _blamed(
    p: TapPlace, rows: list[CheckResult], at: list[int], why: str, rounding: str | None
) -> dict[int, CheckResult]:  # fmt: skip
    """The rows of a place that departs. rounding: only those that are seen to be rounded so; None: only the words of
    those that fail."""
    found: dict[int, CheckResult] = {}
    for k, row in zip(at, rows, strict=True):
        if (row.rank, row.tap) != p.tap:
            continue
        if row.status == FAIL:
            found[k] = replace(row, message=f"{row.message}; {why}")
        elif rounding is not None and row.rounding == rounding:
            found[k] = replace(row, status=FAIL, measure="habit", measured=1.0, allowed=0.5, message=why)
    return found


def _excused(rows: list[CheckResult], at: list[int], allowed: dict[str, str]) -> dict[int, CheckResult]:
    """The rows that fail, and are within their limits with one of their machine's habits allowed for; those that pass
    anyway are marked with it."""
    found: dict[int, CheckResult] = {}
    for k, row in zip(at, rows, strict=True):
        if not allowed:
            continue
        if row.status == PASS:  # it does the same, and a comparison must know
            found[k] = replace(row, habit=next(iter(allowed.values())))
            continue
        if not row.evidence:
            continue
        would = Evidence.of_text(row.evidence).would
        fits = [(would[name], text) for name, text in allowed.items() if would.get(name, 2.0) <= 1.0]
        if fits and row.allowed is not None:
            severity, text = min(fits)
            message = f"{text}: as this machine computes everywhere, and no further off than that explains"
            found[k] = replace(row, status=PASS, measured=severity * row.allowed, message=message, habit=text)
    return found


def _unknown(key: Key, places: list[TapPlace]) -> str:
    of, could = sum(len(p.seen) for p in places), sum(p.known for p in places)
    if not could:
        return f"{key[0]}, {key[1]}: not known: none of {of} outputs has a number that could show it"
    best = max(p.share for p in places)
    return (
        f"{key[0]}, {key[1]}: not known: no known way gives the numbers of its {of} outputs (the best {best:.0%})"
    )


class _Habits:
    """Habits of single outputs, put together for each operator and dtype."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.units: dict[str, float] = {}
        self._enough: set[tuple[str, str]] = set()
        self._all: dict[tuple[str, str, str, str], tuple[float, list[int], set[tuple[int, str]]]] = {}

    def add(self, kind: str, key: Key, text: str, price: float, show: list[TapPlace], outputs: object) -> None:
        assert callable(outputs)
        if not show:
            return
        old = self._all.setdefault((kind, key[0], key[1], text), (price, [0, 0], set()))
        old[1][0] += sum(int(outputs(p)) for p in show)
        old[1][1] += sum(len(p.seen) for p in show)
        old[2].update(p.tap for p in show)

    def enough(self, name: str, dtype: str, show: list[TapPlace]) -> bool:
        """Whether so many layers show a habit that costs something that it is the machine's: two, or one where another
        operator has been seen to have the same."""
        if len(show) >= _LEAST_LAYERS:
            self._enough.add((name, dtype))
        return bool(show) and (name, dtype) in self._enough

    def found(self, order: list[Key]) -> MachineHabits:
        kinds: dict[tuple[str, str, str], list[tuple[str, float, list[int], set[tuple[int, str]]]]] = {}
        for (kind, cls, dtype, text), more in self._all.items():
            kinds.setdefault((kind, cls, dtype), []).append((text, *more))
        habits = []
        for (kind, cls, dtype), parts in kinds.items():  # an operator's outputs may differ: one habit says all
            layers: set[tuple[int, str]] = set().union(*(p[3] for p in parts))
            n, of = (sum(p[2][k] for p in parts) for k in (0, 1))
            text = ", and in another output ".join(p[0] for p in parts)
            habits.append(Habit(kind, cls, dtype, text, max(p[1] for p in parts), n, of, len(layers)))
        known = {(h.operator, h.dtype) for h in habits}
        met = list(dict.fromkeys((cls, dtype) for cls, dtype, _ in order))
        habits.sort(key=lambda h: met.index((h.operator, h.dtype)))
        unknown = [u for u in dict.fromkeys(self.unknown) if not any(u.startswith(f"{o}, {d}:") for o, d in known)]
        return MachineHabits(tuple(habits), tuple(unknown), self.units)
