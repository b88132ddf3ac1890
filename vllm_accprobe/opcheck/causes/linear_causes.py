"""Causes of products with a weight: the bias, a scaling, a reduction that stops early; and of the logits after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    PRECISION,
    SETTING,
    CauseRow,
    Guess,
    Trial,
    among,
    decline,
    edited,
    fits,
    named,
    others,
    rounded_once,
    scaled,
)
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.activations import soft_cap
from vllm_accprobe.opcheck.references.linear import INPUT, RowAdapters, input_of
from vllm_accprobe.opcheck.references.quantised import weight_of

LINEAR = ("*ParallelLinear", "*Linear", "ParallelLMHead")
_ADAPTED = ("*LinearWithLoRA", "*LinearWithShardedLoRA")
_LOGITS = ("LogitsProcessor",)


def _bias(trial: Trial, times: float) -> Expected:
    """The sum may have been rounded with its own bias. Of ranks whose results are added up the first one adds it."""
    call = trial.call
    if ranks := call.extra.get("ranks"):
        other = [edited(r, params={"bias": r.param("bias") * times}) for r in ranks]
        changed = edited(call, extra={"ranks": other})
    else:
        changed = edited(call, params={"bias": call.param("bias") * times})
    return replace(rounded_once(trial, "output.0"), value=trial.evaluate(changed)["output.0"].value)


def _each_rank(trial: Trial) -> list[int]:
    ranks = trial.call.extra.get("ranks", ())
    if len(ranks) < 2 or not trial.call.attr("reduce_results", default=True):
        raise Declined("nothing is added up over ranks")
    return [len(ranks)]


def _shares(trial: Trial) -> Iterator[Guess]:
    ranks = int(trial.call.attrs.get("tp_size", 1))
    if not trial.call.extra.get("ranks"):
        yield from (Guess(float(x)) for x in (ranks, 1.0 / ranks) if ranks > 2)
    yield from fits(_bias, trial, [1.0, 0.1])


def _neighbours_scale(trial: Trial, which: str) -> Expected:
    call, plain = trial.call, trial.plain["output.0"]
    weight = call.params.get("weight")
    if weight is None or weight.element_size() != 1 or call.extra.get("ranks"):
        raise Declined("its weights have more than 8 bits, or its results are added up")
    size = input_of(call).double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    ratio = size.roll(1 if which == "before" else -1, 0) / size
    bias = call.params["bias"].double() if call.params.get("bias") is not None else 0.0
    return scaled(plain, ratio, (plain.value - bias) * ratio + bias)


def linear_input(call: Call) -> tuple[str, Any]:
    """The input's name and values. Raises Declined."""
    width = weight_of(call).shape[-1]
    for name in (*INPUT, "1"):
        if name in call.inputs and call.inputs[name].dim() > 1 and call.inputs[name].shape[-1] == width:
            return name, call.inputs[name]
    raise Declined("its input was not captured")


def _tails(trial: Trial) -> Iterator[Guess]:
    """How many inputs the reduction leaves out at its end: those after which the error is least, on a few numbers."""
    _name, x = linear_input(trial.call)
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


def _short(trial: Trial, n: int) -> Expected:
    """The rest may have been added to, or taken from, a sum that was rounded."""
    name, x = linear_input(trial.call)
    kept = x.clone()
    kept[..., -n:] = 0
    value = trial.evaluate(edited(trial.call, inputs={name: kept}))["output.0"].value
    return replace(rounded_once(trial, "output.0"), value=value)


def _adapters(trial: Trial) -> RowAdapters:
    found: RowAdapters = trial.extra("adapters")
    return found


def _other_adapters(trial: Trial) -> list[Guess]:
    rows = _adapters(trial)
    names = [n for n in ("", *rows.weights) if any(own != n for own in rows.of_row)]
    return among(f"adapter {n!r}" if n else "no adapter" for n in names)


def _another_adapter(trial: Trial, words: str) -> Call:
    rows = _adapters(trial)
    name = next((n for n in rows.weights if words == f"adapter {n!r}"), "")
    return edited(trial.call, extra={"adapters": replace(rows, of_row=(name,) * len(rows.of_row))})


def _powers(trial: Trial) -> list[Guess]:
    scales = {float(part["scaling"]) for parts in _adapters(trial).weights.values() for part in parts.values()}
    return among(("not applied", "applied twice") if scales - {1.0} else ())


def _adapter_scaling(trial: Trial, words: str) -> Call:
    rows = _adapters(trial)
    weights = {name: {part: {**w, "scaling": w["scaling"] ** 2 if words == "applied twice" else 1.0}
                      for part, w in parts.items()} for name, parts in rows.weights.items()}  # fmt: skip
    return edited(trial.call, extra={"adapters": replace(rows, weights=weights)})


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


def _in_another_order(trial: Trial, parameter: tuple[int, tuple[int, ...]]) -> Call:
    ranks, order = parameter
    z = trial.extra("lm_head")
    return edited(trial.call, extra={"lm_head": z.unflatten(-1, (ranks, -1))[..., list(order), :].flatten(-2)})


def _own_cap(trial: Trial) -> float:
    return float(trial.call.attrs.get("soft_cap") or trial.call.config.get("final_logit_softcapping") or 0.0)


def _own_scale(trial: Trial) -> float:
    return float(trial.call.attr("scale", default=1.0))


def _capped(trial: Trial, change: Callable[[Any], Any]) -> Expected:
    """lm_head's product, as wide as the logits, with ``change`` instead of its soft cap."""
    z = change(trial.extra("lm_head").double()[..., : trial.mine().shape[-1]])
    return scaled(trial.plain["output.0"], 1.0, _own_scale(trial) * z)


def _other_cap(trial: Trial, cap: float) -> Expected:
    return _capped(trial, lambda z: soft_cap(z, cap))


def _other_scale(trial: Trial, scale: float) -> Call:
    return edited(trial.call, attrs={"scale": scale})


def _scales(trial: Trial) -> Iterator[Guess]:
    own = _own_scale(trial)
    yield from others(own, (float(x) for x in (*named(trial, "scale"), 1.0, own * own)))
    if own != 1.0:
        yield from fits(_other_scale, trial, [own])


CAUSES = (
    CauseRow("no_bias", SETTING, LINEAR, "without its bias", lambda t, _: _bias(t, 0.0)),
    CauseRow("bias_twice", SETTING, LINEAR, "with its bias added twice",
             lambda t, _: decline("twice is once by each rank") if len(t.call.extra.get("ranks", ())) == 2
             else _bias(t, 2.0)),
    CauseRow("bias_of_each_rank", SETTING, LINEAR, "with its bias added by each of {0} ranks",
             lambda t, ranks: _bias(t, float(ranks)), _each_rank),
    CauseRow("scales_of_neighbours", PRECISION, LINEAR,
             "with the 8-bit scale of the row {0} for each row of its input", _neighbours_scale,
             lambda _: among(("before", "after")), whole=True),
    CauseRow("bias_times", SETTING, LINEAR, "with its bias times {0:.4g}", _bias, _shares),
    CauseRow("short", ADDRESS, LINEAR, "without the last {0} of its inputs", _short, _tails),
    CauseRow("another_adapter", ADDRESS, _ADAPTED, "with {0} in place of its rows' own", _another_adapter,
             _other_adapters, whole=True),
    CauseRow("adapter_scaling", SETTING, _ADAPTED, "with its adapter's scaling {0}", _adapter_scaling, _powers,
             whole=True),
    CauseRow("ranks_in_another_order", ADDRESS, _LOGITS,
             "with the vocabulary's parts of {0} ranks gathered in the order {1}", _in_another_order, _orders),
    CauseRow("no_logits_cap", SETTING, _LOGITS, "without its soft cap of {0:g}",
             lambda t, _: _capped(t, lambda z: z), lambda t: [cap] if (cap := _own_cap(t)) else []),
    CauseRow("other_logits_cap", SETTING, _LOGITS, "with a soft cap of {0:.4g}", _other_cap,
             lambda t: chain((Guess(float(x)) for x in named(t, "soft_cap") if x and x != _own_cap(t)),
                             fits(_other_cap, t, [3.0, 10.0, 30.0]))),
    CauseRow("other_logits_scale", SETTING, _LOGITS, "with the logits' scale {0:.4g}", _other_scale, _scales),
)  # fmt: skip
