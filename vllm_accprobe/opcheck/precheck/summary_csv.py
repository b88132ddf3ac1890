"""torch_xray's joined table: ``summary_diff_check xpu.csv gpu.csv result.csv``.

The problem: torch_xray's guide ends in a table of both machines that people sort in Excel, by the largest error and by
the counts above 1e-n. The idea: what opdiff judges is written once more, in that table's columns. ``min-val`` and
``max-val`` are of what the card gave; a csv that does not have them (opcheck.csv) leaves the cells empty. Not here: the
judging (diff/verdicts.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.plain_csv import inert, write_rows
from vllm_accprobe.standards.measures import DECADES

COUNTS = tuple(f"{side}_1e-{n}" for side in ("xpu", "gpu") for n in range(1, len(DECADES) + 1))
COLUMNS = ("name", "op_name", "dtype", "shape", "min-val", "max-val", "is_pass", "xpu_max", "gpu_max", *COUNTS)
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

    def write(self) -> Path:
        """Raises OSError."""
        write_rows(self.path, COLUMNS, self._rows)
        return self.path
