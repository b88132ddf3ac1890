"""When the requests of a pass are sent: which of them meet in one batch.

The problem: what a server computes for a request depends on what else is in its batch, so the way requests arrive is
part of the measurement. The idea: a pass has a word for it (one: each after the answer to the one before; all: at once;
poisson:RATE: at random moments, RATE a second), and the moments are the same every time.
Not here: sending (passes.py).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

SEED = 0


@dataclass(frozen=True)
class Arrival:
    """word: as the user wrote it. rate: of poisson, a second; None otherwise."""

    word: str
    rate: float | None = None

    @property
    def alone(self) -> bool:
        """Whether no request ever meets another."""
        return self.word in ("one", "score")

    def moments(self, n: int) -> list[float]:
        """Seconds after the beginning, ascending, of n requests."""
        if self.rate is None:
            return [0.0] * n
        draw, now, found = random.Random(SEED), 0.0, []
        for _ in range(n):
            found.append(now)
            now += draw.expovariate(self.rate)
        return found


def parse(word: str) -> Arrival:
    """Raises ValueError."""
    if word in ("one", "all"):
        return Arrival(word)
    found = re.fullmatch(r"poisson:(\d{1,6}(?:\.\d{1,6})?)", word)
    if found and float(found[1]) > 0:
        return Arrival(word, float(found[1]))
    raise ValueError(f"{word!r} is none of one, all and poisson:RATE (requests a second)")
