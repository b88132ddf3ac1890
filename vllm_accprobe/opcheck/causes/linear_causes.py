"""Causes of products with a weight: the bias, a scaling, a reduction that stops early; and of the logits after them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    PRECISION,
    SETTING,
    Guess,
    Trial,
    cause,
    edited,
    fits,
    named,
    rounded_once,
    scaled,
)
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.activations import soft_cap
from vllm_accprobe.opcheck.references.linear import RowAdapters
from vllm_accprobe.opcheck.references.quantised import weight_of

LINEAR = ("*ParallelLinear", "*Linear", "ParallelLMHead")
_INPUT = ("input_", "x", "input", "hidden_states", "0", "1")


def _bias(trial: Trial, times: float) -> Expected:
    """The sum may have been rounded with its own bias. Of ranks whose results are added up the first one adds it."""
    call = trial.call
    if ranks := call.extra.get("ranks"):
        other = [edited(r, params={"bias": r.param("bias") * times}) for r in ranks]
        changed = edited(call, extra={"ranks": other})
    else:
        changed = edited(call, params={"bias": call.param("bias") * times})
    return replace(rounded_once(trial, "output.0"), value=trial.evaluate(changed)["output.0"].value)


@cause(SETTING, *LINEAR, text="without its bias")
def no_bias(trial: Trial, _: Any) -> Expected:
    return _bias(trial, 0.0)


@cause(SETTING, *LINEAR, text="with its bias added twice")
def bias_twice(trial: Trial, _: Any) -> Expected:
    if len(trial.call.extra.get("ranks", ())) == 2:
        raise Declined("twice is once by each rank")
    return _bias(trial, 2.0)


def _ranks(trial: Trial) -> Sequence[Call]:
    """The calls whose results are added up. Raises Declined."""
    ranks: Sequence[Call] = trial.call.extra.get("ranks", ())
    if len(ranks) < 2 or not trial.call.attr("reduce_results", default=True):
        raise Declined("nothing is added up over ranks")
    return ranks


@cause(SETTING, *LINEAR, text="with its bias added by each of {0} ranks", values=lambda t: [len(_ranks(t))])
def bias_of_each_rank(trial: Trial, ranks: int) -> Expected:
    return _bias(trial, float(ranks))


@cause(PRECISION, *LINEAR, text="with the 8-bit scale of the row {0} for each row of its input", whole=True,
       values=lambda _: [Guess(n, choices=2.0) for n in ("before", "after")])  # fmt: skip
def scales_of_neighbours(trial: Trial, which: str) -> Expected:
    call, plain = trial.call, trial.plain["output.0"]
    weight = call.params.get("weight")
    if weight is None or weight.element_size() != 1 or call.extra.get("ranks"):
        raise Declined("its weights have more than 8 bits, or its results are added up")
    size = call.wide(*_INPUT).abs().amax(-1, keepdim=True).clamp(min=1e-30)
    ratio = size.roll(1 if which == "before" else -1, 0) / size
    bias = call.params["bias"].double() if call.params.get("bias") is not None else 0.0
    return scaled(plain, ratio, (plain.value - bias) * ratio + bias)


def _shares(trial: Trial) -> Iterator[Guess]:
    ranks = int(trial.call.attrs.get("tp_size", 1))
    if not trial.call.extra.get("ranks"):
        yield from (Guess(float(x)) for x in (ranks, 1.0 / ranks) if ranks > 2)
    yield from fits(_bias, trial, [1.0, 0.1])


@cause(SETTING, *LINEAR, text="with its bias times {0:.4g}", values=_shares)
def bias_times(trial: Trial, times: float) -> Expected:
    return _bias(trial, times)


def _input(call: Call) -> tuple[str, Any]:
    """The input's name and values. Raises Declined."""
    width = weight_of(call).shape[-1]
    for name in _INPUT:
        if name in call.inputs and call.inputs[name].dim() > 1 and call.inputs[name].shape[-1] == width:
            return name, call.inputs[name]
    raise Declined("its input was not captured")


def _tails(trial: Trial) -> Iterator[Guess]:
    """How many inputs the reduction leaves out at its end: those after which the error is least, on a few numbers."""
    _name, x = _input(trial.call)
    weight, width = weight_of(trial.call), x.shape[-1]
    off = (trial.mine().double() - trial.plain["output.0"].value).reshape(-1, weight.shape[0])
    worst = off.abs().amax(1).argsort(descending=True)[:4]
    columns = off[worst].abs().sum(0).argsort(descending=True)[:64]
    terms = x.reshape(-1, width)[worst].double().unsqueeze(1) * weight[columns].double().unsqueeze(0)
    lost = terms.flip(-1).cumsum(-1)  # by how many are left out, less one
    left = (off[worst][:, columns].unsqueeze(-1) + lost).square().sum((0, 1))
    best = int(left.argmin()) + 1
    if best < width:
        yield Guess(best, choices=float(width))


@cause(ADDRESS, *LINEAR, text="without the last {0} of its inputs", values=_tails)
def short(trial: Trial, n: int) -> Expected:
    """The rest may have been added to, or taken from, a sum that was rounded."""
    name, x = _input(trial.call)
    kept = x.clone()
    kept[..., -n:] = 0
    value = trial.evaluate(edited(trial.call, inputs={name: kept}))["output.0"].value
    return replace(rounded_once(trial, "output.0"), value=value)


# --- adapters ---------------------------------------------------------------------------------------------------------

_ADAPTED = ("*LinearWithLoRA", "*LinearWithShardedLoRA")


def _adapters(trial: Trial) -> RowAdapters:
    found: RowAdapters = trial.extra("adapters")
    return found


def _others(trial: Trial) -> Iterator[Guess]:
    rows = _adapters(trial)
    names = [n for n in ("", *rows.weights) if any(own != n for own in rows.of_row)]
    yield from (Guess(f"adapter {n!r}" if n else "no adapter", choices=float(len(names))) for n in names)


@cause(ADDRESS, *_ADAPTED, text="with {0} in place of its rows' own", values=_others, whole=True)
def another_adapter(trial: Trial, words: str) -> Call:
    rows = _adapters(trial)
    name = next((n for n in rows.weights if words == f"adapter {n!r}"), "")
    return edited(trial.call, extra={"adapters": replace(rows, of_row=(name,) * len(rows.of_row))})


def _powers(trial: Trial) -> Iterator[Guess]:
    scales = {float(part["scaling"]) for parts in _adapters(trial).weights.values() for part in parts.values()}
    yield from (Guess(w, choices=2.0) for w in ("not applied", "applied twice") if scales - {1.0})


@cause(SETTING, *_ADAPTED, text="with its adapter's scaling {0}", values=_powers, whole=True)
def adapter_scaling(trial: Trial, words: str) -> Call:
    rows = _adapters(trial)
    weights = {name: {part: {**w, "scaling": w["scaling"] ** 2 if words == "applied twice" else 1.0}
                      for part, w in parts.items()} for name, parts in rows.weights.items()}  # fmt: skip
    return edited(trial.call, extra={"adapters": replace(rows, weights=weights)})


# --- logits ----------------------------------------------------------------------------------------------------------


def _orders(trial: Trial) -> Iterator[Guess]:
    """(ranks, whose part of the vocabulary stands in each place): the part that is nearest to mine there, in the rows
    that are furthest off."""
    call, z, mine = trial.call, trial.extra("lm_head"), trial.mine().double()
    rows = (mine - trial.plain["output.0"].value.reshape(mine.shape)).square().sum(-1).topk(min(4, len(mine))).indices
    few = replace(call, outputs={"output.0": trial.mine()[rows]})
    for ranks in (n for n in (2, 4, 8, 16) if z.shape[-1] % n == 0 and z.shape[-1] // n * (n - 1) < mine.shape[-1]):
        part, off = z.shape[-1] // ranks, []
        for by in range(ranks):
            y = trial.evaluate(edited(few, extra={"lm_head": z[rows].roll(by * part, -1)}))["output.0"].value
            off.append([float(o.square().sum()) for o in (y - mine[rows]).split(part, -1)])
        order = tuple((k - min(range(ranks), key=lambda by: off[by][k])) % ranks for k in range(ranks))
        if sorted(order) == list(range(ranks)) and order != tuple(range(ranks)):
            yield Guess((ranks, order), choices=float(math.factorial(ranks)))


@cause(ADDRESS, "LogitsProcessor", values=_orders,
       text="with the vocabulary's parts of {0} ranks gathered in the order {1}")  # fmt: skip
def ranks_in_another_order(trial: Trial, parameter: tuple[int, tuple[int, ...]]) -> Call:
    ranks, order = parameter
    z = trial.extra("lm_head")
    return edited(trial.call, extra={"lm_head": z.unflatten(-1, (ranks, -1))[..., list(order), :].flatten(-2)})


def _product(trial: Trial) -> Any:
    """lm_head's product, as wide as the logits."""
    return trial.extra("lm_head").double()[..., : trial.mine().shape[-1]]


def _logits_cap(call: Call) -> float:
    return float(call.attrs.get("soft_cap") or call.config.get("final_logit_softcapping") or 0.0)


def _had_cap(trial: Trial) -> list[float]:
    cap = _logits_cap(trial.call)
    return [cap] if cap else []


@cause(SETTING, "LogitsProcessor", text="without its soft cap of {0:g}", values=_had_cap)
def no_logits_cap(trial: Trial, cap: float) -> Expected:
    z = float(trial.call.attr("scale", default=1.0)) * _product(trial)
    return scaled(trial.plain["output.0"], 1.0, z)


def _caps(trial: Trial) -> Iterator[Guess]:
    own = _logits_cap(trial.call)
    yield from (Guess(float(x)) for x in named(trial, "soft_cap") if x and x != own)
    yield from fits(other_logits_cap, trial, [3.0, 10.0, 30.0])


@cause(SETTING, "LogitsProcessor", text="with a soft cap of {0:.4g}", values=_caps)
def other_logits_cap(trial: Trial, cap: float) -> Expected:
    z = float(trial.call.attr("scale", default=1.0)) * soft_cap(_product(trial), cap)
    return scaled(trial.plain["output.0"], 1.0, z)


def _logits_scales(trial: Trial) -> Iterator[Guess]:
    own = float(trial.call.attr("scale", default=1.0))
    known = [float(x) for x in [*named(trial, "scale"), 1.0, own * own] if float(x) != own]
    yield from map(Guess, dict.fromkeys(known))
    if own != 1.0:
        yield from fits(other_logits_scale, trial, [own])


@cause(SETTING, "LogitsProcessor", text="with the logits' scale {0:.4g}", values=_logits_scales)
def other_logits_scale(trial: Trial, scale: float) -> Call:
    return edited(trial.call, attrs={"scale": scale})


