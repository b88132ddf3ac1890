"""The measures of one output against its reference: their names, as opcheck.csv has them, and what each is.

The problem: a csv that another machine wrote must mean the same. The idea: one dataclass that all standards read. g is
the reference, m is mine, d = m - g; CURRENT, V1 and ACCUMULATIVE are dtype_limits.py's limits of what a small value is.
Not here: how they are measured (opcheck/measures.py). Needs neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

Values = Mapping[str, "float | None"]
"""Measures by name, of one side; None or absent: not measured."""
DECADES = tuple(f"above_1e_{n}" for n in range(1, 7))
COUNTS = ("elements", "nonfinite", "nonfinite_mismatch", *DECADES)
"""Measures that are whole numbers."""


@dataclass(frozen=True, slots=True)
class Measures:
    """One output against its reference. Counts are of elements; errors in the tensor's own unit; None: not defined.

    max_abs_reference, max_abs_mine: largest finite |g| and |m|. cosine: g.m / (|g| |m|). rmse, rel_l2: sqrt(mean d*d),
    sqrt(sum d*d / sum g*g). max_rel_err, mean_rel_err: of |d| / |g| where g is not 0. dual_N: share of elements with
    |d| / (|g| + eps) < 1 / N. error_balance: |#(m > g) - #(m < g)| / elements, g in mine's dtype. binary_err_ratio:
    share that is not equal. inf_nan_err_ratio: share where only one is NaN, or one is infinite and the other, both cut
    to the dtype's range, is further off than rtol.

    Of CURRENT, and with v1_ of V1: small_value_err_ratio: share of small values with |d| > atol; normal_max_rel_err,
    normal_mean_rel_err: of |d| / (|g| + eps) over normal values; normal_rmse: over them, times the square root of
    elements / (normal + 1e-4) + 1e-4; rel_err_ratio: share of normal values beyond rtol; abs_err_ratio: share of small
    values beyond atol. With acc_ of ACCUMULATIVE.

    ulp_*: |d| in steps of mine's dtype at g, 2**(max(floor(log2 |g|), smallest exponent) - mantissa), and for g = 0 of
    1.0; ulp_share: above 32 for float32, above 1 for coarser dtypes. ait_share: with |m / g - 1| within ait's
    tolerance. above_1e_n: |d| > 10**-n. kl: KL divergence of softmax(g) from softmax(m) over the whole tensor, where
    requested."""

    FIELDS: ClassVar[tuple[str, ...]]

    elements: int
    nonfinite: int
    nonfinite_mismatch: int
    max_abs_reference: float | None
    max_abs_mine: float | None
    cosine: float | None
    max_abs_err: float | None
    mean_abs_err: float | None
    rmse: float | None
    rel_l2: float | None
    max_rel_err: float | None
    mean_rel_err: float | None
    dual_100: float | None
    dual_1000: float | None
    dual_10000: float | None
    error_balance: float | None
    binary_err_ratio: float | None
    ulp_max: float | None
    ulp_mean: float | None
    ulp_share: float | None
    inf_nan_err_ratio: float | None
    small_value_err_ratio: float | None
    normal_max_rel_err: float | None
    normal_mean_rel_err: float | None
    normal_rmse: float | None
    rel_err_ratio: float | None
    abs_err_ratio: float | None
    v1_inf_nan_err_ratio: float | None
    v1_small_value_err_ratio: float | None
    v1_normal_max_rel_err: float | None
    v1_normal_mean_rel_err: float | None
    v1_normal_rmse: float | None
    v1_rel_err_ratio: float | None
    v1_abs_err_ratio: float | None
    acc_inf_nan_err_ratio: float | None
    acc_rel_err_ratio: float | None
    acc_abs_err_ratio: float | None
    ait_share: float | None
    above_1e_1: int
    above_1e_2: int
    above_1e_3: int
    above_1e_4: int
    above_1e_5: int
    above_1e_6: int
    kl: float | None = None


Measures.FIELDS = tuple(f.name for f in fields(Measures))


def as_measures(values: Values) -> Measures:
    """Measures of a csv's values; what is not there is None, and a count 0."""
    found = {f: int(values.get(f) or 0) if f in COUNTS else values.get(f) for f in Measures.FIELDS}
    return Measures(**found)  # type: ignore[arg-type]
