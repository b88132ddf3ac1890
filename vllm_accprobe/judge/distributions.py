"""Tails of the binomial distribution and of Student's t, in double precision, by Python's own functions.

The problem: six numbers of the whole package need these tails, and scipy, which has them, takes 143 MB of an
installation and half a second of a start. The idea: all of them are one function, the regularized incomplete beta
function, by its continued fraction [NIST Digital Library of Mathematical Functions, 8.17.22] with the evaluation of
W. Lentz [Applied Optics 15 (1976) 668]. Its leading factor is computed as a deviation from the maximum, as C. Loader
does for the binomial [Fast and accurate computation of binomial probabilities, 2000]: logarithms of gamma functions
alone lose digits where counts are large. Compared with scipy in tests/judge/test_statistic.py.

Elsewhere: quantiles and tails of the normal and the chi-square distribution (statistic.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TINY = 1e-300
_EPSILON = 1e-16


def incomplete_beta(a: float, b: float, x: float, y: float | None = None) -> float:
    """I_x(a, b), the probability that a beta variable is at most x. a, b > 0; 0 <= x <= 1.

    y: 1 - x, where the caller has it with more digits than a subtraction leaves. ValueError outside these ranges.
    """
    y = 1.0 - x if y is None else y
    if not (a > 0.0 and b > 0.0 and 0.0 <= x <= 1.0):
        raise ValueError(f"I_x(a, b) needs a, b > 0 and 0 <= x <= 1, not a={a}, b={b}, x={x}")
    if x <= 0.0 or y <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges fast on the other side only
        return 1.0 - incomplete_beta(b, a, y, x)
    return min(1.0, _density(a, b, x, y) / a * _fraction(a, b, x))


def binomial_at_most(k: int, n: int, p: float) -> float:
    """P(at most k of n), each with probability p."""
    return 0.0 if k < 0 else 1.0 if k >= n else incomplete_beta(n - k, k + 1.0, 1.0 - p, p)


def binomial_at_least(k: int, n: int, p: float) -> float:
    """P(at least k of n), each with probability p."""
    return 1.0 if k <= 0 else 0.0 if k > n else incomplete_beta(float(k), n - k + 1.0, p)


def t_at_most(freedom: float, t: float) -> float:
    """P(T <= t) of Student's t with so many degrees of freedom."""
    square = t * t
    if math.isinf(square):
        return 0.0 if t < 0 else 1.0
    tail = 0.5 * incomplete_beta(0.5 * freedom, 0.5, freedom / (freedom + square), square / (freedom + square))
    return tail if t <= 0 else 1.0 - tail


def t_quantile(freedom: float, p: float) -> float:
    """The t that T does not exceed with probability p, 0 < p < 1."""
    if p < 0.5:
        return -t_quantile(freedom, 1.0 - p)
    high = 1.0
    while t_at_most(freedom, high) < p:
        high *= 2.0
    return root(lambda t: t_at_most(freedom, t) - p, 0.0, high)


def root(of: Callable[[float], float], low: float, high: float) -> float:
    """Where ``of`` changes its sign between low and high, by bisection down to the last bit. ValueError where the signs
    at both ends are equal."""
    at_low, at_high = of(low), of(high)
    if at_low == 0.0 or at_high == 0.0:
        return low if at_low == 0.0 else high
    if (at_low > 0) == (at_high > 0):
        raise ValueError(f"no change of sign between {low} and {high}")
    while low < (middle := 0.5 * (low + high)) < high:
        if (value := of(middle)) == 0.0:
            return middle
        low, high = (middle, high) if (value > 0) == (at_low > 0) else (low, middle)
    return middle


def _density(a: float, b: float, x: float, y: float) -> float:
    """x^a y^b / B(a, b). Both logarithms are of the distance from the maximum, at a / (a + b)."""
    n, off = a + b, x * b - y * a
    exponent = sum(
        power * (math.log1p(of / power) if abs(of) < 0.5 * power else math.log(part * n / power))
        for power, part, of in ((a, x, off), (b, y, -off))
    )
    return math.sqrt(a * (b / n) / (2.0 * math.pi)) * math.exp(exponent + _stirling(n) - _stirling(a) - _stirling(b))


def _stirling(a: float) -> float:
    """The error of Stirling's formula for the logarithm of the gamma function of a."""
    if a < 16.0:
        return math.lgamma(a) - ((a - 0.5) * math.log(a) - a + 0.5 * math.log(2.0 * math.pi))
    s = a * a
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / (1188 * s)) / s) / s) / s) / a


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x(a, b); a and b in the thousands take some hundred terms."""
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, 1_000_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d, c = 1.0 + term * d, 1.0 + term / c
            d, c = 1.0 / (d if abs(d) > _TINY else _TINY), c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1.0) <= _EPSILON:
            break
    return value
