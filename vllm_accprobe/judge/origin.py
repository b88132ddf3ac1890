"""Which taps made an error, rather than passing one on.

The problem: behind the first wrong number everything is wrong, and a wrong token makes all later tokens wrong
through attention. The idea: what stands in a tap's way is compared with what comes out, row by row. A tensor's error at
a row is CREATED there if it exceeds the limit by more than the errors in front of it explain: those of the tap's
inputs and parameters at the rows that can influence this one. In front of a leaf's output are its inputs. Between the
children of a parent (a residual addition, a reshape, a call that no hook sees) lie the children's inputs: in front of
them are the parent's inputs and the outputs that came before; what is created there is the parent's own doing. So the
deepest visible module is blamed, and a parent only for what none of its children shows.
Not here: how large an error is (verdict.py), what is in front of what (flow.py), flipped tokens (flips.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import position, subject
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.flow import Tree
from vllm_accprobe.judge.hidden import COLUMNS, GAIN, GROWTH, NARROW, Hidden, Look, Peers
from vllm_accprobe.judge.standards import Standard

AFTER_ANOTHER = {COLUMNS: 2.0, GAIN: 3.0, GROWTH: 3.0}
"""How strong a hidden sign must be (hidden.Hidden.strength) behind another origin."""
INPUT, OUTPUT, PARAM = "input", "output", "param"
_NONE = np.zeros(0, np.int64)
_NO_NUMBERS = np.zeros(0)


@dataclass(frozen=True)
class Trace:
    """One (tap, role, call) of mine with its errors.

    kind: input, output (also what was changed in place) or param. seen: sorted keys of the rows that were compared.
    keys, err: the rows with an error, sorted by key, and how large it is (verdict.RowErrors.err). everywhere: an error
    that belongs to no row (a parameter). limit: what the tap may create. vision: the keys are rows of images.
    allowed: what may have piled up there. weak: err is a lower bound, from statistics. rel, gain: of the same rows,
    relative L2 error and slope of mine over the golden minus 1. rounding: one rounding's relative error, 0.0 where
    values must be equal. columns: metrics.structure's sums. width: elements of a row.
    """

    tap: str
    role: str
    call: int
    kind: str
    order: int
    limit: float
    seen: np.ndarray
    keys: np.ndarray
    err: np.ndarray
    everywhere: float = 0.0
    vision: bool = False
    allowed: float = 0.0
    weak: bool = False
    rel: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)
    gain: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)
    rounding: float = 0.0
    columns: np.ndarray | None = None
    width: int = 1


@dataclass(frozen=True)
class Created:
    """An origin: rows ``keys`` of ``trace`` (none for a parameter), with what came in front of them.

    hidden: the sign by which an error was found that lies within fixed limits (hidden.py). look: all rows of the trace
    with what stood in front of them."""

    tap: str
    trace: Trace
    keys: np.ndarray
    err: np.ndarray
    explained: np.ndarray
    evidence: str
    hidden: Hidden | None = None
    look: Look | None = None


def kind_of(role: str) -> str:
    return INPUT if role.startswith("input") else PARAM if role.startswith("param") else OUTPUT


def find_origins(
    traces: Sequence[Trace], tree: Tree, standard: Standard, images: Mapping[int, list[tuple[int, int, int]]]
) -> list[Created]:
    """The taps that create errors, in data-flow order. images: TokenPlan.images."""
    return _Search(traces, tree, standard, images).run()


class _Search:
    def __init__(self, traces: Sequence[Trace], tree: Tree, standard: Standard, images: Mapping[int, Any]):
        self.tree, self.standard, self.images = tree, standard, images
        self.by_tap: dict[str, dict[str, list[Trace]]] = defaultdict(lambda: {INPUT: [], OUTPUT: [], PARAM: []})
        for t in sorted(traces, key=lambda t: t.order):
            self.by_tap[t.tap][t.kind].append(t)
        self.found: dict[str, list[Created]] = defaultdict(list)
        self.looks: dict[tuple[str, int], Look] = {}

    def run(self) -> list[Created]:
        self._look()
        taps = sorted(self.by_tap, key=lambda t: -_level(self.tree, t))
        for tap in taps:  # the deepest first, so that a parent knows what its descendants are blamed for
            for t in self.by_tap[tap][PARAM]:
                if t.everywhere > 0:
                    one = np.array([t.everywhere])
                    self.found[tap].append(Created(tap, t, _NONE, one, np.zeros(1), "values"))
            self._body(tap)
        self._top()
        found = _sure(sorted((c for cs in self.found.values() for c in cs), key=lambda c: c.trace.order))
        return [replace(c, look=self.looks.get((c.tap, id(c.trace)))) for c in found]

    def _look(self) -> None:
        """Looks at every place and what is in front of it, before anybody is blamed: all are each other's measure."""
        for tap in list(self.by_tap):  # asking for a tap that has no trace adds it
            for sink, sources in self._places(tap):
                if sink.rounding and len(sink.seen) and not sink.weak:
                    self.looks[(tap, id(sink))] = self._look_at(tap, sink, sources)
        self.peers = Peers(list(self.looks.values()))

    def _look_at(self, tap: str, sink: Trace, sources: list[Trace]) -> Look:
        mixing = self.tree.mixing.get(tap, True)
        before, gain = np.zeros(len(sink.seen)), np.zeros(len(sink.seen))
        for source in sources:
            if source is sink:
                continue
            # What has few elements multiplies whole rows: a gate, the weights of the chosen experts.
            factor = np.maximum(np.abs(source.gain), source.rel) if source.width < NARROW else np.abs(source.gain)
            for values, out in ((source.rel, before), (factor, gain)):
                if len(values) == len(source.keys):
                    plain = replace(source, err=values)
                    np.maximum(out, self._influence(plain, sink, sink.seen, mixing), out=out)
        role = sink.role if sink.tap == tap else f"{sink.tap}/{sink.role}"
        err, slope = (_spread(sink.seen, sink.keys, v) for v in (sink.rel, sink.gain))
        columns = [s.columns for s in sources if s.columns is not None and s is not sink]
        cls = self.tree.classes.get(tap, "")
        rows = sink.seen, err, slope, before, gain
        return Look(tap, role, cls, sink.rounding, *rows, sink.width, sink.columns, columns, mixing)

    def _places(self, tap: str) -> list[tuple[Trace, list[Trace]]]:
        """Where ``tap`` itself may create an error, with what is in front: its outputs, and between its children."""
        children = self.tree.children.get(tap, [])
        own = self.by_tap[tap][OUTPUT]
        places = [(sink, self._inside(tap, sink) if children else self._before(tap, sink)) for sink in own]
        for child in children:
            places += [(sink, self._inside(tap, sink)) for sink in self.by_tap[child][INPUT]]
        return places

    def _body(self, tap: str) -> None:
        below = self._blamed_below(tap)
        for sink, sources in self._places(tap):
            self._check(tap, sink, sources, self.tree.mixing.get(tap, True), below)

    def _top(self) -> None:
        """What is created in front of the outermost taps, where nobody else can be blamed: their inputs."""
        for tap in self.tree.children.get(None, []):
            for sink in self.by_tap[tap][INPUT]:
                self._check(tap, sink, self._earlier(sink), True, [])

    def _before(self, tap: str, sink: Trace) -> list[Trace]:
        """In front of a leaf's output: the same call's inputs and its parameters; without inputs, what came before."""
        mine = self.by_tap[tap]
        inputs = [t for t in mine[INPUT] if t.call == sink.call] or mine[INPUT]
        sources = inputs + mine[PARAM] + self._silent(tap)
        if not inputs:
            sources += self._around(tap, sink)
        return sources

    def _inside(self, tap: str, sink: Trace) -> list[Trace]:
        """In front of a place in the body of ``tap``: its inputs and parameters, and its children's earlier outputs."""
        mine = self.by_tap[tap]
        sources = [t for t in mine[INPUT] if t.order <= sink.order]
        if not sources:
            sources = self._around(tap, sink)
        sources = sources + mine[PARAM]
        for child in self.tree.children.get(tap, []):
            sources += [t for t in self.by_tap[child][OUTPUT] if t.order < sink.order]
            sources += self.by_tap[child][PARAM] if not self.by_tap[child][OUTPUT] else []
        if tap == ROOT_TAP:  # logits and sampling read what the root gave out
            sources += [t for t in mine[OUTPUT] if t.order < sink.order]
        return sources

    def _around(self, tap: str, sink: Trace) -> list[Trace]:
        up = self.tree.parent.get(tap)
        return self._inside(up, sink) if up is not None else self._earlier(sink)

    def _earlier(self, sink: Trace) -> list[Trace]:
        return [t for kinds in self.by_tap.values() for t in kinds[OUTPUT] if t.order < sink.order]

    def _silent(self, tap: str) -> list[Trace]:
        """Parameters of siblings that never run as modules: lm_head's weight is used inside the logits processor."""
        siblings = self.tree.children.get(self.tree.parent.get(tap), [])
        silent = (s for s in siblings if s != tap and not self.by_tap[s][OUTPUT] and not self.tree.children.get(s))
        return [t for s in silent for t in self.by_tap[s][PARAM]]

    def _blamed_below(self, tap: str) -> list[Trace]:
        """What descendants created, as sources of unlimited error."""
        out = []
        todo = list(self.tree.children.get(tap, []))
        while todo:
            child = todo.pop()
            todo += self.tree.children.get(child, [])
            for c in self.found[child]:
                everywhere = 0.0 if len(c.keys) else np.inf
                err = np.full(len(c.keys), np.inf)
                out.append(replace(c.trace, keys=c.keys, err=err, everywhere=everywhere))
        return out

    def _check(self, tap: str, sink: Trace, sources: list[Trace], mixing: bool, below: list[Trace]) -> None:
        bad = sink.err > sink.limit
        if not bad.any():
            self._check_hidden(tap, sink, below)
            return
        keys, err = sink.keys[bad], sink.err[bad]
        explained = np.zeros(len(keys))
        for source in [*sources, *(b for b in below if b.order < sink.order)]:
            if source is not sink:
                found = self._influence(source, sink, keys, mixing)
                if source.weak:  # what is known to be wrong may be wrong by any amount
                    found = np.where(found > source.limit, np.inf, found * self.standard.amplification)
                np.maximum(explained, found, out=explained)
        rules = self.standard
        share = np.where(explained > sink.limit, rules.wild, rules.amplification)
        created = (err > sink.limit + share * explained) & (explained < rules.garbage)
        created &= ~(np.isinf(err) & (explained > max(sink.limit, 0.0)))
        if created.any():
            evidence = "values" if np.isinf(err[created]).any() else "jump"
            self.found[tap].append(Created(tap, sink, keys[created], err[created], explained[created], evidence))
        else:
            self._check_hidden(tap, sink, below)

    def _check_hidden(self, tap: str, sink: Trace, below: list[Trace]) -> None:
        look = self.looks.get((tap, id(sink)))
        # What a child made that is blamed already shows again between the children, in other parts and proportions.
        if look is None or any(s.order < sink.order for s in below):
            return
        hidden = self.peers.judge(look)
        if hidden is not None:
            rows = hidden.rows
            found = look.keys[rows], np.maximum(look.err, np.abs(look.gain))[rows], look.before[rows]
            self.found[tap].append(Created(tap, sink, *found, "jump", hidden))

    def _influence(self, source: Trace, sink: Trace, keys: np.ndarray, mixing: bool) -> np.ndarray:
        """The largest error of ``source`` among the rows that can influence each of ``keys``: float64 [len(keys)]."""
        base = np.full(len(keys), source.everywhere)
        if not len(source.keys):
            return base
        if source.vision and not sink.vision:
            source = self._as_text(source)
        elif sink.vision and not source.vision:
            return base
        elif source.vision:
            return np.maximum(base, _same_subject(source, keys))
        return np.maximum(base, _causal(source, keys) if mixing else _same_row(source, keys))

    def _as_text(self, source: Trace) -> Trace:
        """An image's error, at the text positions which the image fills."""
        worst: dict[int, float] = {}
        for who, e in zip(subject(source.keys).tolist(), source.err.tolist(), strict=True):
            worst[who] = max(worst.get(who, 0.0), e)
        at: dict[int, float] = {}
        for who, e in worst.items():
            for text, first, n in self.images.get(who, ()):
                for p in range(first, first + n):
                    key = (text << 32) | p
                    at[key] = max(at.get(key, 0.0), e)
        keys = np.array(sorted(at), np.int64)
        err = np.array([at[k] for k in keys.tolist()])
        return Trace(source.tap, source.role, source.call, source.kind, source.order, 0.0, keys, keys, err)


def _sure(created: list[Created]) -> list[Created]:
    """Without signs that are weak where something before has been found: a fault's traces are no honest noise."""
    out: list[Created] = []
    for c in created:
        if c.hidden is None or not out or c.hidden.strength > AFTER_ANOTHER[c.hidden.how]:
            out.append(c)
    return out


def _spread(wanted: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``values`` of the sorted ``keys`` at all ``wanted`` keys, 0 where there is none."""
    out = np.zeros(len(wanted))
    if len(keys) and len(values) == len(keys):
        if np.array_equal(keys, wanted):  # the usual case, at a tenth of the cost
            return values.astype(np.float64)
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        out = np.where(keys[at] == wanted, values[at], 0.0)
    return out


def _level(tree: Tree, tap: str) -> int:
    return len(tree.above(tap))


def _same_row(source: Trace, keys: np.ndarray) -> np.ndarray:
    if np.array_equal(source.keys, keys):
        return source.err
    at = np.minimum(np.searchsorted(source.keys, keys), len(source.keys) - 1)
    return np.where(source.keys[at] == keys, source.err[at], 0.0)


def _same_subject(source: Trace, keys: np.ndarray) -> np.ndarray:
    who = subject(keys)
    out = np.zeros(len(keys))
    for one in np.unique(who):
        mask = subject(source.keys) == one
        if mask.any():
            out[who == one] = source.err[mask].max()
    return out


def _causal(source: Trace, keys: np.ndarray) -> np.ndarray:
    """Rows of the same request at positions up to the row's; where such a row was computed for another request (a
    shared prefix in the cache), any request's row at that position."""
    out = np.zeros(len(keys))
    where = position(keys)
    source_at, seen_at = position(source.keys), position(source.seen)
    for one in np.unique(subject(keys)):  # all keys are sorted: a request is a stretch
        mine, own, seen = (_stretch(k, int(one)) for k in (keys, source.keys, source.seen))
        at, err = source_at[own], source.err[own]
        have = seen_at[seen]
        top = int(where[mine][-1])
        if np.searchsorted(have, top, side="right") <= top:  # rows of this request are missing before its last one
            other = ~np.isin(source_at, have)
            other[own] = False
            at, err = np.concatenate([at, source_at[other]]), np.concatenate([err, source.err[other]])
            order = np.argsort(at, kind="stable")
            at, err = at[order], err[order]
        if not len(at):
            continue
        err = np.maximum.accumulate(err)
        i = np.searchsorted(at, where[mine], side="right")
        out[mine] = np.where(i > 0, err[np.maximum(i - 1, 0)], 0.0)
    return out


def _stretch(keys: np.ndarray, who: int) -> slice:
    """Where the rows of one request lie in sorted ``keys``."""
    first, last = np.searchsorted(keys, [who << 32, (who + 1) << 32])
    return slice(int(first), int(last))


def merge_seen(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The sorted union of several key arrays."""
    arrays = [a for a in arrays if len(a)]
    return np.unique(np.concatenate(arrays)) if arrays else _NONE
