"""Standards that judge one machine's output against the reference alone: msprobe's, ait's, torch_xray's.

The problem: most people have one machine and a reference on the CPU. The idea: each rule reads a handful of Measures
and gives the tool's own word. Sources: msprobe, section "API Pre-check Metrics", the same in both releases; ait's
opcheck tolerances as msit 8.2 has them; torch_xray's example table, in which all rows with an error of 0.0156 fail and
none with 0.0078 does. In all of them a NaN or infinity on one side only is an error, which the documents do not say
and their tools do not always find. Not here: two machines against each other (two_sided.py).
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_accprobe.judge.foreign import COSINE, LARGEST, XRAY_LARGEST
from vllm_accprobe.opcheck.measures import Measures
from vllm_accprobe.opcheck.standards.apis import QUANTISERS, api_of
from vllm_accprobe.opcheck.standards.finding import ERROR, PASS, WARNING, Finding, Judged, of, skip

ZERO = 2.220446049250313e-16
"""msprobe takes a tensor with no larger value for zero: it has no direction."""
AIT_SHARES = {
    "float32": 0.9999, "float16": 0.999, "bfloat16": 0.999, "float64": 0.9999, "int64": 0.9999, "int32": 0.9999,
    "int16": 0.999, "int8": 0.999, "uint8": 0.99, "bool": 1.0,
}  # fmt: skip
"""More than this share must be within ait's tolerance (measures.AIT); of booleans all."""
_EXACT = ("bool", "int", "uint")


def unmeasured(m: Measures) -> str:
    """Why nothing can be said about ``m``, or ""."""
    if not m.elements:
        return "empty tensor"
    return "no finite values" if m.max_abs_err is None and not m.inf_nan_err_ratio else ""


def broken(m: Measures) -> Judged | None:
    """The error that a one-sided NaN or infinity is."""
    if not m.inf_nan_err_ratio:
        return None
    reason = f"{m.nonfinite_mismatch} of {m.elements} elements are NaN or infinite on one side only"
    return Judged("inf_nan_err_ratio", m.inf_nan_err_ratio, 0.0, ERROR, reason)


def msprobe(m: Measures, op: str, dtype: str) -> Finding:
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
    coarse = dtype in ("float16", "bfloat16") or dtype.startswith("float8")
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
    if api_of(op) in QUANTISERS:
        largest = m.max_abs_err or 0.0
        bad = f"off by {largest:g}, a quantised value may be by 1" if largest > 1 else ""
        return of("quantised", [Judged("max_abs_err", largest, 1.0, ERROR if bad else PASS, bad)])
    rate = m.binary_err_ratio or 0.0
    bad = f"{round(rate * m.elements)} of {m.elements} values differ and must be equal" if rate else ""
    return of("binary consistency", [Judged("binary_err_ratio", rate, 0.0, ERROR if bad else PASS, bad)])


def ait(m: Measures, op: str, dtype: str) -> Finding:
    """The share of elements within a relative tolerance by dtype."""
    if why := unmeasured(m):
        return skip("tolerance", why)
    if wrong := broken(m):
        return of("tolerance", [wrong])
    limit, share = AIT_SHARES.get(dtype, AIT_SHARES["float16"]), m.ait_share
    if share is None:
        return skip("tolerance", "ait_share was not measured")
    good = share > limit or share == 1.0
    reason = "" if good else f"{share:.6g} of the elements are within the tolerance, more than {limit:g} must be"
    return of("tolerance", [Judged("ait_share", share, limit, PASS if good else ERROR, reason)])


def xray(m: Measures, op: str, dtype: str) -> Finding:
    """The largest error against 0.01."""
    if why := unmeasured(m):
        return skip("decades", why)
    if wrong := broken(m):
        return of("decades", [wrong])
    largest = m.max_abs_err or 0.0
    reason = f"{m.above_1e_2} elements are off by more than {XRAY_LARGEST:g}" if largest > XRAY_LARGEST else ""
    return of("decades", [Judged("max_abs_err", largest, XRAY_LARGEST, ERROR if reason else PASS, reason)])


SINGLE: dict[str, Callable[[Measures, str, str], Finding]] = {
    "msprobe": msprobe, "msprobe-1.0": msprobe, "ait": ait, "xray": xray,
}  # fmt: skip
