"""The name, formula, unit and source of each metric column, for tables, tooltips and documents.

Not here: the code (definition.py is the definition). Symbols: g golden, m mine, d = m - g over the positions where both
are finite; a row is what belongs to one token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    formula: str
    meaning: str
    source: str


_GOLUB = "Golub and Van Loan, Matrix Computations, 4th ed., section 2.2.3 (relative error in a vector norm)"
_OWN = "accprobe"

CATALOG: tuple[Entry, ...] = (
    Entry("cosine", "sum(g*m) / (norm(g) * norm(m)); empty when a norm is 0", "direction; 1 is equal", "Salton 1971"),
    Entry("max_abs_err", "max |d|", "largest difference, in the tensor's unit", _GOLUB),
    Entry("mean_abs_err", "mean |d|", "average difference", "Willmott and Matsuura 2005"),
    Entry("rmse", "sqrt(mean(d*d))", "root mean square difference", "Willmott and Matsuura 2005"),
    Entry("rel_l2", "norm(d) / norm(g); empty when norm(g) is 0", "difference relative to the golden", _GOLUB),
    Entry("max_rel_err", "max |d| / |g| over positions with g != 0", "largest relative error of one element", _GOLUB),
    Entry(
        "worst_row_rel_l2",
        "max over rows of norm(d_r) / max(norm(g_r), s * median norm of this tap's golden rows), "
        "s = min(1, 0.1 + 1 / sqrt(width))",
        "the row that differs most; one bad row among thousands shows here and not in rel_l2",
        _OWN,
    ),
    Entry(
        "worst_row_norm_ratio",
        "norm(m_r) / norm(g_r) of the row where it is furthest from 1 (a norm below the floor counts as it)",
        "a wrong scale shows here before it shows in any angle",
        _OWN,
    ),
    Entry("nonfinite", "positions where g or m is NaN or infinite", "left out of the other metrics", _OWN),
    Entry("nonfinite_mismatch", "those of them that differ", "NaN equals NaN, +inf equals +inf", _OWN),
)
BY_NAME = {e.name: e for e in CATALOG}
