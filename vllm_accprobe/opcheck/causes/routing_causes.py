"""Causes of routed experts: how they are chosen and weighed, which of them computed a row, and what each does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.activations_causes import OTHERS
from vllm_accprobe.opcheck.causes.api import ADDRESS, FACTOR, SETTING, Guess, Trial, cause, rounded_once
from vllm_accprobe.opcheck.floors.rounding import middles
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references import composite, moe
from vllm_accprobe.opcheck.references.parts import unit_of

EXPERTS = "UnquantizedFusedMoEMethod"
WEIGHTS = "input.topk_weights"


# --- how they are chosen and weighed ---------------------------------------------------------------------------------


def _routed(trial: Trial, **changed: Any) -> dict[str, Expected]:
    """The weights with other settings of `route`."""
    call, logits = trial.call, trial.extra("router_logits")
    return {WEIGHTS: moe.routed(logits, call.tensor("topk_ids"), unit_of(logits), {**moe.choosing(call), **changed})}


@cause(SETTING, EXPERTS, text="with {0} scores in its router", values=lambda trial: [
    "sigmoid" if moe.choosing(trial.call).get("scoring") == "softmax" else "softmax"
])  # fmt: skip
def other_scoring(trial: Trial, scoring: str) -> dict[str, Expected]:
    return _routed(trial, scoring=scoring)


@cause(SETTING, EXPERTS, text="with its router's weights {0}", values=lambda trial: [
    "not renormalised" if moe.choosing(trial.call)["renormalize"] else "renormalised to a sum of 1"
])  # fmt: skip
def other_renormalisation(trial: Trial, _: str) -> dict[str, Expected]:
    return _routed(trial, renormalize=not moe.choosing(trial.call)["renormalize"])


@cause(SETTING, EXPERTS, text="without the bias that corrects its router's scores")
def no_correction(trial: Trial, _: Any) -> dict[str, Expected]:
    if moe.choosing(trial.call)["bias"] is None:
        raise Declined("it has none")
    return _routed(trial, bias=None)


def _factors(trial: Trial) -> list[Guess]:
    own, config = float(moe.choosing(trial.call)["factor"]), trial.call.config.get("routed_scaling_factor")
    known = [1.0, own * own, float(config or 1.0), float(config or 1.0) * own]
    return [Guess(x) for x in dict.fromkeys(known) if not math.isclose(x, own)]


@cause(SETTING, EXPERTS, text="with the routed scaling factor {0:.4g}", values=_factors)
def other_routed_factor(trial: Trial, factor: float) -> dict[str, Expected]:
    return _routed(trial, factor=factor)


def _misnumbered(trial: Trial) -> list[Guess]:
    n = trial.extra("router_logits").shape[-1]
    return [Guess(k, choices=float(n - 1)) for k in range(1, n)]


@cause(ADDRESS, EXPERTS, text="with the right weights, and experts whose numbers are {0} too large (modulo theirs)",
       values=_misnumbered)  # fmt: skip
def weights_of_others(trial: Trial, n: int) -> dict[str, Expected]:
    call, logits = trial.call, trial.extra("router_logits")
    ids = (call.tensor("topk_ids") - n) % logits.shape[-1]
    return {WEIGHTS: moe.routed(logits, ids, unit_of(logits), moe.choosing(call))}


@cause(SETTING, EXPERTS, text="without its groups of experts")
def no_groups(trial: Trial, _: Any) -> dict[str, Expected]:
    if moe.choosing(trial.call)["groups"] == 1:
        raise Declined("it has none")
    return _routed(trial, groups=1, top_groups=1)


# --- what they compute -----------------------------------------------------------------------------------------------


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


def _numbers(trial: Trial) -> list[Guess]:
    n = len(trial.call.stored("w13_weight"))
    return [Guess(k, choices=float(n - 1)) for k in range(1, n)]


@cause(ADDRESS, EXPERTS, text="with experts whose numbers are {0} too large (beyond the last, from 0 on)",
       values=_numbers)  # fmt: skip
def experts_shifted(trial: Trial, n: int) -> Expected:
    ids = trial.call.tensor("topk_ids")
    return _experts(trial, ids=torch.where(ids >= 0, (ids + n) % len(trial.call.stored("w13_weight")), ids))


@cause(ADDRESS, EXPERTS, text="with the weights of its chosen experts in reverse order")
def weights_reversed(trial: Trial, _: Any) -> Expected:
    return _experts(trial, weights=trial.call.wide("topk_weights").flip(-1))


@cause(SETTING, EXPERTS, text="without its router's weights (each chosen expert counts 1)")
def no_weights(trial: Trial, _: Any) -> Expected:
    return _experts(trial, weights=torch.ones_like(trial.call.wide("topk_weights")))


@cause(SETTING, EXPERTS, text="with its router's weights applied twice")
def weights_twice(trial: Trial, _: Any) -> Expected:
    return _experts(trial, weights=trial.call.wide("topk_weights").square())


@cause(SETTING, EXPERTS, text="with its router's weights on the experts' inputs instead of their outputs")
def weights_on_input(trial: Trial, _: Any) -> Expected:
    x, weights, ids, w13, w2 = _tensors(trial)
    plain, act = trial.plain["output.0"], moe.activation_of(trial.call)
    out = torch.zeros_like(plain.value)
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    for k in range(ids.shape[1]):
        dense = moe.dense(ones, ids[:, k : k + 1], len(w13))
        out += moe.expert_mlps(x * weights[:, k : k + 1], dense, w13, w2, act, trial.call.unit).value
    return replace(plain, value=out)


@cause(SETTING, EXPERTS, text="with gate and up exchanged in all experts")
def expert_halves_exchanged(trial: Trial, _: Any) -> Expected:
    w13 = trial.call.stored("w13_weight")
    return _experts(trial, w13=torch.cat(w13.chunk(2, 1)[::-1], 1))


def _acts(trial: Trial) -> list[str]:
    own = moe.activation_of(trial.call)
    return [name for name, f in OTHERS.items() if f is not own]


@cause(SETTING, EXPERTS, text="with {0} in its experts", values=_acts)
def expert_activation(trial: Trial, name: str) -> Expected:
    return _experts(trial, act=OTHERS[name])


def _last(trial: Trial) -> list[int]:
    return list(range(1, trial.call.tensor("topk_ids").shape[1]))


@cause(SETTING, EXPERTS, text="with the first {0} of its chosen experts alone", values=_last)
def fewer_experts(trial: Trial, k: int) -> Expected:
    weights = trial.call.wide("topk_weights").clone()
    weights[:, k:] = 0
    return _experts(trial, weights=weights)


# --- one expert ------------------------------------------------------------------------------------------------------


def _of_expert(trial: Trial, e: int) -> Any:
    """What one expert adds to each row."""
    ids, weights = trial.call.tensor("topk_ids"), trial.call.wide("topk_weights")
    return _experts(trial, weights=torch.where(ids == e, weights, 0.0)).value


def _chosen(trial: Trial) -> list[Guess]:
    ids = trial.call.tensor("topk_ids")
    n = len(trial.call.stored("w13_weight"))
    return [Guess(int(e), choices=float(n)) for e in ids[ids >= 0].unique()]


@cause(FACTOR, EXPERTS, text="without expert {0}", values=_chosen)
def expert_missing(trial: Trial, e: int) -> Expected:
    plain = trial.plain["output.0"]
    return replace(plain, value=plain.value - _of_expert(trial, e).reshape(plain.value.shape))


def _scaled(trial: Trial) -> Iterator[Guess]:
    mine, value = trial.mine().double(), trial.plain["output.0"].value.reshape(trial.mine().shape)
    for guess in _chosen(trial):
        part = _of_expert(trial, guess.value).reshape(mine.shape)
        size = float(part.square().sum())
        for target in (mine, middles(mine, trial.dtype("output.0"))):
            factor = 1.0 + float(((target - value) * part).sum()) / size if size else math.nan
            if math.isfinite(factor):
                yield Guess((guess.value, factor), fitted=1, choices=guess.choices)


@cause(FACTOR, EXPERTS, text="with expert {0}'s part multiplied by {1:.4g}", values=_scaled)
def expert_times(trial: Trial, parameter: tuple[int, float]) -> Expected:
    e, factor = parameter
    plain = rounded_once(trial, "output.0")
    return replace(plain, value=plain.value + (factor - 1.0) * _of_expert(trial, e).reshape(plain.value.shape))


@cause(FACTOR, EXPERTS, text="with all of a row multiplied by {1:.4g} where expert {0} is among its chosen ones",
       values=lambda trial: _rows_of_experts(trial))  # fmt: skip
def rows_of_expert_times(trial: Trial, parameter: tuple[int, float]) -> Expected:
    e, factor = parameter
    plain = rounded_once(trial, "output.0")
    there = (trial.call.tensor("topk_ids") == e).any(-1, keepdim=True)
    return replace(plain, value=torch.where(there, plain.value * factor, plain.value))


def _rows_of_experts(trial: Trial) -> Iterator[Guess]:
    mine, value = trial.mine().double(), trial.plain["output.0"].value.reshape(trial.mine().shape)
    for guess in _chosen(trial):
        there = (trial.call.tensor("topk_ids") == guess.value).any(-1)
        y, m = value[there], mine[there]
        for target in (m, middles(m, trial.dtype("output.0"))):
            if size := float(y.square().sum()):
                yield Guess((guess.value, float((y * target).sum()) / size), fitted=1, choices=guess.choices)


# --- shared experts --------------------------------------------------------------------------------------------------

BLOCKS = ("MoERunner", "FusedMoE", "*MoE", "*MoeSparseMoeBlock", "*SparseMoeBlock", "*Moe")


def _shared(trial: Trial) -> Any:
    """What shared experts add to a block's output, float64, its shape."""
    call, plain = trial.call, trial.plain["output.0"].value
    part = composite.shared_of(call)
    if part is None or part.numel() != plain.numel():
        raise Declined("it has no shared experts, or they were not captured")
    return part.reshape(plain.shape)


@cause(SETTING, *BLOCKS, text="without its shared experts")
def shared_skipped(trial: Trial, _: Any) -> Expected:
    return _shared_times(trial, 0.0)


def _shared_factors(trial: Trial) -> Iterator[Guess]:
    part, mine = _shared(trial), trial.mine().double()
    factor = float(trial.call.config.get("routed_scaling_factor") or 1.0)
    known = [x for x in dict.fromkeys((2.0, factor, 1.0 / factor)) if x != 1.0]
    yield from (Guess(x, choices=float(len(known))) for x in known)
    value = trial.plain["output.0"].value.reshape(part.shape)
    for target in (mine, middles(mine, trial.dtype("output.0"))):
        yield Guess(1.0 + float(((target.reshape(part.shape) - value) * part).sum() / part.square().sum()), fitted=1)


@cause(FACTOR, *BLOCKS, text="with its shared experts' part multiplied by {0:.4g}", values=_shared_factors)
def shared_times(trial: Trial, factor: float) -> Expected:
    return _shared_times(trial, factor)


def _shared_times(trial: Trial, factor: float) -> Expected:
    """The sum may have been rounded with, or without them."""
    plain = rounded_once(trial, "output.0")
    return replace(plain, value=plain.value + (factor - 1.0) * _shared(trial))
