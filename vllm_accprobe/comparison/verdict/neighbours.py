"""What fed an origin and what it feeds, each with its error.

The problem: "it introduces the error" is believed when its inputs are seen to be right and the next tap's wrong. The
idea: upstream edges are those of the judge (align/data_flow.py), named by whose output they are where equal bytes tell
(plan/relations.py). An edge's error is its pair's in the step of the origin's first row, else the worst step's. Nearest
first, at most `NEAREST`; the others are counted. Not here: who is an origin (origin_entries.py), drawing (report/).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, PARAM, DataFlow, Key, PlainTensor
from vllm_accprobe.comparison.pair import FAIL, PASS, SKIP, value_of, was_compared
from vllm_accprobe.comparison.runner_inputs import is_cache
from vllm_accprobe.formats.common.foreign import VALUE
from vllm_accprobe.judge.origins import OriginEntry

if TYPE_CHECKING:
    from vllm_accprobe.comparison.measure.measured import Measured
    from vllm_accprobe.comparison.pair import Pairs
    from vllm_accprobe.comparison.plan.relations import Sources
    from vllm_accprobe.comparison.row_table import RowTable

NEAREST = 8
"""Edges on either side of an origin; chosen: as many as a person and a narrow page can take in."""
MOST_ORIGINS = 50
"""Origins that get neighbours, the first ones; chosen: reports list fewer."""
_LOOKED_AT = 64
"""Tensors behind an origin among which its next reader is looked for where no bytes tell."""
IDENTICAL = "identical"
OWN, ORDER = "own", "order"
"""How an edge is known besides by equal bytes (plan/relations.py): a tensor of the origin itself, whose source was not
captured; the place in the data flow: what is between the two was not captured."""

_Place = tuple[str, str, Key, str, str]
"""(tap, role, key of the pair that holds the error, role_in, by) of an edge."""
_RANK = {INPUT: 0, PARAM: 1, OUTPUT: 2}


@dataclass(frozen=True)
class Edge:
    """One tensor that goes into an origin, or out of it.

    tap, role: whose output it is, or who takes it in, in mine's spelling. role_in: as what the origin takes it in, ""
    where it is none of its own inputs and parameters. error: of the pair's worst row, or of the whole tensor, relative
    L2; over: how many times its limit. status: identical, pass, fail, or skip for what was not compared. by: both, mine
    or golden, the sides whose equal bytes tell (comparison/plan/relations.py); own or order. pair: index into
    ``Comparison.pairs``, None without one.
    """

    tap: str
    role: str
    role_in: str
    error: float | None
    over: float | None
    status: str
    by: str
    pair: int | None

    def plain(self) -> dict[str, Any]:
        names = ("tap", "role", "role_in", "error", "over", "status", "by")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class OriginNeighbours:
    """An origin's neighbours. tap, role: its tensor. fed_by, feeds: the edges; left_out: how many more of each."""

    tap: str
    role: str
    fed_by: tuple[Edge, ...]
    feeds: tuple[Edge, ...]
    left_out: tuple[int, int] = (0, 0)

    def plain(self) -> dict[str, Any]:
        out: dict[str, Any] = {name: [e.plain() for e in getattr(self, name)] for name in ("fed_by", "feeds")}
        more = zip(("fed_by_more", "feeds_more"), self.left_out, strict=True)
        return out | {name: n for name, n in more if n}


def neighbours(
    origins: Sequence[OriginEntry], pairs: Pairs, measured: Measured | None, rows: RowTable | None
) -> list[OriginNeighbours | None]:
    """Of each of the ``origins`` (compare.json's) its neighbours; None where the data flow around it is not known: the
    tensor has no place in it, or nothing that was compared is next to it."""
    if measured is None or not origins:
        return [None] * len(origins)
    flow = _Flow(measured, pairs, rows)
    found = [flow.around(o) for o in origins[:MOST_ORIGINS]]
    return found + [None] * (len(origins) - len(found))


class _Flow:
    def __init__(self, measured: Measured, pairs: Pairs, rows: RowTable | None):
        setting = measured.setting
        self.links, self.pairs, self.rows = setting.links, pairs, rows
        seen = ((u, next((p for p in u.parts if not p.skip), None)) for u in measured.units)
        found = {u.key: PlainTensor(*u.key, u.order, part.width) for u, part in seen if part is not None}
        self.in_order = sorted(found.values(), key=lambda t: t.order)
        self.flow = DataFlow(self.in_order, setting.tree)
        self.by_key: dict[Key, list[int]] = defaultdict(list)
        for i, key in enumerate(zip(*map(pairs.column, ("tap", "role", "call")), strict=True)):
            self.by_key[key].append(i)
        self.takers: dict[Key, list[Key]] = defaultdict(list)
        for to, (maker, _) in self.links.items():
            self.takers[maker].append(to)

    def around(self, origin: OriginEntry) -> OriginNeighbours | None:
        if is_cache(origin):
            return None
        sink = self._sink(str(origin.get("module")), str(origin.get("role")))
        if sink is None or sink.role == VALUE:  # a file's: what went into it is not known
            return None
        steps = self._steps(sink, origin)
        gap = origin.get("gap") or {}
        # Of a gap what it begins with comes first; what stands in front of that is not next to it.
        in_front = sorted(self._in_front(sink), key=lambda place: place[0] != str(gap.get("after")).partition("/")[0])
        fed = [self._edge(*place, steps) for place in in_front]
        feeds = [self._edge(*place, steps) for place in self._behind(sink)]
        if not fed and not feeds:
            return None
        more = max(len(fed) - NEAREST, 0), max(len(feeds) - NEAREST, 0)
        return OriginNeighbours(sink.tap, sink.role, tuple(fed[:NEAREST]), tuple(feeds[:NEAREST]), more)

    def _sink(self, module: str, role: str) -> PlainTensor | None:
        """The origin's tensor: its own, or, between its children, one of theirs (`origin_entry`). What a weight
        spoils is the module's output."""
        child, _, inner = role.rpartition("/")
        tap, role = (child, inner) if child in self.flow.by_tap else (module, role)
        if tap not in self.flow.by_tap:
            return None
        own = self.flow.by_tap[tap]
        named = [t for kind in own.values() for t in kind if t.role == role and t.kind != PARAM]
        failed = [t for t in named if any(self.pairs[i].status == FAIL for i in self.by_key[t.key])]
        if role.startswith("param."):
            named = own[OUTPUT]
        return next(iter([*failed, *named]), None)

    def _steps(self, sink: PlainTensor, origin: OriginEntry) -> frozenset[int | None]:
        """The first step that computed the origin's row; empty where it is not known."""
        rows, who, where = self.rows, origin.get("request"), origin.get("position")
        if rows is None or who is None or where is None:
            return frozenset()
        owners = [i for i, r in enumerate(rows.requests) if r == who or r.startswith(f"{who}, image ")]
        for i in sorted(self.by_key[sink.key], key=lambda i: self.pairs[i].step or 0):
            here = slice(*np.searchsorted(rows.pair, [i, i + 1]))  # the table is in the order of pairs
            if (np.isin(rows.request[here], owners) & (rows.position[here] == where)).any():
                return frozenset({self.pairs[i].step})
        return frozenset()

    def _in_front(self, sink: PlainTensor) -> list[_Place]:
        """What fed ``sink``: its module's inputs and parameters, then the nearest that came before."""
        link = self.links.get(sink.key)
        if link is not None and sink.kind == INPUT:
            return [(link[0][0], link[0][1], link[0], sink.role, link[1])]
        sources = {t.key: t for t in self.flow.before(sink) if t is not sink}
        ordered = sorted(sources.values(), key=lambda t: (_RANK[t.kind], t.order if t.kind != OUTPUT else -t.order))
        return [self._source(t) for t in ordered]

    def _source(self, t: PlainTensor) -> _Place:
        """Whose output ``t``, in front of an origin, is: its own where it is one; of an input as bytes tell, or else
        the last one in front of it, of which it is made with whatever was not captured."""
        if t.kind == OUTPUT:
            return t.tap, t.role, t.key, "", ORDER
        if t.kind == INPUT and t.key in self.links:
            maker, by = self.links[t.key]
            return maker[0], maker[1], t.key, t.role, by
        outputs = [s for s in self.flow.before(t) if s.kind == OUTPUT] if t.kind == INPUT else []
        last = max(outputs, key=lambda s: s.order, default=None)
        return (t.tap, t.role, t.key, t.role, OWN) if last is None else (last.tap, last.role, t.key, t.role, ORDER)

    def _behind(self, sink: PlainTensor) -> list[_Place]:
        if sink.kind == INPUT:
            return [(sink.tap, sink.role, sink.key, "", ORDER)]
        takers = self.takers.get(sink.key, [])
        inner = [k for k in takers if not any(o[0].startswith(f"{k[0]}.") for o in takers)]
        if inner:
            return [(k[0], k[1], k, "", self.links[k][1]) for k in inner]
        at = self.in_order.index(sink)
        right = self._identical(sink.key)
        for t in self.in_order[at + 1 : at + 1 + _LOOKED_AT]:
            if t.kind == PARAM or t.order <= sink.order or (not right and self._identical(t.key)):
                continue  # nothing equal is made of what is not
            if any(s is sink for s in self.flow.before(t)):
                return [(t.tap, t.role, t.key, "", ORDER)]
        return []

    def _identical(self, key: Key) -> bool:
        return all(self.pairs[i].identical for i in self.by_key[key] if was_compared(self.pairs[i]))

    def _edge(self, tap: str, role: str, key: Key, role_in: str, by: str, steps: frozenset[int | None]) -> Edge:
        here = [i for i in self.by_key[key] if self.pairs[i].status != SKIP]
        at = [i for i in here if self.pairs[i].step in steps] or here
        if not at:
            return Edge(tap, role, role_in, None, None, SKIP, by, next(iter(self.by_key[key]), None))
        worst = max(at, key=lambda i: (self.pairs[i].status == FAIL, self.pairs.severities[i], -i))
        if all(self.pairs[i].identical for i in at):
            return Edge(tap, role, role_in, 0.0, 0.0, IDENTICAL, by, worst)
        pair = self.pairs[worst]
        error, over = value_of(pair), float(self.pairs.severities[worst])
        nan = error is not None and math.isnan(error)
        status = FAIL if pair.status == FAIL else PASS
        return Edge(tap, role, role_in, math.inf if nan else error, over, status, by, worst)


def with_neighbours(
    origins: Iterable[OriginEntry], neighbours: Iterable[OriginNeighbours | None], sources: Sources
) -> list[dict[str, Any]]:
    """compare.json's origins: with their neighbours, and where their code is."""
    out = []
    for origin, near in zip(origins, neighbours, strict=True):
        code = sources.get(str(origin.get("module")))
        known = {"source": dict(zip(("golden", "mine"), code, strict=True))} if code is not None else {}
        out.append({"gap": None} | dict(origin) | (near.plain() if near is not None else {}) | known)
    return out
