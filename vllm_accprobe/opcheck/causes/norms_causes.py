"""Causes of norms: the epsilon, the weight, the mean, the residual, the columns that are averaged over.

Each is an edit of RMSNorm's or LayerNorm's formula (references/norms.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.api import SETTING, CauseRow, Guess, Trial, decline, edited, fits, named, others
from vllm_accprobe.opcheck.reference import Call, Declined, required
from vllm_accprobe.opcheck.references import norms

RMS = ("RMSNorm", "*RMSNorm", "*RMSNormFused")
LAYER = ("LayerNorm", "*LayerNorm")
ALL = (*RMS, *LAYER)
_USUAL = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def own_epsilon(trial: Trial) -> float:
    return norms.epsilon(trial.call)[0]


def _parts(trial: Trial) -> norms.NormParts:
    return required(norms.parts_of(trial.call), "no norm whose parts are known")


def normed_input(call: Call) -> Any:
    """What is squared: with its residual, and without its mean where the norm takes that off. Raises Declined."""
    return required(norms.parts_of(call), "no norm whose parts are known").x


def by_root(trial: Trial, root: Any) -> Any:
    """The output where the norm divides by ``root`` [..., 1] instead of its own."""
    parts = _parts(trial)
    return parts.scaled / root + parts.bias


def _power(change: Callable[[Any, int], Any]) -> Callable[[Trial, Any], Any]:
    """A change of the mean square. change: (mean square [..., 1], width) → what stands in its place."""

    def found(trial: Trial, _: Any) -> Any:
        parts = _parts(trial)
        return by_root(trial, (change(parts.power, parts.scaled.shape[-1]) + own_epsilon(trial)).sqrt())

    return found


def _width(trial: Trial) -> int:
    return int(_parts(trial).scaled.shape[-1])


def _with_epsilon(trial: Trial, eps: float) -> Call:
    own = next((n for n in norms.EPSILONS if n in trial.call.attrs), norms.EPSILONS[0])
    return edited(trial.call, without=("usual", "epsilon"), attrs={own: eps})


def _epsilons(trial: Trial) -> Iterator[Guess]:
    own = own_epsilon(trial)
    recorded = [trial.call.attrs.get(n) for n in norms.EPSILONS]  # which is not its siblings' where that is not ``own``
    known = [*recorded, *named(trial, *norms.EPSILONS), *(trial.call.config.get(n) for n in norms._CONFIGURED)]
    yield from others(own, (x for x in known if isinstance(x, float)), _USUAL)
    yield from fits(_with_epsilon, trial, [own * 10.0**k for k in range(-2, 7)])


def _by_parts(trial: Trial, n: int) -> Any:
    """The norm of a rank's own heads (MiniMax-M2's q and k norms), or of a head instead of all."""
    x = normed_input(trial.call)
    power = x.square().unflatten(-1, (n, -1)).mean(-1, keepdim=True).expand(*x.shape[:-1], n, x.shape[-1] // n)
    return by_root(trial, (power.flatten(-2) + own_epsilon(trial)).sqrt())


def _of_one_part(trial: Trial, part: tuple[int, int]) -> Any:
    x = normed_input(trial.call)[..., slice(*part)]
    return by_root(trial, (x.square().mean(-1, keepdim=True) + own_epsilon(trial)).sqrt())


def _first_parts(trial: Trial) -> list[tuple[int, int]]:
    width = _width(trial)
    return [(width // n * k, width // n * (k + 1)) for n in (2, 4, 8) if width % n == 0 for k in range(n)]


def _other_width(trial: Trial, n: float) -> Any:
    return _power(lambda power, width: power * (width / n))(trial, None)


def _divisors(trial: Trial) -> Iterator[Guess]:
    width = _width(trial)
    for guess in fits(_other_width, trial, [float(width)]):
        if round(guess.value) != width and abs(guess.value - round(guess.value)) < 0.05 * width**0.5:
            yield Guess(round(guess.value), fitted=1, choices=float(width))


def _weighed(change: Callable[[Any, float], Any]) -> Callable[[Trial, Any], Call]:
    """A change of the weight. change: (weight, what the norm adds to it) → weight."""
    return lambda trial, _: edited(trial.call, params={
        "weight": change(trial.call.param("weight"), norms.offset_of(trial.call))})  # fmt: skip


def _with_input(names: tuple[str, ...], times: float, *roles: str) -> Callable[[Trial, Any], Any]:
    """A norm whose input, or residual, of these names is ``times`` as large. roles: the outputs that show it; all."""

    def found(trial: Trial, _: Any) -> Any:
        call = trial.call
        name = next((n for n in names if n in call.inputs), None)
        if name is None or call.maybe(*norms.RESIDUAL) is None:
            raise Declined("it has no residual")
        outputs = trial.evaluate(edited(call, inputs={name: call.inputs[name].double() * times}))
        return {role: outputs[role] for role in roles or outputs}

    return found


CAUSES = (
    CauseRow("no_epsilon", SETTING, ALL, "without its epsilon", lambda t, _: _with_epsilon(t, 0.0)),
    CauseRow("other_epsilon", SETTING, ALL, "with the epsilon {0:.3g}", _with_epsilon, _epsilons),
    CauseRow("epsilon_behind_root", SETTING, ALL, "with its epsilon added behind the square root",
             lambda t, _: by_root(t, _parts(t).power.sqrt() + own_epsilon(t))),
    CauseRow("norm_skipped", SETTING, ALL, "without its norm (x is only weighed)",
             lambda t, _: by_root(t, torch.ones_like(_parts(t).power))),
    CauseRow("sum_for_mean", SETTING, ALL, "with the sum of the squares instead of their mean",
             _power(lambda power, width: power * width)),
    CauseRow("norm_by_parts", SETTING, ALL, "with its mean over each of {0} parts of a row instead of the whole",
             _by_parts, lambda t: [n for n in (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
                                   if _width(t) % n == 0 and _width(t) // n > 1]),
    CauseRow("mean_of_the_rank", SETTING, ("*RMSNormTP",),
             "with the mean square of its own rank's channels instead of all ranks'",
             lambda t, _: edited(t.call, attrs={"tp_world": 1}) if int(t.call.attr("tp_world", default=1)) > 1
             else decline("it has one rank")),
    CauseRow("mean_of_one_part", SETTING, ALL,
             "with its mean over columns {0} to {1} alone (the second not included)", _of_one_part, _first_parts),
    CauseRow("other_divisor", SETTING, ALL, "with its squares' sum divided by {0} instead of its width", _other_width,
             _divisors),
    CauseRow("no_weight", SETTING, ALL, "without its weight", _weighed(lambda w, one: torch.ones_like(w) - one)),
    CauseRow("weight_and_one", SETTING, RMS, "with 1 + its weight instead of its weight",
             _weighed(lambda w, one: decline("it does so") if one else w + 1.0)),
    CauseRow("weight_without_one", SETTING, RMS, "with its weight instead of 1 + its weight",
             _weighed(lambda w, one: w - 1.0 if one else decline("it does so"))),
    CauseRow("centred", SETTING, RMS, "with its mean taken off before, as a LayerNorm does",
             lambda t, _: norms.layer_norm(normed_input(t.call), norms.weight_of(t.call), None, own_epsilon(t))),
    CauseRow("not_centred", SETTING, LAYER, "without taking its mean off, as an RMSNorm does",
             lambda t, _: _parts(t).bias + norms.rms_norm(t.call.wide(*norms.INPUT), norms.weight_of(t.call),
                                                          own_epsilon(t))),
    CauseRow("sample_variance", SETTING, LAYER, "with its variance over n - 1 numbers instead of n",
             _power(lambda power, width: power * (width / (width - 1.0)))),
    CauseRow("no_residual", SETTING, RMS, "without adding its residual", _with_input(norms.RESIDUAL, 0.0)),
    CauseRow("residual_twice", SETTING, RMS, "with its residual added twice", _with_input(norms.RESIDUAL, 2.0)),
    CauseRow("norm_of_input_alone", SETTING, RMS, "of its input alone, though its second output has the residual added",
             _with_input(norms.RESIDUAL, 0.0, "output.0")),
    CauseRow("norm_of_residual_alone", SETTING, RMS, "of its residual alone, without its input",
             _with_input(norms.INPUT, 0.0, "output.0")),
    CauseRow("no_bias", SETTING, LAYER, "without its bias",
             lambda t, _: edited(t.call, params={"bias": t.call.param("bias") * 0.0})),
    CauseRow("bias_twice", SETTING, LAYER, "with its bias added twice",
             lambda t, _: edited(t.call, params={"bias": t.call.param("bias") * 2.0})),
)  # fmt: skip
