"""The chart of a series as SVG: factor over the limit of each tap, by dump.

The problem: a page of a series should need neither plotly's two megabytes nor a script to be read or printed. The idea:
lines and points as SVG with classes for its style; factors lie on a logarithmic axis with the limit at 1, what is
smaller than its end lies on it, and what is infinite lies above it. Not here: which taps (series_page.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_accprobe.report.between import tap_of
from vllm_accprobe.report.html.elements import escaped
from vllm_accprobe.report.series.dump_entry import SeriesEntry, over_limit

MAX_LINES = 60
"""chosen: more lines than this are one grey area."""
STEPS = (0.003, 0.03, 0.1, 0.3, 1, 3, 30)
"""Of the page's colours, as in html/base.js."""
WIDTH, HEIGHT = 1000, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 26, 46
LOWEST = -3.0
"""chosen: log10 of the factor at the axis' lower end; honest rounding seldom reaches it."""


def step(over: float) -> int:
    """Which of the page's colours: 0 no error, 6 and more beyond the limit."""
    if over == 0:
        return 0
    return next((i + 1 for i, s in enumerate(STEPS) if over <= s), len(STEPS) + 1)


def chart(entries: Sequence[SeriesEntry], taps: Sequence[str]) -> str:
    """Empty where no tap ever failed."""
    if not taps:
        return ""
    finite = [e.taps[t].over for t in taps for e in entries if t in e.taps and math.isfinite(e.taps[t].over)]
    top = max(1.0, math.ceil(math.log10(max([1.0, *finite])) + 0.2))
    origins = {tap_of(o) for e in entries for o in e.origins}

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(entries)

    def y(over: float) -> float:
        if not math.isfinite(over):
            return TOP - 12
        at = LOWEST if over <= 0 else max(LOWEST, math.log10(over))
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - at) / (top - LOWEST)

    out = [
        f'<svg id="series-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Factor over the limit of '
        f'{len(taps)} taps, by dump; the table below has the numbers">'
    ]
    for e in range(math.ceil(LOWEST), int(top) + 1):
        kind, at = "limit" if e == 0 else "grid", y(10.0**e)
        word = "limit" if e == 0 else f"{10.0**e:g}×"
        out.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{word}</text>')
    every = max(1, -(-len(entries) // 16))
    for i, entry in enumerate(entries):
        out.append(f'<rect class="mark {entry.status}" x="{x(i) - 5:.1f}" y="{HEIGHT - BOTTOM + 8}" width="10" '
                   f'height="10" rx="2"><title>{escaped(entry.name, 80)}: {entry.status}</title></rect>')  # fmt: skip
        if i % every == 0:
            name = escaped(entry.name, 18)
            out.append(f'<text class="tick" x="{x(i):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>')
    drawn = list(enumerate(taps))
    for i, tap in sorted(drawn, key=lambda it: it[1] in origins):  # origins on top
        points = [(k, e.name, e.taps[tap]) for k, e in enumerate(entries) if tap in e.taps]
        runs = "".join(
            f"{'L' if j and points[j - 1][0] == k - 1 else 'M'}{x(k):.1f} {y(t.over):.1f}"
            for j, (k, _, t) in enumerate(points)
        )
        dots = "".join(
            f'<circle class="{"failed" if t.failed else "held"}" cx="{x(k):.1f}" cy="{y(t.over):.1f}" r="3.5">'
            f"<title>{escaped(tap)}, {escaped(name, 80)}: {over_limit(t.over)} the limit</title></circle>"
            for k, name, t in points
        )
        kind = "line origin" if tap in origins else "line"
        out.append(f'<g class="{kind}" id="line-{i}" data-tap="{i}"><path d="{runs}"/>{dots}</g>')
    return "".join([*out, "</svg>"])
