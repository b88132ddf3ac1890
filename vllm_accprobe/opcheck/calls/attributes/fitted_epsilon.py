"""A norm's epsilon from what went in and what came out.

The problem: msprobe, msit and torch_xray record a norm's tensors and none of its numbers, so that the module could not
be judged at all. The idea: a norm is y = a / sqrt(q + eps) + b with a, q and b known, so that each row gives
1 / s**2 - q, where s is the slope of y - b over a by least squares with the weights of rounded numbers; rows are
averaged by their standard errors, and whether they agree is told. A usual epsilon that lies within the error of most
of a class's modules is taken; a fit that is none of them is said and not judged, because it may be a wrong kernel's.
Formulas: norms.py's; weighted least squares [Bevington and Robinson, Data Reduction, 3rd ed., chapter 6]. An error of
y has the variance unit**2 (y**2 + (y - b)**2) / 3, a rounding of the result and one before the bias, and half a unit
that a whole row may share (norms.py): of a kernel that rounds once this is several times too much.
Not here: what else an attribute may come from (untold.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, Call
from vllm_accprobe.opcheck.references.norms import NormParts, parts_of

USUAL = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
"""Chosen: the epsilons that models' configurations have (1e-12 BERT's, 1e-6 Qwen's, 1e-5 Llama's), and between."""
SIGMAS = 4.0
"""Standard errors that a fit may lie away from the truth (chosen: one norm in sixteen thousand lies further)."""
_NAME_IT = "name it with --attribute eps=VALUE"
_LARGEST = 1 << 24
"""Elements of a norm that is fitted: some dozens are read for one class."""


@dataclass(frozen=True)
class EpsilonFit:
    """value, error: of one module's call, its standard error; smallest: of q, the mean square or variance of a row;
    unit: one rounding of the output; agree: whether the rows give one number."""

    value: float
    error: float
    smallest: float
    unit: float
    agree: bool

    def allows(self, epsilon: float) -> bool:
        return self.agree and abs(self.value - epsilon) <= SIGMAS * self.error


def fit(call: Call) -> EpsilonFit | None:
    """None where the call is no norm, lacks a tensor, or has no finite row."""
    out, parts = call.outputs.get("output.0"), parts_of(call)
    if out is None or parts is None or out.numel() > _LARGEST or out.numel() != parts.scaled.numel():
        return None
    return _fitted(parts, out.double().reshape(parts.scaled.shape), call.unit)


def _fitted(parts: NormParts, y: Any, unit: float) -> EpsilonFit | None:
    a, q = parts.scaled, parts.power
    d = y - parts.bias
    variance = unit * unit * (y * y + d * d) / 3.0
    floor = (unit * 1e-2) ** 2 * d.square().mean(-1, keepdim=True)
    weight = 1.0 / (variance + floor).clamp(min=1e-300)
    size = (weight * a * a).sum(-1)
    slope = (weight * a * d).sum(-1) / size
    error = (1.0 / size + (0.5 * ROUNDED * unit * slope).square()).sqrt()
    epsilon = slope**-2 - q.squeeze(-1)
    sigma = 2.0 * error / slope.abs() ** 3
    good = torch.isfinite(epsilon) & torch.isfinite(sigma) & (slope > 0) & (sigma > 0)
    if not bool(good.any()):
        return None
    epsilon, sigma = epsilon[good], sigma[good]
    shares = sigma**-2
    mean = float((epsilon * shares).sum() / shares.sum())
    square, n = float(((epsilon - mean) / sigma).square().sum()), len(epsilon)
    agree = square <= n + SIGMAS * (2.0 * n) ** 0.5 + SIGMAS
    return EpsilonFit(mean, float(shares.sum() ** -0.5), float(q.min()), unit, agree)


@dataclass(frozen=True)
class ChosenEpsilon:
    """value: None where none was chosen; slack: relative error of y that the choice leaves; said: where it comes from,
    or why there is none."""

    value: float | None
    slack: float
    said: str


def choose(fits: Sequence[EpsilonFit]) -> ChosenEpsilon:
    """The usual epsilon that most modules of a class fit."""
    if not fits:
        return ChosenEpsilon(None, 0.0, "its epsilon was not recorded, and no call has what a fit needs")
    best = min(fits, key=lambda f: f.error)
    number = f"{best.value:.3g} ± {best.error:.1g}"

    def rank(epsilon: float) -> tuple[int, float]:
        return -sum(f.allows(epsilon) for f in fits), abs(best.value - epsilon)

    chosen = min(USUAL, key=rank)
    votes = -rank(chosen)[0]
    if 2 * votes <= len(fits):
        why = f"its epsilon was not recorded; input and output fit {number}, which is no usual one"
        return ChosenEpsilon(None, 0.0, f"{why}: {_NAME_IT}")
    others = [e for e in USUAL if e != chosen and all(f.allows(e) for f in fits if f.allows(chosen))]
    slack = max((0.5 * abs(e - chosen) / (f.smallest + min(e, chosen)) for e in others for f in fits), default=0.0)
    between = f"{min((*others, chosen)):g} to {max((*others, chosen)):g}"
    if slack > best.unit:
        why = f"its epsilon was not recorded; input and output fit all from {between}"
        return ChosenEpsilon(None, 0.0, f"{why}: {_NAME_IT}")
    if others:
        why = f"epsilon {chosen:g}, fitted to input and output; {between} fit as well"
        return ChosenEpsilon(chosen, slack, f"{why}, and differ by less than a rounding")
    modules = f"{votes} of {len(fits)} modules" if len(fits) > 1 else "one module"
    return ChosenEpsilon(chosen, slack, f"epsilon {chosen:g}, fitted to input and output of {modules} ({number})")
