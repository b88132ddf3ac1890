"""How units of the plan relate: routers of chosen experts, inputs of another kind, origins of inputs, source files.

The problem: whether another expert is a near tie stands in another tap's logits; a dump does not say where an input
came from; integers on one side may be fractions on the other. The idea: a unit of chosen experts gets its router's
logits and chooser, logits without a recorded choice how many of them are taken. An input is the output with the same
bytes in each of the first steps (`Makers`); a link is one side's alone where the other denies it. Inputs of another
kind of number are left out and counted. Not here: what follows (judge/near_ties.py, verdict/neighbours.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, Key, is_choice, is_logits, is_weight, kind_of
from vllm_accprobe.align.names import TapPair, enclosing
from vllm_accprobe.comparison.measure.read import Loader, RowBlock, Unread
from vllm_accprobe.comparison.plan.groups import Groups, SeenTensor
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.schema import Module, Record, Stats
from vllm_accprobe.judge import near_ties

Place = tuple[Group, Any, np.ndarray]
"""A group of chosen experts, how it is cut, and its rows."""


def with_routers(units: Sequence[Unit], modules: Iterable[Module] = ()) -> list[Unit]:
    """``units`` in order of the flow; those of chosen experts with the logits that come last before them, and logits
    without a choice with how many of them are taken. modules: of either dump."""
    out = _with_takes(units, modules)
    for i, unit in enumerate(units):
        if is_choice(unit.key[1], unit.cls):
            for other in reversed(units[:i]):
                tap, role, call = other.key
                fits = call == unit.key[2] and is_logits(tap, role, other.cls)
                if fits and near_ties.in_front_of(tap, unit.key[0]):
                    by, bias = _chooser(unit.key[0], units, modules)
                    out[i] = replace(unit, router=(other.golden, other.mine), chooser=by, bias=bias)
                    break
    return out


def _chooser(
    choosing: str, units: Sequence[Unit], modules: Iterable[Module]
) -> tuple[near_ties.Chooser | None, tuple[Group, Group] | None]:
    """By what the experts of tap ``choosing`` are chosen, and golden's and mine's bias, where it is not their logits
    alone and the dumps say it."""
    bias = next(
        ((u.golden[0], u.mine[0]) for u in units if u.key[1].endswith("correction_bias") and u.golden and u.mine
         and near_ties.in_front_of(u.key[0], choosing)), None,
    )  # fmt: skip
    says: dict[str, Any] = {}
    for module in modules:
        if "top_k" in module.attrs or "router.class" in module.attrs or "num_group" in module.attrs:
            inside = choosing.startswith(f"{module.tap}.") or near_ties.in_front_of(module.tap, choosing)
            says |= module.attrs if inside else {}
    found = {name: says.get(f"router.{name}", says.get(name)) for name in _CHOICE}
    groups, top, grouped = found["num_expert_group"], found["topk_group"], found["use_grouped_topk"]
    groups = says.get("num_group") if groups is None else groups
    if grouped is False or not isinstance(groups, int) or not isinstance(top, int):
        groups = top = 1
    if found["scoring_func"] not in ("softmax", "sigmoid") or (groups == 1 and bias is None):
        return None, None
    if bias is None and says.get("has_correction_bias"):
        return None, None
    return near_ties.Chooser(found["scoring_func"], groups, top), bias


OTHER_FACTOR = "the routed scaling factor is in the experts' weights on one side, and on the other it is applied later"
_FACTOR = "routed_scaling_factor"


def scaled_elsewhere(units: Sequence[Unit], golden: Iterable[Module], mine: Iterable[Module]) -> frozenset[int]:
    """Which of ``units`` are experts' weights that one side has multiplied with the model's factor, while the other
    side multiplies the sum, and what experts make of such weights: they differ by it, and nothing is wrong. golden,
    mine: each side's modules."""
    taps = {u.key[0] for u in units if is_weight(u.key[1], u.cls) and _differ(u, golden, mine)}
    return frozenset(
        i for i, u in enumerate(units)
        if u.key[0] in taps and (is_weight(u.key[1], u.cls) or u.key[1].startswith("output"))
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
        near = tap.startswith(f"{module.tap}.") or near_ties.in_front_of(module.tap, tap)
        if near and isinstance(factor, (int, float)) and (chooses or "router.class" in module.attrs):
            whole *= factor
            within = float(factor) if chooses else within
    return within, whole


_CHOICE = ("scoring_func", "num_expert_group", "topk_group", "use_grouped_topk")


def _with_takes(units: Sequence[Unit], modules: Iterable[Module]) -> list[Unit]:
    # of a router, or of a block without experts of its own, top_k alone says nothing
    holders = {m.tap: near_ties.taken(m.attrs) for m in modules if {"top_k", "global_num_experts"} <= set(m.attrs)}
    chosen = [u.key[0] for u in units if is_choice(u.key[1], u.cls)]
    biased = [u.key[0] for u in units if u.key[1].endswith("correction_bias")]
    out = []
    for unit in units:
        tap, role, _ = unit.key
        takes = 0
        if holders and is_logits(tap, role, unit.cls):
            own = [holder for holder in holders if near_ties.in_front_of(tap, holder)]
            block = tap.rpartition(".")[0] + "."
            routed = any(near_ties.in_front_of(tap, choice) for choice in chosen)
            if own and not routed and not any(bias.startswith(block) for bias in biased):
                takes = min(holders[holder] for holder in own)
        out.append(replace(unit, takes=takes) if takes else unit)
    return out


def logits_alone(golden: Any, mine: Any, takes: int) -> np.ndarray:
    """`undecided` of rows of logits. golden, mine: (block, rows in it)."""
    g, m = (widen(block.data[at], block.dtype) for block, at in (golden, mine))
    return near_ties.undecided(g.reshape(len(g), -1), m.reshape(len(m), -1), takes)


def margins(
    readers: Sequence[Any],
    unit: Unit,
    places: tuple[Place, Place],
    fits: Callable[[int, Group], bool],
    loaders: Sequence[Loader],
) -> np.ndarray | None:
    """`margins` of some rows: float64 [rows, 3]. places: golden's and mine's. None where one side has no logits
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
    return near_ties.margins(golden.astype(np.int64), mine.astype(np.int64), golden_logits, mine_logits, by, bias)


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


_MOST = 2.0**53
"""Beyond this, floating point has no room for every integer."""
OTHER_KIND = "inputs of another kind of number (integers against fractions)"


def mixed(unit: Unit, golden: Group, mine: Group) -> bool:
    kinds = {DTYPES[g.first.dtype].kind for g in (golden, mine)}
    return unit.key[1].startswith(("input", "inplace")) and "float" in kinds and len(kinds) > 1


def fractions(blocks: Iterable[tuple[RowBlock, np.ndarray]]) -> bool:
    """Whether a block of floating point holds, in its rows, numbers that no integer can be: not whole, or beyond all
    ids (what is added to scores where a mask of booleans forbids)."""
    for block, rows in blocks:
        if DTYPES[block.dtype].kind == "float":
            values = widen(block.data[rows], block.dtype, as_float=True)
            most = 65503.0 if block.dtype == "float16" else _MOST  # a mask's smallest number is no id in float16 either
            whole = (values == np.rint(values)) & (np.abs(values) <= most)
            if not (whole | np.isnan(values)).all():
                return True
    return False


def fractional(stats: Stats | None) -> bool:
    return stats is not None and any(v is not None and v != round(v) for v in (stats.min, stats.max))


Sources = dict[str, "tuple[str | None, str | None]"]
"""Mine's tap → (golden's ``package/file.py:line``, mine's), of taps of which at least one side knows it."""


def sources_of(pairs: Iterable[TapPair], golden: Any, mine: Any) -> Sources:
    known = [{m.tap: m.source for ms in d.modules.values() for m in ms if m.source} for d in (golden, mine)]
    found = {p.mine.tap: (known[0].get(p.golden.tap), known[1].get(p.mine.tap)) for p in pairs}
    return {tap: both for tap, both in found.items() if any(both)}


STEPS = 4
"""Steps in which bytes must be equal; chosen: the prompt's and three of decoding, where chance would have to repeat."""
BOTH, MINE, GOLDEN = "both", "mine", "golden"
Links = dict[Key, "tuple[Key, str]"]
"""An input → (whose output it is, on which side: both, unless one denies it)."""


def links_of(units: Sequence[Unit]) -> Links:
    """The links of all inputs of a plan that have one; keys are mine's."""
    order = {u.key: u.order for u in units}
    if not any(kind_of(role) == INPUT for _, role, _ in order):
        return {}
    sides = []
    for side in (GOLDEN, MINE):
        groups = {u.key: Groups.of(getattr(u, side)) for u in units}
        first = {step for g in groups.values() for step in g.step[g.hashed[:STEPS]].tolist()}
        sides.append(Makers(order, {key: g.seen(first) for key, g in groups.items()}))
    out: Links = {}
    for key in order:
        found = [side.maker(key) for side in sides] if kind_of(key[1]) == INPUT else [None, None]
        maker = found[1] or found[0]
        if maker is not None:
            denied = [own is None and side.denies(key, maker) for own, side in zip(found, sides, strict=True)]
            out[key] = maker, MINE if denied[0] else GOLDEN if denied[1] else BOTH
    return out


class Makers:
    """Whose output each input is, by bytes. order: of each place in the flow; records: of it, one of each step, at
    least of all steps that are among the first `STEPS` of a place."""

    def __init__(self, order: Mapping[Key, int], records: Mapping[Key, Sequence[Record | SeenTensor]]):
        self._order = order
        self.records = {key: [r for r in found if r.hash is not None] for key, found in records.items()}
        wanted = {(r.step, r.hash) for found in self.records.values() for r in found[:STEPS]}
        self._makers: dict[tuple[int | None, str | None], list[Key]] = {place: [] for place in wanted}
        for key, found in self.records.items():
            for r in found if kind_of(key[1]) == OUTPUT else ():
                if (r.step, r.hash) in wanted:
                    self._makers[r.step, r.hash].append(key)

    def maker(self, key: Key) -> Key | None:
        """Whose output a tensor has the bytes of, of what came before it."""
        seen = self.records[key][:STEPS]
        if not seen:
            return None
        alike = set.intersection(*(set(self._makers.get((r.step, r.hash), ())) for r in seen))
        made = [k for k in alike if self._order[k] < self._order[key]]
        if not made:
            return None
        last = max(made, key=lambda k: (self._order[k], k))
        # Of what it and the taps inside of it gave out alike, the innermost tap's.
        inside = [k for k in made if k[0] == last[0] or last[0] in enclosing(k[0])]
        return max(inside, key=lambda k: (k[0].count("."), k == last, k))

    def denies(self, key: Key, maker: Key) -> bool:
        """Whether both tensors are here in one step, of one dtype and shape, and are not equal."""
        made = {r.step: r for r in self.records[maker]}
        pairs = [(r, made[r.step]) for r in self.records[key][:STEPS] if r.step in made]
        return any((a.dtype, a.shape) == (b.dtype, b.shape) and a.hash != b.hash for a, b in pairs)
