"""measures.py once more, with torch alone.

The problem: torch does not bring numpy, and the folder of gentest promises to need torch and pytest only, its csv
included. The idea: the same definitions on float64 tensors; a test holds both against each other, measure by measure,
so that neither can drift. Where the definitions come from and what they mean: measures.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

BLOCK = 1 << 17
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-23, "float32": 2.0**-52, "float64": 2.0**-52}
ULP = {
    "float16": (-14, 10), "bfloat16": (-126, 7), "float32": (-126, 23), "float64": (-1022, 52),
    "float8_e4m3fn": (-6, 3), "float8_e5m2": (-14, 2),
}  # fmt: skip
ULP_BOUND = {"float32": 32.0, "float64": 32.0}
AIT = {
    "float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-8, "float64": 1e-4, "int64": 1e-4, "int32": 1e-4,
    "int16": 1.0, "int8": 1.0, "uint8": 1.0, "bool": 0.0,
}  # fmt: skip
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
           "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # fmt: skip
DOMAINS = (
    ("", {"float16": (2.0**-11, 2.0**-16, 2.0**-10), "bfloat16": (2.0**-8, 2.0**-16, 2.0**-8),
          "": (2.0**-14, 2.0**-30, 2.0**-20)}),
    ("v1_", {"float16": (1e-3, 1e-5, 1e-3), "bfloat16": (1e-3, 1e-5, 4e-3), "": (1e-6, 1e-9, 1e-6)}),
    ("acc_", {"float16": (1.0, 2.0**-8, 2.0**-8), "bfloat16": (1.0, 2.0**-7, 2.0**-7),
              "": (1.0, 2.0**-11, 2.0**-11)}),
)  # fmt: skip
_TINY = 2.0**-23
_SHARED = ("small_value_err_ratio", "normal_max_rel_err", "normal_mean_rel_err", "normal_rmse", "rel_err_ratio",
           "abs_err_ratio")  # fmt: skip


def measure(reference: Any, mine: Any, dtype: str) -> dict[str, float | int | None]:
    """measures.Measures' fields but ``kl``, by name. reference, mine: float64 or int64 tensors of one shape (complex
    ones as pairs); dtype: mine's, torch's name."""
    dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    g, m = reference.reshape(-1), mine.reshape(-1)
    sums = _Sums(dtype, _scale(g, m, dtype))
    for at in range(0, len(g), BLOCK):
        sums.add(g[at : at + BLOCK], m[at : at + BLOCK])
    return sums.fields()


def _scale(g: Any, m: Any, dtype: str) -> float:
    # What is beyond mine's range counts as infinite and takes no part.
    most = 2 * LARGEST[dtype] if dtype in ("float16", "bfloat16", "float32") else math.inf
    tops = [float(x.abs().max()) for x in (t.double()[t.double().abs() < most] for t in (g, m)) if len(x)]
    top = max(tops, default=0.0)
    return 1.0 if top == 0 or 1e-100 < top < 1e120 else math.ldexp(1.0, -math.frexp(top)[1])


class _Sums:
    def __init__(self, dtype: str, scale: float):
        self.dtype, self.scale, self.eps = dtype, scale, EPS.get(dtype, EPS["float16"])
        self.total: dict[str, float] = {}
        self.top: dict[str, float] = {}
        self.limits = [(name, limits.get(dtype, limits[""])) for name, limits in DOMAINS]

    def _add(self, name: str, value: Any) -> None:
        self.total[name] = self.total.get(name, 0) + (int(value) if isinstance(value, int) else float(value))

    def _max(self, name: str, values: Any) -> None:
        if len(values):
            self.top[name] = max(self.top.get(name, -1.0), float(values.max()))

    def add(self, g: Any, m: Any) -> None:
        exact = not g.is_floating_point() and not m.is_floating_point()
        wide, wide_m = g.double(), m.double()
        cast = wide
        if self.dtype in ("float16", "bfloat16", "float32"):
            cast = wide.to(torch.float16 if self.dtype == "float16" else torch.float32).double()
            wide = torch.where(torch.isinf(cast), cast, wide)
        d = (m - g).double() if exact else wide_m - wide
        same = (g == m) if exact else (wide == wide_m) | (torch.isnan(wide) & torch.isnan(wide_m))
        count = int(same.sum())
        for name, value in (("n", len(g)), ("more", int((wide_m > cast).sum())), ("less", int((wide_m < cast).sum())),
                            ("unequal", len(g) - count)):  # fmt: skip
            self._add(name, value)
        finite = torch.isfinite(wide) & torch.isfinite(wide_m)
        if not bool(finite.all()):
            self._nonfinite(wide[~finite], wide_m[~finite], int((~finite & same).sum()))
        if bool(finite.any()):
            self._finite(wide[finite], wide_m[finite], d[finite])

    def _nonfinite(self, g: Any, m: Any, same: int) -> None:
        self._add("nonfinite", len(g))
        for name, value in [("mismatch", len(g) - same), ("ait", same), ("steep", len(g) - same),
                            *((f"dual_{n}", same) for n in (100, 1000, 10000)),
                            *((f"above_1e_{i}", len(g) - same) for i in range(1, 7))]:  # fmt: skip
            self._add(name, value)
        top = LARGEST.get(self.dtype, 1.7976931348623157e308)
        a, b = g.clamp(-top, top), m.clamp(-top, top)
        rel = (b - a).abs() / (a.abs() + self.eps)
        for name, (_, _, rtol) in self.limits:
            fine = (rel <= rtol) | (torch.isnan(g) & torch.isnan(m))
            self._add(f"{name}/inf_nan", len(g) - int(fine.sum()))

    def _finite(self, g: Any, m: Any, d: Any) -> None:
        a, e = g.abs(), d.abs()
        x, y, z = g * self.scale, m * self.scale, d * self.scale
        for name, value in (("gg", x @ x), ("mm", y @ y), ("gm", x @ y), ("dd", z @ z), ("abs_d", e.sum())):
            self._add(name, value)
        for name, values in (("g", a), ("m", m.abs()), ("d", e)):
            self._max(name, values)
        nonzero = a != 0
        plain = e[nonzero] / a[nonzero]
        self._add("nonzero", len(plain))
        self._add("rel", plain.sum())
        self._max("rel", plain)
        rel = e / (a + self.eps)
        for n in (100, 1000, 10000):
            self._add(f"dual_{n}", int((rel < 1.0 / n).sum()))
        for i in range(1, 7):
            self._add(f"above_1e_{i}", int((e > 10.0**-i).sum()))
        self._add("ait", int(((e <= AIT.get(self.dtype, AIT["float16"]) * a) | (a <= _TINY)).sum()))
        if self.dtype in ULP:
            smallest, mantissa = ULP[self.dtype]
            exponent = torch.where(g == 0, 0, torch.frexp(g).exponent - 1).clamp(min=smallest)
            ulp = torch.ldexp(e, (mantissa - exponent).double())
            self._add("ulp", ulp.sum())
            self._max("ulp", ulp)
            self._add("steep", int((ulp > ULP_BOUND.get(self.dtype, 1.0)).sum()))
        for name, (small, atol, rtol) in self.limits:
            little = a <= small
            self._add(f"{name}/smalls", int(little.sum()))
            self._add(f"{name}/small_wrong", int((little & (e > atol)).sum()))
            r, f = torch.where(little, 0.0, rel), torch.where(little, 0.0, e)
            self._add(f"{name}/dd", f @ f)
            self._add(f"{name}/rel", r.sum())
            self._max(f"{name}/rel", r)
            self._add(f"{name}/normal_wrong", int((r > rtol).sum()))

    def fields(self) -> dict[str, float | int | None]:
        t, top = self.total, self.top
        n, seen = int(t.get("n", 0)), int(t.get("n", 0) - t.get("nonfinite", 0))
        gg, mm, dd, has_ulp = t.get("gg", 0.0), t.get("mm", 0.0), t.get("dd", 0.0), self.dtype in ULP
        length = math.sqrt(gg) * math.sqrt(mm)

        def share(name: str) -> float | None:
            return t.get(name, 0) / n if n else None

        found: dict[str, float | int | None] = {
            "elements": n, "nonfinite": int(t.get("nonfinite", 0)), "nonfinite_mismatch": int(t.get("mismatch", 0)),
            "max_abs_reference": top.get("g"), "max_abs_mine": top.get("m"),
            "cosine": max(-1.0, min(1.0, t["gm"] / length)) if length else None,
            "max_abs_err": top.get("d"), "mean_abs_err": t["abs_d"] / seen if seen else None,
            "rmse": math.sqrt(dd / seen) / self.scale if seen else None,
            "rel_l2": math.sqrt(dd) / math.sqrt(gg) if gg else (0.0 if seen and not dd else None),
            "max_rel_err": top.get("rel"), "mean_rel_err": t["rel"] / t["nonzero"] if t.get("nonzero") else None,
            **{f"dual_{k}": share(f"dual_{k}") for k in (100, 1000, 10000)},
            "error_balance": abs(t.get("more", 0) - t.get("less", 0)) / n if n else None,
            "binary_err_ratio": share("unequal"), "ulp_max": top.get("ulp"),
            "ulp_mean": t.get("ulp", 0.0) / seen if has_ulp and seen else None,
            "ulp_share": share("steep") if has_ulp else None, "ait_share": share("ait"),
            **{f"above_1e_{i}": int(t.get(f"above_1e_{i}", 0)) for i in range(1, 7)},
        }  # fmt: skip
        for name, _ in self.limits:
            found |= {name + key: value for key, value in self._domain(name, n, seen).items()}
        return found

    def _domain(self, name: str, n: int, seen: int) -> dict[str, float | None]:
        if not n:
            return dict.fromkeys(("inf_nan_err_ratio", *_SHARED))
        t = self.total
        smalls = t.get(f"{name}/smalls", 0)
        normal = seen - smalls
        wrong = t.get(f"{name}/small_wrong", 0) / smalls if smalls else 0.0
        return {
            "inf_nan_err_ratio": t.get(f"{name}/inf_nan", 0) / n,
            "small_value_err_ratio": wrong,
            "normal_max_rel_err": self.top.get(f"{name}/rel", 0.0),
            "normal_mean_rel_err": t.get(f"{name}/rel", 0.0) / normal if normal else 0.0,
            "normal_rmse": math.sqrt(t.get(f"{name}/dd", 0.0) / n * (n / (normal + 1e-4) + 1e-4)),
            "rel_err_ratio": t.get(f"{name}/normal_wrong", 0) / normal if normal else 0.0,
            "abs_err_ratio": wrong,
        }
