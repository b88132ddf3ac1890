"""A pair's histograms and errors over position and column as small integers for the page.

The problem: 200 pairs of 500 bins as decimal numbers are megabytes. The idea: counts as they are, errors as thousandths
of their peak, which is told beside them. Not here: how they come about (comparison/measure/spreads.py), drawing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.report.text import nonfinite

if TYPE_CHECKING:
    from vllm_accprobe.comparison.row_table import ValueSpread

STEPS = 1000
INFINITE = STEPS + 1


def spread_json(spread: ValueSpread) -> dict[str, Any]:
    """columns and positions: [peak, thousandths of it]; -1 for no rows, 1001 for not finite."""
    return {
        "range": [_plain(spread.low), _plain(spread.high)],
        "golden": spread.golden.tolist(),
        "mine": spread.mine.tolist(),
        "columns": _parts(spread.columns),
        "width": spread.width,
        "positions": _parts(spread.positions),
        "ends": [spread.first, spread.last],
        "read": [spread.read, spread.rows],
    }


def _parts(values: np.ndarray) -> list[Any]:
    finite = np.isfinite(values)
    peak = float(values[finite].max(initial=0.0))
    scaled = np.where(values < 0, -1, np.ceil(np.where(finite, values, 0) / (peak or 1.0) * STEPS))
    return [_plain(peak), np.where(finite, scaled, INFINITE).astype(int).tolist()]


def _plain(value: float) -> Any:
    return nonfinite(value) or float(f"{value:.4g}")
