"""torch_xray's result.csv: ``compare GOLDEN MINE result.csv``.

The problem: torch_xray's `compare` takes a third word, the table that people then open in Excel, and its guide names
the card's file first, where golden is first here. The idea: the table has that tool's columns, of the pairs that were
compared by its standard; and a line says which side was taken for golden. Not here: comparing (comparison/engine.py),
the standard (standards/xray.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.cli.common.options import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

XRAY, DEFAULT = "xray", "accprobe"
COLUMNS = ("Index", "Status", "Module (Bench/Target)", "Cosine", "RMSE", "IsClose (%)", "Max Err (t)", "GtNum")


def standard_for(sheet: Path | None, standard: str | None, no_pairs: bool) -> str:
    """The standard to compare by. Raises CommandError where the table cannot be written."""
    if sheet is None:
        return standard or DEFAULT
    if no_pairs:
        raise CommandError(f"{sheet} is written of two dumps: not with --rejudge or --plan")
    if standard not in (None, XRAY):
        raise CommandError(f"{sheet} is torch_xray's table, which has its standard's columns: not with --standard "
                           f"{standard}; --out DIR has a csv of any")  # fmt: skip
    return XRAY


def check(sheet: Path | None, dumps: Sequence[Path]) -> None:
    """Raises CommandError where the table must not be written."""
    from vllm_accprobe.cli.common import outputs

    if sheet is None:
        return
    if sheet.suffix != ".csv":
        raise CommandError(f"{sheet}: the third word is torch_xray's table, a .csv; two dumps are compared")
    outputs.check_place(sheet, dumps, "RESULT.csv")
    if sheet.is_symlink() or (sheet.exists() and not outputs.is_ours(sheet, outputs.csv_with(*COLUMNS[:2]))):
        raise CommandError(f"{sheet} is not of this command: nothing is overwritten; name another file")
    outputs.writable(sheet.parent, "RESULT.csv")


def write(result: Comparison, sheet: Path) -> Path:
    """Raises OSError."""
    from vllm_accprobe.report.table import write_csv_lines

    assert result.foreign is not None
    rows: list[tuple[Any, ...]] = []
    for index, (pair, cells) in enumerate(zip(result.pairs, result.foreign.rows, strict=True)):
        status, cosine, rmse, close, largest, above = cells[:6]
        name = pair.golden if pair.golden == pair.mine or not pair.mine else f"{pair.golden} / {pair.mine}"
        rows.append((index, status, name or pair.mine, cosine, rmse, close, largest, above))
    write_csv_lines(sheet, COLUMNS, rows)
    return sheet


def order(golden: Path, mine: Path) -> str:
    """The line that says which side was which."""
    return (f"note: {golden} was taken for golden, {mine} for mine; torch_xray's guide has the card first, here "
            "golden is first")  # fmt: skip
