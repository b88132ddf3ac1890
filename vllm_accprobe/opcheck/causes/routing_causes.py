"""Causes of routed experts: how they are chosen and weighed, which of them computed a row, and what each does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.activations_causes import OTHERS
from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    FACTOR,
    SETTING,
    CauseRow,
    Guess,
    Trial,
    among,
    decline,
    rounded_once,
    with_value,
)
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references import composite, moe
from vllm_accprobe.opcheck.references.parts import unit_of

EXPERTS = ("UnquantizedFusedMoEMethod",)
_WEIGHTS = "input.topk_weights"
_BLOCKS = ("MoERunner", "FusedMoE", "*MoE", "*MoeSparseMoeBlock", "*SparseMoeBlock", "*Moe")


def _routed(trial: Trial, by: int = 0, **changed: Any) -> dict[str, Expected]:
    """The weights of experts whose numbers are ``by`` smaller, with other settings of `route`."""
    call, logits = trial.call, trial.extra("router_logits")
    ids = call.tensor("topk_ids")
    ids = (ids - by) % logits.shape[-1] if by else ids
    return {_WEIGHTS: moe.routed(logits, ids, unit_of(logits), {**moe.choosing(call), **changed})}


def _factors(trial: Trial) -> list[Guess]:
    own, config = float(moe.choosing(trial.call)["factor"]), trial.call.config.get("routed_scaling_factor")
    known = [1.0, own * own, float(config or 1.0), float(config or 1.0) * own]
    return [Guess(x) for x in dict.fromkeys(known) if not math.isclose(x, own)]


def _renormalised(trial: Trial) -> bool:
    return bool(moe.choosing(trial.call)["renormalize"])


def _tensors(trial: Trial) -> tuple[Any, Any, Any, Any, Any]:
    """x, topk_weights, topk_ids, w13, w2."""
    call = trial.call
    return (call.wide("x"), call.wide("topk_weights"), call.tensor("topk_ids"), call.stored("w13_weight"),
            call.stored("w2_weight"))  # fmt: skip


def _experts(trial: Trial, weights: Any = None, ids: Any = None, act: Any = None, w13: Any = None) -> Expected:
    x, own, chosen, first, second = _tensors(trial)
    dense = moe.dense(own if weights is None else weights, chosen if ids is None else ids, len(first))
    act = moe.activation_of(trial.call) if act is None else act
    return moe.expert_mlps(x, dense, first if w13 is None else w13, second, act, trial.call.unit)


def _weighed(change: Callable[[Any], Any]) -> Callable[[Trial, Any], Expected]:
    return lambda trial, _: _experts(trial, weights=change(trial.call.wide("topk_weights")))


def _shifted(trial: Trial, n: int) -> Expected:
    ids = trial.call.tensor("topk_ids")
    return _experts(trial, ids=torch.where(ids >= 0, (ids + n) % len(trial.call.stored("w13_weight")), ids))


def _on_input(trial: Trial, _: Any) -> Any:
    x, weights, ids, w13, w2 = _tensors(trial)
    act, out = moe.activation_of(trial.call), torch.zeros_like(trial.plain["output.0"].value)
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    for k in range(ids.shape[1]):
        dense = moe.dense(ones, ids[:, k : k + 1], len(w13))
        out += moe.expert_mlps(x * weights[:, k : k + 1], dense, w13, w2, act, trial.call.unit).value
    return out


def _fewer(trial: Trial, k: int) -> Expected:
    weights = trial.call.wide("topk_weights").clone()
    weights[:, k:] = 0
    return _experts(trial, weights=weights)


def _of_expert(trial: Trial, e: int) -> Any:
    """What one expert adds to each row."""
    ids, weights = trial.call.tensor("topk_ids"), trial.call.wide("topk_weights")
    return _experts(trial, weights=torch.where(ids == e, weights, 0.0)).value


def _of_shared(trial: Trial) -> Any:
    """What shared experts add to a block's output, float64, its shape."""
    call, plain = trial.call, trial.plain["output.0"].value
    part = composite.shared_of(call)
    if part is None or part.numel() != plain.numel():
        raise Declined("it has no shared experts, or they were not captured")
    return part.reshape(plain.shape)


def _with_part(trial: Trial, part: Any, factor: float) -> Expected:
    """The output with one of its parts ``factor`` times as large. It may have been rounded with, or without it."""
    plain = rounded_once(trial, "output.0")
    return replace(plain, value=plain.value + (factor - 1.0) * part.reshape(plain.value.shape))


def _fitted(trial: Trial, part: Any) -> Iterator[float]:
    """The factor of a part by least squares."""
    value = trial.plain["output.0"].value
    part = part.reshape(value.shape)
    size = float(part.square().sum())
    for target in trial.targets():
        yield 1.0 + float(((target.reshape(value.shape) - value) * part).sum()) / size if size else math.nan


def _chosen(trial: Trial) -> list[Guess]:
    ids = trial.call.tensor("topk_ids")
    return among(ids[ids >= 0].unique().tolist(), float(len(trial.call.stored("w13_weight"))))


def _scaled(trial: Trial) -> Iterator[Guess]:
    for guess in _chosen(trial):
        for factor in _fitted(trial, _of_expert(trial, guess.value)):
            if math.isfinite(factor):
                yield Guess((guess.value, factor), fitted=1, choices=guess.choices)


def _rows_times(trial: Trial, parameter: tuple[int, float]) -> Expected:
    e, factor = parameter
    plain = rounded_once(trial, "output.0")
    there = (trial.call.tensor("topk_ids") == e).any(-1, keepdim=True)
    return replace(plain, value=torch.where(there, plain.value * factor, plain.value))


def _rows_of_experts(trial: Trial) -> Iterator[Guess]:
    value = trial.plain["output.0"].value.reshape(trial.mine().shape)
    for guess in _chosen(trial):
        there = (trial.call.tensor("topk_ids") == guess.value).any(-1)
        y = value[there]
        for target in trial.targets():
            if size := float(y.square().sum()):
                yield Guess((guess.value, float((y * target[there]).sum()) / size), fitted=1, choices=guess.choices)


def _shared_factors(trial: Trial) -> Iterator[Guess]:
    factor, part = float(trial.call.config.get("routed_scaling_factor") or 1.0), _of_shared(trial)
    yield from among(x for x in dict.fromkeys((2.0, factor, 1.0 / factor)) if x != 1.0)
    yield from (Guess(x, fitted=1) for x in _fitted(trial, part))


CAUSES = (
    CauseRow("other_scoring", SETTING, EXPERTS, "with {0} scores in its router",
             lambda t, scoring: _routed(t, scoring=scoring),
             lambda t: ["sigmoid" if moe.choosing(t.call).get("scoring") == "softmax" else "softmax"]),
    CauseRow("other_renormalisation", SETTING, EXPERTS, "with its router's weights {0}",
             lambda t, _: _routed(t, renormalize=not _renormalised(t)),
             lambda t: ["not renormalised" if _renormalised(t) else "renormalised to a sum of 1"]),
    CauseRow("no_correction", SETTING, EXPERTS, "without the bias that corrects its router's scores",
             lambda t, _: decline("it has none") if moe.choosing(t.call)["bias"] is None else _routed(t, bias=None)),
    CauseRow("other_routed_factor", SETTING, EXPERTS, "with the routed scaling factor {0:.4g}",
             lambda t, factor: _routed(t, factor=factor), _factors),
    CauseRow("weights_of_others", ADDRESS, EXPERTS,
             "with the right weights, and experts whose numbers are {0} too large (modulo theirs)", _routed,
             lambda t: among(range(1, t.extra("router_logits").shape[-1]))),
    CauseRow("no_groups", SETTING, EXPERTS, "without its groups of experts",
             lambda t, _: decline("it has none") if moe.choosing(t.call)["groups"] == 1
             else _routed(t, groups=1, top_groups=1)),
    CauseRow("experts_shifted", ADDRESS, EXPERTS,
             "with experts whose numbers are {0} too large (beyond the last, from 0 on)", _shifted,
             lambda t: among(range(1, len(t.call.stored("w13_weight"))))),
    CauseRow("weights_reversed", ADDRESS, EXPERTS, "with the weights of its chosen experts in reverse order",
             _weighed(lambda w: w.flip(-1))),
    CauseRow("no_weights", SETTING, EXPERTS, "without its router's weights (each chosen expert counts 1)",
             _weighed(torch.ones_like)),
    CauseRow("weights_twice", SETTING, EXPERTS, "with its router's weights applied twice", _weighed(torch.square)),
    CauseRow("weights_on_input", SETTING, EXPERTS,
             "with its router's weights on the experts' inputs instead of their outputs", _on_input),
    CauseRow("expert_halves_exchanged", SETTING, EXPERTS, "with gate and up exchanged in all experts",
             lambda t, _: _experts(t, w13=torch.cat(t.call.stored("w13_weight").chunk(2, 1)[::-1], 1))),
    CauseRow("expert_activation", SETTING, EXPERTS, "with {0} in its experts",
             lambda t, name: _experts(t, act=OTHERS[name]),
             lambda t: [name for name, f in OTHERS.items() if f is not moe.activation_of(t.call)]),
    CauseRow("fewer_experts", SETTING, EXPERTS, "with the first {0} of its chosen experts alone", _fewer,
             lambda t: range(1, t.call.tensor("topk_ids").shape[1])),
    CauseRow("expert_missing", FACTOR, EXPERTS, "without expert {0}", lambda t, e: with_value(
        t, (y := t.plain["output.0"].value) - _of_expert(t, e).reshape(y.shape)), _chosen),
    CauseRow("expert_times", FACTOR, EXPERTS, "with expert {0}'s part multiplied by {1:.4g}",
             lambda t, p: _with_part(t, _of_expert(t, p[0]), p[1]), _scaled),
    CauseRow("rows_of_expert_times", FACTOR, EXPERTS,
             "with all of a row multiplied by {1:.4g} where expert {0} is among its chosen ones", _rows_times,
             _rows_of_experts),
    CauseRow("shared_skipped", SETTING, _BLOCKS, "without its shared experts",
             lambda t, _: _with_part(t, _of_shared(t), 0.0)),
    CauseRow("shared_times", FACTOR, _BLOCKS, "with its shared experts' part multiplied by {0:.4g}",
             lambda t, factor: _with_part(t, _of_shared(t), factor), _shared_factors),
)  # fmt: skip
