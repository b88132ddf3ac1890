"""Dumps of two tools, or of two graphs of one tool, that share no names: what their own files say about each other.

The problem: an ATB graph numbers operators, torch names modules, the graph engine joins the names of what it fuses. The
idea: who knows a format knows which of its places is which of another's (align/engines/atb_torch.py, atb_topology.py,
torchair.py); here that knowledge becomes rules for names as they stand, which bridge.py applies like any other.
Not here: patterns (mapping.py, vllm_hf.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from vllm_accprobe.align.engines import atb_torch
from vllm_accprobe.align.mapping import RoleRule, Rules, Source, TapRule
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.schema import ROOT_TAP, Record
from vllm_accprobe.formats import torchair
from vllm_accprobe.formats.common import atb_topology

Place = tuple[str, str]
"""(tap, role)."""
Pairs = dict[Place, tuple[tuple[Place, ...], str]]
"""Place of mine → (places of golden that make it, why)."""


def meet(golden: Any, mine: Any, rules: Rules | None) -> tuple[Rules, bool, list[str]] | None:
    """(rules, whether they say how golden's places are made of mine's, lines to say) for two dumps that need it; None
    for others, or where the user's own rules are for them."""
    kinds = [str(getattr(d, "family", "")) for d in (golden, mine)]
    if "" in kinds and _alike(golden, mine):
        return None
    types = rules.types if rules is not None else {}
    if rules is not None and not types:
        return None
    if kinds == ["atb", "atb"]:
        return _two_atb(golden, mine)
    for made, of, origin, pair in (
        ("atb", "", "torch modules for ATB operators", partial(_torch_and_atb, types=types)),
        ("ge", "fx", "FX nodes for GE operators", _fx_and_ge),
    ):
        if sorted(kinds) == sorted((made, of)):
            swapped = kinds[0] == made
            pairs, lines = pair(*((mine, golden) if swapped else (golden, mine)))
            return _rules(origin, pairs), swapped, lines
    if kinds == ["ge", "ge"]:
        fused = _fusions(golden, mine)
        lines = [f"mapping: {len(fused)} tensors of fused operators, by the names of what they fuse"]
        return (_rules("fused operators", fused), False, lines) if fused else None
    return None


def _alike(golden: Any, mine: Any) -> bool:
    """Whether the two call most places the same: one was converted from the other's tool."""
    taps = [{r.tap for r in d.records} for d in (golden, mine)]
    return 2 * len(taps[0] & taps[1]) > min(map(len, taps))


def _rules(origin: str, pairs: Pairs) -> Rules:
    exact: dict[str, list[TapRule]] = defaultdict(list)
    for (tap, role), (sources, why) in pairs.items():
        part = RoleRule(role, tuple(Source(t, r) for t, r in sources))
        exact[tap].append(TapRule(tap, (part,), why, alone=True))
    return Rules(origin, exact={tap: tuple(rs) for tap, rs in exact.items()})


def _places(records: Iterable[Record]) -> dict[Place, Record]:
    found: dict[Place, Record] = {}
    for r in records:
        found.setdefault((r.tap, r.role), r)
    return found


# --- torch and ATB ---


def _torch_and_atb(torch: Any, other: Any, types: Mapping[str, tuple[str, ...]]) -> tuple[Pairs, list[str]]:
    """ATB's places as made of torch's."""
    have, wanted = _places(torch.records), _places(other.records)
    shapes = {place: r.shape for place, r in wanted.items()}
    pairs: Pairs = {}
    lines = ["mapping: operators of an ATB graph and modules of a torch model, by their types and order"]
    for taps in _graphs(other.records):
        forest = atb_topology.tree(taps, other.topology)
        matches, said = atb_torch.atb_to_torch(forest, _modules(torch), shapes, types)
        lines += [s for s in said if s not in lines]
        for m in matches:
            sources = tuple(place for s in m.torch if (place := _recorded(s, have)) is not None)
            if m.atb in wanted and len(sources) == len(m.torch) and _comparable(wanted[m.atb], sources, have):
                pairs.setdefault(m.atb, (sources, m.why))
    named = {tap: sources for (tap, role), (sources, _) in pairs.items() if role == "output.0"}
    lines += [f"names: {tap} is {' with '.join(_called(s) for s in sources)}" for tap, sources in named.items()]
    return pairs, lines


def _called(place: Place) -> str:
    return place[0] if place[1].startswith("output") else f"{place[0]}/{place[1]}"


def _graphs(records: Iterable[Record]) -> list[list[str]]:
    """The taps of each different graph: prompt and decoding may run two."""
    by_step: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for r in records:
        if r.step is not None:
            by_step[(r.rank, r.step)][r.tap] = None
    return [list(taps) for taps in dict.fromkeys(tuple(sorted(t)) for t in by_step.values())]


def _modules(dump: Any) -> list[tuple[str, str]]:
    """(tap, class) in the order in which they ran, those that never did behind them."""
    ran = sorted((r for r in dump.records if r.step is not None), key=lambda r: (r.step, r.rank, r.seq))
    classes = {r.tap: r.cls for r in (*ran, *(r for r in dump.records if r.step is None)) if r.tap != ROOT_TAP}
    return list(classes.items())


def _recorded(place: Place, have: Mapping[Place, Record]) -> Place | None:
    """The place as the torch side calls it: its first input is ``input.hidden_states`` in one tool, ``input.0`` in
    another."""
    tap, role = place
    if place in have:
        return place
    if role == "input.0":
        return next(((t, r) for t, r in have if t == tap and r.startswith("input.")), None)
    return None


def _comparable(record: Record, sources: tuple[Place, ...], have: Mapping[Place, Record]) -> bool:
    """A weight only as it stands: packed or turned over it is another tensor. Integers of a quantised operator are not
    the numbers that they stand for."""
    if record.role.startswith("param."):
        return len(sources) == 1 and have[sources[0]].shape == record.shape
    kinds = {DTYPES[have[s].dtype].kind for s in sources} | {DTYPES[record.dtype].kind}
    return len(kinds) == 1


# --- ATB and ATB ---


def _two_atb(golden: Any, mine: Any) -> tuple[Rules, bool, list[str]] | None:
    """Two graphs whose operators have other numbers or types, one quantised perhaps. None where all names agree."""
    sides = _places(golden.records), _places(mine.records)
    if {tap for tap, _ in sides[0]} == {tap for tap, _ in sides[1]}:
        return None
    same = atb_topology.atb_to_atb(*(_forest(d) for d in (golden, mine)))
    pairs: Pairs = {}
    left = 0
    for (tap, role), record in sides[1].items():
        source = (same.get(tap, ""), role)
        if source not in sides[0]:
            continue
        if _comparable(record, (source,), sides[0]):
            pairs[(tap, role)] = ((source,), "the same operator of the other graph")
        else:
            left += 1
    lines = [f"mapping: two ATB graphs: {len(same)} operators of mine are the same as one of golden's"]
    if left:
        lines.append(f"mapping: {left} tensors that are integers on one side and numbers on the other: not compared")
    return _rules("operators of two ATB graphs", pairs), False, lines


def _forest(dump: Any) -> list[atb_topology.Node]:
    taps = dict.fromkeys(t for graph in _graphs(dump.records) for t in graph)
    counting = {r.tap for r in dump.records if r.role == "output.0" and r.dtype in ("int8", "uint8")}
    return atb_topology.tree(taps, dump.topology, counting)


# --- torchair ---


def _fx_and_ge(fx: Any, ge: Any) -> tuple[Pairs, list[str]]:
    """GE's places as made of FX's: outputs by the names in the graph, inputs by their order."""
    have, wanted = _places(fx.records), _places(ge.records)
    nodes = {op: node for (op, _), (node, _) in ge.fx.items()}
    pairs: Pairs = {}
    for tap, role in wanted:
        kind, _, index = role.partition(".")
        parts = [tap] if tap in ge.known or tap in nodes else torchair.split_fused(tap, ge.known)
        if not parts or not index.isdecimal():
            continue
        if kind == "output":
            node, k = ge.fx.get((parts[-1], int(index)), ("", 0))
            source = (node, f"output.{k}")
        else:
            op, k = _taken(parts, int(index), ge.inputs, sum(t == tap and r.startswith("input") for t, r in wanted))
            source = (nodes.get(op, ""), f"input.{k}")
        if source in have:
            pairs[(tap, role)] = ((source,), "_fx_tensor_name" + (f", {_FUSED}" if len(parts) > 1 else ""))
    lines = ["mapping: a GE dump and an FX dump, by _fx_tensor_name of the graph beside the GE dump"]
    if not ge.fx:
        lines.append("mapping: no dynamo_original_graph_*.txt beside the GE dump: nothing tells which FX node is which")
    return pairs, lines


_FUSED = "fused: first inputs, last outputs"


def _taken(parts: list[str], index: int, inputs: Mapping[str, list[str]], count: int) -> tuple[str, int]:
    """Which input of which of the ``parts`` input ``index`` of an operator with ``count`` inputs is: by the graph where
    it agrees about their number, else the first one's."""
    outside = torchair.fused_inputs(parts, inputs) if len(parts) > 1 else []
    return outside[index] if len(outside) == count and index < count else (parts[0], index)


def _fusions(golden: Any, mine: Any) -> Pairs:
    """Fused operators of either side: first inputs and last outputs are those of what the other side did not fuse."""
    sides = _places(golden.records), _places(mine.records)
    taps = [{tap for tap, _ in side} for side in sides]
    inputs = {**golden.inputs, **mine.inputs}
    pairs: Pairs = {}
    for fused, plain in ((1, 0), (0, 1)):
        for tap in taps[fused] - taps[plain]:
            parts = torchair.split_fused(tap, taps[plain] | golden.known | mine.known)
            roles = [r for t, r in sides[fused] if t == tap and parts]
            for role in roles:
                kind, _, index = role.partition(".")
                op, k = parts[-1], index
                if kind == "input" and index.isdecimal():
                    op, at = _taken(parts, int(index), inputs, sum(r.startswith("input") for r in roles))
                    k = str(at)
                here, there = (tap, role), (op, f"{kind}.{k}")
                if there in sides[plain] and there not in sides[fused]:
                    pairs[here if fused else there] = (((there if fused else here),), _FUSED)
    return pairs
