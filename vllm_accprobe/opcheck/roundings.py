"""What the roundings of a right kernel leave: units, sums, and what two errors make together.

The problem: a noise and a bound stand beside each formula of references/, and a rounding that one forgets is a false
alarm. The idea: the constants and the few rules that they consist of are here, each with its source.
Elsewhere: what noise and bound are (reference.py), a search for what a bound forgets (scripts/search_bounds.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.kernels.float_formats import LOW, half_step, smallest
from vllm_accprobe.opcheck.reference import Expected, combined

Tensor = Any  # a torch.Tensor
ROUNDED = 3.0**-0.5
"""Units: the standard error of a rounding to nearest, at most. Derived: step / sqrt(12), and a step is 2 units of the
power of two below a number, so at most 2 units of it."""
APPROXIMATE = 2.0**-10
"""Chosen: relative error of an approximate exp, log, tanh, erf or rsqrt in a bound. PTX's tanh.approx.f32 is within
2**-11 [PTX ISA, section tanh], ex2.approx and rsqrt.approx within 2**-22; half as exact again leaves room for another
vendor's, and is a quarter of bfloat16's rounding. It widens bounds only: an error that all elements share is seen."""
SUM = 2.0**-24
"""Unit of the float32 accumulator that engines sum in; a lower one breaks the bound, which is what it is for."""


def gamma(n: float, unit: float = SUM) -> float:
    """n u / (1 - n u): relative to the sum of absolute values, what summing n products in any order leaves at most
    [Higham, lemma 3.1]; inf where n u reaches 1."""
    return n * unit / (1.0 - n * unit) if n * unit < 1.0 else float("inf")


def sum_of_two(total: Tensor, unit: float) -> Expected:
    """The sum of two numbers on one grid, which is rounded once. Its last bits are few-valued: where the larger term's
    step is twice the smaller's, half of all sums lie in the middle of two numbers, and a rounding's variance is step**2
    / 8 instead of / 12. Derived: (step**2 / 12) (1 + 2 * 4**-k) for k bits between, k > 0; the half more is noise, and
    a step is at most 2 units."""
    size = total.abs()
    return Expected(total, (2.0 / 24.0**0.5 * unit) * size, bound=SUM * size)


def once(size: Any, unit: float, times: Any = 1.0) -> Any:
    """What rounding numbers of this ``size`` once to the grid of ``unit`` leaves at most in what they are multiplied
    ``times`` for: u |x| + eta [Higham, ASNA, (2.8)]."""
    return (unit * times) * size + subnormal(unit, times)


def subnormal(unit: float, times: Any = 1.0) -> Any:
    """The eta of `once`, half the smallest subnormal number: in float16 2**-25, and silu(-15) = -4.6e-6 lies 6e-8 from
    its neighbours; 0.0 in dtypes that have bfloat16's range."""
    least = _LEAST.get(unit, 0.0)
    return least * times if least else 0.0


def rounded(y: Expected, unit: float) -> Expected:
    """``y`` rounded once."""
    size = once(y.value.abs(), unit)
    return replace(y, noise=combined(y.noise, ROUNDED * size), bound=None if y.bound is None else y.bound + size)


def added(a: Expected, b: Expected) -> Expected:
    """The sum of two values with independent errors."""
    bound = None if a.bound is None or b.bound is None else a.bound + b.bound
    return Expected(a.value + b.value, combined(a.noise, b.noise), bound=bound)


def summed(parts: Iterable[Expected], unit: float) -> Expected:
    """The sum over ranks, each part and each sum rounded."""
    each = (rounded(part, unit) for part in parts)
    return functools.reduce(lambda total, part: added(rounded(total, unit), part), each)


_LEAST = {half_step(n): 0.5 * smallest(n) for n, (_, least) in LOW.items() if least > -126}
"""By unit, half the smallest subnormal number of the dtypes that have a narrow range."""
_LARGEST = torch.finfo(torch.float32).max


def within_float32(y: Expected, *squared: Any) -> Expected:
    """``y`` without a reference for rows that no float32 kernel can compute, whose squares overflow its sum: 1 /
    sqrt(inf) makes them 0, and what is wrong is what gave them such numbers. squared: what is squared and added up,
    [rows, ..., n]."""
    wide = [x.detach() for x in squared if x.dim() > 1 and x.numel()]
    if all(float(max(b, -a)) * float(max(b, -a)) * x.shape[-1] < _LARGEST for x in wide for a, b in (x.aminmax(),)):
        return y
    sums = [x.square().sum(-1).reshape(len(x), -1) for x in wide]
    rows = torch.stack([~(s >= _LARGEST).any(1) for s in sums]).all(0)  # a NaN in another group hides no overflow
    if bool(rows.all()):
        return y
    return replace(y, rows=rows if y.rows is None else y.rows & rows, reason=y.reason or "its squares overflow float32")
