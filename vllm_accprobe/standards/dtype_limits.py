"""What the tools' formulas put in for each dtype: eps, steps of the last place, tolerances, what a small value is.

The problem: the documents state a formula once and its numbers by dtype, and each release has others. The idea: a
table for each number, read by whoever measures (opcheck/measures.py); the limits that judge what was measured stand in
each standard's file. Sources: as opcheck/measures.py names them. Copied next to the tests that gentest writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_accprobe.kernels.float_formats import FORMATS
from vllm_accprobe.kernels.formulas import eps_of

EPS = {"bfloat16": eps_of("bfloat16"), "float16": eps_of("float32"), "float32": eps_of("float64"),
       "float64": eps_of("float64")}  # fmt: skip
"""What is added to |g| before dividing: the machine epsilon of the reference's dtype, which is one wider than mine's;
bfloat16's own, as msprobe has it. Others: float16's."""
ULP = {name: (least, bits - 1) for name, (bits, least) in FORMATS.items() if not name.endswith("fnuz")}
"""Smallest exponent of a normal number, bits of the mantissa; msprobe knows no other formats."""
ULP_BOUND = {"float32": 32.0, "float64": 32.0}
"""ulp_share counts what is above; 1 for coarser dtypes."""
AIT = {
    "float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-8, "float64": 1e-4, "int64": 1e-4, "int32": 1e-4,
    "int16": 1.0, "int8": 1.0, "uint8": 1.0, "bool": 0.0,
}  # fmt: skip
"""ait's tolerance for |m / g - 1|; float16's for others. Where |g| is not above formulas.TINY ait counts no error."""
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
           "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # fmt: skip
"""The largest finite numbers. Without infinity, float8_e4m3fn saturates."""


@dataclass(frozen=True)
class Domain:
    """How one release tells small values from normal ones, by dtype; "" stands for all others. small: a value with
    |g| <= small is small; atol: its error must not exceed this; rtol: a normal value's |d| / (|g| + eps) must not."""

    small: dict[str, float]
    atol: dict[str, float]
    rtol: dict[str, float]

    def of(self, dtype: str) -> tuple[float, float, float]:
        return tuple(t.get(dtype, t[""]) for t in (self.small, self.atol, self.rtol))  # type: ignore[return-value]


CURRENT = Domain(
    {"float16": 2.0**-11, "bfloat16": 2.0**-8, "": 2.0**-14},
    {"float16": 2.0**-16, "bfloat16": 2.0**-16, "": 2.0**-30},
    {"float16": 2.0**-10, "bfloat16": 2.0**-8, "": 2.0**-20},
)
"""msprobe's present document, "Small Value Range"; it does not state rtol: 26.2's."""
V1 = Domain(
    {"float16": 1e-3, "bfloat16": 1e-3, "": 1e-6},
    {"float16": 1e-5, "bfloat16": 1e-5, "": 1e-9},
    {"float16": 1e-3, "bfloat16": 4e-3, "": 1e-6},
)
"""msprobe 1.0.4's document, section 4.2; rtol: its api_precision_threshold.yaml."""
_BOUND = {"float16": 2.0**-8, "bfloat16": 2.0**-7, "": 2.0**-11}
ACCUMULATIVE = Domain({"": 1.0}, _BOUND, _BOUND)
"""msprobe's accumulative error: everything below 1 is small, and one bound serves both."""
