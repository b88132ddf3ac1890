"""Causes of activations: another function, its halves exchanged, one of them left out, a limit, a scaled argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.api import SETTING, CauseRow, Guess, Trial, among, fits
from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.references import activations

GATED, _ALONE = ("SiluAndMul", "MulAndSilu", "GeluAndMul"), tuple(activations.ALONE)
OTHERS: dict[str, Callable[[Any], Any]] = {
    "silu": activations.silu, "gelu": activations.gelu, "gelu by tanh": activations.gelu_tanh,
    "quick gelu": activations.quick_gelu, "relu": torch.relu, "relu squared": activations.relu2,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "no activation": lambda x: x,
}  # fmt: skip


def parts(trial: Trial) -> tuple[Any, Any, Callable[[Any], Any]]:
    """(gate, up, activation), float64; up is 1 where there is none."""
    if trial.call.cls in activations.ALONE:
        return trial.call.wide(*activations.INPUT), 1.0, activations.formula_of(trial.call)
    gate, up, f = activations.gate_of(trial.call)
    return gate.double(), up.double(), f


def _by(y: Callable[[Any, Any, Callable[[Any], Any]], Any]) -> Callable[[Trial, Any], Any]:
    """A change without a parameter. y: (gate, up, activation) → output."""
    return lambda trial, _: y(*parts(trial))


def _names(trial: Trial) -> list[str]:
    own = parts(trial)[2]
    return [name for name, f in OTHERS.items() if f is not own]


def _other(trial: Trial, name: str) -> Any:
    gate, up, _ = parts(trial)
    return OTHERS[name](gate) * up


def _interleaved(trial: Trial, _: Any) -> Any:
    x, f = trial.call.wide(*activations.INPUT), parts(trial)[2]
    first, second = x[..., ::2], x[..., 1::2]
    return second * f(first) if trial.call.cls != "MulAndSilu" else first * f(second)


def _scaled(trial: Trial, factor: float) -> Any:
    gate, up, f = parts(trial)
    return f(factor * gate) * up


def _sloped(trial: Trial, factor: float) -> Any:
    gate, up, _ = parts(trial)
    return gate * torch.sigmoid(factor * gate) * up


def _slopes(trial: Trial) -> Iterator[Guess]:
    if parts(trial)[2] is not activations.silu:
        raise Declined("no x * sigmoid(x)")
    yield Guess(1.702)
    yield from fits(_sloped, trial, [1.0])


def _clamped(trial: Trial, limit: float) -> Any:
    gate, up, f = parts(trial)
    return f(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _limits(trial: Trial) -> Iterator[Guess]:
    known = [x for n in ("swiglu_limit", "activation_clamp") if (x := trial.call.config.get(n))]
    yield from (Guess(float(x)) for x in known)
    yield from among((x for x in (6.0, 7.0, 8.0, 10.0) if x not in known), 4.0)
    yield from fits(_clamped, trial, [0.5 * float(parts(trial)[0].abs().max())])


CAUSES = (
    CauseRow("other_gate", SETTING, GATED, "with {0} on its gate", _other, _names),
    CauseRow("other_activation", SETTING, _ALONE, "with {0}", _other, _names),
    CauseRow("halves_exchanged", SETTING, GATED, "with gate and up exchanged", _by(lambda gate, up, f: f(up) * gate)),
    CauseRow("interleaved", SETTING, GATED, "with gate and up interleaved instead of in halves", _interleaved),
    CauseRow("up_alone", SETTING, GATED, "without its gate (up alone)", _by(lambda gate, up, f: up)),
    CauseRow("gate_alone", SETTING, GATED, "without up (the activated gate alone)", _by(lambda gate, up, f: f(gate))),
    CauseRow("both_activated", SETTING, GATED, "with the activation on up as well",
             _by(lambda gate, up, f: f(gate) * f(up))),
    CauseRow("scaled_gate", SETTING, (*GATED, *_ALONE), "with the activation of {0:.4g} times its argument", _scaled,
             lambda t: chain(among((1.702, 2.0, 0.5)), fits(_scaled, t, [1.0]))),
    CauseRow("sigmoid_slope", SETTING, ("SiluAndMul", "MulAndSilu", "SiLU"),
             "with sigmoid of {0:.4g} times its argument", _sloped, _slopes),
    CauseRow("clamped", SETTING, GATED, "with its gate cut at {0:.4g} and up at that to both sides", _clamped, _limits),
)  # fmt: skip
