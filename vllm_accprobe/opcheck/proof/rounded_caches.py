"""How much of a difference is the format of a cache: what is said where one side keeps keys and values in 8 bits.

The problem: such a pair differs by percents in every attention, and a wrong block would differ by as much. The idea: a
replay knows what the format alone does to each output, and whether anything is left beyond it. Not here: the figures
(references/paged/eight_bit_cache.py), what follows for the origins (decide.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

OtherCache = tuple[str, str, float, float, float]
"""Which side; the format; how far it alone moves the row of an output that it moves most, relative L2; the standard
error that its step gives there; the most that its step allows."""


def other_caches(value: Mapping[str, Any]) -> dict[str, OtherCache]:
    """What JSON kept of them. Raises ValueError and TypeError for anything else."""
    found: dict[str, OtherCache] = {}
    for tap, (side, kind, *figures) in value.items():
        share, expected, most = map(float, figures)
        found[str(tap)] = str(side), str(kind), share, expected, most
    return found


def rounded_caches(caches: Mapping[str, OtherCache], right: Collection[str]) -> list[str]:
    """Sentences: one for each side and format."""
    groups: dict[tuple[str, str], list[str]] = {}
    for tap, (side, kind, *_) in caches.items():
        groups.setdefault((side, kind), []).append(tap)
    return [_said(side, kind, taps, caches, right) for (side, kind), taps in groups.items()]


def _said(side: str, kind: str, taps: list[str], caches: Mapping[str, OtherCache], right: Collection[str]) -> str:
    wrong = [tap for tap in taps if tap not in right]
    worst = max(taps, key=lambda tap: caches[tap][2])
    share, expected, most = caches[worst][2:]
    what = f"{side}'s cache is {kind} in {len(taps)} attention{'s' * (len(taps) > 1)}"
    alone = (
        f"that rounding alone moves a row of their outputs by up to {share:.3g} ({worst}; the format's step gives "
        f"{expected:.3g} there and allows {most:.3g})"
    )
    if wrong:
        return f"{what}: {alone}; what {wrong[0]} differs by is not that rounding"
    return f"{what}: {alone}, and beyond it mine is right for its own inputs: no wrong state, no wrong kernel"
