"""Causes of norms: the epsilon, the weight, the mean, the residual, the columns that are averaged over.

Each is an edit of RMSNorm's or LayerNorm's formula (references/norms.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.api import SETTING, Guess, Trial, cause, edited, fits, named
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references import norms

RMS = ("RMSNorm", "*RMSNorm", "*RMSNormFused")
LAYER = ("LayerNorm", "*LayerNorm")
ALL = (*RMS, *LAYER)
_USUAL = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def _with(call: Call, eps: float) -> Call:
    own = next((n for n in norms.EPSILONS if n in call.attrs), norms.EPSILONS[0])
    return edited(call, without=("usual", "epsilon"), attrs={own: eps})


def _own(trial: Trial) -> float:
    return norms.epsilon(trial.call)[0]


@cause(SETTING, *ALL, text="without its epsilon")
def no_epsilon(trial: Trial, _: Any) -> Call:
    return _with(trial.call, 0.0)


def _epsilons(trial: Trial) -> Iterator[Guess]:
    own = _own(trial)
    recorded = [trial.call.attrs.get(n) for n in norms.EPSILONS]  # which is not its siblings' where that is not ``own``
    known = [*recorded, *named(trial, *norms.EPSILONS), *(trial.call.config.get(n) for n in norms._CONFIGURED)]
    known = [x for x in dict.fromkeys(known) if isinstance(x, float) and x != own]
    yield from map(Guess, known)
    yield from (Guess(x, choices=len(_USUAL)) for x in _USUAL if x != own and x not in known)
    yield from fits(_other_epsilon, trial, [own * 10.0**k for k in range(-2, 7)])


def _other_epsilon(trial: Trial, eps: float) -> Call:
    return _with(trial.call, eps)


@cause(SETTING, *ALL, text="with the epsilon {0:.3g}", values=_epsilons)
def other_epsilon(trial: Trial, eps: float) -> Call:
    return _with(trial.call, eps)


def _parts(trial: Trial) -> norms.NormParts:
    parts = norms.parts_of(trial.call)
    if parts is None:
        raise Declined("no norm whose parts are known")
    return parts


def _by_root(trial: Trial, root: Any) -> Expected:
    """The output where the norm divides by ``root`` [..., 1] instead of its own."""
    parts, plain = _parts(trial), trial.plain["output.0"]
    return replace(plain, value=(parts.scaled / root + parts.bias).reshape(plain.value.shape))


@cause(SETTING, *ALL, text="with its epsilon added behind the square root")
def epsilon_behind_root(trial: Trial, _: Any) -> Expected:
    return _by_root(trial, _parts(trial).power.sqrt() + _own(trial))


@cause(SETTING, *ALL, text="without its norm (x is only weighed)")
def norm_skipped(trial: Trial, _: Any) -> Expected:
    return _by_root(trial, torch.ones_like(_parts(trial).power))


@cause(SETTING, *ALL, text="with the sum of the squares instead of their mean")
def sum_for_mean(trial: Trial, _: Any) -> Expected:
    parts = _parts(trial)
    return _by_root(trial, (parts.power * parts.scaled.shape[-1] + _own(trial)).sqrt())


def _parts_of_width(trial: Trial) -> list[int]:
    width = _parts(trial).scaled.shape[-1]
    return [n for n in (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64) if width % n == 0 and width // n > 1]


@cause(SETTING, *ALL, text="with its mean over each of {0} parts of a row instead of the whole", values=_parts_of_width)
def norm_by_parts(trial: Trial, n: int) -> Expected:
    """The norm of a rank's own heads (MiniMax-M2's q and k norms), or of a head instead of all."""
    x = _input(trial.call)
    power = x.square().unflatten(-1, (n, -1)).mean(-1, keepdim=True).expand(*x.shape[:-1], n, x.shape[-1] // n)
    return _by_root(trial, (power.flatten(-2) + _own(trial)).sqrt())


@cause(SETTING, "*RMSNormTP", text="with the mean square of its own rank's channels instead of all ranks'")
def mean_of_the_rank(trial: Trial, _: Any) -> Call:
    if int(trial.call.attr("tp_world", default=1)) < 2:
        raise Declined("it has one rank")
    return edited(trial.call, attrs={"tp_world": 1})


def _first_parts(trial: Trial) -> list[tuple[int, int]]:
    width = _parts(trial).scaled.shape[-1]
    return [(width // n * k, width // n * (k + 1)) for n in (2, 4, 8) if width % n == 0 for k in range(n)]


@cause(SETTING, *ALL, text="with its mean over columns {0} to {1} alone (the second not included)", values=_first_parts)
def mean_of_one_part(trial: Trial, part: tuple[int, int]) -> Expected:
    x = _input(trial.call)[..., slice(*part)]
    return _by_root(trial, (x.square().mean(-1, keepdim=True) + _own(trial)).sqrt())


def _input(call: Call) -> Any:
    """What is normalised: with its residual, and centred where the norm centres it."""
    x, residual = call.wide("x", "hidden_states", "input", "0"), call.maybe("residual", "1")
    x = x if residual is None else x + residual.double()
    return x if "RMSNorm" in call.cls else x - x.mean(-1, keepdim=True)


def _divisors(trial: Trial) -> Iterator[Guess]:
    width = _parts(trial).scaled.shape[-1]
    for guess in fits(_other_width, trial, [float(width)]):
        if round(guess.value) != width and abs(guess.value - round(guess.value)) < 0.05 * width**0.5:
            yield Guess(round(guess.value), fitted=1, choices=float(width))


def _other_width(trial: Trial, n: float) -> Expected:
    parts = _parts(trial)
    return _by_root(trial, (parts.power * (parts.scaled.shape[-1] / n) + _own(trial)).sqrt())


@cause(SETTING, *ALL, text="with its squares' sum divided by {0} instead of its width", values=_divisors)
def other_divisor(trial: Trial, n: int) -> Expected:
    return _other_width(trial, n)


@cause(SETTING, *ALL, text="without its weight")
def no_weight(trial: Trial, _: Any) -> Call:
    weight = trial.call.param("weight")
    return edited(trial.call, params={"weight": torch.ones_like(weight) - norms.offset_of(trial.call.cls)})


@cause(SETTING, *RMS, text="with 1 + its weight instead of its weight")
def weight_and_one(trial: Trial, _: Any) -> Call:
    if norms.offset_of(trial.call.cls):
        raise Declined("it does so")
    return edited(trial.call, params={"weight": trial.call.param("weight") + 1.0})


@cause(SETTING, *RMS, text="with its weight instead of 1 + its weight")
def weight_without_one(trial: Trial, _: Any) -> Call:
    if not norms.offset_of(trial.call.cls):
        raise Declined("it does so")
    return edited(trial.call, params={"weight": trial.call.param("weight") - 1.0})


@cause(SETTING, *RMS, text="with its mean taken off before, as a LayerNorm does")
def centred(trial: Trial, _: Any) -> Expected:
    call = trial.call
    x = _input(call)
    weight = call.param("weight") + norms.offset_of(call.cls) if "weight" in call.params else None
    return replace(trial.plain["output.0"], value=norms.layer_norm(x, weight, None, _own(trial)))


@cause(SETTING, *LAYER, text="without taking its mean off, as an RMSNorm does")
def not_centred(trial: Trial, _: Any) -> Expected:
    call = trial.call
    x = call.wide("input", "x", "hidden_states", "0")
    y = norms.rms_norm(x, call.param("weight") if "weight" in call.params else None, norms._own(call))
    return replace(trial.plain["output.0"], value=y + call.param("bias") if "bias" in call.params else y)


@cause(SETTING, *LAYER, text="with its variance over n - 1 numbers instead of n")
def sample_variance(trial: Trial, _: Any) -> Expected:
    parts = _parts(trial)
    n = parts.scaled.shape[-1]
    return _by_root(trial, (parts.power * (n / (n - 1.0)) + _own(trial)).sqrt())


@cause(SETTING, *RMS, text="without adding its residual")
def no_residual(trial: Trial, _: Any) -> dict[str, Any]:
    return _residual(trial, 0.0)


@cause(SETTING, *RMS, text="with its residual added twice")
def residual_twice(trial: Trial, _: Any) -> dict[str, Any]:
    return _residual(trial, 2.0)


def _residual(trial: Trial, times: float, both: bool = True) -> dict[str, Any]:
    call = trial.call
    name = next((n for n in ("residual", "1") if n in call.inputs), None)
    if name is None:
        raise Declined("it has no residual")
    found = dict(trial.evaluate(edited(call, inputs={name: call.inputs[name].double() * times})))
    return found if both else {"output.0": found["output.0"]}


@cause(SETTING, *RMS, text="of its input alone, though its second output has the residual added")
def norm_of_input_alone(trial: Trial, _: Any) -> dict[str, Any]:
    return _residual(trial, 0.0, both=False)


@cause(SETTING, *RMS, text="of its residual alone, without its input")
def norm_of_residual_alone(trial: Trial, _: Any) -> dict[str, Any]:
    call = trial.call
    name = next((n for n in ("x", "hidden_states", "input", "0") if n in call.inputs), None)
    if name is None or call.maybe("residual", "1") is None:
        raise Declined("it has no residual")
    return {"output.0": trial.evaluate(edited(call, inputs={name: torch.zeros_like(call.inputs[name])}))["output.0"]}


@cause(SETTING, *LAYER, text="without its bias")
def no_bias(trial: Trial, _: Any) -> Call:
    return _bias(trial, 0.0)


@cause(SETTING, *LAYER, text="with its bias added twice")
def bias_twice(trial: Trial, _: Any) -> Call:
    return _bias(trial, 2.0)


def _bias(trial: Trial, times: float) -> Call:
    return edited(trial.call, params={"bias": trial.call.param("bias") * times})
