"""What one layer's outputs show of how they were computed: the evidence of its calls, added up and read.

Not here: the counting (evidence.py), what all layers together mean (decided.py). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from vllm_accprobe.opcheck.habits import habit_words as words
from vllm_accprobe.opcheck.habits.evidence import (
    AWAY,
    BINS,
    DIRECTIONS,
    NEAREST,
    SIGMAS,
    ZERO,
    Candidate,
    Evidence,
    EvidencePool,
    hits,
)  # fmt: skip
from vllm_accprobe.opcheck.run.result_row import Checked

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
    """An output that was looked at."""

    row: Checked
    evidence: Evidence

    @cached_property
    def hits(self) -> dict[Candidate, int]:
        return hits(self.evidence)

    @property
    def told(self) -> bool:
        """Whether its numbers can tell one direction, or way, from another."""
        return len(set(self.hits.values())) > 1

    def best(self, way: str) -> set[str]:
        """The directions by which a way (the plain one where it was not tried) predicts most."""
        way = way if way in self.evidence.ways else words.ONCE
        most = max(self.hits[way, d] for d in DIRECTIONS)
        return {d for d in DIRECTIONS if self.hits[way, d] == most}


@dataclass(frozen=True)
class TapPlace:
    """tap: (rank, path); direction: how its results are rounded, "" where that cannot be told; ways: those that its
    numbers allow, none where no way predicts them."""

    tap: tuple[int, str]
    seen: list[Seen]
    pool: EvidencePool
    direction: str
    ways: frozenset[str]

    @property
    def told(self) -> int:
        """Outputs whose numbers can tell."""
        return sum(s.told for s in self.seen)

    @property
    def share(self) -> float:
        """Of its numbers, those that the best way predicts."""
        return self.pool.share(self.pool.alive[0]) if self.pool.alive else 0.0

    def outputs_of(self, direction: str) -> int:
        """Outputs that show this rounding."""
        if direction == words.STOCHASTIC or not self.pool.alive:
            return self.told
        way = self.pool.alive[0][0]
        return sum(s.told and direction in s.best(way) for s in self.seen)

    def outputs_way(self, ways: frozenset[str]) -> int:
        """Outputs that one of these ways explains as well as any other, but for chance."""
        found = 0
        for s in self.seen:
            most = max(s.hits.values(), default=0)
            mine = max((n for (way, _), n in s.hits.items() if way in ways), default=-1)
            found += s.told and most - mine <= SIGMAS * math.sqrt(max(most, 1) * 0.1) + 1
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
        return TapPlace(tap, seen, pool, words.STOCHASTIC, frozenset())
    directions = {d for _, d in alive}
    ways = {w for w, _ in alive}
    direction = directions.pop() if len(directions) == 1 else ""
    if share < _FITS:
        return TapPlace(tap, seen, pool, direction if _clear(pool, alive[0], seen) else "", frozenset())
    return TapPlace(tap, seen, pool, direction, frozenset(ways) if direction else frozenset())


def _clear(pool: EvidencePool, best: Candidate, seen: list[Seen]) -> bool:
    """Whether the direction of the last rounding shows through what is not known before it. A scale that is a little
    too small looks much like truncation: most outputs must have been found to be truncated whatever their scale."""
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
