"""Floating-point formats by torch's names: how many significant bits, and where normal numbers begin.

Not here: how bits become numbers (dump/dtypes.py), the size of a rounding (judge/rounding_unit.py). Copied next to
the tests that gentest writes.
"""

from __future__ import annotations

FORMATS = {
    "float8_e5m2": (3, -14), "float8_e5m2fnuz": (3, -15), "float8_e4m3fn": (4, -6), "float8_e4m3fnuz": (4, -7),
    "bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126), "float64": (53, -1022),
}  # fmt: skip
"""Significant bits, the leading one counted; exponent of the smallest normal number. The coarsest first."""
LOW = {name: of for name, of in FORMATS.items() if of[0] < 24}
"""Those whose results were rounded to their grid at the end; with more bits the order of summation decides."""


def half_step(dtype: str) -> float:
    """Half a step over the power of two below a number, what one rounding moves it by at most; 0.0 for what is no
    float."""
    return float(2.0 ** -FORMATS[dtype][0]) if dtype in FORMATS else 0.0


def smallest(dtype: str) -> float:
    """The smallest subnormal number; 0.0 for what is no float."""
    bits, least = FORMATS.get(dtype, (0, 0))
    return float(2.0 ** (least - bits + 1)) if bits else 0.0
