"""Causes of activations: another function, its halves exchanged, one of them left out, a limit, a scaled argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.api import SETTING, Guess, Trial, cause, fits
from vllm_accprobe.opcheck.habits.look import gate_of
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references import activations

GATED = ("SiluAndMul", "MulAndSilu", "GeluAndMul")
ALONE = tuple(activations._ALONE)
OTHERS: dict[str, Callable[[Any], Any]] = {
    "silu": activations.silu, "gelu": activations.gelu, "gelu by tanh": activations.gelu_tanh,
    "quick gelu": activations.quick_gelu, "relu": torch.relu, "relu squared": activations.relu2,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "no activation": lambda x: x,
}  # fmt: skip


def _x(call: Call) -> Any:
    return call.wide("x", "input_", "input", "hidden_states", "0")


def _parts(trial: Trial) -> tuple[Any, Any, Callable[[Any], Any]]:
    """(gate, up, activation) of a gated one, float64."""
    gate, up, f = gate_of(trial.call)
    return gate.double(), up.double(), f


def _own(trial: Trial) -> Callable[[Any], Any]:
    if trial.call.cls in ALONE:
        return activations._formula(trial.call)
    return _parts(trial)[2]


def _gated(trial: Trial, value: Any) -> Expected:
    return replace(trial.plain["output.0"], value=value)


def _names(trial: Trial) -> list[str]:
    own = _own(trial)
    return [name for name, f in OTHERS.items() if f is not own]


@cause(SETTING, *GATED, text="with {0} on its gate", values=_names)
def other_gate(trial: Trial, name: str) -> Expected:
    gate, up, _ = _parts(trial)
    return _gated(trial, OTHERS[name](gate) * up)


@cause(SETTING, *ALONE, text="with {0}", values=_names)
def other_activation(trial: Trial, name: str) -> Expected:
    return _gated(trial, OTHERS[name](_x(trial.call)))


@cause(SETTING, *GATED, text="with gate and up exchanged")
def halves_exchanged(trial: Trial, _: Any) -> Expected:
    gate, up, f = _parts(trial)
    return _gated(trial, f(up) * gate)


@cause(SETTING, *GATED, text="with gate and up interleaved instead of in halves")
def interleaved(trial: Trial, _: Any) -> Expected:
    x, f = _x(trial.call), _own(trial)
    first, second = x[..., ::2], x[..., 1::2]
    return _gated(trial, second * f(first) if trial.call.cls != "MulAndSilu" else first * f(second))


@cause(SETTING, *GATED, text="without its gate (up alone)")
def up_alone(trial: Trial, _: Any) -> Expected:
    return _gated(trial, _parts(trial)[1])


@cause(SETTING, *GATED, text="without up (the activated gate alone)")
def gate_alone(trial: Trial, _: Any) -> Expected:
    gate, _up, f = _parts(trial)
    return _gated(trial, f(gate))


@cause(SETTING, *GATED, text="with the activation on up as well")
def both_activated(trial: Trial, _: Any) -> Expected:
    gate, up, f = _parts(trial)
    return _gated(trial, f(gate) * f(up))


def _factors(trial: Trial) -> Iterator[Guess]:
    yield from (Guess(x, choices=3.0) for x in (1.702, 2.0, 0.5))
    yield from fits(scaled_gate, trial, [1.0])


@cause(SETTING, *GATED, *ALONE, text="with the activation of {0:.4g} times its argument",
       values=_factors)  # fmt: skip
def scaled_gate(trial: Trial, factor: float) -> Expected:
    f = _own(trial)
    if trial.call.cls in ALONE:
        return _gated(trial, f(factor * _x(trial.call)))
    gate, up, _ = _parts(trial)
    return _gated(trial, f(factor * gate) * up)


def _slopes(trial: Trial) -> Iterator[Guess]:
    if _own(trial) is not activations.silu:
        raise Declined("no x * sigmoid(x)")
    yield Guess(1.702)
    yield from fits(sigmoid_slope, trial, [1.0])


@cause(SETTING, "SiluAndMul", "MulAndSilu", "SiLU", text="with sigmoid of {0:.4g} times its argument", values=_slopes)
def sigmoid_slope(trial: Trial, factor: float) -> Expected:
    if trial.call.cls == "SiLU":
        x = _x(trial.call)
        return _gated(trial, x * torch.sigmoid(factor * x))
    gate, up, _ = _parts(trial)
    return _gated(trial, gate * torch.sigmoid(factor * gate) * up)


def _limits(trial: Trial) -> Iterator[Guess]:
    config = trial.call.config
    known = [x for n in ("swiglu_limit", "activation_clamp") if (x := config.get(n))]
    yield from (Guess(float(x)) for x in known)
    yield from (Guess(float(x), choices=4.0) for x in (6.0, 7.0, 8.0, 10.0) if x not in known)
    yield from fits(clamped, trial, [0.5 * float(_parts(trial)[0].abs().max())])


@cause(SETTING, *GATED, text="with its gate cut at {0:.4g} and up at that to both sides", values=_limits)
def clamped(trial: Trial, limit: float) -> Expected:
    gate, up, f = _parts(trial)
    return _gated(trial, f(gate.clamp(max=limit)) * up.clamp(-limit, limit))
