"""msprobe's files of its second stage: api_precision_compare_details_<time>.csv and ..._result_<time>.csv.

The problem: scripts that read msprobe's verdict on two machines know these two files. The idea: what opdiff judges is
written once more, in msprobe's columns, in the words of release 26.2; an empty cell is one space, as there. A measure
that was not judged by the API's algorithm stays empty. Not here: the judging (diff/verdicts.py), opdiff's own files
(diff/lines.py), the first stage's (check_csv.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.plain_csv import inert, write_rows

EMPTY = " "
_PAIRS = {
    "small_value_ratio": ("小值域错误比值", "小值域判定结果"), "rmse_ratio": ("均方根误差比值", "均方根误差判定结果"),
    "max_rel_ratio": ("相对误差最大值比值", "相对误差最大值判定结果"),
    "mean_rel_ratio": ("相对误差平均值比值", "相对误差平均值判定结果"),
    "error_balance_ratio": ("误差均衡性比值", "误差均衡性判定结果"),
    "inf_nan_err_ratio": ("inf/nan错误率", "inf/nan判定结果"), "rel_err_ratio": ("相对误差错误率", "相对误差判定结果"),
    "abs_err_ratio": ("绝对误差错误率", "绝对误差判定结果"),
    "binary_err_ratio": ("二进制一致错误率", "二进制一致错误率判定结果"),
}  # fmt: skip
_ULP = {"ulp_mean": "ULP误差平均值", "ulp_share": "ULP误差大于阈值占比", "ulp_share_ratio": "ULP误差大于阈值占比比值"}
_ULP_STATUS = "ULP误差判定结果"
_DUAL = ("双千指标", "双千指标判定结果")
DETAILS = (
    "API Name", *(c for pair in _PAIRS.values() for c in pair), *_ULP.values(), _ULP_STATUS, *_DUAL, "比对结果",
    "比对算法", "Message",
)  # fmt: skip
RESULT = ("API Name", "Forward Test Success", "Backward Test Success", "Message")
_ALGORITHMS = {
    "absolute threshold": "绝对阈值法", "benchmark ratio": "标杆比对法", "binary consistency": "二进制一致法",
    "ULP": "ULP误差比对法", "dual-1000": "双千指标法", "accumulative error": "累积误差比对法",
}  # fmt: skip
_WORD = {"skip": "SKIP"}


class CompareFiles:
    """Gathers what is judged, and writes both files in ``out``. name: how the API of a row is called."""

    def __init__(self, out: Path, stamp: str, digits: int = 14):
        self.paths = tuple(out / f"api_precision_compare_{kind}_{stamp}.csv" for kind in ("result", "details"))
        self._digits = digits
        self._rows: list[list[str]] = []

    def add(self, c: Any) -> None:
        """c: diff/verdicts.Compared. An output that one file alone has is no row of msprobe's."""
        if c.side:
            return
        judged = {j.name: j for j in c.finding.judged}
        cells = []
        for name in _PAIRS:
            found = judged.get(name)
            cells += [self._number(found), _word(found.status) if found else EMPTY]
        cells += [self._number(judged.get(name)) for name in _ULP]
        share = judged.get("ulp_share")
        cells.append(_word(share.status) if share else EMPTY)
        dual = judged.get("dual_1000")
        cells += [self._number(dual), _word(dual.status) if dual else EMPTY]
        algorithm = _ALGORITHMS.get(c.finding.algorithm, c.finding.algorithm) or EMPTY
        end = [_word(c.finding.status), algorithm, c.finding.message]
        self._rows.append([inert(x) for x in (".".join(c.row.key), *cells, *end)])

    def _number(self, judged: Any) -> str:
        if judged is None or judged.value is None:
            return EMPTY
        return f"{judged.value:.{self._digits}f}" if math.isfinite(judged.value) else str(judged.value)

    def write(self, totals: Any) -> Sequence[Path]:
        """totals: diff/verdicts.DiffTotals. Raises OSError."""
        result, details = self.paths
        write_rows(details, DETAILS, self._rows)
        calls = ([inert(".".join(key)), *(_word(s) for s in call.statuses), call.message]
                 for key, call in totals.calls.items())  # fmt: skip
        write_rows(result, RESULT, calls)
        return self.paths


def _word(status: str) -> str:
    return _WORD.get(status, status) or EMPTY
