"""Where an origin lies between two taps: the gap, what stands in it, and the setting that would split it.

The problem: between two tensors that were compared there may be operators that nobody saw. What one of them does wrong
shows first at the next tap, and that tap's operator is innocent. The idea: from the tensor that shows the error the
flow (plan/untapped.py) is followed back to the nearest compared tensors; every module that is passed on the way may
have made the error. Those are left out that an earlier compared tensor was also made of, if it is right in these rows.
A norm divides the size of its only input out: it does not vouch for what is in front of it, up to the next sum. Where
no dump saw the modules between, the model's tree says which may stand there, without order. An operator whose own input
was not compared is in the gap itself; a replay may take it out, or convict it (opcheck/proof/decide.py).
Not here: which tensor shows an error that nothing in front explains (judge/origins.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison.plan.untapped import Untapped, bodies, enclosed_by
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.flow import Key, Tree
from vllm_accprobe.judge.origins import Origin
from vllm_accprobe.judge.tensor_errors import INPUT, OUTPUT, PARAM, TensorErrors, kind_of
from vllm_accprobe.judge.upstream import Upstream, block_of, is_fed

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
        """compare.json's ``origins[].gap``."""
        return {"after": self.after or None, "before": self.before, "contains": list(self.contains)}


@dataclass(frozen=True)
class _Front:
    """What stands in front of a tensor: the nearest compared tensors, and what is passed on the way from them."""

    ends: frozenset[Key]
    passed: frozenset[_Place]


class GapFinder:
    """The gaps of one comparison. traces: of all compared tensors."""

    def __init__(self, untapped: Untapped, traces: Sequence[TensorErrors], tree: Tree):
        self.untapped, self._tree = untapped, tree
        self._traces = sorted(traces, key=lambda t: t.order)
        self._by_key = {(t.tap, t.role, t.call): t for t in traces}
        self._outputs = {t.tap for t in traces if t.kind == OUTPUT}
        self._inputs = {t.tap for t in traces if t.kind == INPUT}
        self._fronts: dict[tuple[Key, bool], _Front] = {}

    def of(self, c: Origin) -> Gap | None:
        """The gap in which ``c`` was made; None where its own operator, or the module that is named, made it."""
        sink = c.trace
        if sink.kind == PARAM:
            return None
        open_ = sink.kind == OUTPUT and self._leaf(sink.tap) and not self._fed(sink)
        if sink.kind == OUTPUT and self._leaf(sink.tap) and not open_:
            return None
        key = (sink.tap, sink.role, sink.call)
        if key in self.untapped.flow:
            after, inside = self._by_flow(c, key)
        else:
            after, inside = self._by_tree(sink)
        if not inside:
            return None
        return Gap(after, sink.tap, (*inside, sink.tap) if open_ else inside)

    def _leaf(self, tap: str) -> bool:
        return tap != ROOT_TAP and tap not in self._parents

    @cached_property
    def _parents(self) -> frozenset[str]:
        return frozenset(up for child in self._outputs | self._inputs for up in enclosing(child))

    def _fed(self, sink: TensorErrors) -> bool:
        """Whether what went into the operator was compared."""
        own = [t for t in self._of_tap.get(sink.tap, ()) if t.kind == INPUT]
        return is_fed([t for t in own if t.call == sink.call] or own)

    @cached_property
    def _of_tap(self) -> Mapping[str, list[TensorErrors]]:
        found: dict[str, list[TensorErrors]] = {}
        for t in self._traces:
            found.setdefault(t.tap, []).append(t)
        return found

    # --- by the flow -------------------------------------------------------------------------------------------

    def _by_flow(self, c: Origin, key: Key) -> tuple[str, tuple[str, ...]]:
        front = self._front(key)
        passed = set(front.passed)
        for t in self._traces:
            if t.order >= c.trace.order:
                break
            other = (t.tap, t.role, t.call)
            if t.kind != PARAM and other in self.untapped.flow and _right(t, c.keys):
                passed -= self._front(other, vouching=True).passed
        hidden = {tap for tap, role, _ in self.untapped.flow if kind_of(role) == OUTPUT} - self._outputs
        places = [p for p in passed if p[1] not in (LEFT, ENTERED) and p[0] != c.trace.tap]
        left = [p[0] for p in passed if p[1] == LEFT and p[0] in hidden]
        if not places and not left:
            return "", ()
        order = {k: i for i, k in enumerate(self.untapped.flow)}
        operators = dict.fromkeys(p[0] for p in sorted(places, key=lambda p: order.get(p, -1)))
        ups = set(enclosing(c.trace.tap))
        around = sorted({m for m, how, _ in passed if how == LEFT or (how == ENTERED and m in ups)} - operators.keys())
        return self._after(front.ends, c.trace), (*operators, *around)

    def _after(self, ends: Iterable[Key], sink: TensorErrors) -> str:
        known = sorted((self._by_key[k] for k in ends if k in self._by_key), key=lambda t: t.order)
        before = [t for t in known if t.order < sink.order]
        if not before:
            return ""
        last = next((t for t in reversed(before) if is_fed([t])), before[-1])  # what a router said is no beginning
        return last.tap if last.kind == OUTPUT else f"{last.tap}/{last.role}"

    def _front(self, key: Key, vouching: bool = False) -> _Front:
        """vouching: without what may be too large or too small as a whole in front of a norm that has one input."""
        if (key, vouching) not in self._fronts:
            self._fronts[key, vouching] = self._walk(key, vouching)
        return self._fronts[key, vouching]

    def _walk(self, key: Key, vouching: bool) -> _Front:
        flow = self.untapped.flow
        ends: set[Key] = set()
        passed: set[_Place] = set()
        known, todo = {(key, False)}, [(key, False)]
        while todo:
            taker, blind = todo.pop()
            made = flow.get(taker, ())
            # Behind a norm a factor of its only input is not seen, up to where that input was a sum.
            blind = vouching and len(made) == 1 and (blind or (taker != key and self._is_norm(taker)))
            for maker in made:
                if not blind:
                    passed.update(self._bodies(maker, taker))
                if maker in self._by_key:
                    ends.add(maker)
                    continue
                if kind_of(maker[1]) == OUTPUT and not blind:
                    passed.add(maker)
                if (maker, blind) not in known:
                    known.add((maker, blind))
                    todo.append((maker, blind))
        return _Front(frozenset(ends), frozenset(passed))

    def _is_norm(self, key: Key) -> bool:
        return kind_of(key[1]) == OUTPUT and bool(_NORM.search(self.untapped.classes.get(key[0]) or key[0]))

    def _bodies(self, maker: Key, taker: Key) -> Iterator[_Place]:
        left, entered = bodies(maker, taker)
        yield from ((m, LEFT, 0) for m in left if m not in self._outputs)
        yield from ((m, ENTERED, 0) for m in entered if m not in self._inputs)

    # --- by the tree -------------------------------------------------------------------------------------------

    def _by_tree(self, sink: TensorErrors) -> tuple[str, tuple[str, ...]]:
        given = [t for t in self._tree_fronts.before(sink) if t.kind == OUTPUT and t.order < sink.order]
        last = max(given, key=lambda t: t.order, default=None)
        if last is None:
            return "", ()
        return last.tap, tuple(self._between(last.tap, sink.tap))

    @cached_property
    def _tree_fronts(self) -> Upstream:
        return Upstream(self._traces, self._tree)

    def _between(self, after: str, before: str) -> list[str]:
        """Modules that nobody saw and that may stand between two taps: numbered blocks between theirs, and what the
        blocks of the two hold themselves, but for what lies in a module whose output was compared."""
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
    entry: dict[str, Any], gap: Gap | None, classes: Mapping[str, str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """compare.json's entry of an origin with its ``gap``: the module is then the one that encloses it, and the role
    that of the tensor that shows the error, behind its tap's name. settings: as constants_differ.differing's; what is
    known of a module in the gap stands in the entry."""
    if gap is None:
        return entry | {"gap": None}
    others = [f"{m}: {settings[m]}" for m in gap.contains if m in settings and m != gap.before]
    if others:
        told = "; ".join(filter(None, (str(entry["setting"]), *others)))
        entry = entry | {"setting": told, "shape": "; ".join(filter(None, (str(entry["shape"]), *others)))}
    role = str(entry["role"])
    role = role if role.startswith(f"{gap.before}/") else f"{gap.before}/{role}"
    return entry | {"module": gap.module, "class": classes.get(gap.module, ""), "role": role, "gap": gap.plain()}


def taps_of(origin: Mapping[str, Any]) -> tuple[str, ...]:
    """The taps that an origin's error was measured at: its module, or the end of its gap."""
    gap = origin.get("gap")
    return (str(gap["before"]),) if gap else (str(origin.get("module")),)


def suspects_of(origin: Mapping[str, Any]) -> tuple[str, ...]:
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
    engine, probe = run.get("engine"), run.get("probe")
    graphs = engine.get("graphs") if isinstance(engine, Mapping) else None
    if run.get("tool") != "accprobe" or not isinstance(probe, Mapping):
        return {}
    inside = _globs(gap)
    chosen = [str(m) for m in probe.get("modules") or ()]
    if isinstance(graphs, Mapping):
        if "all" in (*(probe.get("graph_taps") or ()), *chosen):
            return {"GRAPHS": "0"}
        ends = [tap.partition("/")[0] for tap in (gap.get("after") or "", gap["before"]) if tap]
        taps = [_glob(tap) for tap in ends if tap != ROOT_TAP]
        return {"GRAPHS": "1", "GRAPH_TAPS": ",".join(dict.fromkeys((*taps[:1], *inside, *taps[1:])))}
    return {"MODULES": ",".join(dict.fromkeys((*chosen, *inside)))} if chosen and inside else {}


def _globs(gap: Mapping[str, Any]) -> list[str]:
    """Globs over what lies in a gap."""
    inside = [str(m) for m in gap["contains"] if m != gap["before"]]
    if len(inside) <= _MANY:
        return [_glob(m) for m in inside]
    return list(dict.fromkeys(f"{_glob(b)}.*" if (b := block_of(m)) else _glob(m) for m in inside))


def _glob(tap: str) -> str:
    return "".join("?" if c in "*?[],!" or c.isspace() or not c.isprintable() else c for c in tap)
