"""Whether one layer's number is unlike its kin's: how far the same operator may honestly lie apart in n layers.

The problem: layers honestly differ, and how much nobody knows beforehand. The largest of three others is no limit: the
fourth exceeds it in one of four cases; and a spread that three layers show may by chance be a tenth of the real one.
The idea: leave the layer out, and take mean m and variance s^2 of the k others. A further value is then
x = m + s t sqrt(1 + 1 / k) with Student's t of k - 1 degrees of freedom, whatever the spread is. With few layers that
forgives nearly everything, so that what the comparison's other operators show is used as well: their variances are
spread about a common one, s0^2, as if that was known from d0 degrees of freedom, and both are fitted to them [G. Smyth,
Stat. Appl. Genet. Mol. Biol. 3 (2004) 3, section 6.2: moderated t]. The variance is then
(d0 s0^2 + (k - 1) s^2) / (d0 + k - 1), and t has d0 + k - 1 degrees of freedom. Where operators differ wildly d0 is
near 0, and each stands for itself. Honest gains have other reasons to differ besides: see ``passed_on`` and
constants.TRUNCATED.
Not here: asking (outliers.py), the quantiles (chance.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.chance import Against, against_kin


class Spreads:
    """One number per layer, of several kinds of operators: how far a layer may be from its kin.

    by_kind: kind → float64 [layers]. least: a standard deviation that is not undercut."""

    def __init__(self, by_kind: Mapping[str, Sequence[float]], least: float):
        self._least = least
        self._values = {kind: np.asarray(v, np.float64) for kind, v in by_kind.items()}
        self._known = {k: (float(np.var(v, ddof=1)), len(v) - 1) for k, v in self._values.items() if len(v) > 1}
        self._common: dict[str, tuple[float, float]] = {}

    def against(self, kind: str, at: int) -> Against | None:
        """Layer ``at`` of ``kind`` against the others; None where these are fewer than c.FEWEST_KIN."""
        values = self._values[kind]
        others = np.delete(values, at)
        k = len(others)
        if k < c.FEWEST_KIN:
            return None
        if kind not in self._common:
            self._common[kind] = _fitted([v for name, v in self._known.items() if name != kind], self._least)
        variance, freedom = self._common[kind]
        own = max(float(np.var(others, ddof=1)), self._least**2)
        return against_kin(float(values[at] - np.mean(others)), k, (k - 1) * own, variance, freedom)


def _fitted(known: Sequence[tuple[float, int]], least: float) -> tuple[float, float]:
    """(s0^2, d0) of (variance, degrees of freedom) of other kinds, by the moments of log variances: their mean is
    log s0^2 + psi(d / 2) - log(d / 2) - psi(d0 / 2) + log(d0 / 2), their variance psi'(d / 2) + psi'(d0 / 2) [Smyth,
    section 6.2]. d0 is 0 for too few of them, and no more than what they were estimated from. A few kinds that happen
    to be alike would make it too large, and tails too thin: their variance is taken at its upper confidence bound,
    (G - 1) / chi^2_q(G - 1) times what it is, of G kinds, q = c.KINDS_DOUBT."""
    if len(known) < c.FEWEST_KINDS:
        return 0.0, 0.0
    variance = np.maximum([v for v, _ in known], least**2)
    half = np.array([d for _, d in known]) / 2.0
    e = np.log(variance) - scipy.special.psi(half) + np.log(half)
    doubt = (len(e) - 1) / float(scipy.special.chdtri(len(e) - 1, 1.0 - c.KINDS_DOUBT))
    beyond = float(np.var(e, ddof=1) * doubt - np.mean(scipy.special.polygamma(1, half)))
    most = float(sum(d for _, d in known))
    freedom = min(2.0 * _inverse_trigamma(beyond), most) if beyond > 0 else most
    middle = float(np.mean(e)) + float(scipy.special.psi(freedom / 2.0)) - math.log(freedom / 2.0)
    return math.exp(middle), freedom


def _inverse_trigamma(y: float) -> float:
    """x with psi'(x) = y > 0, by Newton's method on 1 / psi', which is convex [Smyth, appendix]."""
    x = 0.5 + 1.0 / y
    for _ in range(_NEWTON):
        value = float(scipy.special.polygamma(1, x))
        step = value * (1.0 - value / y) / float(scipy.special.polygamma(2, x))
        x += step
        if -step / x < _ENOUGH:
            break
    return x


_NEWTON, _ENOUGH = 50, 1e-8


def doubt_of(kin: int) -> float:
    """How much further out than Student's quantile a layer must be: the standard deviation of so many others is itself
    known to 1 / sqrt(2 (kin - 1)), one standard error [normal theory], and the freedom that other kinds of operators
    lend it supposes that kinds are alike in what they are spread by. 1.5 for three others, 1.1 for sixty."""
    return 1.0 + (2.0 * max(kin - 1, 1)) ** -0.5


def passed_on(here: Mapping[str, float], there: Mapping[str, float]) -> float:
    """The most that an input's mean gain differs by between two layers; what only one has is 0 in the other."""
    return max((abs(here.get(k, 0.0) - there.get(k, 0.0)) for k in {*here, *there}), default=0.0)
