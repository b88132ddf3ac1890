"""What lies between two compared tensors and was not seen on both sides: the flow through modules without a tap.

The problem: in a compiled engine, under VLLM_ACCPROBE_MODULES or in another tool's dump most operators stand between
two taps, and an error that comes up there shows first at the next tap, which is innocent. The idea: one side usually
saw more than the other (an eager golden sees every module). Its records say which tensor each one was made of: by equal
bytes (annotations.py), else by place (judge/upstream.py). That flow is kept for the tensors that are compared and for
those that are not, in mine's names; of modules that nobody saw, the names that the dumps list as skipped are kept.
Not here: which of them an origin is blamed for (verdict/gaps.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.tokens import NO_ROWS
from vllm_accprobe.comparison.plan.annotations import STEPS, Makers
from vllm_accprobe.dump.schema import ROOT_TAP, Record
from vllm_accprobe.judge.flow import Key, Tree
from vllm_accprobe.judge.tensor_errors import INPUT, OUTPUT, PARAM, TensorErrors, kind_of
from vllm_accprobe.judge.upstream import Upstream, unseen_taps

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
        """As JSON."""
        return [[[k, list(made)] for k, made in self.flow.items()], list(self.modules), dict(self.classes)]

    @staticmethod
    def of_plain(value: Any) -> Untapped:
        """Raises what Python says of anything that ``plain`` did not write."""
        flow, modules, classes = value
        read = {_key(k): tuple(map(_key, made)) for k, made in flow}
        return Untapped(read, tuple(map(str, modules)), {str(t): str(c) for t, c in classes.items()})


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
    return Untapped(flow, tuple(t for t in listed if not _is_container(t, listed)), classes)


def _hidden(keys: Iterable[Key], compared: Mapping[Key, Key]) -> set[str]:
    """The taps of a side none of whose outputs is compared."""
    seen = {k[0] for k in compared if kind_of(k[1]) == OUTPUT}
    return {k[0] for k in keys if kind_of(k[1]) == OUTPUT} - seen


def _in_tree(dump: Any, taps: Iterable[str]) -> list[str]:
    """``taps`` in the order in which the dump lists its modules, those that it skipped behind them."""
    known = {m.tap: m.index for modules in dump.modules.values() for m in modules}
    listed = {s.tap: i for i, s in enumerate(dump.skips)}
    return sorted(taps, key=lambda t: (known.get(t, len(known) + listed.get(t, 0)), t))


def _is_container(tap: str, taps: Iterable[str]) -> bool:
    """Whether a module holds numbered ones, and computes nothing."""
    start = f"{tap}."
    return any(t.startswith(start) and t[len(start) :].partition(".")[0].isdecimal() for t in taps)


class _FlowOfDump:
    """What each tensor of one dump was made of."""

    def __init__(self, records: Records, order: Sequence[Key], classes: Mapping[str, str]):
        self._order = {key: i for i, key in enumerate(order)}
        self._first = {k: records[k][0] for k in order}
        self._makers = Makers(self._order, {k: records[k][:STEPS] for k in order})
        none = np.zeros(0)
        made = [TensorErrors(*key, kind_of(key[1]), i, 0.0, NO_ROWS, none, none) for key, i in self._order.items()]
        spans: dict[str, list[int]] = {}
        for t in made:
            if t.call == 0:
                spans.setdefault(t.tap, []).append(t.order)
        stretches = {tap: (min(at), max(at)) for tap, at in spans.items() if len(at) > 1}
        tree = Tree.of(list(dict.fromkeys(t.tap for t in made)), classes, stretches)
        self._tree, self._fronts = tree, Upstream(made, tree)
        self._traces = {(t.tap, t.role, t.call): t for t in made}

    def _is_float(self, key: Key) -> bool:
        return "float" in self._first[key].dtype

    def _whole_of(self, trace: TensorErrors) -> Key | None:
        """The nearest output before an input whose rows are wider: q, k and v are slices of one product."""
        if trace.kind != INPUT:
            return None
        width = _width(self._first[trace.tap, trace.role, trace.call])
        before = [t for t in self._fronts.before(trace) if t.kind == OUTPUT and t.order < trace.order]
        wider = [t for t in before if _width(self._first[t.tap, t.role, t.call]) > width]
        last = max(wider, key=lambda t: t.order, default=None)
        return None if last is None else (last.tap, last.role, last.call)

    def named(self, compared: Mapping[Key, Key], taps: Mapping[str, str]) -> dict[Key, tuple[Key, ...]]:
        """The flow in mine's names."""

        def name(key: Key) -> Key:
            return compared.get(key) or (taps.get(key[0], key[0]), key[1], key[2])

        return {name(key): tuple(dict.fromkeys(map(name, self._made_of(key)))) for key in self._order}

    def _made_of(self, key: Key) -> list[Key]:
        trace = self._traces[key]
        maker = self._makers.maker(key)
        if trace.kind == OUTPUT:
            children = self._tree.children.get(key[0], ())
            if maker is None or not children or key[0] not in enclosing(maker[0]):
                maker = None
        if maker is not None:
            return [maker]
        if trace.kind == INPUT and not self._is_float(key):
            return []  # positions and ids come from outside
        whole = self._whole_of(trace)
        if whole is not None:
            return [whole]
        return [(t.tap, t.role, t.call) for t in self._fronts.before(trace) if t.kind != PARAM and t is not trace]


def _width(record: Record) -> int:
    """Elements of a row."""
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


def _key(value: Any) -> Key:
    tap, role, call = value
    return str(tap), str(role), int(call)
