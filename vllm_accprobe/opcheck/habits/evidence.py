"""What one output's numbers say of how they were computed, as counts that can be added up.

The problem: one output is rarely enough to tell how a machine computes, the outputs are checked in several processes,
and what was seen must survive in a csv. The idea: every way of computing an output is a hypothesis that predicts its
numbers. Of a sample of them it is counted which hypotheses were right together; these counts are added over calls and
layers, and any two hypotheses are compared by the numbers that one of them alone has rightly: McNemar's test [Q.
McNemar, Psychometrika 12 (1947) 153], as in rounding.py. A hypothesis that no other beats is what the numbers allow.
Not here: the hypotheses (ways.py), the counting (look.py), what follows (decided.py). Needs no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

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
    functions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
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
        if not text or len(text) > _MOST:
            return Evidence()
        try:
            given = json.loads(text)
            if not isinstance(given, dict) or set(given) - {f.name for f in fields(Evidence)}:
                return Evidence()
            return Evidence(
                tuple(str(w) for w in given.get("ways", ())),
                {int(k): int(v) for k, v in given.get("masks", {}).items()},
                tuple((int(n), int(up)) for n, up in given.get("ups", ())),
                int(given.get("out", 0)),
                _two(given.get("subnormals", (0, 0))),
                {str(k): tuple(float(x) for x in v) for k, v in given.get("functions", {}).items() if len(v) == 5},
                {str(k): float(v) for k, v in given.get("would", {}).items()},
                int(given.get("terms", 0)),
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            return Evidence()


def _two(value: Any) -> tuple[int, int]:
    kept, flushed = value
    return int(kept), int(flushed)


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
