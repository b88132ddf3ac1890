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
        array = self.xp.ascontiguousarray(array).reshape(-1)
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


class TorchArrays:
    """As `NumpyArrays`, where there is nothing but torch."""

    def __init__(self) -> None:
        self.xp: Any = importlib.import_module("torch")
        self.double, self.single, self.half = self.xp.float64, self.xp.float32, self.xp.float16

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def flat(self, array: Any) -> Any:
        array = (self.xp.view_as_real(array) if array.is_complex() else array).reshape(-1)
        return array if array.is_floating_point() else array.long()

    def to(self, array: Any, dtype: Any) -> Any:
        return array.to(dtype)

    def exact(self, array: Any) -> bool:
        return not array.is_floating_point()

    def apart(self, g: Any, m: Any) -> Any:
        return (m - g).to(self.double) if self.exact(g) and self.exact(m) else None


def measure(
    reference: Any, mine: Any, dtype: str, *, kl: bool = False, current: Domain = CURRENT, v1: Domain = V1
) -> Measures:
    """Two numpy arrays or two tensors on the CPU. reference: float64 (or float32, integers, bool); mine: the same
    numbers' like, any dtype that holds them exactly; one shape; dtype: mine's, torch's name. kl costs a further pass.
    current, v1: other limits of small values.

    Raises ValueError for two shapes, and for numbers that are neither real nor complex (those are taken as pairs)."""
    if reference.shape != mine.shape:
        raise ValueError(f"the reference has shape {list(reference.shape)}, mine has {list(mine.shape)}")
    arrays = TorchArrays() if type(reference).__module__.startswith("torch") else NumpyArrays()
    g, m = arrays.flat(reference), arrays.flat(mine)
    dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    domains = current, v1, ACCUMULATIVE
    with arrays.quiet():  # overflow to infinity and NaN from infinity are what is being measured
        counts = _Sums(arrays, dtype, domains, 1.0).all(g, m)
        top = max(counts.top_g, counts.top_m)
        if top > 0 and not 1e-100 < top < 1e120:  # squares of the largest and smallest doubles are none
            power = math.ldexp(1.0, min(-math.frexp(top)[1], 1023))
            counts = _Sums(arrays, dtype, domains, power).all(g, m)
        return counts.measures(_kl(arrays, g, m, dtype) if kl else None)


def _blocks(g: Any, m: Any) -> Iterator[tuple[Any, Any]]:
    for begin in range(0, len(g), BLOCK):
        yield g[begin : begin + BLOCK], m[begin : begin + BLOCK]


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


class _Sums:
    """What the blocks add up to. scale: a power of two that all is multiplied by before it is squared."""

    def __init__(self, arrays: NumpyArrays | TorchArrays, dtype: str, domains: tuple[Domain, ...], scale: float):
        self.arrays, self.xp, self.dtype, self.scale = arrays, arrays.xp, dtype, scale
        self.eps = EPS.get(dtype, EPS["float16"])
        *whole, counted = (_Split(arrays.xp, d.of(dtype)) for d in domains)
        counted.whole = False  # of the accumulative error only counts are known
        self.domains = [*whole, counted]
        self.n = self.nonfinite = self.mismatch = self.unequal = self.more = self.less = self.ait = self.steep = 0
        self.gg = self.mm = self.gm = self.dd = self.abs_d = self.rel = self.ulp = 0.0
        self.top_g = self.top_m = self.top_d = self.top_rel = self.top_ulp = -1.0
        self.nonzero = 0
        self.dual, self.above = [0, 0, 0], [0] * 6

    def all(self, g: Any, m: Any) -> _Sums:
        """Itself, after everything."""
        for a, b in _blocks(g, m):
            self.add(a, b)
        return self

    def add(self, g: Any, m: Any) -> None:
        self.n += len(g)
        arrays, xp = self.arrays, self.xp
        wide, cast = _in_range(arrays, g, self.dtype)
        wide_m = arrays.to(m, arrays.double)
        exact = (g, m) if arrays.exact(g) else (wide, wide_m)  # large integers are not equal where doubles are
        same = exact[0] == exact[1]
        if same.all() and xp.isfinite(wide).all() and (cast is wide or (cast == wide).all()):
            self._add_equal(wide)
            return
        same |= xp.isnan(wide) & xp.isnan(wide_m)
        d = arrays.apart(g, m)
        d = wide_m - wide if d is None else d
        self.more += int(xp.count_nonzero(wide_m > cast))
        self.less += int(xp.count_nonzero(wide_m < cast))
        self.unequal += len(g) - int(xp.count_nonzero(same))
        finite = xp.isfinite(wide) & xp.isfinite(wide_m)
        if not finite.all():
            self._add_nonfinite(wide[~finite], wide_m[~finite], int(xp.count_nonzero(~finite & same)))
            wide, wide_m, d = wide[finite], wide_m[finite], d[finite]
        if len(wide):
            self._add_finite(wide, wide_m, d)

    def _add_equal(self, g: Any) -> None:
        """As `_add_finite` where mine is the reference."""
        a, x = self.xp.abs(g), g if self.scale == 1.0 else g * self.scale
        square = _dot(x, x)
        self.gg, self.mm, self.gm = self.gg + square, self.mm + square, self.gm + square
        top, nonzero = float(a.max()), int(self.xp.count_nonzero(a))
        self.top_g, self.top_m = max(self.top_g, top), max(self.top_m, top)
        self.top_d, self.top_ulp = max(self.top_d, 0.0), max(self.top_ulp, 0.0 if self.dtype in ULP else -1.0)
        self.nonzero += nonzero
        self.top_rel = max(self.top_rel, 0.0) if nonzero else self.top_rel
        self.dual = [x + len(g) for x in self.dual]
        self.ait += len(g)
        for split in self.domains:
            split.smalls += int(self.xp.count_nonzero(a <= split.small))

    def _add_nonfinite(self, g: Any, m: Any, same: int) -> None:
        self.nonfinite += len(g)
        self.mismatch += len(g) - same
        self.ait += same
        self.dual = [x + same for x in self.dual]
        self.above = [x + len(g) - same for x in self.above]
        self.steep += len(g) - same
        top = LARGEST.get(self.dtype, sys.float_info.max)
        cut_g, cut_m = self.xp.clip(g, -top, top), self.xp.clip(m, -top, top)
        rel = self.xp.abs(cut_m - cut_g) / (self.xp.abs(cut_g) + self.eps)
        for split in self.domains:
            consistent = (rel <= split.rtol) | (self.xp.isnan(g) & self.xp.isnan(m))
            split.inf_nan += len(g) - int(self.xp.count_nonzero(consistent))

    def _add_finite(self, g: Any, m: Any, d: Any) -> None:
        a, e = self.xp.abs(g), self.xp.abs(d)
        x, y, z = (g, m, d) if self.scale == 1.0 else (g * self.scale, m * self.scale, d * self.scale)
        self.gg, self.mm, self.gm = self.gg + _dot(x, x), self.mm + _dot(y, y), self.gm + _dot(x, y)
        self.dd += _dot(z, z)
        self.abs_d += float(e.sum())
        self.top_g, self.top_m = max(self.top_g, float(a.max())), max(self.top_m, float(m.max()), -float(m.min()))
        largest = float(e.max())
        self.top_d = max(self.top_d, largest)
        nonzero = int(self.xp.count_nonzero(a))
        if nonzero:
            plain = e / a if nonzero == len(a) else e[a != 0] / a[a != 0]
            self.nonzero += nonzero
            self.rel += float(plain.sum())
            self.top_rel = max(self.top_rel, float(plain.max()))
        rel = e / (a + self.eps)
        for i, part in enumerate(DUAL):
            self.dual[i] += int(self.xp.count_nonzero(rel < part))
        for i in range(6):
            if largest > 10.0 ** -(i + 1):
                self.above[i] += int(self.xp.count_nonzero(e > 10.0 ** -(i + 1)))
        self.ait += int(self.xp.count_nonzero((e <= AIT.get(self.dtype, AIT["float16"]) * a) | (a <= TINY)))
        self._add_ulp(g, e, nonzero < len(a))
        for split in self.domains:
            split.add(a, e, rel)

    def _add_ulp(self, g: Any, e: Any, some_zero: bool) -> None:
        if self.dtype not in ULP:
            return
        smallest, mantissa = ULP[self.dtype]
        step = (g.view(self.xp.int64) & _EXPONENT).view(self.xp.float64).clip(2.0**smallest)
        if some_zero:
            step[g == 0] = 1.0
        ulp = e / step
        ulp *= 2.0**mantissa
        self.ulp += float(ulp.sum())
        self.top_ulp = max(self.top_ulp, float(ulp.max()))
        self.steep += int(self.xp.count_nonzero(ulp > ULP_BOUND.get(self.dtype, 1.0)))

    def measures(self, kl: float | None) -> Measures:
        n, seen = self.n, self.n - self.nonfinite
        has_ulp = self.dtype in ULP
        current, v1, acc = self.domains

        def share(count: float) -> float | None:
            return count / n if n else None

        def top(value: float) -> float | None:
            return value if value >= 0 else None

        sums = self.gg, self.mm, self.gm, self.dd, self.abs_d, self.top_d, self.top_rel
        whole = metrics(seen, *sums, self.nonfinite, self.mismatch)
        no_direction = 0.0 if seen and not self.gg and not self.dd else None
        inf_nan, small, top_rel, mean_rel, rmse, rel_wrong, abs_wrong = current.values(n, seen)
        v1_inf_nan, v1_small, v1_top_rel, v1_mean_rel, v1_rmse, v1_rel_wrong, v1_abs_wrong = v1.values(n, seen)
        acc_inf_nan, _, _, _, _, acc_rel_wrong, acc_abs_wrong = acc.values(n, seen)
        return Measures(
            elements=n, nonfinite=whole.nonfinite, nonfinite_mismatch=whole.nonfinite_mismatch,
            max_abs_reference=top(self.top_g), max_abs_mine=top(self.top_m),
            cosine=None if whole.cosine is None else max(-1.0, min(1.0, whole.cosine)),
            max_abs_err=whole.max_abs_err, mean_abs_err=whole.mean_abs_err,
            rmse=None if whole.rmse is None else whole.rmse / self.scale,
            rel_l2=whole.rel_l2 if self.gg else no_direction,
            max_rel_err=whole.max_rel_err, mean_rel_err=self.rel / self.nonzero if self.nonzero else None,
            dual_100=share(self.dual[0]), dual_1000=share(self.dual[1]), dual_10000=share(self.dual[2]),
            error_balance=share(abs(self.more - self.less)), binary_err_ratio=share(self.unequal),
            ulp_max=top(self.top_ulp), ulp_mean=self.ulp / seen if has_ulp and seen else None,
            ulp_share=share(self.steep) if has_ulp else None,
            inf_nan_err_ratio=inf_nan, small_value_err_ratio=small, normal_max_rel_err=top_rel,
            normal_mean_rel_err=mean_rel, normal_rmse=rmse, rel_err_ratio=rel_wrong, abs_err_ratio=abs_wrong,
            v1_inf_nan_err_ratio=v1_inf_nan, v1_small_value_err_ratio=v1_small, v1_normal_max_rel_err=v1_top_rel,
            v1_normal_mean_rel_err=v1_mean_rel, v1_normal_rmse=v1_rmse, v1_rel_err_ratio=v1_rel_wrong,
            v1_abs_err_ratio=v1_abs_wrong,
            acc_inf_nan_err_ratio=acc_inf_nan, acc_rel_err_ratio=acc_rel_wrong, acc_abs_err_ratio=acc_abs_wrong,
            ait_share=share(self.ait), above_1e_1=self.above[0], above_1e_2=self.above[1], above_1e_3=self.above[2],
            above_1e_4=self.above[3], above_1e_5=self.above[4], above_1e_6=self.above[5], kl=kl,
        )  # fmt: skip


def _dot(a: Any, b: Any) -> float:
    return float(a @ b)


class _Split:
    """Small and normal values by one domain. whole: sums and the largest are computed, and not counts alone."""

    def __init__(self, xp: Any, limits: tuple[float, float, float]):
        self.xp, self.whole = xp, True
        self.small, self.atol, self.rtol = limits
        self.inf_nan = self.smalls = self.small_wrong = self.normal_wrong = 0
        self.dd = self.rel = self.top = 0.0

    def add(self, a: Any, e: Any, rel: Any) -> None:
        small = a <= self.small
        smalls = int(self.xp.count_nonzero(small))
        self.smalls += smalls
        if smalls:
            self.small_wrong += int(self.xp.count_nonzero(small & (e > self.atol)))
            rel = self.xp.where(small, 0.0, rel)
        if self.whole:
            e = self.xp.where(small, 0.0, e) if smalls else e
            self.dd += float(e @ e)
            self.rel += float(rel.sum())
            self.top = max(self.top, float(rel.max()))
        self.normal_wrong += int(self.xp.count_nonzero(rel > self.rtol))

    def values(self, n: int, seen: int) -> tuple[float | None, ...]:
        """inf_nan_err_ratio to abs_err_ratio, in Measures' order."""
        if not n:
            return (None,) * 7
        normal = seen - self.smalls
        wrong = self.small_wrong / self.smalls if self.smalls else 0.0
        rmse = math.sqrt(self.dd / n * (n / (normal + 1e-4) + 1e-4))
        mean = self.rel / normal if normal else 0.0
        return self.inf_nan / n, wrong, self.top, mean, rmse, self.normal_wrong / normal if normal else 0.0, wrong


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
