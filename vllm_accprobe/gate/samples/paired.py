"""What n paired questions say about two servers: p, interval, and how many questions it would take.

The problem: 26 right answers of 50 against 24 are taken for a drop, and kernels are switched off one by one for it. The
questions were the same, so the two counts are no independent samples: only the questions whose answers flipped speak.
The idea: right or wrong is tested by McNemar's exact test, any other score by the sign-flip test of which McNemar's is
the case of differences of one. Each p comes with an interval, and with the number of questions that would be needed.
Not here: which questions are pairs (match.py), many tests at once (contrast.py).

Signs: differences are mine - golden, negative where mine is worse. lost: golden right and mine wrong; won: the reverse.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import optimize, special

POWER = 0.8
"""Chosen: how likely the needed number of questions shows the difference; the habit of the field [J. Cohen, Statistical
Power Analysis for the Behavioral Sciences, 1988, 2.4]."""
LEVEL = 0.95
"""Chosen: of intervals."""
EXACT = 16
"""Chosen: so many differences that are not 0 have 65,536 patterns of signs, which are all tried."""
DRAWS = 99_999
"""Chosen: patterns that are drawn where there are more; the least p is 1e-5."""
MANY = 4096
"""Chosen: from so many differences on the sum over random signs is taken for normal, so that no draw takes long."""
_CHUNK = 1 << 22


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p: under the null each flip goes either way with 1/2 [Q. McNemar, Psychometrika 12 (1947) 153;
    exact: F. Mosteller, Biometrics 8 (1952) 220]. 1 where nothing flipped."""
    flips = lost + won
    return min(1.0, 2.0 * float(special.bdtr(min(lost, won), flips, 0.5))) if flips else 1.0


def tango(lost: int, won: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Score interval of the difference of two paired proportions, (won - lost) / n: all differences that a score test
    does not reject [T. Tango, Statistics in Medicine 17 (1998) 891, eq. 10 to 13]. It has a width even where nothing
    flipped, which Wald's has not. n >= 1 pairs."""
    return -_upper(lost, won, n, level), _upper(won, lost, n, level)


def _upper(b: int, c: int, n: int, level: float) -> float:
    """The upper end for the difference (b - c) / n."""
    z = _z(1.0 - level)

    def score(d: float) -> float:
        off = b - c - n * d
        linear = (2.0 * n - b + c) * d - b - c
        root = math.sqrt(max(linear * linear + 8.0 * n * c * d * (1.0 - d), 0.0))
        q = (root - linear) / (4.0 * n)  # of the second kind of flip, by maximum likelihood under d
        variance = n * (2.0 * q + d * (1.0 - d))
        return off / math.sqrt(variance) + z if variance > 0 else (z if off >= 0 else -math.inf)

    low, high = (b - c) / n, 1.0 - 1e-12
    if low >= high or score(high) > 0:
        return 1.0
    return float(optimize.brentq(score, low, high, xtol=1e-12))


def needed(flipping: float, difference: float, alpha: float, power: float = POWER) -> int | None:
    """Pairs with which McNemar's test shows this difference, where this share of the questions flips
    [R. Connor, Biometrics 43 (1987) 207, eq. 3; O. Miettinen, Biometrics 24 (1968) 339]. None where there is none."""
    if not difference or flipping < abs(difference):
        return None
    z = _z(alpha) * math.sqrt(flipping) + _beta(power) * math.sqrt(max(flipping - difference * difference, 0.0))
    return math.ceil((z / difference) ** 2)


def smallest(flipping: float, n: int, alpha: float, power: float = POWER) -> float | None:
    """The least difference that n pairs show with this power, by the same formula; None where even one in which all
    flips go one way is not shown."""
    if flipping <= 0:
        return None

    def short(d: float) -> float:
        spread = _beta(power) * math.sqrt(max(flipping - d * d, 0.0))
        return _z(alpha) * math.sqrt(flipping) + spread - d * math.sqrt(n)

    return None if short(flipping) > 0 else float(optimize.brentq(short, 0.0, flipping, xtol=1e-9))


def sign_flip(differences: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the mean of paired differences, float64 [n]: under the null each has either sign [R. Fisher, The
    Design of Experiments, 1935, sec. 21]. No distribution is assumed, which a t-test does: scores such as BLEU or F1
    are bounded, skewed, and mostly equal on both sides. All signs up to EXACT differences, DRAWS of them with this
    seed, and (hits + 1) / (draws + 1) [B. Phipson, G. Smyth, Stat. Appl. Genet. Mol. Biol. 9 (2010) 39] up to MANY,
    from there on normal with the variance of the sum [W. Hoeffding, Ann. Math. Statist. 23 (1952) 169]."""
    d = np.asarray(differences, np.float64)
    d = d[d != 0]
    if not d.size:
        return 1.0
    d = d / np.abs(d).max()  # scores of 1e300 have sums, too
    reached = abs(float(d.sum())) * (1.0 - 1e-12)  # equal sums in another order of adding
    if d.size > MANY:
        return 2.0 * float(special.ndtr(-reached / math.sqrt(float((d * d).sum()))))
    if d.size <= EXACT:
        patterns = np.arange(1 << d.size)[:, None] >> np.arange(d.size) & 1
        return float(np.mean(np.abs((2.0 * patterns - 1.0) @ d) >= reached))
    random, hits, left = np.random.default_rng(seed), 0, DRAWS
    while left:
        rows = min(left, max(_CHUNK // d.size, 1))
        signs = np.unpackbits(np.frombuffer(random.bytes(-(-rows * d.size // 8)), np.uint8), count=rows * d.size)
        sums = 2.0 * (signs.reshape(rows, d.size) @ d) - d.sum()
        hits += int(np.count_nonzero(np.abs(sums) >= reached))
        left -= rows
    return (hits + 1) / (DRAWS + 1)


def mean_interval(differences: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of the mean of float64 [n] [Student, Biometrika 6 (1908) 1]: approximate for skewed scores,
    which is why the test is another. Infinite for a single difference."""
    d = np.asarray(differences, np.float64)
    if d.size < 2:
        return -math.inf, math.inf
    half = float(special.stdtrit(d.size - 1, 0.5 + level / 2)) * float(d.std(ddof=1)) / math.sqrt(d.size)
    return float(d.mean()) - half, float(d.mean()) + half


def needed_mean(differences: np.ndarray, alpha: float, power: float = POWER) -> int | None:
    """Pairs that show this mean at this spread: ((z_alpha/2 + z_beta) s / mean)^2 [J. Cohen, 1988, 2.3, normal]."""
    mean, spread = float(np.mean(differences)), float(np.std(differences))
    if not mean:
        return None
    return math.ceil(max(((_z(alpha) + _beta(power)) * spread / mean) ** 2, 1.0))


def holm(ps: list[float], rate: float) -> list[bool]:
    """Which of several tests reject so that any false one is as rare as ``rate``, however they depend on one another
    [S. Holm, Scand. J. Statist. 6 (1979) 65]."""
    rejected = [False] * len(ps)
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[i] > rate / (len(ps) - rank):
            break
        rejected[i] = True
    return rejected


def _z(alpha: float) -> float:
    value: Any = special.ndtri(alpha / 2)
    return -float(value)


def _beta(power: float) -> float:
    value: Any = special.ndtri(power)
    return float(value)
