"""torch_xray's result.csv: ``compare GOLDEN MINE result.csv``.

The problem: torch_xray's `compare` takes a third word, the table that people then open in Excel, and its guide names
the card's file first, where golden is first here. The idea: the table has that tool's columns, of the pairs that were
compared by its standard; and a line says which side was taken for golden. Not here: comparing (comparison/engine.py),
the standard (standards/xray.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.opcheck.compat import CompatError

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

XRAY, DEFAULT = "xray", "accprobe"
COLUMNS = ("Index", "Status", "Module (Bench/Target)", "Cosine", "RMSE", "IsClose (%)", "Max Err (t)", "GtNum")


def standard_for(sheet: Path | None, standard: str | None, no_pairs: bool) -> str:
    """The standard to compare by. Raises CompatError where the table cannot be written."""
    if sheet is None:
        return standard or DEFAULT
    if sheet.suffix != ".csv":
        raise CompatError(f"{sheet}: the third word is torch_xray's table, a .csv; two dumps are compared")
    if no_pairs:
        raise CompatError(f"{sheet} is of two dumps: not with --rejudge or --plan")
    if standard not in (None, XRAY):
        raise CompatError(f"{sheet} is torch_xray's table, which has its standard's columns: not with --standard "
                           f"{standard}; --out DIR has a csv of any")  # fmt: skip
    return XRAY


def rows(result: Comparison) -> list[tuple[Any, ...]]:
    """The table, a row for each pair."""
    assert result.foreign is not None
    out: list[tuple[Any, ...]] = []
    for index, (pair, cells) in enumerate(zip(result.pairs, result.foreign.rows, strict=True)):
        status, cosine, rmse, close, largest, above = cells[:6]
        name = pair.golden if pair.golden == pair.mine or not pair.mine else f"{pair.golden} / {pair.mine}"
        out.append((index, status, name or pair.mine, cosine, rmse, close, largest, above))
    return out


def order(golden: Path, mine: Path) -> str:
    """The line that says which side was which."""
    return (f"note: {golden} was taken for golden, {mine} for mine; torch_xray's guide has the card first, here "
            "golden is first")  # fmt: skip
