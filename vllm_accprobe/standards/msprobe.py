"""msprobe: cosine, largest error, then the dual metrics by dtype; of two machines the ratios of msprobe_ratios.py.

Sources: the documents of accuracy_checking_details.csv, section "API Pre-check Metrics" (release 1.0 in Chinese, the
present one in English; the rules of one side against its benchmark are the same in both, the columns' names are each
document's own). Where msprobe's code differs, the documents are followed: its code judges float outputs by benchmark
ratios that need a second machine's csv, which these rules do not.
Not here: two machines against each other (msprobe_ratios.py), by which algorithm (msprobe_apis.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vllm_accprobe.standards import msprobe_apis as apis
from vllm_accprobe.standards import msprobe_ratios as ratios
from vllm_accprobe.standards.declaration import SKIPPED, Cell, MachineRule, NamedStandard, Numbers, PairRule, Side
from vllm_accprobe.standards.finding import ERROR, PASS, WARNING, Finding, Judged, broken, of, skip, unmeasured
from vllm_accprobe.standards.measures import Measures
from vllm_accprobe.standards.two_machines import dtypes_differ

COSINE, LARGEST = 0.99, 1e-3
ZERO = 2.220446049250313e-16
"""A tensor with no larger value is taken for zero: it has no direction."""
COARSE = ("float16", "bfloat16", "float8")
"""Dtypes that are judged by dual-100 and dual-1000 instead of dual-1000 and dual-10000."""
COLUMNS = (
    "Cosine similarity", "Maximum absolute error", "Dual-100 metric", "Dual-1000 metric", "Dual-10000 metric",
    "Binary consistency error rate", "Status", "Message",
)  # fmt: skip
COLUMNS_V1 = (
    "余弦相似度", "最大绝对误差", "双百指标", "双千指标", "双万指标", "二进制一致错误率", "Status", "Message",
)  # fmt: skip
ALGORITHMS = {
    "absolute": apis.ABSOLUTE, "benchmark": apis.BENCHMARK, "binary": apis.BINARY, "ulp": apis.ULP,
    "dual-1000": apis.DUAL_1000, "accumulative": apis.ACCUMULATIVE,
}  # fmt: skip
"""By the names that --algorithm takes."""
_EXACT = ("bool", "int", "uint")


def pairs(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    """As `output`, of whole tensors."""
    shares = tuple(n.share(f"within_{parts}") for parts in (100, 1000, 10000))
    if n.exact:
        unequal = n.sum("unequal", 0.0)
        rate = None if unequal is None or not n.count else unequal / n.count
        word, why = (ERROR, "values differ and must be equal") if n.max_abs or n.broken else (PASS, "")
        return (None, n.max_abs, None, None, None, rate, word, why), word, why
    word, why = _pair_word(n, shares)
    return (n.cosine, n.max_abs, *shares, None, word, why), word, why


def _pair_word(n: Numbers, shares: tuple[float | None, ...]) -> tuple[str, str]:
    if n.broken:
        return ERROR, "NaN or infinity on one side only"
    if n.max_abs is None:
        return SKIPPED, "no finite values"
    if n.count > 1 and not n.zero and not n.identical:  # a single element has no direction
        if n.cosine is None and n.max_abs > ZERO:
            return ERROR, "one side is all zero"
        if n.cosine is not None and not n.cosine > COSINE:
            return ERROR, f"cosine similarity {n.cosine:.4g} is not above {COSINE}"
    if n.max_abs < LARGEST or n.identical:
        return PASS, ""
    coarse = n.dtype.startswith(COARSE)
    steps = ((0, 100), (1, 1000)) if coarse else ((1, 1000), (2, 10000))
    for (at, parts), word in zip(steps, (ERROR, WARNING), strict=True):
        share = shares[at]
        if share is None:
            return SKIPPED, "not measured"
        if not share > 1.0 - 1.0 / parts:
            return word, f"dual-{parts}: {share:.6g} is not above {1.0 - 1.0 / parts:g}"
    return PASS, ""


def output(m: Measures, op: str, dtype: str) -> Finding:
    """Cosine, largest error, then the dual metrics by dtype; integers bit by bit."""
    if "dropout" in op.lower():
        return skip("dual", "dropout is random")
    if why := unmeasured(m):
        return skip("dual", why)
    if dtype.startswith(_EXACT):
        return _exact(m, op)
    if wrong := broken(m):
        return of("dual", [wrong])
    judged = []
    if m.elements > 1 and ((m.max_abs_reference or 0.0) > ZERO or (m.max_abs_mine or 0.0) > ZERO):
        judged.append(_cosine(m))
        if judged[0].status == ERROR:
            return of("dual", judged)
    largest = m.max_abs_err or 0.0
    if largest < LARGEST:
        return of("dual", [*judged, Judged("max_abs_err", largest, LARGEST, PASS)])
    coarse = dtype.startswith(COARSE)
    for parts, share, word in _dual(m, coarse):
        limit = 1.0 - 1.0 / parts
        status = PASS if share > limit else word
        reason = "" if status == PASS else f"dual-{parts}: {share:.6g} is not above {limit:g}"
        judged.append(Judged(f"dual_{parts}", share, limit, status, reason))
        if status != PASS:
            break
    return of("dual", judged)


def _cosine(m: Measures) -> Judged:
    if (m.max_abs_reference or 0.0) <= ZERO or (m.max_abs_mine or 0.0) <= ZERO or m.cosine is None:
        side = "the reference" if (m.max_abs_reference or 0.0) <= ZERO else "mine"
        return Judged("cosine", None, COSINE, ERROR, f"{side} is all zero")
    good = m.cosine > COSINE
    return Judged(
        "cosine", m.cosine, COSINE, PASS if good else ERROR, "" if good else f"cosine {m.cosine:.4g} is not above 0.99"
    )


def _dual(m: Measures, coarse: bool) -> list[tuple[int, float, str]]:
    if coarse:
        return [(100, m.dual_100 or 0.0, ERROR), (1000, m.dual_1000 or 0.0, WARNING)]
    return [(1000, m.dual_1000 or 0.0, ERROR), (10000, m.dual_10000 or 0.0, WARNING)]


def _exact(m: Measures, op: str) -> Finding:
    if apis.api_of(op) in apis.QUANTISERS:
        largest = m.max_abs_err or 0.0
        bad = f"off by {largest:g}, a quantised value may be by 1" if largest > 1 else ""
        return of("quantised", [Judged("max_abs_err", largest, 1.0, ERROR if bad else PASS, bad)])
    rate = m.binary_err_ratio or 0.0
    bad = f"{round(rate * m.elements)} of {m.elements} values differ and must be equal" if rate else ""
    return of("binary consistency", [Judged("binary_err_ratio", rate, 0.0, ERROR if bad else PASS, bad)])


def machines(release: ratios.Release, golden: Side, mine: Side, api: str, algorithm: str | None) -> Finding:
    """Mine's distance from the CPU against golden's; of two dtypes, what judges mine alone."""
    theirs = golden.values
    if golden.dtype != mine.dtype:
        algorithm = algorithm or apis.algorithm_of(api, mine.dtype)
        if algorithm in (apis.BENCHMARK, None):
            return dtypes_differ(golden, mine, algorithm or "")
        theirs = {**theirs, "ulp_share": 0.0}  # no share of golden's is a smaller one
    return ratios.judge(release, theirs, mine.values, api, mine.dtype, algorithm)


def _named(release: ratios.Release, columns: tuple[str, ...], level: Callable[[str], str]) -> NamedStandard:
    rule = MachineRule(partial(machines, release), ALGORITHMS, level)
    return NamedStandard(release.name, pairs=PairRule(columns, pairs), output=output, machines=rule)


STANDARDS = (_named(ratios.CURRENT, COLUMNS, apis.level_of), _named(ratios.V1, COLUMNS_V1, lambda api: ""))
