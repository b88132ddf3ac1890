"""Which logits a row's experts were chosen by, and how clearly.

The problem: whether another expert is a near tie stands in the router's logits, a tensor of another tap. The idea: the
plan gives a unit of chosen experts the groups of its router's logits; where rows differ, the logits of these rows, of
the same step on either side, are read as well, and only what they say is kept (judge/routing.py: three numbers a row).
Logits whose choice is not in both dumps are told how many of them are taken, and speak for themselves.
Not here: what follows from that (judge/routing.py, near_ties.py), the other measures (activations.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.judge import near_ties, routing

Place = tuple[Group, Any, np.ndarray]
"""A group of chosen experts, how it is cut, and its rows."""


def with_routers(units: Sequence[Unit], modules: Iterable[Module] = ()) -> list[Unit]:
    """``units`` in order of the flow; those of chosen experts with the logits that come last before them, and logits
    without a choice with how many of them are taken. modules: of either dump."""
    out = _with_takes(units, modules)
    for i, unit in enumerate(units):
        if routing.is_choice(unit.key[1], unit.cls):
            for other in reversed(units[:i]):
                tap, role, call = other.key
                fits = call == unit.key[2] and routing.is_logits(tap, role, other.cls)
                if fits and routing.in_front_of(tap, unit.key[0]):
                    by, bias = _chooser(unit.key[0], units, modules)
                    out[i] = replace(unit, router=(other.golden, other.mine), chooser=by, bias=bias)
                    break
    return out


def _chooser(
    choosing: str, units: Sequence[Unit], modules: Iterable[Module]
) -> tuple[routing.Chooser | None, tuple[Group, Group] | None]:
    """By what the experts of tap ``choosing`` are chosen, and golden's and mine's bias, where it is not their logits
    alone and the dumps say it."""
    bias = next(
        ((u.golden[0], u.mine[0]) for u in units if u.key[1].endswith("correction_bias") and u.golden and u.mine
         and routing.in_front_of(u.key[0], choosing)), None,
    )  # fmt: skip
    says: dict[str, Any] = {}
    for module in modules:
        if "top_k" in module.attrs or "router.class" in module.attrs or "num_group" in module.attrs:
            around = choosing.startswith(f"{module.tap}.") or routing.in_front_of(module.tap, choosing)
            says |= module.attrs if around else {}
    found = {name: says.get(f"router.{name}", says.get(name)) for name in _CHOICE}
    groups, top, grouped = found["num_expert_group"], found["topk_group"], found["use_grouped_topk"]
    groups = says.get("num_group") if groups is None else groups
    if grouped is False or not isinstance(groups, int) or not isinstance(top, int):
        groups = top = 1
    if found["scoring_func"] not in ("softmax", "sigmoid") or (groups == 1 and bias is None):
        return None, None
    if bias is None and says.get("has_correction_bias"):
        return None, None
    return routing.Chooser(found["scoring_func"], groups, top), bias


OTHER_FACTOR = "the routed scaling factor is in the experts' weights on one side, and on the other it is applied later"
_FACTOR = "routed_scaling_factor"


def scaled_elsewhere(units: Sequence[Unit], golden: Iterable[Module], mine: Iterable[Module]) -> frozenset[int]:
    """Which of ``units`` are experts' weights that one side has multiplied with the model's factor, while the other
    side multiplies the sum, and what experts make of such weights: they differ by it, and nothing is wrong. golden,
    mine: each side's modules."""
    taps = {u.key[0] for u in units if routing.is_weight(u.key[1], u.cls) and _differ(u, golden, mine)}
    return frozenset(
        i for i, u in enumerate(units)
        if u.key[0] in taps and (routing.is_weight(u.key[1], u.cls) or u.key[1].startswith("output"))
    )  # fmt: skip


def _differ(unit: Unit, golden: Iterable[Module], mine: Iterable[Module]) -> bool:
    found = [_factors(tap, modules) for tap, modules in ((unit.golden_key[0], golden), (unit.key[0], mine))]
    (in_golden, golden_whole), (in_mine, mine_whole) = found
    return None not in (in_golden, in_mine) and in_golden != in_mine and math.isclose(golden_whole, mine_whole)


def _factors(tap: str, modules: Iterable[Module]) -> tuple[float | None, float]:
    """(the factor in the weights that ``tap`` takes, None where that is not known; with the one behind it)."""
    within, whole = None, 1.0
    for module in modules:
        factor = module.attrs.get(_FACTOR)
        chooses = "top_k" in module.attrs
        near = tap.startswith(f"{module.tap}.") or routing.in_front_of(module.tap, tap)
        if near and isinstance(factor, (int, float)) and (chooses or "router.class" in module.attrs):
            whole *= factor
            within = float(factor) if chooses else within
    return within, whole


_CHOICE = ("scoring_func", "num_expert_group", "topk_group", "use_grouped_topk")


def _with_takes(units: Sequence[Unit], modules: Iterable[Module]) -> list[Unit]:
    holders = {module.tap: near_ties.taken(module.attrs) for module in modules if "top_k" in module.attrs}
    chosen = [u.key[0] for u in units if routing.is_choice(u.key[1], u.cls)]
    biased = [u.key[0] for u in units if u.key[1].endswith("correction_bias")]
    out = []
    for unit in units:
        tap, role, _ = unit.key
        takes = 0
        if holders and routing.is_logits(tap, role, unit.cls):
            own = [holder for holder in holders if routing.in_front_of(tap, holder)]
            block = tap.rpartition(".")[0] + "."
            told = any(routing.in_front_of(tap, choice) for choice in chosen)
            if own and not told and not any(bias.startswith(block) for bias in biased):
                takes = min(holders[holder] for holder in own)
        out.append(replace(unit, takes=takes) if takes else unit)
    return out


def logits_alone(golden: Any, mine: Any, takes: int) -> np.ndarray:
    """`near_ties.undecided` of rows of logits. golden, mine: (block, rows in it)."""
    g, m = (widen(block.data[at], block.dtype) for block, at in (golden, mine))
    return near_ties.undecided(g.reshape(len(g), -1), m.reshape(len(m), -1), takes)


def margins(
    readers: Sequence[Any],
    unit: Unit,
    places: tuple[Place, Place],
    fits: Callable[[int, Group], bool],
    loaders: Sequence[Loader],
) -> np.ndarray | None:
    """`routing.margins` of some rows: float64 [rows, 3]. places: golden's and mine's. None where one side has no logits
    of that step, or another number of experts."""
    router = unit.router
    assert router is not None
    read: list[np.ndarray] = []
    for side, (group, cut, rows) in enumerate(places):
        logits = next((g for g in router[side] if g.where == group.where and g.readable and fits(side, g)), None)
        if logits is None:
            return None
        for what, how in ((group, cut), (logits, None)):
            block, at = readers[side].load(what, how, rows)
            read.append(widen(block.data[at], block.dtype))
    golden, golden_logits, mine, mine_logits = read
    if golden_logits.shape != mine_logits.shape:
        return None
    by, bias = unit.chooser, _biases(unit, loaders)
    if by is not None and not all(by.fits(golden_logits.shape[1], b) for b in bias):
        by, bias = None, (None, None)
    return routing.margins(golden.astype(np.int64), mine.astype(np.int64), golden_logits, mine_logits, by, bias)


def _biases(unit: Unit, loaders: Sequence[Loader]) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """What corrects the scores, float64 [experts], golden's and mine's. Of shape [0] where it cannot be read."""
    if unit.bias is None:
        return None, None
    read = []
    for loader, group in zip(loaders, unit.bias, strict=True):
        try:
            block = loader.load(group) if group.readable else None
        except Unread:
            block = None
        values = np.zeros(0) if block is None else widen(block.data, block.dtype, as_float=True)
        read.append(values.reshape(-1).astype(np.float64))
    return read[0], read[1]
