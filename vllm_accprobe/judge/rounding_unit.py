"""The relative error of one rounding in each dtype: the unit in which all limits are given.

The problem: an error of 1e-3 is a defect in float32 and nothing in bfloat16. The idea: an operator computes in float32
and rounds once to the tensor's dtype, by at most 2**-p for p significant bits [N. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., theorem 2.2]. For float32 and float64 the order of summation decides: 64 roundings (a
random walk over sums of some thousands of terms [same book, section 4.2]). In a model the coarsest dtype counts. Not
here: how many units are allowed (standards/limits.py).
"""

from __future__ import annotations

from collections.abc import Iterable

_ROUNDING = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float32": 64 * 2.0**-24,
    "float64": 64 * 2.0**-53,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "complex64": 64 * 2.0**-24,
    "complex128": 64 * 2.0**-53,
}
_ACTIVATIONS = ("bfloat16", "float16", "float32", "float64")


def unit(dtype: str) -> float:
    """The relative error of one correct result in ``dtype`` (torch's name); 0.0 for dtypes compared exactly."""
    return _ROUNDING.get(dtype, 0.0)


def is_exact(golden: str, mine: str) -> bool:
    """Whether a pair of these dtypes must be equal: one of them is not a floating-point dtype."""
    return unit(golden) == 0.0 or unit(mine) == 0.0


def is_mask(role: str) -> bool:
    """Whether a tensor of this role hides places with the lowest number of its dtype, which is another in each dtype:
    a factor that all its values share, and no sign of an error."""
    return role.endswith("mask")


def flow_unit(dtypes: Iterable[str]) -> float:
    """The unit of a whole model: of the coarsest dtype among its activations' ``dtypes``, 8-bit floats left out.

    An 8-bit tensor is coarse itself, but what a scaled product makes of it is not.
    """
    return max((unit(d) for d in dtypes if d in _ACTIVATIONS), default=0.0)
