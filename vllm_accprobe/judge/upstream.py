"""What is upstream of a tensor: the order of the data flow, the tree of taps, and errors that may reach a row.

The problem: an error is introduced where nothing upstream explains it, and no dump says what is upstream; a row of
attention depends on all earlier rows of its request, a linear layer's on one, a text row on all rows of its image. The
idea: sequence numbers give the order (`flow_order`), paths and spans the tree (`Tree`), numbered blocks the layers
passed (`Layers`). Upstream of a leaf's output are the call's inputs and parameters; upstream of a place between a
parent's children are the parent's inputs and the earlier children's outputs (`Upstream`). Of each source the largest
error that can reach a row counts (`Influence`): rows are sorted by key, so that "all earlier rows" is a running
maximum. Where no tree is known, all earlier outputs are upstream; `Prefixes` continues from the longest list already
worked out. Not here: limits (standards/limits.py), origins (origins.py).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.tokens import RowSet, position, subject
from vllm_accprobe.dump.schema import ROOT_TAP, Module
from vllm_accprobe.judge.constants import NARROW
from vllm_accprobe.judge.near_ties import is_choice, is_logits, is_weight
from vllm_accprobe.judge.tensor_errors import INPUT, OUTPUT, PARAM, Columns, TensorErrors, spread

Key = tuple[str, str, int]
"""(tap, role, call)."""
_MIXES = re.compile(r"attention|attn|mamba|ssm|conv|recurrent|retention|rwkv|delta|mixer|lstm|gru", re.I)
_ROWWISE = re.compile(
    r"linear|norm|embed|rotary|rope|act|silu|gelu|relu|mul|mlp|feedforward|ffn|moe|expert|router|gate|logits|sampler"
    r"|lmhead|dropout|identity",
    re.I,
)


def flow_order(records: Iterable[tuple[int, int, int, Key]]) -> list[Key]:
    """Orders keys from (step, rank, seq, key) of every record that has a step."""
    moments: dict[tuple[int, int], list[tuple[int, Key]]] = {}
    for step, rank, seq, key in records:
        moments.setdefault((step, rank), []).append((seq, key))
    ordered: list[Key] = []
    known: set[Key] = set()
    for moment in sorted(moments):
        if all(key in known for _, key in moments[moment]):
            continue
        sequence = list(dict.fromkeys(key for _, key in sorted(moments[moment], key=lambda item: item[0])))
        fresh: list[Key] = []
        for key in sequence:
            if key not in known:
                fresh.append(key)
            elif fresh:
                # Before what follows: the vision tower before the model, a later pipeline stage before the end.
                at = ordered.index(key)
                ordered[at:at] = fresh
                fresh = []
        if fresh:
            previous = [k for k in sequence[: sequence.index(fresh[0])] if k in known]
            at = ordered.index(previous[-1]) + 1 if previous else len(ordered)
            ordered[at:at] = fresh
        known.update(sequence)
    return ordered


def add_parameters(
    ordered: Sequence[Key], parameters: Iterable[tuple[str, str]], modules: Sequence[Module]
) -> list[Key]:
    """Puts each (tap, role) of a parameter before its tap's first tensor, or, for a tap that never ran as a module,
    behind the last tensor of the module that stands before it in the model's tree."""
    by_tap: dict[str, list[Key]] = {}
    for tap, role in parameters:
        by_tap.setdefault(tap, []).append((tap, role, 0))
    if not by_tap:
        return list(ordered)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, (tap, _, _) in enumerate(ordered):
        first.setdefault(tap, i)
        last[tap] = i
    put: dict[float, list[Key]] = {}
    place = -1.0
    index = [m.tap for m in sorted(modules, key=lambda m: m.index)]
    for tap in index + [t for t in by_tap if t not in set(index)]:
        if tap in by_tap:
            put.setdefault(first[tap] - 0.5 if tap in first else place + 0.25, []).extend(by_tap.pop(tap))
        if tap in last and tap != ROOT_TAP:
            place = float(last[tap])
    out = [(float(i), key) for i, key in enumerate(ordered)]
    out += [(at, key) for at, keys in put.items() for key in keys]
    return [key for _, key in sorted(out, key=lambda item: item[0])]  # stable: what is put at one place keeps its order


@dataclass
class Tree:
    """The taps of one dump that have tensors. parent: nearest enclosing tap; children likewise; all in flow order.

    A tap encloses those whose paths begin with its own, and a neighbour that runs while it runs (the logits processor
    calls lm_head)."""

    classes: Mapping[str, str]
    parent: dict[str, str | None] = field(default_factory=dict)
    children: dict[str | None, list[str]] = field(default_factory=dict)
    mixing: dict[str, bool] = field(default_factory=dict)

    @staticmethod
    def of(taps: Sequence[str], classes: Mapping[str, str], spans: Mapping[str, tuple[int, int]] | None = None) -> Tree:
        """spans: for taps with inputs and outputs, the places of the first and the last of them in the flow."""
        tree = Tree(classes)
        known = set(taps)
        for tap in taps:
            above = () if tap == ROOT_TAP else (*enclosing(tap), ROOT_TAP)
            tree.parent[tap] = next((up for up in above if up in known), None)
        for tap, up in list(tree.parent.items()):
            if up is not None and spans and tap in spans:
                first, last = spans[tap]
                siblings = [s for s in taps if s != tap and tree.parent[s] == up and s in spans]
                callers = [s for s in siblings if spans[s][0] < first and last < spans[s][1]]
                if callers:
                    tree.parent[tap] = min(callers, key=lambda s: spans[s][1] - spans[s][0])
        for tap in taps:
            tree.children.setdefault(tree.parent[tap], []).append(tap)
        for tap in sorted(dict.fromkeys(taps), key=lambda t: -len(tree.above(t))):
            cls = classes.get(tap, "")
            inside = any(tree.mixing[c] for c in tree.children.get(tap, ()))
            tree.mixing[tap] = inside or mixes(tap, cls)
        return tree

    def above(self, tap: str) -> list[str]:
        out = []
        up = self.parent.get(tap)
        while up is not None:
            out.append(up)
            up = self.parent.get(up)
        return out


def mixes(tap: str, cls: str) -> bool:
    """Whether a row of the output depends on other rows of the input."""
    what = cls or tap.rpartition(".")[2].replace("_", "")
    plain = re.search(r"norm|linear|embed|rotary|rope", what, re.I)
    if _MIXES.search(what) and not plain:
        return True
    return not _ROWWISE.search(what)


_NOWHERE, _BEHIND = 1e18, 1e19
"""Places: of what the tree does not hold, and of what comes behind even that."""
_BLOCK = re.compile(r"^(.*?\.)?(\d+)(?=\.|$)")


def block_of(tap: str) -> str | None:
    """The outermost numbered block in which a tap stands: ``model.layers.3`` of ``model.layers.3.mlp``."""
    match = _BLOCK.match(tap)
    return match.group(0) if match else None


class Layers:
    """The layers of one dump, and how many of them each of its keys has behind it.

    ordered: keys in order of the flow. modules: the model's tree, as far as it was selected. unseen: taps that ran
    without being seen (see `unseen_taps`)."""

    def __init__(self, ordered: Sequence[Key], modules: Sequence[Module], unseen: Iterable[str] = ()):
        seen = {b for tap, role, _ in ordered if not _is_param(role) and (b := block_of(tap))}
        self._index = {m.tap: m.index for m in modules}
        self._unseen: dict[str, float] = {}
        for tap in unseen:
            block = block_of(tap)
            if block is not None and block not in seen:
                at = float(self._index.get(tap, _NOWHERE))
                self._unseen[block] = min(at, self._unseen.get(block, _NOWHERE))
        self._passed: dict[Key, frozenset[str]] = {}
        now: frozenset[str] = frozenset()
        for key in ordered:
            now = self._after(now, key)
            self._passed[key] = now

    def _after(self, now: frozenset[str], key: Key) -> frozenset[str]:
        tap, role, _ = key
        # A block counts as passed for its own taps too; a parent's parameters and inputs come before.
        if _is_param(role):
            return now
        own = block_of(tap)
        more = {own} if own is not None else set()
        if self._unseen:
            place = _place(tap, role, self._index)
            more |= {b for b, at in self._unseen.items() if at < place or (own is not None and _earlier(b, own))}
        return now if more <= now else now | more

    def passed(self, key: Key) -> frozenset[str]:
        """The layers that the data has entered at ``key``; those of an unknown key are none."""
        return self._passed.get(key, frozenset())


def gaps(passed: Sequence[frozenset[str]], taps: Sequence[str], counts: Sequence[bool]) -> list[int]:
    """For each compared tensor, in order of the flow, how many layers without a compared tap were passed since the one
    before. counts: False for parameters, which have no place in the flow: 0."""
    compared = {block_of(tap) for tap, yes in zip(taps, counts, strict=True) if yes}
    out, before = [], 0
    known: dict[frozenset[str], int] = {}
    for layers, yes in zip(passed, counts, strict=True):
        if not yes:
            out.append(0)
            continue
        if layers not in known:
            known[layers] = len(layers - compared)
        out.append(max(known[layers] - before, 0))
        before = max(known[layers], before)
    return out


def _is_param(role: str) -> bool:
    return role.startswith("param.")


def unseen_taps(dump: Any) -> list[str]:
    """Taps of a dump that ran and were not seen: not selected, or inside of what torch.compile made one piece of."""
    out = {s.tap for s in dump.skips if s.reason.startswith("not selected")}
    compiled = {s.tap for s in dump.skips if s.reason.startswith("compiled")}
    if compiled:
        taps = {m.tap for modules in dump.modules.values() for m in modules} | {s.tap for s in dump.skips}
        out |= {t for t in taps if not compiled.isdisjoint((t, *enclosing(t)))}
    return sorted(out)


def _earlier(block: str, other: str) -> bool:
    (here, _, n), (there, _, m) = block.rpartition("."), other.rpartition(".")
    return here == there and int(n) < int(m)


def _place(tap: str, role: str, index: Mapping[str, int]) -> float:
    """Where a tap stands in the model's tree: the root's outputs and the sampler behind everything (even what has no
    place), a tap that is not in the tree before everything."""
    if tap == ROOT_TAP:
        return -1.0 if role.startswith("input") else _BEHIND
    if "." not in tap and tap not in index:
        return _BEHIND
    return float(next((index[t] for t in (tap, *enclosing(tap)) if t in index), -1))


KEPT = 64 << 20
"""Bytes of answers that are kept."""


@dataclass(frozen=True, eq=False)
class PassedOn:
    """What a list of sources passes on to the rows of a place: as TensorStats' before, gain_before, columns_before."""

    err: np.ndarray
    gain: np.ndarray
    columns: list[Columns]


class Influence:
    """images: TokenPlan.images, subject of a vision row → the text places which its image fills."""

    def __init__(self, images: Mapping[int, list[tuple[int, int, int]]], kept: int = KEPT):
        self.images, self._limit = images, kept
        self._found: OrderedDict[tuple[Any, ...], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._whole: dict[tuple[RowSet, RowSet], bool] = {}

    def again(
        self, source: TensorErrors, what: str, values: np.ndarray, vision: bool, rows: RowSet, mixing: bool
    ) -> np.ndarray:
        """`of`, remembered. what: names ``values``, which must be the same for one source."""
        name = source, what, vision, rows, mixing
        if name in self._found:
            self._found.move_to_end(name)
            return self._found[name]
        self._found[name] = found = self.of(source, values, vision, rows, mixing)
        self._bytes += found.nbytes
        while self._bytes > self._limit and len(self._found) > 1:
            self._bytes -= self._found.popitem(last=False)[1].nbytes
        return found

    def of(self, source: TensorErrors, values: np.ndarray, vision: bool, wanted: RowSet, mixing: bool) -> np.ndarray:
        """The largest of ``values`` (of ``source``'s rows with errors) among the rows that can influence each of the
        ``wanted``, which are sorted: float64 [len(wanted)], to be read only. vision: these are rows of images."""
        base, keys = source.everywhere, wanted.keys
        if not len(source.keys) or (vision and not source.vision):
            return np.full(len(keys), base)
        if source.vision and vision:
            found = _same_subject(source.keys, values, keys)
        else:
            rows, seen = source.keys, source.seen
            if source.vision:
                rows, values = self._as_text(source.keys, values)
                seen = RowSet(rows)
            found = self._causal(rows, values, seen, wanted) if mixing else spread(keys, rows, values)
        return np.maximum(base, found)

    def passed_on(
        self, sink: TensorErrors, sources: list[TensorErrors], mixing: bool, known: PassedOn | None
    ) -> PassedOn:
        """What reaches the rows of ``sink`` from ``sources``, and from those whose share is ``known``."""
        if known is None:
            before, gain = np.zeros(len(sink.seen)), np.zeros(len(sink.seen))
        else:
            before, gain = known.err.copy(), known.gain.copy()
        for source in sources:
            # What has few elements multiplies whole rows: a gate, the weights of the chosen experts.
            factor = np.maximum(np.abs(source.gain), source.rel) if source.width < NARROW else np.abs(source.gain)
            for what, values, out in (("rel", source.rel, before), ("gain", factor, gain)):
                if len(values) == len(source.keys):
                    found = self.again(source, what, values, sink.vision, sink.seen, mixing)
                    np.maximum(out, found, out=out)
        columns = [s.by_column for s in sources if s.by_column is not None]
        return PassedOn(before, gain, columns if known is None else [*known.columns, *columns])

    def _as_text(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An image's error, at the text positions which the image fills: (keys, values)."""
        worst: dict[int, float] = {}
        for who, e in zip(subject(keys).tolist(), values.tolist(), strict=True):
            worst[who] = max(worst.get(who, 0.0), e)
        at: dict[int, float] = {}
        for who, e in worst.items():
            for text, first, n in self.images.get(who, ()):
                for p in range(first, first + n):
                    key = (text << 32) | p
                    at[key] = max(at.get(key, 0.0), e)
        rows = np.array(sorted(at), np.int64)
        return rows, np.array([at[k] for k in rows.tolist()])

    def _causal(self, rows: np.ndarray, values: np.ndarray, seen: RowSet, wanted: RowSet) -> np.ndarray:
        """Rows of the same request at positions up to the row's; where such a row was computed for another request (a
        shared prefix in the cache), any request's row at that position."""
        keys = wanted.keys
        if not self._complete(seen, wanted):
            return _causal_anywhere(rows, values, seen.keys, keys)
        most = np.array(values, np.float64)
        edges = [*_edges(rows), len(rows)]
        for start, stop in pairwise(edges):
            np.maximum.accumulate(most[start:stop], out=most[start:stop])
        if rows is keys:
            return most
        first = np.searchsorted(rows, subject(keys) << 32)
        at = np.searchsorted(rows, keys, side="right")
        return np.where(at > first, most[np.maximum(at - 1, 0)], 0.0)

    def _complete(self, seen: RowSet, wanted: RowSet) -> bool:
        """Whether ``seen`` has all rows of each request up to the last one that is ``wanted``."""
        name = seen, wanted
        if name not in self._whole:
            keys = wanted.keys
            starts = _edges(keys)
            last = keys[np.append(starts[1:], len(keys)) - 1] if len(keys) else keys
            have = np.searchsorted(seen.keys, last, side="right") - np.searchsorted(seen.keys, subject(last) << 32)
            self._whole[name] = bool((have > position(last)).all())
            while len(self._whole) > 64:
                self._whole.pop(next(iter(self._whole)))
        return self._whole[name]


def _edges(keys: np.ndarray) -> np.ndarray:
    who = subject(keys)
    return np.flatnonzero(np.append(True, who[1:] != who[:-1])) if len(keys) else np.zeros(0, np.int64)


def _same_subject(rows: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    who, owners = subject(keys), subject(rows)
    out = np.zeros(len(keys))
    for one in np.unique(who):
        mask = owners == one
        if mask.any():
            out[who == one] = values[mask].max()
    return out


def _causal_anywhere(rows: np.ndarray, values: np.ndarray, seen: np.ndarray, keys: np.ndarray) -> np.ndarray:
    out = np.zeros(len(keys))
    where = position(keys)
    source_at, seen_at = position(rows), position(seen)
    for one in np.unique(subject(keys)):  # all keys are sorted: a request is a stretch
        mine, own, have = (_stretch(k, int(one)) for k in (keys, rows, seen))
        at, err = source_at[own], values[own]
        top = int(where[mine][-1])
        if np.searchsorted(seen_at[have], top, side="right") <= top:  # rows of this request are missing
            other = ~np.isin(source_at, seen_at[have])
            other[own] = False
            at, err = np.concatenate([at, source_at[other]]), np.concatenate([err, values[other]])
            order = np.argsort(at, kind="stable")
            at, err = at[order], err[order]
        if not len(at):
            continue
        err = np.maximum.accumulate(err)
        i = np.searchsorted(at, where[mine], side="right")
        out[mine] = np.where(i > 0, err[np.maximum(i - 1, 0)], 0.0)
    return out


def _stretch(keys: np.ndarray, who: int) -> slice:
    first, last = np.searchsorted(keys, [who << 32, (who + 1) << 32])
    return slice(int(first), int(last))


LONG = 16
"""Shorter lists are not worth it."""
OPEN = 16
"""Lists that are remembered: places come tap by tap, so that few are open at a time."""
S = TypeVar("S")


class Prefixes(Generic[S]):
    """Remembers a state S, never to be changed in place, for lists of sources."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[list[TensorErrors], S]] = OrderedDict()

    def begun(
        self, name: tuple[Hashable, ...], sources: Sequence[TensorErrors], sink: TensorErrors
    ) -> tuple[int, S | None]:
        """(how many of ``sources`` a state is known for, the state). name: what else it depends on. sink: is no source
        of its own, so that nothing is known where it is among them."""
        if len(sources) < LONG or (name, sources[0]) not in self._known:
            return 0, None
        known, state = self._known[name, sources[0]]
        if len(known) > len(sources) or list(sources[: len(known)]) != known or sink in known:
            return 0, None
        return len(known), state

    def keep(self, name: tuple[Hashable, ...], sources: Sequence[TensorErrors], sink: TensorErrors, state: S) -> None:
        if len(sources) < LONG or sink in sources:
            return
        self._known[name, sources[0]] = list(sources), state
        self._known.move_to_end((name, sources[0]))
        while len(self._known) > OPEN:
            self._known.popitem(last=False)


BACKWARD = "backward."
"""What the places of backward runs begin with."""


class Upstream:
    """The traces of a comparison by tap and kind, and what stands in front of each of them in the ``tree``."""

    def __init__(self, traces: Sequence[TensorErrors], tree: Tree):
        self.tree = tree
        self.by_tap: dict[str, dict[str, list[TensorErrors]]] = defaultdict(lambda: {INPUT: [], OUTPUT: [], PARAM: []})
        for t in sorted(traces, key=lambda t: t.order):
            self.by_tap[t.tap][t.kind].append(t)
        self._given_out = sorted((t for t in traces if t.kind == OUTPUT), key=_order)
        self._silent_in: dict[str | None, list[tuple[str, list[TensorErrors]]]] = {}

    def places(self, tap: str) -> list[tuple[TensorErrors, list[TensorErrors]]]:
        """Where ``tap`` itself may create an error, with what is in front: its outputs, and between its children."""
        children = self.tree.children.get(tap, [])
        own = self.by_tap[tap][OUTPUT]
        places = [(sink, self._inside(tap, sink) if children else self._before(tap, sink)) for sink in own]
        for child in children:
            places += [(sink, self._inside(tap, sink)) for sink in self.by_tap[child][INPUT]]
        return places

    def before(self, sink: TensorErrors) -> list[TensorErrors]:
        """What is in front of any tensor, as `places` says it of its place; of a parameter nothing."""
        if sink.kind == PARAM:
            return []
        if sink.kind == INPUT:
            return self._around(sink.tap, sink)
        return self._inside(sink.tap, sink) if self.tree.children.get(sink.tap) else self._before(sink.tap, sink)

    def _before(self, tap: str, sink: TensorErrors) -> list[TensorErrors]:
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

    def _inside(self, tap: str, sink: TensorErrors) -> list[TensorErrors]:
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

    def _given(self, tap: str, sink: TensorErrors) -> list[TensorErrors]:
        """What ``tap`` gave out before ``sink``; where nobody saw any of that (a compiled module is in the tree by its
        parameters alone), its parameters and what its children gave."""
        mine = self.by_tap[tap]
        if mine[OUTPUT]:
            return [t for t in mine[OUTPUT] if t.order < sink.order]
        inside = (t for child in self.tree.children.get(tap, []) for t in self._given(child, sink))
        return [*mine[PARAM], *inside]

    def _around(self, tap: str, sink: TensorErrors) -> list[TensorErrors]:
        up = self.tree.parent.get(tap)
        return self._inside(up, sink) if up is not None else self.earlier(sink)

    def earlier(self, sink: TensorErrors) -> list[TensorErrors]:
        """In order: what stands in front of the next place begins with the same (Prefixes)."""
        return self._given_out[: bisect_left(self._given_out, sink.order, key=_order)]

    def _silent(self, tap: str) -> list[TensorErrors]:
        """Parameters of siblings that never run as modules: lm_head's weight is used inside the logits processor."""
        up = self.tree.parent.get(tap)
        if up not in self._silent_in:
            siblings = self.tree.children.get(up, [])
            silent = [s for s in siblings if not self.by_tap[s][OUTPUT] and not self.tree.children.get(s)]
            self._silent_in[up] = [(s, self.by_tap[s][PARAM]) for s in silent if self.by_tap[s][PARAM]]
        return [t for s, params in self._silent_in[up] if s != tap for t in params]

    def is_part(self, tap: str, sink: TensorErrors) -> bool:
        """Whether a place between children may be a slice of what one of them gave out (q, k and v of one product): of
        the whole's error a part may have any share, and nothing is computed there that could be out of the ordinary."""
        if sink.tap == tap or sink.kind != INPUT:
            return False
        before = [t for child in self.tree.children.get(tap, []) for t in self.by_tap[child][OUTPUT]]
        return any(t.order < sink.order and t.width > sink.width for t in before)

    def untapped(self, tap: str, sink: TensorErrors) -> bool:
        """Whether operators that nobody saw lie between ``sink`` and what is in front of it: whole layers, or, where
        inputs were captured elsewhere, those that lead to a leaf without any (inside a compiled graph)."""
        leaf = sink.tap == tap and sink.kind == OUTPUT and not self.tree.children.get(tap)
        return sink.gap > 0 or (leaf and self._takes_inputs and not self.by_tap[tap][INPUT])

    @cached_property
    def _takes_inputs(self) -> bool:
        return any(kinds[INPUT] and kinds[OUTPUT] for kinds in self.by_tap.values())

    def unfed(self, tap: str, sink: TensorErrors) -> bool:
        leaf = sink.tap == tap and sink.kind == OUTPUT and not self.tree.children.get(tap)
        inputs = self.by_tap[tap][INPUT]
        return leaf and not is_fed([t for t in inputs if t.call == sink.call] or inputs)

    def inputs_known(self, tap: str, sink: TensorErrors, sources: list[TensorErrors]) -> bool:
        """Whether an error of 0 upstream of a leaf's output means equal inputs, and not that they were not captured: a
        tensor that is no mere factor went into the same call, at all of its rows."""
        if sink.tap != tap or sink.kind != OUTPUT or self.tree.children.get(tap):
            return False
        wide = [s for s in sources if s.tap == tap and s.kind == INPUT and s.width >= NARROW and s.rounding]
        return any(s.vision == sink.vision and bool(np.isin(sink.seen.keys, s.seen.keys).all()) for s in wide)


def is_fed(inputs: Sequence[TensorErrors]) -> bool:
    """Whether these are more than what a router said: of experts in compiled graphs only that went in visibly."""
    said = (is_choice(t.role, "") or is_weight(t.role, "") or is_logits(t.tap, t.role, "") for t in inputs)
    return not all(said)


def _order(t: TensorErrors) -> int:
    return t.order
