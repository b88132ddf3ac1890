"""An origin's neighbours as plain JSON values for the page's drawing.

Not here: which they are (comparison/verdict/neighbours.py), words (report/neighbours/), the drawing (around.js).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report import facts
from vllm_accprobe.report.neighbours import sentences
from vllm_accprobe.report.text import nonfinite, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.comparison.verdict.neighbours import Edge

NAME = 400


def around_json(comparison: Comparison, page_index: Mapping[int, int]) -> list[dict[str, Any]]:
    """An entry for each origin with neighbours. page_index: index in ``Comparison.pairs`` → index on the page."""
    out = []
    for origin, around in zip(comparison.origins, comparison.neighbours, strict=True):
        if around is None:
            continue
        sides = {side: [_edge(e, page_index) for e in getattr(around, side)] for side in ("fed_by", "feeds")}
        place = {"module": safe(facts.tap_of(origin), NAME), "tap": safe(around.tap, NAME)}
        said = {"role": safe(around.role, 80), "said": sentences.described(around), "left_out": list(around.left_out)}
        out.append(place | said | sides)
    return out


def _edge(edge: Edge, page_index: Mapping[int, int]) -> dict[str, Any]:
    return {
        "tap": safe(edge.tap, NAME),
        "role": safe(edge.role, 80),
        "in": safe(edge.role_in, 80),
        "by": edge.by,
        "status": edge.status,
        "over": None if edge.over is None else nonfinite(edge.over) or float(f"{edge.over:.4g}"),
        "said": f"{sentences.name(edge)}: {sentences.error(edge)}",
        "pair": None if edge.pair is None else page_index.get(edge.pair),
    }
