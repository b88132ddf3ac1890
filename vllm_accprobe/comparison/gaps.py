"""What lies between two compared tensors without being seen, and which origin lies in such a gap.

The problem: in a compiled engine, with VLLM_ACCPROBE_MODULES or in another tool's dump, most operators stand between
two taps; what one of them does wrong shows first at the next tap, whose operator is innocent. The idea: one side
usually saw more; its flow, by equal bytes or by place, is kept in mine's names (`Untapped`). From the tensor that shows
an error it is followed back to the nearest compared tensors (`GapFinder`): every module passed may have made it, but
those that another, right tensor was made of as well. A norm removes the scale of its only input and does not vouch for
it. Without a flow, the model's tree says what may stand between. Not here: which tensor shows the error
(judge/origins.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import (
    INPUT,
    OUTPUT,
    PARAM,
    DataFlow,
    Key,
    PlainTensor,
    Tree,
    block_of,
    is_fed,
    kind_of,
    unseen_taps,
)
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison.plan.relations import STEPS, Makers
from vllm_accprobe.comparison.plan.unit import TOP_LOGITS
from vllm_accprobe.dump.decode import Where, decode, object_at
from vllm_accprobe.dump.schema import ROOT_TAP, Record
from vllm_accprobe.judge.origins import Origin, OriginEntry
from vllm_accprobe.judge.tensor_errors import TensorErrors

Records = Mapping[Key, Sequence[Record]]
"""One rank's records of each place, in order of steps."""


@dataclass(frozen=True)
class Untapped:
    """flow: each tensor of the side that saw more → what it was made of; empty where no side saw more than both did.
    modules: modules without a compared output that ran unseen on a side, in order of the model's tree. classes: of
    modules, as far as a dump says them."""

    flow: Mapping[Key, tuple[Key, ...]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        return [[[k, list(made)] for k, made in self.flow.items()], list(self.modules), dict(self.classes)]

    @staticmethod
    def of_plain(value: Any, where: Where = "") -> Untapped:
        """Raises DecodeError for anything that ``plain`` did not write."""
        return Untapped(*decode(tuple[dict[Key, tuple[Key, ...]], tuple[str, ...], dict[str, str]], value, where))


NOTHING = Untapped()


def untapped_of(
    sides: Sequence[Callable[[], Records]], orders: Sequence[Sequence[Key]], compared: Sequence[Mapping[Key, Key]],
    taps: Mapping[str, str], dumps: Sequence[Any],
) -> Untapped:  # fmt: skip
    """sides, orders, compared, dumps: golden's and mine's. sides: called where something is hidden. compared: a side's
    own name of each compared tensor → mine's name. taps: golden's tap → mine's, of those that are paired."""
    ran = [[k for k in order if kind_of(k[1]) != PARAM] for order in orders]
    hidden = [_hidden(keys, known) for keys, known in zip(ran, compared, strict=True)]
    seen = {key[0] for key in compared[1].values() if kind_of(key[1]) == OUTPUT}
    listed = dict.fromkeys(t for d in dumps for t in _in_tree(d, unseen_taps(d)) if t not in seen)
    if not any(hidden) and not listed:
        return NOTHING
    side = 0 if len(hidden[0]) >= len(hidden[1]) else 1
    classes = {m.tap: m.cls for d in dumps for modules in d.modules.values() for m in modules}
    flow: dict[Key, tuple[Key, ...]] = {}
    if hidden[side]:
        records = sides[side]()
        classes |= {found[0].tap: found[0].cls for found in records.values() if found[0].cls}
        known = [k for k in ran[side] if k in records]
        flow = _FlowOfDump(records, known, classes).named(compared[side], taps if side == 0 else {})
    # A module that holds numbered ones is a container and computes nothing.
    containers = {up for t in listed for at, up in pairwise((t, *enclosing(t))) if at.rpartition(".")[2].isdecimal()}
    return Untapped(flow, tuple(t for t in listed if t not in containers), classes)


def _hidden(keys: Iterable[Key], compared: Mapping[Key, Key]) -> set[str]:
    """The taps of a side none of whose outputs is compared."""
    seen = {k[0] for k in compared if kind_of(k[1]) == OUTPUT}
    return {k[0] for k in keys if kind_of(k[1]) == OUTPUT} - seen


def _in_tree(dump: Any, taps: Iterable[str]) -> list[str]:
    """``taps`` in the order in which the dump lists its modules, those that it skipped behind them."""
    known = {m.tap: m.index for modules in dump.modules.values() for m in modules}
    listed = {s.tap: i for i, s in enumerate(dump.skips)}
    return sorted(taps, key=lambda t: (known.get(t, len(known) + listed.get(t, 0)), t))


class _FlowOfDump:
    def __init__(self, records: Records, order: Sequence[Key], classes: Mapping[str, str]):
        self._order = {key: i for i, key in enumerate(order)}
        self._first = {k: records[k][0] for k in order}
        self._makers = Makers(self._order, {k: records[k][:STEPS] for k in order})
        made = [PlainTensor(*key, i) for key, i in self._order.items()]
        spans: dict[str, list[int]] = {}
        for t in made:
            if t.call == 0:
                spans.setdefault(t.tap, []).append(t.order)
        stretches = {tap: (min(at), max(at)) for tap, at in spans.items() if len(at) > 1}
        tree = Tree.of(list(dict.fromkeys(t.tap for t in made)), classes, stretches)
        self._flow = DataFlow(made, tree)

    def _whole_of(self, trace: PlainTensor) -> Key | None:
        """The nearest output before an input whose rows are wider: q, k and v are slices of one product."""
        if trace.kind != INPUT:
            return None
        width = _width(self._first[trace.key])
        before = [t for t in self._flow.before(trace) if t.kind == OUTPUT and t.order < trace.order]
        wider = [t for t in before if _width(self._first[t.key]) > width]
        last = max(wider, key=lambda t: t.order, default=None)
        return None if last is None else last.key

    def named(self, compared: Mapping[Key, Key], taps: Mapping[str, str]) -> dict[Key, tuple[Key, ...]]:
        def name(key: Key) -> Key:
            return compared.get(key) or (taps.get(key[0], key[0]), key[1], key[2])

        return {name(key): tuple(dict.fromkeys(map(name, self._made_of(key)))) for key in self._order}

    def _made_of(self, key: Key) -> list[Key]:
        trace = self._flow.by_key[key]
        maker = self._makers.maker(key)
        if trace.kind == OUTPUT:
            children = self._flow.tree.children.get(key[0], ())
            if maker is None or not children or key[0] not in enclosing(maker[0]):
                maker = None
        if maker is not None:
            return [maker]
        if trace.kind == INPUT and "float" not in self._first[key].dtype:
            return []  # positions and ids come from outside
        whole = self._whole_of(trace)
        if whole is not None:
            return [whole]
        return [t.key for t in self._flow.before(trace) if t.kind != PARAM and t is not trace]


def _width(record: Record) -> int:
    rest = [n for i, n in enumerate(record.shape) if i != record.row_dim]
    return math.prod(rest)


def bodies(maker: Key, taker: Key) -> tuple[list[str], list[str]]:
    """(modules that the data leaves, modules that it enters) on its way from one tensor to the next: of these, code
    between their children may lie there. Containers of numbered modules have none."""
    out = enclosed_by(maker[0])[kind_of(maker[1]) != INPUT :]
    into = enclosed_by(taker[0])[1:]
    left = [m for m in out if m and m not in (*into, taker[0])]
    return left, [m for m in into if m and m not in (*out, maker[0])]


def enclosed_by(tap: str) -> list[str]:
    """A tap, and the modules whose code calls what encloses it, nearest first; [""] for the root itself."""
    if tap == ROOT_TAP:
        return [""]
    paths = [tap, *enclosing(tap)]
    return [tap, *(up for path, up in pairwise(paths) if not path.rpartition(".")[2].isdecimal())]


_NORM = re.compile("norm", re.I)
_Place = tuple[str, str, int]
"""What the flow passes: an unseen output (tap, role, call), or code of a module (its path, LEFT or ENTERED, 0)."""
LEFT, ENTERED = "<", ">"


@dataclass(frozen=True)
class Gap:
    """after: the last compared place in front, ``tap`` of an output or ``tap/role`` of an input, "" for the model's own
    start; before: the tap that shows the error; contains: the modules that may have made it, in order of execution
    where that is known, then those whose own code lies there; with ``before`` itself where its input was not compared.
    """

    after: str
    before: str
    contains: tuple[str, ...]

    @property
    def module(self) -> str:
        """The innermost module that encloses the gap: an origin's ``module``, and thus never an innocent operator."""
        ends = enclosed_by(self.after.partition("/")[0]), enclosed_by(self.before)
        return next((up for up in ends[0] if up and up in ends[1]), ROOT_TAP)

    def plain(self) -> dict[str, Any]:
        return {"after": self.after or None, "before": self.before, "contains": list(self.contains)}


@dataclass(frozen=True)
class _Front:
    """What stands in front of a tensor: the nearest compared tensors, and what is passed on the way from them."""

    ends: frozenset[Key]
    passed: frozenset[_Place]


class GapFinder:
    def __init__(self, untapped: Untapped, flow: DataFlow[TensorErrors]):
        self.untapped, self._flow = untapped, flow
        self._traces = sorted(flow.tensors, key=lambda t: t.order)
        self._outputs = {t.tap for t in flow.tensors if t.kind == OUTPUT}
        self._inputs = {t.tap for t in flow.tensors if t.kind == INPUT}
        self._walks: dict[tuple[Key, bool], _Front] = {}

    def of(self, c: Origin) -> Gap | None:
        """The gap in which ``c`` was made; None where its own operator, or the module that is named, made it."""
        sink = c.trace
        if sink.kind == PARAM:
            return None
        open_ = sink.kind == OUTPUT and self._leaf(sink.tap) and not self._fed(sink)
        returned = sink.role == TOP_LOGITS
        if sink.kind == OUTPUT and self._leaf(sink.tap) and not open_ and not returned:
            return None
        if sink.key in self.untapped.flow:
            after, inside = self._by_flow(c, sink.key)
        else:
            after, inside = self._by_tree(sink)
        if returned and not inside:
            # The best logits are those of ``compute_logits``, not the sampler's work: the model's own code made them.
            return Gap(after or self._after(self._front(sink.key).ends, sink), sink.tap, (ROOT_TAP,))
        if not inside:
            return None
        return Gap(after, sink.tap, (*inside, sink.tap) if open_ else inside)

    def _leaf(self, tap: str) -> bool:
        return tap != ROOT_TAP and tap not in self._parents

    @cached_property
    def _parents(self) -> frozenset[str]:
        return frozenset(up for child in self._outputs | self._inputs for up in enclosing(child))

    def _fed(self, sink: TensorErrors) -> bool:
        own = self._flow.by_tap[sink.tap][INPUT]
        return is_fed([t for t in own if t.call == sink.call] or own)

    # --- by the flow -------------------------------------------------------------------------------------------

    def _by_flow(self, c: Origin, key: Key) -> tuple[str, tuple[str, ...]]:
        front = self._front(key)
        passed = set(front.passed)
        for t in self._traces:
            if t.order >= c.trace.order:
                break
            if t.kind != PARAM and t.key in self.untapped.flow and _right(t, c.keys):
                passed -= self._front(t.key, vouching=True).passed
        hidden = {tap for tap, role, _ in self.untapped.flow if kind_of(role) == OUTPUT} - self._outputs
        places = [p for p in passed if p[1] not in (LEFT, ENTERED) and p[0] != c.trace.tap]
        left = [p[0] for p in passed if p[1] == LEFT and p[0] in hidden]
        if not places and not left:
            return "", ()
        order = {k: i for i, k in enumerate(self.untapped.flow)}
        operators = dict.fromkeys(p[0] for p in sorted(places, key=lambda p: order.get(p, -1)))
        ups = set(enclosing(c.trace.tap))
        outer = sorted({m for m, how, _ in passed if how == LEFT or (how == ENTERED and m in ups)} - operators.keys())
        return self._after(front.ends, c.trace), (*operators, *outer)

    def _after(self, ends: Iterable[Key], sink: TensorErrors) -> str:
        known = sorted((self._flow.by_key[k] for k in ends if k in self._flow.by_key), key=lambda t: t.order)
        before = [t for t in known if t.order < sink.order]
        if not before:
            return ""
        last = next((t for t in reversed(before) if is_fed([t])), before[-1])  # what a router said is no beginning
        return last.tap if last.kind == OUTPUT else f"{last.tap}/{last.role}"

    def _front(self, key: Key, vouching: bool = False) -> _Front:
        """vouching: without what may be too large or too small as a whole in front of a norm that has one input."""
        if (key, vouching) not in self._walks:
            self._walks[key, vouching] = self._walk(key, vouching)
        return self._walks[key, vouching]

    def _walk(self, key: Key, vouching: bool) -> _Front:
        flow = self.untapped.flow
        ends: set[Key] = set()
        passed: set[_Place] = set()
        known, todo = {(key, False)}, [(key, False)]
        while todo:
            taker, blind = todo.pop()
            made = flow.get(taker, ())
            # Behind a norm a factor of its only input is not seen, up to where that input was a sum.
            norm = kind_of(taker[1]) == OUTPUT and bool(_NORM.search(self.untapped.classes.get(taker[0]) or taker[0]))
            blind = vouching and len(made) == 1 and (blind or (taker != key and norm))
            for maker in made:
                if not blind:
                    left, entered = bodies(maker, taker)
                    passed.update((m, LEFT, 0) for m in left if m not in self._outputs)
                    passed.update((m, ENTERED, 0) for m in entered if m not in self._inputs)
                if maker in self._flow.by_key:
                    ends.add(maker)
                    continue
                if kind_of(maker[1]) == OUTPUT and not blind:
                    passed.add(maker)
                if (maker, blind) not in known:
                    known.add((maker, blind))
                    todo.append((maker, blind))
        return _Front(frozenset(ends), frozenset(passed))

    # --- by the tree -------------------------------------------------------------------------------------------

    def _by_tree(self, sink: TensorErrors) -> tuple[str, tuple[str, ...]]:
        outputs = [t for t in self._flow.before(sink) if t.kind == OUTPUT and t.order < sink.order]
        last = max(outputs, key=lambda t: t.order, default=None)
        if last is None:
            return "", ()
        return last.tap, tuple(self._between(last.tap, sink.tap))

    def _between(self, after: str, before: str) -> list[str]:
        """Modules that were not captured and that may stand between two taps: numbered blocks between theirs, and what
        the blocks of the two hold themselves, but for what lies in a module whose output was compared."""
        blocks = block_of(after), block_of(before)
        own = [b for b in dict.fromkeys(blocks) if b is not None]
        skipped = list(_numbers_between(*blocks))
        whole = [tap for tap in skipped if tap not in self._outputs]
        if not own:
            return whole
        enclosed = {before, *enclosing(before), *enclosing(after)}
        found = [m for m in self.untapped.modules if any(m.startswith(f"{b}.") for b in (*own, *skipped))]
        known = self._outputs - enclosed
        return [*whole, *(m for m in found if known.isdisjoint(enclosing(m)))]


def _numbers_between(after: str | None, before: str | None) -> Iterator[str]:
    """``layers.3`` and ``layers.4`` between ``layers.2`` and ``layers.5``."""
    if after is None or before is None:
        return
    (here, _, n), (there, _, m) = after.rpartition("."), before.rpartition(".")
    if here == there and int(m) - int(n) <= _MOST_BLOCKS:
        yield from (f"{here}.{i}" if here else str(i) for i in range(int(n) + 1, int(m)))


_MOST_BLOCKS = 10_000
"""Chosen: numbers come from names in a dump; no model has so many layers."""


def _right(t: TensorErrors, keys: np.ndarray) -> bool:
    """Whether a tensor shows these rows, and none of them is beyond its limit."""
    if t.everywhere > t.limit or (len(keys) and not np.isin(keys, t.seen.keys).all()):
        return False
    return not (t.err[np.isin(t.keys, keys)] > t.limit).any()


def entry_of(
    entry: OriginEntry, gap: Gap | None, classes: Mapping[str, str], settings: Mapping[str, str]
) -> OriginEntry:
    """compare.json's entry of an origin with its ``gap``: the module is then the one that encloses it, and the role
    that of the tensor that shows the error, behind its tap's name. settings: as notes.differing's; what is
    known of a module in the gap stands in the entry."""
    if gap is None:
        return {**entry, "gap": None}
    others = [f"{m}: {settings[m]}" for m in gap.contains if m in settings and m != gap.before]
    if others:
        text = "; ".join(filter(None, (str(entry["setting"]), *others)))
        entry = {**entry, "setting": text, "shape": "; ".join(filter(None, (str(entry["shape"]), *others)))}
    role = str(entry["role"])
    role = role if role.startswith(f"{gap.before}/") else f"{gap.before}/{role}"
    return {**entry, "module": gap.module, "class": classes.get(gap.module, ""), "role": role, "gap": gap.plain()}


def taps_of(origin: OriginEntry) -> tuple[str, ...]:
    """The taps that an origin's error was measured at: its module, or the end of its gap."""
    gap = origin.get("gap")
    return (str(gap["before"]),) if gap else (str(origin.get("module")),)


def suspects_of(origin: OriginEntry) -> tuple[str, ...]:
    """The modules that may have made an origin's error."""
    gap = origin.get("gap")
    if not gap:
        return (str(origin.get("module")),)
    return tuple(map(str, dict.fromkeys((*gap["contains"], gap["before"]))))


_MANY = 6
"""Chosen: modules that a setting names one by one; more are named by their blocks."""


def splitting(gap: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, str]:
    """The settings, without VLLM_ACCPROBE_, of a further capture of ``run`` that sees what lies in a gap; {} where the
    run is not ours or has seen all that it can see."""
    graphs, probe = object_at(run, "engine", "graphs"), object_at(run, "probe")
    if run.get("tool") != "accprobe" or probe is None:
        return {}
    inside = _globs(gap)
    chosen = [str(m) for m in probe.get("modules") or ()]
    if graphs is not None:
        if "all" in (*(probe.get("graph_taps") or ()), *chosen):
            return {"GRAPHS": "0"}
        ends = [tap.partition("/")[0] for tap in (gap.get("after") or "", gap["before"]) if tap]
        taps = [_glob(tap) for tap in ends if tap != ROOT_TAP]
        return {"GRAPHS": "1", "GRAPH_TAPS": ",".join(dict.fromkeys((*taps[:1], *inside, *taps[1:])))}
    return {"MODULES": ",".join(dict.fromkeys((*chosen, *inside)))} if chosen and inside else {}


def _globs(gap: Mapping[str, Any]) -> list[str]:
    inside = [str(m) for m in gap["contains"] if m != gap["before"]]
    if len(inside) <= _MANY:
        return [_glob(m) for m in inside]
    return list(dict.fromkeys(f"{_glob(b)}.*" if (b := block_of(m)) else _glob(m) for m in inside))


def _glob(tap: str) -> str:
    return "".join("?" if c in "*?[],!" or c.isspace() or not c.isprintable() else c for c in tap)
