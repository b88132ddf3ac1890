"""torch_xray's tables of two machines: of ``compare GOLDEN MINE result.csv`` and of ``summary_diff_check``.

The problem: people open these tables in Excel and sort by the largest error and the counts above 1e-n; torch_xray's
guide names the card's file first, where golden is first here. The idea: the same pairs, written once more in that
tool's columns; a line says which side was golden. ``min-val`` and ``max-val`` are of what the card gave, or empty.
Elsewhere: comparing (comparison/engine.py), judging (opcheck/diff.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.opcheck.compat import CompatError
from vllm_accprobe.opcheck.plain_csv import inert
from vllm_accprobe.standards.measures import DECADES
from vllm_accprobe.whole_file import write_csv_lines

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison


XRAY, DEFAULT = "xray", "accprobe"
TABLE_COLUMNS = ("Index", "Status", "Module (Bench/Target)", "Cosine", "RMSE", "IsClose (%)", "Max Err (t)", "GtNum")


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


COUNTS = tuple(f"{side}_1e-{n}" for side in ("xpu", "gpu") for n in range(1, len(DECADES) + 1))
SUMMARY_COLUMNS = (
    "name", "op_name", "dtype", "shape", "min-val", "max-val", "is_pass", "xpu_max", "gpu_max", *COUNTS,
)  # fmt: skip
_WORDS = {"pass": "pass", "warning": "warning", "error": "fail", "skip": "skip"}


class SummaryFile:
    """Gathers what is judged, and writes it to ``path``."""

    def __init__(self, path: Path):
        self.path = path
        self._rows: list[list[object]] = []

    def add(self, c: Any) -> None:
        """c: diff/verdicts.Compared."""
        op = c.row.op or c.row.cls or c.row.api
        kind = op.partition(".")[0] if "." in op else "module"
        low, high = (c.mine or c.row).extremes
        sides = c.mine, c.golden
        largest = [None if side is None else side.value("max_abs_err") for side in sides]
        found = [None if side is None else side.value(d) for side in sides for d in DECADES]
        counts = [None if n is None else int(n) for n in found]
        dtype = f"torch.{c.row.dtype}" if c.row.dtype else ""
        cells = [f"{len(self._rows):05d}-{kind}", op, dtype, c.row.shape, low, high, _WORDS[c.finding.status]]
        self._rows.append([inert(x) if isinstance(x, str) and x not in (low, high) else x
                           for x in (*cells, *largest, *counts)])  # fmt: skip

    def write(self, totals: object = None) -> list[Path]:
        """The file, as msprobe.CompareFiles has its. Raises OSError."""
        write_csv_lines(self.path, SUMMARY_COLUMNS, self._rows)
        return [self.path]
