"""Peers that are turned away: one line each, and a count where they do not stop.

The problem: one line for each of a stranger's ten thousand connections fills the log that is to name the one sender
whose certificate has expired. The idea: the first of an address and a reason is said, the others are counted and said
with the end. Not here: who is turned away (receiver.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

_KINDS = 200
"""Chosen: pairs of address and reason that are told apart; beyond them all are one."""


class Refusals:
    """say: gets a line."""

    def __init__(self, say: Callable[[str], object]):
        self._say = say
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, address: str, why: str) -> None:
        why = " ".join(why.split())[:200]
        with self._lock:
            key = address, why
            if key not in self._seen and len(self._seen) >= _KINDS:
                key = "others", ""
            self._seen[key] += 1
            first = self._seen[key] == 1
        if first:
            self._say(f"refused {address}: {why}" if why else "further peers are refused; they are counted")

    @property
    def total(self) -> int:
        return self._seen.total()

    def lines(self) -> list[str]:
        """For the end: how often, where a reason came more than once."""
        return [f"refused {where}, {n:,} times{': ' + why if why else ''}"
                for (where, why), n in self._seen.most_common(10) if n > 1]  # fmt: skip
