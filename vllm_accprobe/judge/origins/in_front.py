"""What stands in front of what: the tensors that may explain an error at a place.

The problem: an error is created where nothing in front of it explains it, and what is in front is written down nowhere.
The idea: modules enclose one another, so that there are two kinds of places. In front of a leaf's output are the same
call's inputs and parameters; in front of what lies between a parent's children, a child's input or the parent's own
output, are the parent's inputs and what its children gave before.
Not here: which rows of these count (influence.py), blame (origin.py), the tree (judge/flow.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.constants import NARROW
from vllm_accprobe.judge.flow import Tree
from vllm_accprobe.judge.origins.row_errors import INPUT, OUTPUT, PARAM, Trace
from vllm_accprobe.judge.routing import is_choice, is_logits, is_weight

BACKWARD = "backward."
"""What the places of backward runs begin with."""


class Fronts:
    """The traces of a comparison by tap and kind, and what stands in front of each of them in the ``tree``."""

    def __init__(self, traces: Sequence[Trace], tree: Tree):
        self.tree = tree
        self.by_tap: dict[str, dict[str, list[Trace]]] = defaultdict(lambda: {INPUT: [], OUTPUT: [], PARAM: []})
        for t in sorted(traces, key=lambda t: t.order):
            self.by_tap[t.tap][t.kind].append(t)
        self._given_out = sorted((t for t in traces if t.kind == OUTPUT), key=_order)
        self._silent_in: dict[str | None, list[tuple[str, list[Trace]]]] = {}

    def places(self, tap: str) -> list[tuple[Trace, list[Trace]]]:
        """Where ``tap`` itself may create an error, with what is in front: its outputs, and between its children."""
        children = self.tree.children.get(tap, [])
        own = self.by_tap[tap][OUTPUT]
        places = [(sink, self._inside(tap, sink) if children else self._before(tap, sink)) for sink in own]
        for child in children:
            places += [(sink, self._inside(tap, sink)) for sink in self.by_tap[child][INPUT]]
        return places

    def before(self, sink: Trace) -> list[Trace]:
        """What is in front of any tensor, as `places` says it of its place; of a parameter nothing."""
        if sink.kind == PARAM:
            return []
        if sink.kind == INPUT:
            return self._around(sink.tap, sink)
        return self._inside(sink.tap, sink) if self.tree.children.get(sink.tap) else self._before(sink.tap, sink)

    def _before(self, tap: str, sink: Trace) -> list[Trace]:
        """In front of a leaf's output: the same call's inputs and its parameters; without these, what came before."""
        mine = self.by_tap[tap]
        inputs = [t for t in mine[INPUT] if t.call == sink.call] or mine[INPUT]
        sources = inputs + mine[PARAM] + self._silent(tap)
        if not is_fed(inputs):
            sources += self._around(tap, sink)
        if tap.startswith(BACKWARD):  # what a backward run reads besides gradients, the forward run kept for it
            forward = self.by_tap.get(tap.removeprefix(BACKWARD), {})
            sources += [t for kind in (INPUT, PARAM, OUTPUT) for t in forward.get(kind, ())]
        return sources

    def _inside(self, tap: str, sink: Trace) -> list[Trace]:
        """In front of a place in the body of ``tap``: its inputs and parameters, and its children's earlier outputs."""
        mine = self.by_tap[tap]
        sources = [t for t in mine[INPUT] if t.order <= sink.order]
        if not is_fed(sources):
            sources = sources + self._around(tap, sink)
        sources = sources + mine[PARAM]
        for child in self.tree.children.get(tap, []):
            sources += self._given(child, sink)
        if tap == ROOT_TAP:  # logits and sampling read what the root gave out
            sources += [t for t in mine[OUTPUT] if t.order < sink.order]
        return sources

    def _given(self, tap: str, sink: Trace) -> list[Trace]:
        """What ``tap`` gave out before ``sink``; where nobody saw any of that (a compiled module is in the tree by its
        parameters alone), its parameters and what its children gave."""
        mine = self.by_tap[tap]
        if mine[OUTPUT]:
            return [t for t in mine[OUTPUT] if t.order < sink.order]
        inside = (t for child in self.tree.children.get(tap, []) for t in self._given(child, sink))
        return [*mine[PARAM], *inside]

    def _around(self, tap: str, sink: Trace) -> list[Trace]:
        up = self.tree.parent.get(tap)
        return self._inside(up, sink) if up is not None else self.earlier(sink)

    def earlier(self, sink: Trace) -> list[Trace]:
        """In order: what stands in front of the next place begins with the same (prefixes.py)."""
        return self._given_out[: bisect_left(self._given_out, sink.order, key=_order)]

    def _silent(self, tap: str) -> list[Trace]:
        """Parameters of siblings that never run as modules: lm_head's weight is used inside the logits processor."""
        up = self.tree.parent.get(tap)
        if up not in self._silent_in:
            siblings = self.tree.children.get(up, [])
            silent = [s for s in siblings if not self.by_tap[s][OUTPUT] and not self.tree.children.get(s)]
            self._silent_in[up] = [(s, self.by_tap[s][PARAM]) for s in silent if self.by_tap[s][PARAM]]
        return [t for s, params in self._silent_in[up] if s != tap for t in params]

    def is_part(self, tap: str, sink: Trace) -> bool:
        """Whether a place between children may be a slice of what one of them gave out (q, k and v of one product): of
        the whole's error a part may have any share, and nothing is computed there that could be out of the ordinary."""
        if sink.tap == tap or sink.kind != INPUT:
            return False
        before = [t for child in self.tree.children.get(tap, []) for t in self.by_tap[child][OUTPUT]]
        return any(t.order < sink.order and t.width > sink.width for t in before)

    def untapped(self, tap: str, sink: Trace) -> bool:
        """Whether operators that nobody saw lie between ``sink`` and what is in front of it: whole layers, or, where
        inputs were captured elsewhere, those that lead to a leaf without any (inside a compiled graph)."""
        leaf = sink.tap == tap and sink.kind == OUTPUT and not self.tree.children.get(tap)
        return sink.gap > 0 or (leaf and self._takes_inputs and not self.by_tap[tap][INPUT])

    @cached_property
    def _takes_inputs(self) -> bool:
        """Whether inputs of modules that gave something out were captured."""
        return any(kinds[INPUT] and kinds[OUTPUT] for kinds in self.by_tap.values())

    def unfed(self, tap: str, sink: Trace) -> bool:
        """Whether a leaf's output is compared and nothing that went into the leaf."""
        leaf = sink.tap == tap and sink.kind == OUTPUT and not self.tree.children.get(tap)
        inputs = self.by_tap[tap][INPUT]
        return leaf and not is_fed([t for t in inputs if t.call == sink.call] or inputs)

    def inputs_known(self, tap: str, sink: Trace, sources: list[Trace]) -> bool:
        """Whether an error of 0 in front of a leaf's output means equal inputs, and not that nobody saw them: a tensor
        that is no mere factor went into the same call, at all of its rows."""
        if sink.tap != tap or sink.kind != OUTPUT or self.tree.children.get(tap):
            return False
        wide = [s for s in sources if s.tap == tap and s.kind == INPUT and s.width >= NARROW and s.rounding]
        return any(s.vision == sink.vision and bool(np.isin(sink.seen.keys, s.seen.keys).all()) for s in wide)


def is_fed(inputs: Sequence[Trace]) -> bool:
    """Whether these are more than what a router said: of experts in compiled graphs only that went in visibly."""
    said = (is_choice(t.role, "") or is_weight(t.role, "") or is_logits(t.tap, t.role, "") for t in inputs)
    return not all(said)


def _order(t: Trace) -> int:
    return t.order
