"""What the page shows of one pair beyond its numbers, of the tree and of the heat map, as plain JSON values.

The problem: errors by row and sampled values are far more than a page can hold. The idea: the worst rows of the worst
pairs, the samples as they are, one line per tap for the tree, and the heat map's bytes as base64; every name is made
``safe`` on the way. Not here: the pairs (columns.py), what the script draws (pair.js, tree.js, heat.js).
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.report import facts
from vllm_accprobe.report.heat import Heat, factors
from vllm_accprobe.report.html.around import around_json
from vllm_accprobe.report.html.spread import spread_json
from vllm_accprobe.report.neighbours import sentences
from vllm_accprobe.report.text import nonfinite, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.report.html.token_text import TokenTexts

NAME, COMMAND = 400, 10_000
MAX_PAIRS = 2_000
MAX_ROWS = 8


def heat_json(heat: Heat, tokens: TokenTexts | None = None) -> dict[str, Any]:
    """The map begins with the first request, which shows most. tokens: what they say, where that was asked for."""
    columns = [tokens and tokens.columns(r.label, r.start, r.width) for r in heat.requests]
    return {
        "texts": tokens.texts if tokens else {},
        "taps": [safe(t, NAME) for t in heat.taps],
        "layers": [layer and safe(layer, NAME) for layer in heat.layers],
        "leftOut": heat.left_out,
        "requests": [
            {
                "label": safe(r.label, 120),
                "start": r.start.tolist(),
                "step0": r.step0.tolist(),
                "step1": r.step1.tolist(),
                "decode": r.decode.tolist(),
                "width": r.width,
                "tokens": said,
                "worst": _plain(r.worst),
                "codes": base64.b64encode(r.codes.tobytes()).decode("ascii"),
            }
            for r, said in zip(heat.requests, columns, strict=True)
        ],
    }


def tree_json(comparison: Comparison) -> dict[str, Any]:
    """One entry per tap: name, class, place in the data flow, worst severity of its outputs, failed and all pairs."""
    taps: dict[str, list[Any]] = {}
    for p in comparison.pairs:
        entry = taps.setdefault(p.tap, [safe(p.tap, NAME), safe(p.cls or "", 80), p.order, -1.0, 0, 0])
        entry[2] = min(entry[2], p.order)
        if p.status == "fail" or not p.role.startswith("input"):
            entry[3] = max(entry[3], facts.severity(p))
        entry[4] += p.status == "fail"
        entry[5] += 1
    rows = sorted(taps.values(), key=lambda e: (e[2], e[0]))
    return {
        "taps": [[*e[:3], _plain(e[3]), *e[4:]] for e in rows],
        "origins": [safe(facts.tap_of(o), NAME) for o in comparison.origins],
    }


def looks_json(
    comparison: Comparison, page_index: Mapping[int, int], over: np.ndarray | None = None
) -> dict[str, Any]:
    """page_index: index in ``Comparison.pairs`` → index on the page. over: `heat.factors`, where they are known."""
    return {
        "rows": _worst_rows(comparison, page_index, over),
        "samples": {
            str(page_index[s.pair]): {
                "golden": _values(s.golden),
                "mine": _values(s.mine),
                "worst": s.worst,
                "request": None if s.request is None else safe(s.request, 120),
                "position": s.position,
            }
            for s in comparison.samples
            if s.pair in page_index
        },
        "spreads": {str(page_index[s.pair]): spread_json(s) for s in comparison.spreads if s.pair in page_index},
        "no_spread": [f"{n:,} {safe(why, NAME)}" for why, n in comparison.without_spread.items()],
        "code": {safe(tap, NAME): sentences.code(comparison.sources, tap) for tap in comparison.sources},
        "around": around_json(comparison, page_index),
        "again": _again(comparison),
        "shapes": [
            [*(safe(x or "", NAME) for x in facts.place_of(o)), safe(o["shape"], 300)]
            for o in comparison.origins
            if o.get("shape")
        ],
    }


def _again(comparison: Comparison) -> str:
    """The command that compares these two dumps as it was done, but for which taps."""
    given = list(comparison.options)
    if "--taps" in given:
        at = given.index("--taps")
        del given[at : at + 2]
    return safe(shlex.join(["accprobe", "compare", comparison.golden_path, comparison.mine_path, *given]), COMMAND)


def _worst_rows(comparison: Comparison, page_index: Mapping[int, int], over: np.ndarray | None) -> dict[str, list[Any]]:
    rows = comparison.rows
    if rows is None or not len(rows):
        return {}
    pairs, over = comparison.pairs, factors(comparison) if over is None else over
    wanted = sorted(page_index, key=lambda i: (pairs[i].status != "fail", -facts.severity(pairs[i])))[:MAX_PAIRS]
    bounds = np.searchsorted(rows.pair, np.arange(len(pairs) + 1))
    out: dict[str, list[Any]] = {}
    labels = {i: safe(label, 120) for i, label in enumerate(rows.requests)}
    for i in wanted:
        rows.rest()
        own = bounds[i] + np.flatnonzero(rows.error[bounds[i] : bounds[i + 1]])  # NaN is not 0 and stays
        if not len(own):
            continue
        key = np.where(np.isnan(rows.error[own]), np.inf, rows.error[own])
        worst = own[np.argsort(-key, kind="stable")[:MAX_ROWS]]
        columns = (rows.request, rows.position, rows.decode, rows.error, over)
        lines = [
            [labels[who], at, "decode" if decode else "prefill", _plain(error), _plain(ratio)]
            for who, at, decode, error, ratio in zip(*(c[worst].tolist() for c in columns), strict=True)
        ]
        out[str(page_index[i])] = [len(own), *lines]
    return out


def _values(values: np.ndarray) -> list[Any]:
    return [_plain(float(v)) for v in values]


def _plain(value: float, digits: int = 4) -> Any:
    return nonfinite(value) or float(f"{value:.{digits}g}")
