"""What feeds what: the order of the data flow, the tree of taps, and what stands in front of a tensor.

The problem: a dump has tensors and no edges, and planning, judging, gaps and reports must agree on what is upstream.
The idea: sequence numbers give the order (`flow_order`), paths and spans the tree (`Tree`), numbered blocks the layers
passed (`Layers`). In front of a leaf's output are its call's inputs and parameters; in front of a place between a
parent's children are the parent's inputs and the earlier children's outputs (`DataFlow`). Where no tree is known, all
earlier outputs are. Not here: edges that equal bytes show (comparison/plan/relations.py, topology/data_flow.py), errors
that reach a row (judge/origins.py).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Generic, Protocol, TypeVar

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.dump.schema import ROOT_TAP, Module

INPUT, OUTPUT, PARAM = "input", "output", "param"
Key = tuple[str, str, int]
"""(tap, role, call)."""
_CHOICE = re.compile(r"(top_?k|expert)_?(ids|indices|index|idx)$")
_WEIGHT = re.compile(r"(top_?k|expert)_?(weights?|scores|vals?|values)$")
_LOGITS = re.compile(r"router_?logits$|gating_?output$")
_GATE = re.compile(r"(^|\.)(gate|router)$")
_ROUTER = re.compile(r"Top[kK]Router$")
"""transformers' routers give logits, weights and experts, in this order and without names."""


def kind_of(role: str) -> str:
    return INPUT if role.startswith("input") else PARAM if role.startswith("param") else OUTPUT


def is_choice(role: str, cls: str) -> bool:
    """Whether a tensor of this role, of a module of this class, holds the numbers of chosen experts."""
    return bool(_CHOICE.search(role)) or (role == "output.2" and bool(_ROUTER.search(cls)))


def is_logits(tap: str, role: str, cls: str) -> bool:
    """Whether a tensor holds a router's logits, one per expert."""
    named = role == "output.0" and bool(_GATE.search(tap) or _ROUTER.search(cls))
    return named or bool(_LOGITS.search(role))


def is_weight(role: str, cls: str) -> bool:
    return bool(_WEIGHT.search(role)) or (role == "output.1" and bool(_ROUTER.search(cls)))


class FlowTensor(Protocol):
    """What is known of a tensor in the flow. kind: of `kind_of`; order: its place; width: elements of a row."""

    @property
    def tap(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def order(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def key(self) -> Key: ...


P = TypeVar("P", bound=FlowTensor)


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A `FlowTensor` of which nothing else is known."""

    tap: str
    role: str
    call: int
    order: int
    width: int = 1

    @cached_property
    def kind(self) -> str:
        return kind_of(self.role)

    @cached_property
    def key(self) -> Key:
        return self.tap, self.role, self.call


_MIXES = re.compile(r"attention|attn|mamba|ssm|conv|recurrent|retention|rwkv|delta|mixer|lstm|gru", re.I)
_NOT_MIXED = re.compile(r"norm|linear|embed|rotary|rope", re.I)
_HOLDS = re.compile(
    r"(Layer|Block|Model|Encoder|Decoder|Transformer|Predictor|MTP)(StableLayerNorm)?$|For[A-Z]|NormAttentionNorm$"
)
_ONE_KIND = re.compile(
    r"((?i:linear|(?<!prelayer)norm|embed(ding)?|act(ivation)?|mlp|ffn|feedforward|experts?|dropout)|MoE|SparseMoe)"
    r"(Layer|Block)$"
)
"""A layer of its own, which holds no others. Not Moe: a family of models has it in all names (BailingMoeBlock)."""
_ROWWISE = re.compile(
    r"linear|norm|embed|rotary|rope|act|silu|gelu|relu|mul(?!ti)|mlp|feedforward|ffn|moe|expert|router|gate|logits"
    r"|(?<!down)(?<!re)sampler|lmhead|dropout|identity",
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

    def mixes_itself(self, tap: str) -> bool:
        """Whether rows may meet in the code of ``tap``, and not only in a child: by its name, or where no child says
        so. False for what is not in the tree."""
        if not self.mixing.get(tap):
            return False
        named = _named_mixing(_name_of(tap, self.classes.get(tap, "")))
        return named or not any(self.mixing[c] for c in self.children.get(tap, ()))


def mixes(tap: str, cls: str) -> bool:
    """Whether a row of the output may depend on other rows of the input: by its name, where no child shows it. A name
    that says nothing, or that holds layers, does not say that it works by rows."""
    return _named_to_mix(_name_of(tap, cls))


@lru_cache(1024)
def _named_to_mix(what: str) -> bool:
    holds = _HOLDS.search(what) and not _ONE_KIND.search(what)
    return _named_mixing(what) or bool(holds) or not _ROWWISE.search(what)


def _name_of(tap: str, cls: str) -> str:
    return cls or tap.rpartition(".")[2].replace("_", "")


def _named_mixing(what: str) -> bool:
    """The last word decides: linear attention is an attention, and an attention's norm is a norm."""
    last = max((m.end() for m in _MIXES.finditer(what)), default=0)
    return last > max((m.end() for m in _NOT_MIXED.finditer(what)), default=0)


_NOWHERE, _BEHIND = 1e18, 1e19
"""Places: of what the tree does not hold, and of what comes behind even that."""
_BLOCK = re.compile(r"^(.*?\.)?(\d+)(?=\.|$)")


@lru_cache(1 << 14)
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


BACKWARD = "backward."
"""What the places of backward runs begin with."""


class DataFlow(Generic[P]):
    """Tensors of a dump, or of a comparison, by tap and kind, and what stands in front of each in the ``tree``."""

    def __init__(self, tensors: Iterable[P], tree: Tree):
        self.tensors, self.tree = list(tensors), tree
        self.by_key = {t.key: t for t in self.tensors}
        self.by_tap: dict[str, dict[str, list[P]]] = defaultdict(lambda: {INPUT: [], OUTPUT: [], PARAM: []})
        for t in sorted(self.tensors, key=_order):
            self.by_tap[t.tap][t.kind].append(t)
        self._given_out = sorted((t for t in self.tensors if t.kind == OUTPUT), key=_order)
        self._silent_in: dict[str | None, list[tuple[str, list[P]]]] = {}

    def places(self, tap: str) -> list[tuple[P, list[P]]]:
        """Where ``tap`` itself may create an error, with what is in front: its outputs, and between its children."""
        children = self.tree.children.get(tap, [])
        own = self.by_tap[tap][OUTPUT]
        places = [(sink, self._inside(tap, sink) if children else self._before(tap, sink)) for sink in own]
        for child in children:
            places += [(sink, self._inside(tap, sink)) for sink in self.by_tap[child][INPUT]]
        return places

    def before(self, sink: P) -> list[P]:
        """What is in front of any tensor, as `places` says it of its place; of a parameter nothing."""
        if sink.kind == PARAM:
            return []
        if sink.kind == INPUT:
            return self._around(sink.tap, sink)
        return self._inside(sink.tap, sink) if self.tree.children.get(sink.tap) else self._before(sink.tap, sink)

    def _before(self, tap: str, sink: P) -> list[P]:
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

    def _inside(self, tap: str, sink: P) -> list[P]:
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

    def _given(self, tap: str, sink: P) -> list[P]:
        """What ``tap`` gave out before ``sink``; where none of that was captured (a compiled module is in the tree by
        its parameters alone), its parameters and what its children gave."""
        mine = self.by_tap[tap]
        if mine[OUTPUT]:
            return [t for t in mine[OUTPUT] if t.order < sink.order]
        inside = (t for child in self.tree.children.get(tap, []) for t in self._given(child, sink))
        return [*mine[PARAM], *inside]

    def _around(self, tap: str, sink: P) -> list[P]:
        up = self.tree.parent.get(tap)
        return self._inside(up, sink) if up is not None else self.earlier(sink)

    def earlier(self, sink: P) -> list[P]:
        """In order: what stands in front of the next place begins with the same (Prefixes)."""
        return self._given_out[: bisect_left(self._given_out, sink.order, key=_order)]

    def _silent(self, tap: str) -> list[P]:
        """Parameters of siblings that never run as modules: lm_head's weight is used inside the logits processor."""
        up = self.tree.parent.get(tap)
        if up not in self._silent_in:
            siblings = self.tree.children.get(up, [])
            silent = [s for s in siblings if not self.by_tap[s][OUTPUT] and not self.tree.children.get(s)]
            self._silent_in[up] = [(s, self.by_tap[s][PARAM]) for s in silent if self.by_tap[s][PARAM]]
        return [t for s, params in self._silent_in[up] if s != tap for t in params]

    def is_part(self, tap: str, sink: P) -> bool:
        """Whether a place between children may be a slice of what one of them gave out (q, k and v of one product): of
        the whole's error a part may have any share, and nothing is computed there that could be out of the ordinary."""
        if sink.tap == tap or sink.kind != INPUT:
            return False
        before = [t for child in self.tree.children.get(tap, []) for t in self.by_tap[child][OUTPUT]]
        return any(t.order < sink.order and t.width > sink.width for t in before)


def is_fed(inputs: Sequence[FlowTensor]) -> bool:
    """Whether these are more than what a router said: of experts in compiled graphs only that went in visibly."""
    excluded = (is_choice(t.role, "") or is_weight(t.role, "") or is_logits(t.tap, t.role, "") for t in inputs)
    return not all(excluded)


def _order(t: FlowTensor) -> int:
    return t.order
