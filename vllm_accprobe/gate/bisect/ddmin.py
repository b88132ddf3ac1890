"""Delta debugging: the smallest set that still fails, where a set's outcome is known only by trying it.

The problem: n settings have 2^n combinations, each is a server's start, and a fault may need two or three of them
together, so that switching one by one finds nothing or takes the first for the only one. The idea: ddmin [A. Zeller,
R. Hildebrandt, IEEE Transactions on Software Engineering 28 (2002) 183, fig. 5]: halves, then quarters and so on, and
what is left without each, are tried; what fails is gone on with. A combination that cannot be tried (a server that does
not start) is unresolved: it is neither taken for failing nor for passing, and smaller pieces go around it.
Not here: what a trial is (trials.py), what is done with the set (search.py).

The result fails, and no set with one member less does: it is 1-minimal, which for faults that only grow with more
settings is the smallest within itself. One culprit of n takes about 2 log2 n trials, n^2 + 3 n are the most (their
proposition 12; trials that are known already are not counted there).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

PASS, FAIL, UNRESOLVED = "pass", "fail", "unresolved"


def ddmin(items: Sequence[str], test: Callable[[tuple[str, ...]], str]) -> tuple[str, ...]:
    """The members of ``items``, in their order, of a 1-minimal failing set. test: PASS, FAIL or UNRESOLVED for a set.
    All ``items`` are taken to fail and none of them to pass; neither is asked for."""
    current, n = tuple(items), 2
    while len(current) >= 2:
        pieces = split(current, n)
        found = next((piece for piece in pieces if test(piece) == FAIL), None)
        if found is not None:
            current, n = found, 2
            continue
        others = (tuple(i for i in current if i not in piece) for piece in pieces) if n > 2 else ()
        found = next((other for other in others if test(other) == FAIL), None)
        if found is not None:
            current, n = found, max(n - 1, 2)
        elif n >= len(current):
            break
        else:
            n = min(2 * n, len(current))
    return current


def split(items: tuple[str, ...], n: int) -> list[tuple[str, ...]]:
    """n pieces, as equal as can be; 1 <= n <= len(items)."""
    ends = [len(items) * i // n for i in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def usual(n: int) -> int:
    """Trials for one culprit of n."""
    return 2 * math.ceil(math.log2(n)) if n > 1 else 0


def most(n: int) -> int:
    """Trials at most."""
    return n * n + 3 * n
