"""What sums over positions make of a tensor's metrics: one formula each, for compare and for opcheck.

The problem: compare adds up over rows of stored bits, opcheck over blocks of float64, a generated test where there is
no numpy; a cosine that each of them works out for itself may mean three things. The idea: sums are taken where the
numbers lie, and what is built from them stands here, in plain Python.
g is the golden or the reference, m is mine, d = m - g, over the positions where both are finite. Copied next to the
tests that gentest writes. Not here: the sums (definition.py, rows.py; opcheck/measures.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

TINY = 2.0**-23
"""Where |g| is not above this, msit counts no relative error."""
DUAL = (1e-2, 1e-3, 1e-4)
"""The relative errors below which msprobe counts elements: dual-100, -1000 and -10000."""
_EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}


def eps_of(dtype: str) -> float:
    """msprobe's eps, which it adds to |g| before dividing: numpy's machine epsilon, 2**-8 for bfloat16; 0 for dtypes
    that it does not divide by. ``dtype``: of g."""
    return _EPS.get(dtype, 0.0)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one tensor. None where a metric is not defined: no finite position, or a zero norm.

    max_abs_index: flat index of the first largest |d|; max_abs_golden, max_abs_mine: the values there.
    """

    cosine: float | None
    max_abs_err: float | None
    mean_abs_err: float | None
    rmse: float | None
    rel_l2: float | None
    max_rel_err: float | None
    nonfinite: int
    nonfinite_mismatch: int
    max_abs_index: int | None = None
    max_abs_golden: float | None = None
    max_abs_mine: float | None = None


def metrics(
    n: float, gg: float, mm: float, gm: float, dd: float, abs_d: float, max_d: float, max_rel: float, nonfinite: int,
    mismatch: int,
) -> Metrics:  # fmt: skip
    """The metrics of a tensor from its sums, which are called as definition.ROW_FIELDS; max_rel below 0: g is 0
    everywhere."""
    if not n:
        return Metrics(None, None, None, None, None, None, nonfinite, mismatch)
    return Metrics(
        cosine=gm / (sqrt(gg) * sqrt(mm)) if gg > 0 and mm > 0 else None,
        max_abs_err=max_d,
        mean_abs_err=abs_d / n,
        rmse=sqrt(dd / n),
        rel_l2=sqrt(dd) / sqrt(gg) if gg > 0 else None,
        max_rel_err=max_rel if max_rel >= 0 else None,
        nonfinite=nonfinite,
        nonfinite_mismatch=mismatch,
    )
