"""ait: msit's seven metrics of a pair, which come without any verdict, and its opcheck's tolerances of one output.

Of a pair the status stays our own. Of one output more than a share of the elements, by dtype, must lie within a
relative tolerance (dtype_limits.AIT), as msit 8.2 has them; a NaN or infinity on one side only is an error, which
its tools do not always find. Of two machines the same on each.
"""

from __future__ import annotations

from vllm_accprobe.standards.declaration import ERROR, NO_VERDICT, PASS, Cell, NamedStandard, Numbers, PairRule
from vllm_accprobe.standards.finding import Judged, RuleFinding, broken, of, skip, unmeasured
from vllm_accprobe.standards.measures import Measures
from vllm_accprobe.standards.two_machines import each

COLUMNS = (
    "cosine_similarity", "max_relative_error", "mean_relative_error", "max_absolute_error", "mean_absolute_error",
    "kl_divergence", "relative_euclidean_distance", "cmp_fail_reason",
)  # fmt: skip
SHARES = {
    "float32": 0.9999, "float16": 0.999, "bfloat16": 0.999, "float64": 0.9999, "int64": 0.9999, "int32": 0.9999,
    "int16": 0.999, "int8": 0.999, "uint8": 0.99, "bool": 1.0,
}  # fmt: skip
"""More than this share must be within the tolerance; of booleans all."""


def pairs(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    """The metrics, and why they are missing."""
    sums = [n.sum(name, 0.0) for name in ("max_rel", "sum_rel", "max_abs", "sum_abs")]
    means = [None if s is None or not n.count else s / n.count for s in sums]
    euclid = 0.0 if n.identical else n.measures.rel_l2
    kl = 0.0 if n.identical else n.measures.kl
    reason = "data contains NaN or Inf" if n.broken else "" if n.elements or n.identical else "not measured"
    cosine = 1.0 if n.identical or n.zero else n.measures.cosine
    return (cosine, sums[0], means[1], sums[2], means[3], kl, euclid, reason), NO_VERDICT, ""


def output(m: Measures, op: str, dtype: str) -> RuleFinding:
    """The share of elements within a relative tolerance by dtype."""
    if why := unmeasured(m):
        return skip("tolerance", why)
    if wrong := broken(m):
        return of("tolerance", [wrong])
    limit, share = SHARES.get(dtype, SHARES["float16"]), m.ait_share
    if share is None:
        return skip("tolerance", "ait_share was not measured")
    good = share > limit or share == 1.0
    reason = "" if good else f"{share:.6g} of the elements are within the tolerance, more than {limit:g} must be"
    return of("tolerance", [Judged("ait_share", share, limit, PASS if good else ERROR, reason)])


STANDARDS = (NamedStandard("ait", pairs=PairRule(COLUMNS, pairs, needs_kl=True), output=output, machines=each(output)),)
