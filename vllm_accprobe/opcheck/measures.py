"""How far an output is from its reference, in every measure that a standard requires.

The problem: each standard counts something of its own (steps of the last place, errors of small values, decades), and a
generated test on a machine without accprobe and numpy must count the same. The idea: one pass over the flat tensors in
blocks, in float64, over what numpy's arrays and torch's tensors share. g is the reference, m is mine, d = m - g. A
reference beyond the range of mine's dtype counts as infinite. Positions where g or m is not finite are left out of
sums, maxima and ULPs; in shares of all elements (dual_*, ulp_share, ait_share) and counts (above_*) they are right
where both are the same. A measure without a position is None, or 0 where msprobe's formula says 0. Sources: msprobe's
documents of accuracy_checking_details.csv, releases 1.0.4 and 26.2, and 26.2's behaviour; ait's opcheck; torch_xray's
counts above 1e-n; docs/opcheck.md has the formulas. Copied with its helpers into generated tests (kit/testgen.py).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from vllm_accprobe.kernels.formulas import DUAL, TINY, metrics
from vllm_accprobe.standards.dtype_limits import (
    ACCUMULATIVE,
    AIT,
    CURRENT,
    EPS,
    LARGEST,
    ULP,
    ULP_BOUND,
    V1,
    Domain,
)
from vllm_accprobe.standards.measures import Measures

BLOCK = 1 << 17
"""Elements at a time; some twenty arrays of float64 of this length exist at once."""
_EXPONENT = 0x7FF0_0000_0000_0000
"""The bits of a float64 that are the power of two below it."""


class NumpyArrays:
    """What numpy spells differently from torch. numpy is faster on the few rows of a decode step, and a generated test
    has torch alone. xp: the functions that both libraries have under one name."""

    def __init__(self) -> None:
        self.xp: Any = importlib.import_module("numpy")
        self.double, self.single, self.half = self.xp.float64, self.xp.float32, self.xp.float16

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return self.xp.errstate(all="ignore")

    def flat(self, array: Any) -> Any:
        array = self.xp.ascontiguousarray(array).reshape(len(array), -1)
        if array.dtype.kind == "c":
            array = array.view(self.double if array.dtype.itemsize == 16 else self.single)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"numbers of dtype {array.dtype} cannot be measured")
        return array

    def to(self, array: Any, dtype: Any) -> Any:
        return array.astype(dtype, copy=False)

    def exact(self, array: Any) -> bool:
        """Whether these are integers."""
        return array.dtype.kind in "iub"

    def apart(self, g: Any, m: Any) -> Any:
        """m - g of integers, exact and rounded once, where float64 may not hold them; else None."""
        if g.dtype.kind not in "iu" or m.dtype.kind not in "iu" or 8 not in (g.dtype.itemsize, m.dtype.itemsize):
            return None
        less, a, b = m < g, self.to(m, self.xp.uint64), self.to(g, self.xp.uint64)
        return self.xp.where(less, -self.to(b - a, self.double), self.to(a - b, self.double))

    def dots(self, a: Any, b: Any) -> Any:
        """[calls]: of [calls, n]."""
        return self.xp.matmul(a[:, None, :], b[:, :, None])[:, 0, 0]


class TorchArrays:
    """As `NumpyArrays`, where there is nothing but torch."""

    def __init__(self) -> None:
        self.xp: Any = importlib.import_module("torch")
        self.double, self.single, self.half = self.xp.float64, self.xp.float32, self.xp.float16

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def flat(self, array: Any) -> Any:
        array = (self.xp.view_as_real(array) if array.is_complex() else array).reshape(len(array), -1)
        return array if array.is_floating_point() else array.long()

    def to(self, array: Any, dtype: Any) -> Any:
        return array.to(dtype)

    def exact(self, array: Any) -> bool:
        return not array.is_floating_point()

    def apart(self, g: Any, m: Any) -> Any:
        return (m - g).to(self.double) if self.exact(g) and self.exact(m) else None

    def dots(self, a: Any, b: Any) -> Any:
        return self.xp.stack([x @ y for x, y in zip(a, b, strict=True)])


def measure(reference: Any, mine: Any, dtype: str, **more: Any) -> Measures:
    """`measure_each` of one output."""
    if reference.shape != mine.shape:
        raise ValueError(f"the reference has shape {list(reference.shape)}, mine has {list(mine.shape)}")
    return measure_each(reference[None], mine[None], dtype, **more)[0]


def measure_each(
    references: Any, mine: Any, dtype: str, *, kl: bool = False, current: Domain = CURRENT, v1: Domain = V1
) -> list[Measures]:
    """Of several outputs (the first dimension), whatever the others are. Two numpy arrays or two tensors on the CPU of
    one shape. references: float64 (or float32, integers, bool); mine: the same numbers' like, any dtype that holds them
    exactly; dtype: mine's, torch's name. kl costs a further pass. current, v1: other limits of small values.

    Raises ValueError for numbers that are neither real nor complex (those are taken as pairs)."""
    arrays = TorchArrays() if type(references).__module__.startswith("torch") else NumpyArrays()
    g, m = arrays.flat(references), arrays.flat(mine)
    dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    domains = current, v1, ACCUMULATIVE
    found = []
    with arrays.quiet():  # overflow to infinity and NaN from infinity are what is being measured
        for k, sums in enumerate(_Sums(arrays, dtype, domains, 1.0).all(g, m)):
            top, power = max(sums["top_g"], sums["top_m"]), 1.0
            if top > 0 and not 1e-100 < top < 1e120:  # squares of the largest and smallest doubles are none
                power = math.ldexp(1.0, min(-math.frexp(top)[1], 1023))
                (sums,) = _Sums(arrays, dtype, domains, power).all(g[k : k + 1], m[k : k + 1])
            found.append(_measures(sums, dtype, power, _kl(arrays, g[k], m[k], dtype) if kl else None))
    return found


def _blocks(g: Any, m: Any) -> Iterator[tuple[Any, Any]]:
    for begin in range(0, g.shape[-1], BLOCK):
        yield g[..., begin : begin + BLOCK], m[..., begin : begin + BLOCK]


def _in_range(arrays: NumpyArrays | TorchArrays, g: Any, dtype: str) -> tuple[Any, Any]:
    """g in float64 with infinity where it is beyond ``dtype``, and g as msprobe casts it: to numpy's dtype of mine,
    float32 for bfloat16."""
    wide = arrays.to(g, arrays.double)
    cast = wide
    if dtype in ("float16", "bfloat16", "float32"):
        cast = arrays.to(arrays.to(wide, arrays.half if dtype == "float16" else arrays.single), arrays.double)
        over = arrays.xp.isinf(cast)
        if over.any():
            wide = arrays.xp.where(over, cast, wide)
    return wide, cast


_TOPS = ("top_g", "top_m", "top_d", "top_rel", "top_ulp")
_NAMES = (
    "n", "nonfinite", "mismatch", "unequal", "more", "less", "ait", "steep", "nonzero", "gg", "mm", "gm", "dd", "abs_d",
    "rel", "ulp", *(f"dual{n}" for n in range(3)), *(f"above{n}" for n in range(6)),
    *(f"{name}{n}" for n in range(3)
      for name in ("inf_nan", "smalls", "small_wrong", "normal_wrong", "split_dd", "split_rel", "split_top")),
)  # fmt: skip


class _Sums:
    """What the blocks add up to, by name, for each output. scale: a power of two that all is multiplied by before it is
    squared."""

    def __init__(self, arrays: NumpyArrays | TorchArrays, dtype: str, domains: tuple[Domain, ...], scale: float):
        self.arrays, self.xp, self.dtype, self.scale = arrays, arrays.xp, dtype, scale
        self.eps = EPS.get(dtype, EPS["float16"])
        self.domains = [d.of(dtype) for d in domains]

    def all(self, g: Any, m: Any) -> Iterator[dict[str, float]]:
        """What each output comes to, after everything. g, m: [outputs, n]."""
        zeros = self.xp.zeros(len(g), dtype=self.arrays.double)
        self._of = {name: zeros - float(name in _TOPS) for name in (*_TOPS, *_NAMES)}
        for a, b in _blocks(g, m):
            self._add(a, b)
        names, columns = list(self._of), [x.tolist() for x in self._of.values()]
        return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))

    def _plus(self, at: Any, **values: Any) -> None:
        """Adds a number, or a mask's count, for each of the outputs ``at``."""
        for name, x in values.items():
            self._of[name][at] += x.sum(1) if getattr(x, "ndim", 0) == 2 else x

    def _top(self, at: Any, name: str, value: Any) -> None:
        self._of[name][at] = self.xp.maximum(self._of[name][at], value)

    def _add(self, g: Any, m: Any) -> None:
        arrays, xp, every = self.arrays, self.xp, slice(None)
        wide, cast = _in_range(arrays, g, self.dtype)
        wide_m = arrays.to(m, arrays.double)
        exact = (g, m) if arrays.exact(g) else (wide, wide_m)  # large integers are not equal where doubles are
        same = (exact[0] == exact[1]) | (xp.isnan(wide) & xp.isnan(wide_m))
        d = arrays.apart(g, m)
        d = wide_m - wide if d is None else d
        self._plus(every, n=g.shape[1], more=wide_m > cast, less=wide_m < cast, unequal=~same)
        finite = xp.isfinite(wide) & xp.isfinite(wide_m)
        if finite.all():
            self._add_finite(every, wide, wide_m, d)
            return
        for k, each in enumerate(finite):
            if not each.all():
                self._add_nonfinite([k], wide[k][None, ~each], wide_m[k][None, ~each], same[k][None, ~each])
            if each.any():
                self._add_finite([k], wide[k][None, each], wide_m[k][None, each], d[k][None, each])

    def _add_nonfinite(self, at: Any, g: Any, m: Any, same: Any) -> None:
        self._plus(at, nonfinite=g.shape[1], mismatch=~same, ait=same, steep=~same)
        self._plus(at, **{f"dual{n}": same for n in range(3)}, **{f"above{n}": ~same for n in range(6)})
        top = LARGEST.get(self.dtype, sys.float_info.max)
        cut_g, cut_m = self.xp.clip(g, -top, top), self.xp.clip(m, -top, top)
        rel = self.xp.abs(cut_m - cut_g) / (self.xp.abs(cut_g) + self.eps)
        for n, (_, _, rtol) in enumerate(self.domains):
            consistent = (rel <= rtol) | (self.xp.isnan(g) & self.xp.isnan(m))
            self._plus(at, **{f"inf_nan{n}": ~consistent})

    def _add_finite(self, at: Any, g: Any, m: Any, d: Any) -> None:
        xp, dots = self.xp, self.arrays.dots
        a, e = xp.abs(g), xp.abs(d)
        x, y, z = (g, m, d) if self.scale == 1.0 else (g * self.scale, m * self.scale, d * self.scale)
        self._plus(at, gg=dots(x, x), mm=dots(y, y), gm=dots(x, y), dd=dots(z, z), abs_d=e)
        for name, value in (("top_g", a), ("top_m", xp.abs(m)), ("top_d", e)):
            self._top(at, name, xp.amax(value, 1))
        nonzero = (a != 0).sum(1)
        self._plus(at, nonzero=nonzero)
        for rows, u, v in self._without_zeros(at, e, a, nonzero):
            self._plus(rows, rel=u / v)
            self._top(rows, "top_rel", xp.amax(u / v, 1))
        rel = e / (a + self.eps)
        self._plus(at, **{f"dual{n}": rel < part for n, part in enumerate(DUAL)})
        largest = float(e.max())
        self._plus(at, **{f"above{n}": e > 10.0 ** -(n + 1) for n in range(6) if largest > 10.0 ** -(n + 1)})
        self._plus(at, ait=(e <= AIT.get(self.dtype, AIT["float16"]) * a) | (a <= TINY))
        self._add_ulp(at, g, e)
        for n, limits in enumerate(self.domains):
            self._add_split(at, n, a, e, rel, *limits)

    def _without_zeros(self, at: Any, e: Any, a: Any, nonzero: Any) -> Iterator[tuple[Any, Any, Any]]:
        if bool((nonzero == a.shape[1]).all()):
            yield at, e, a
            return
        places = range(len(a)) if isinstance(at, slice) else at
        for k, place in enumerate(places):
            if nonzero[k]:
                some = a[k] != 0
                yield [place], e[k][None, some], a[k][None, some]

    def _add_ulp(self, at: Any, g: Any, e: Any) -> None:
        if self.dtype not in ULP:
            return
        smallest, mantissa = ULP[self.dtype]
        step = (g.view(self.xp.int64) & _EXPONENT).view(self.xp.float64).clip(2.0**smallest)
        step[g == 0] = 1.0
        ulp = e / step
        ulp *= 2.0**mantissa
        self._plus(at, ulp=ulp, steep=ulp > ULP_BOUND.get(self.dtype, 1.0))
        self._top(at, "top_ulp", self.xp.amax(ulp, 1))

    def _add_split(self, at: Any, n: int, a: Any, e: Any, rel: Any, small: float, atol: float, rtol: float) -> None:
        """Small and normal values by one domain."""
        smaller = a <= small
        self._plus(at, **{f"smalls{n}": smaller})
        if smaller.any():
            self._plus(at, **{f"small_wrong{n}": smaller & (e > atol)})
            e, rel = self.xp.where(smaller, 0.0, e), self.xp.where(smaller, 0.0, rel)
        self._plus(at, **{f"normal_wrong{n}": rel > rtol})
        if n < _COUNTED:
            self._plus(at, **{f"split_dd{n}": self.arrays.dots(e, e), f"split_rel{n}": rel})
            self._top(at, f"split_top{n}", self.xp.amax(rel, 1))


_COUNTED = 2
"""Of the accumulative error, the third domain, only counts are known."""


def _measures(s: dict[str, float], dtype: str, scale: float, kl: float | None) -> Measures:
    n, seen = s["n"], s["n"] - s["nonfinite"]
    has_ulp = dtype in ULP

    def share(count: float) -> float | None:
        return count / n if n else None

    def top(value: float) -> float | None:
        return value if value >= 0 else None

    sums = s["gg"], s["mm"], s["gm"], s["dd"], s["abs_d"], s["top_d"], s["top_rel"]
    whole = metrics(seen, *sums, int(s["nonfinite"]), int(s["mismatch"]))
    no_direction = 0.0 if seen and not s["gg"] and not s["dd"] else None
    inf_nan, small, top_rel, mean_rel, rmse, rel_wrong, abs_wrong = _split(s, 0, n, seen)
    v1_inf_nan, v1_small, v1_top_rel, v1_mean_rel, v1_rmse, v1_rel_wrong, v1_abs_wrong = _split(s, 1, n, seen)
    acc_inf_nan, _, _, _, _, acc_rel_wrong, acc_abs_wrong = _split(s, 2, n, seen)
    above = [int(s[f"above{k}"]) for k in range(6)]
    return Measures(
        elements=int(n), nonfinite=whole.nonfinite, nonfinite_mismatch=whole.nonfinite_mismatch,
        max_abs_reference=top(s["top_g"]), max_abs_mine=top(s["top_m"]),
        cosine=None if whole.cosine is None else max(-1.0, min(1.0, whole.cosine)),
        max_abs_err=whole.max_abs_err, mean_abs_err=whole.mean_abs_err,
        rmse=None if whole.rmse is None else whole.rmse / scale,
        rel_l2=whole.rel_l2 if s["gg"] else no_direction,
        max_rel_err=whole.max_rel_err, mean_rel_err=s["rel"] / s["nonzero"] if s["nonzero"] else None,
        dual_100=share(s["dual0"]), dual_1000=share(s["dual1"]), dual_10000=share(s["dual2"]),
        error_balance=share(abs(s["more"] - s["less"])), binary_err_ratio=share(s["unequal"]),
        ulp_max=top(s["top_ulp"]), ulp_mean=s["ulp"] / seen if has_ulp and seen else None,
        ulp_share=share(s["steep"]) if has_ulp else None,
        inf_nan_err_ratio=inf_nan, small_value_err_ratio=small, normal_max_rel_err=top_rel,
        normal_mean_rel_err=mean_rel, normal_rmse=rmse, rel_err_ratio=rel_wrong, abs_err_ratio=abs_wrong,
        v1_inf_nan_err_ratio=v1_inf_nan, v1_small_value_err_ratio=v1_small, v1_normal_max_rel_err=v1_top_rel,
        v1_normal_mean_rel_err=v1_mean_rel, v1_normal_rmse=v1_rmse, v1_rel_err_ratio=v1_rel_wrong,
        v1_abs_err_ratio=v1_abs_wrong,
        acc_inf_nan_err_ratio=acc_inf_nan, acc_rel_err_ratio=acc_rel_wrong, acc_abs_err_ratio=acc_abs_wrong,
        ait_share=share(s["ait"]), above_1e_1=above[0], above_1e_2=above[1], above_1e_3=above[2],
        above_1e_4=above[3], above_1e_5=above[4], above_1e_6=above[5], kl=kl,
    )  # fmt: skip


def _split(s: dict[str, float], of: int, n: float, seen: float) -> tuple[float | None, ...]:
    """inf_nan_err_ratio to abs_err_ratio, in Measures' order, by one domain."""
    if not n:
        return (None,) * 7
    smalls, wrong, rel = (s[f"{name}{of}"] for name in ("smalls", "small_wrong", "normal_wrong"))
    normal = seen - smalls
    wrong = wrong / smalls if smalls else 0.0
    rmse = math.sqrt(s[f"split_dd{of}"] / n * (n / (normal + 1e-4) + 1e-4))
    mean = s[f"split_rel{of}"] / normal if normal else 0.0
    return s[f"inf_nan{of}"] / n, wrong, s[f"split_top{of}"], mean, rmse, rel / normal if normal else 0.0, wrong


def _kl(arrays: NumpyArrays | TorchArrays, g: Any, m: Any, dtype: str) -> float | None:
    """sum p (log p - log q) of the softmaxes over all positions that are finite on both sides; at least 0."""
    tops, sums = [-math.inf, -math.inf], [0.0, 0.0]
    cross = 0.0
    for last in (False, True):
        for a, b in _blocks(g, m):
            pair = _in_range(arrays, a, dtype)[0], arrays.to(b, arrays.double)
            finite = arrays.xp.isfinite(pair[0]) & arrays.xp.isfinite(pair[1])
            x, y = pair[0][finite], pair[1][finite]
            if not len(x):
                continue
            if not last:
                tops = [max(tops[0], float(x.max())), max(tops[1], float(y.max()))]
                continue
            weight = arrays.xp.exp(x - tops[0])
            sums = [sums[0] + float(weight.sum()), sums[1] + float(arrays.xp.exp(y - tops[1]).sum())]
            cross += float((weight * (x - y)).sum())
    if tops[0] == -math.inf:
        return None
    log_p, log_q = tops[0] + math.log(sums[0]), tops[1] + math.log(sums[1])
    return max(0.0, cross / sums[0] - log_p + log_q)
