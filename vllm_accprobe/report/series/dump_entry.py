"""What a series keeps of one comparison: a few numbers, and one per tap.

The problem: a comparison holds every pair and every row's error, and a series is many of them. The idea: when a dump
has been compared, what the series says of it is taken out, and the comparison can go. Dumps that could not be compared
have an entry, too: their line says why. Not here: how the series is said (series_lines.py, series_json.py,
series_page.py), comparing (cli/comparing/many_dumps.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report import facts
from vllm_accprobe.report.text import safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

PASSED, FAILED, UNREADABLE, NOTHING = "pass", "fail", "unreadable", "nothing"
STATUS = {0: PASSED, 1: FAILED, 2: UNREADABLE, 3: NOTHING}
"""By the exit code that the dump alone would have given."""
WORST_FIRST = (2, 3, 1, 0)
"""Exit codes: what could not be answered stands above what was."""
_ORIGIN = ("module", "class", "role", "request", "position", "phase", "created", "floor", "gap")


@dataclass(frozen=True, slots=True)
class SeriesTap:
    """One tap of one dump. cls: its class; order: its place in the data flow; over: its worst output, or what failed,
    as a factor of its limit, infinite for NaNs; failed: pairs."""

    cls: str
    order: int
    over: float
    failed: int


@dataclass(frozen=True)
class SeriesEntry:
    """One dump of a series. name: unique in it; path: as given; code: the exit code; says: the headline, or what went
    wrong; page: of its own, relative to the series' page, None where there is none. over: the worst factor over a
    limit; culprit, origins: as in compare.json, few fields of each."""

    name: str
    path: str
    code: int
    says: str
    page: str | None = None
    over: float | None = None
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    identical: int = 0
    flipped: int = 0
    origins: tuple[dict[str, Any], ...] = ()
    taps: dict[str, SeriesTap] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return STATUS.get(self.code, UNREADABLE)

    @property
    def culprit(self) -> dict[str, Any] | None:
        return self.origins[0] if self.origins else None


def entry_of(comparison: Comparison, name: str, path: str, page: str) -> SeriesEntry:
    """What is kept of a finished comparison."""
    counts = comparison.counts
    taps: dict[str, SeriesTap] = {}
    for pair in comparison.pairs:
        if pair.status == "skip" or (pair.status != FAILED and pair.role.startswith("input")):
            continue
        over, failed = facts.severity(pair), int(pair.status == FAILED)
        old = taps.get(pair.tap)
        taps[pair.tap] = (
            SeriesTap(pair.cls or "", pair.order, over, failed)
            if old is None
            else SeriesTap(old.cls, min(old.order, pair.order), max(old.over, over), old.failed + failed)
        )
    return SeriesEntry(
        name, path, 0 if comparison.verdict == PASSED else 1, facts.headline(comparison), page,
        max((t.over for t in taps.values()), default=None), counts.passed, counts.failed, counts.skipped,
        counts.identical, len(comparison.tokens.get("flipped") or ()),
        tuple({key: origin.get(key) for key in _ORIGIN} for origin in comparison.origins), taps,
    )  # fmt: skip


def not_compared(name: str, path: str, code: int, why: str) -> SeriesEntry:
    """The entry of a dump that could not be read (code 2) or of which nothing could be compared (3)."""
    return SeriesEntry(name, path, code, safe(why, 1000))


def exit_code(entries: Sequence[SeriesEntry]) -> int:
    """The worst of them."""
    return min((e.code for e in entries), key=WORST_FIRST.index, default=0)


def failing_taps(entries: Sequence[SeriesEntry]) -> list[str]:
    """Taps that failed in any dump, in data-flow order."""
    order: dict[str, int] = {}
    for tap, found in ((tap, found) for e in entries for tap, found in e.taps.items()):
        order[tap] = min(order.get(tap, found.order), found.order)
    return sorted({t for e in entries for t, s in e.taps.items() if s.failed}, key=lambda t: (order[t], t))


def over_limit(value: float | None) -> str:
    """``13x``, ``0.2x``, ``0``, ``∞``; empty where nothing was compared."""
    if not value:
        return "" if value is None else "0"
    return "∞" if not math.isfinite(value) else f"{value:.3g}x" if value < 1e6 else f"{value:.0e}x"
