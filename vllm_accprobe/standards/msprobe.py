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
from vllm_accprobe.standards.declaration import (
    SKIPPED,
    Cell,
    MachineRule,
    MachineSide,
    NamedStandard,
    Numbers,
    PairRule,
)
from vllm_accprobe.standards.finding import (
    ERROR,
    PASS,
    SKIP,
    WARNING,
    Judged,
    RuleFinding,
    broken,
    of,
    skip,
    unmeasured,
)
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
    """`output`, of a whole tensor, whose operator is not known."""
    m = n.measures
    found = output(m, "", n.dtype)
    word = SKIPPED if found.status == SKIP else found.status
    if n.dtype.startswith(_EXACT):
        numbers: tuple[Cell, ...] = (None, m.max_abs_err, None, None, None, m.binary_err_ratio)
    else:
        numbers = (m.cosine, m.max_abs_err, m.dual_100, m.dual_1000, m.dual_10000, None)
    return (*numbers, word, found.message), word, found.message


def output(m: Measures, op: str, dtype: str) -> RuleFinding:
    """Cosine, largest error, then the dual metrics by dtype; integers bit by bit."""
    if "dropout" in op.lower():
        return skip("dual", "dropout is random")
    if why := unmeasured(m):
        return skip("dual", why)
    if dtype.startswith(_EXACT):
        return _exact(m, op)
    if wrong := broken(m):
        return of("dual", [wrong])
    direction = _cosine(m)
    if direction is not None and direction.status == ERROR:
        return of("dual", [direction])
    judged = [] if direction is None else [direction]
    largest = m.max_abs_err or 0.0
    if largest < LARGEST:
        return of("dual", [*judged, Judged("max_abs_err", largest, LARGEST, PASS)])
    steps = (100, 1000) if dtype.startswith(COARSE) else (1000, 10000)
    for parts, word in zip(steps, (ERROR, WARNING), strict=True):
        name, limit = f"dual_{parts}", 1.0 - 1.0 / parts
        share: float | None = getattr(m, name)
        if share is None:
            return skip("dual", f"{name} was not measured")
        status = PASS if share > limit else word
        reason = "" if status == PASS else f"dual-{parts}: {share:.6g} is not above {limit:g}"
        judged.append(Judged(name, share, limit, status, reason))
        if status != PASS:
            break
    return of("dual", judged)


def _cosine(m: Measures) -> Judged | None:
    """None where there is no direction: of a single finite element, and of two zero tensors."""
    if m.elements - m.nonfinite < 2:
        return None
    sides = [x for x in (m.max_abs_reference, m.max_abs_mine) if x is not None] or [m.max_abs_err or 0.0]
    if max(sides) <= ZERO:
        return None
    if min(sides) <= ZERO or m.cosine is None:
        side = "one side" if m.max_abs_reference is None else "the reference" if sides[0] <= ZERO else "mine"
        return Judged("cosine", None, COSINE, ERROR, f"{side} is all zero")
    good = m.cosine > COSINE
    return Judged(
        "cosine", m.cosine, COSINE, PASS if good else ERROR, "" if good else f"cosine {m.cosine:.4g} is not above 0.99"
    )


def _exact(m: Measures, op: str) -> RuleFinding:
    if apis.api_of(op) in apis.QUANTISERS:
        largest = m.max_abs_err or 0.0
        bad = f"off by {largest:g}, a quantised value may be by 1" if largest > 1 else ""
        return of("quantised", [Judged("max_abs_err", largest, 1.0, ERROR if bad else PASS, bad)])
    rate = m.binary_err_ratio
    bad = "values differ and must be equal" if rate or (rate is None and m.max_abs_err) else ""
    if rate:
        bad = f"{round(rate * m.elements)} of {m.elements} {bad}"
    return of("binary consistency", [Judged("binary_err_ratio", rate, 0.0, ERROR if bad else PASS, bad)])


def machines(
    release: ratios.Release, golden: MachineSide, mine: MachineSide, api: str, algorithm: str | None
) -> RuleFinding:
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
