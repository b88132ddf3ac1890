"""Which call feeds which, from the tensors that a dump recorded.

The problem: a dump has the inputs and outputs of modules and operators, and no edges; what a model's source computes
between two modules (a residual sum, a split) was recorded by nobody. The idea: an input is the latest earlier output of
equal bytes, or the model's own input. What no call gave is looked for among what the caller had (by_values.py). Where
that finds nothing, a module gets it from a node ``NotRecorded``, which is drawn behind what nobody else took and says
that this is a guess; an operator gets it from outside, as a weight or a constant would come.
Not here: calls and their identities (tap_calls.py), files (onnx_file.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any

from vllm_accprobe.align.by_values import Relations
from vllm_accprobe.dump.opcalls import SEPARATOR
from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import ROOT_TAP, Module
from vllm_accprobe.topology.model_graph import GraphNode, GraphTensor, ModelGraph
from vllm_accprobe.topology.tap_calls import CallTensor, TapCall, Tick, calls_of, cut, fullest

GAP = "NotRecorded"
_GAP_NOTE = "computed between modules by code that the dump does not show; its inputs are a guess: what no module took"


def graph_of(
    dump: Dump, level: int | None = None, rank: int | None = None, step: int | None = None, tick: Tick = lambda: None
) -> ModelGraph:
    """One step of one rank as a graph; by default the step that shows most taps.

    level: how deep modules are opened, 1 for what the model itself calls; None: to the innermost call, operators where
    they were captured. tick: called per tensor that is looked at. Raises DumpError where there is nothing to draw.
    """
    if rank is None or step is None:
        among = [r for r in dump.records if r.step is not None and rank in (None, r.rank) and step in (None, r.step)]
        place = fullest(among, [op for op in dump.ops if rank in (None, op.rank) and step in (None, op.step)])
        if place is None:
            raise DumpError(f"{dump.path}: no tensor of a step was recorded, so there is no flow to draw")
        rank, step = place
    calls = calls_of(dump, rank, step, tick)
    drawn = cut(calls, level)
    if not drawn:
        raise DumpError(f"{dump.path}: no call of a module or an operator in step {step} of rank {rank}")
    if len(drawn) > _LARGEST:
        raise DumpError(f"{dump.path}: {len(drawn):,} calls are too many for one picture: choose a --level")
    if not any(c.takes for c in drawn):
        raise DumpError(
            f"{dump.path}: no input of any module was recorded, so nothing tells what feeds what; "
            "`accprobe inspect DUMP --tree` shows the modules"
        )
    return _Drawing(dump, calls, drawn).graph(rank, step, level)


class _Drawing:
    def __init__(self, dump: Dump, calls: Sequence[TapCall], drawn: Sequence[TapCall]):
        self.dump, self.calls, self.drawn = dump, calls, drawn
        self.tensors: dict[str, GraphTensor] = {}
        self.nodes: list[GraphNode] = []
        self.inputs: list[str] = []
        self.root = next((c for c in calls if c.tap == ROOT_TAP), None)
        self.names: dict[tuple[int, int], str] = {}  # (which drawn call, which output) → tensor
        self.givers: dict[Hashable, list[tuple[int, str]]] = defaultdict(list)
        self.seen: dict[str, CallTensor] = {}
        self.taken: set[str] = set()
        self.made: dict[Hashable, str] = {}
        self.borders: dict[Hashable, str] = {}
        self.done: list[tuple[TapCall, int, tuple[str, ...]]] = []  # who gave, when, what
        self.of_tap: dict[str, list[TapCall]] = defaultdict(list)
        for c in calls:
            self.of_tap[c.tap].append(c)
        self.relations = Relations(dump)
        self.gaps = self.told = 0
        for i, c in enumerate(drawn):
            for k, out in enumerate(c.gives):
                name = f"{c.tap}/{out.role}" + (f"#{c.call}" if c.call else "")
                self.names[i, k] = self._tensor(name, out)
                if out.key is not None:
                    self.givers[out.key].append((c.end, self.names[i, k]))
        for listed in self.givers.values():
            listed.sort(key=lambda item: item[0])

    def graph(self, rank: int, step: int, level: int | None) -> ModelGraph:
        modules = {m.tap: m for m in self.dump.modules.get(rank, [])}
        for i, c in enumerate(self.drawn):
            takes = self._inputs(c)
            gives = tuple(self.names[i, k] for k in range(len(c.gives)))
            self.done.append((c, c.end, gives))
            kind = c.cls.rpartition("::")[2] or "Module"
            note = "" if c.takes else "its inputs were not recorded"
            self.nodes.append(GraphNode(c.name, kind, takes, gives, _attributes(c, modules.get(c.tap)), note))
        notes = []
        if self.told:
            notes.append(
                f"{self.told} slices, picked rows, sums or products between modules were found by their values"
            )
        if self.gaps:
            notes.append(f"{self.gaps} nodes {GAP}: {_GAP_NOTE}")
        facts = {"rank": str(rank), "step": str(step), "level": "all" if level is None else str(level),
                 "dump": self.dump.path.name}  # fmt: skip
        if isinstance(model := self.dump.run.get("model"), str):
            facts["model"] = model.rpartition("/")[2]
        name = self.root.cls if self.root is not None and self.root.cls else self.dump.path.name
        outputs = self._outputs()
        return ModelGraph(name, tuple(self.nodes), self.tensors, tuple(self.inputs), outputs, facts, tuple(notes))

    def _tensor(self, name: str, seen: CallTensor) -> str:
        unique, n = name, 2
        while unique in self.tensors:
            unique, n = f"{name}~{n}", n + 1
        self.tensors[unique] = GraphTensor(unique, seen.dtype, seen.shape, seen.note)
        self.seen[unique] = seen
        return unique

    def _inputs(self, c: TapCall) -> tuple[str, ...]:
        found: list[str | None] = [self._giver(seen, c.begin) for seen in c.takes]
        missing = [i for i, name in enumerate(found) if name is None]
        if missing:
            for i, name in zip(missing, self._between(c, [c.takes[i] for i in missing]), strict=True):
                found[i] = name
        names = tuple(name for name in found if name is not None)
        self.taken.update(names)
        return names

    def _giver(self, seen: CallTensor, before: int) -> str | None:
        """The tensor of equal bytes that was given last, else the model's own input, else what a node between made."""
        if seen.key is None:
            return None
        listed = self.givers.get(seen.key, [])
        at = bisect_right(listed, before, key=lambda item: item[0])
        if at:
            return listed[at - 1][1]
        for own in self.root.takes if self.root is not None else ():
            if own.key == seen.key:
                return self._border(own.role.partition(".")[2] or own.role, own)
        return self.made.get(seen.key) or self.borders.get(seen.key)

    def _border(self, name: str, seen: CallTensor) -> str:
        """An input of the whole."""
        known = self.borders.get(seen.key) if seen.key is not None else None
        if known is None:
            known = self._tensor(name, seen)
            self.inputs.append(known)
            if seen.key is not None:
                self.borders[seen.key] = known
        return known

    def _between(self, c: TapCall, missing: Sequence[CallTensor]) -> list[str]:
        """Names for what ``c`` takes and nobody gave."""
        had = self._had(c)
        out = [""] * len(missing)
        unknown: list[tuple[int, CallTensor]] = []
        for i, seen in enumerate(missing):
            told = self.relations.explain(seen, [(name, self.seen[name]) for name in had])
            if told is None:
                unknown.append((i, seen))
                continue
            self.told += 1
            name = self._tensor(f"{c.tap}/{seen.role} made", seen)
            self.nodes.append(
                GraphNode(f"{told.kind} for {c.name} {seen.role}", told.kind, told.takes, (name,), told.attributes,
                          "found by the values of the tensors around it")
            )  # fmt: skip
            self._give(c, seen, name, told.takes)
            out[i] = name
        if not unknown:
            return out
        free = [name for name in had if name not in self.taken] or had[-1:]
        if not free or c.operator:
            for i, seen in unknown:
                out[i] = self._border(f"{c.tap}/{seen.role}", seen)
            return out
        self.gaps += 1
        made = [self._tensor(f"{c.tap}/{seen.role} made", seen) for _, seen in unknown]
        self.nodes.append(GraphNode(f"{GAP} before {c.name}", GAP, tuple(free), tuple(made), {}, _GAP_NOTE))
        for (i, seen), name in zip(unknown, made, strict=True):
            self._give(c, seen, name, free)
            out[i] = name
        return out

    def _give(self, c: TapCall, seen: CallTensor, name: str, takes: Sequence[str]) -> None:
        self.taken.update(takes)
        self.done.append((c, c.begin, (name,)))
        if seen.key is not None:
            self.made[seen.key] = name

    def _had(self, c: TapCall) -> list[str]:
        """What the code around ``c`` could use: what its home was given, then what was given inside the home before
        ``c`` began; the home above where there is neither."""
        home = c.home
        while home:
            own = next((h for h in reversed(self.of_tap.get(home, ())) if h.begin <= c.begin and h is not c), None)
            since = own.begin if own is not None else -1
            found: list[tuple[int, str]] = []
            for seen in own.takes if own is not None else ():
                name = self._giver(seen, since)
                found += [(since, name)] if name is not None else []
            inside = "" if home == ROOT_TAP else home
            for d, end, names in islice(reversed(self.done), _BACK):
                if d.begin < since or len(found) > 2 * _MOST:
                    break
                if end <= c.begin and (not inside or d.tap.startswith((f"{inside}.", f"{inside}{SEPARATOR}"))):
                    found += [(end, name) for name in names]
            if found:
                found.sort(key=lambda item: item[0])
                return list(dict.fromkeys(name for _, name in found))[-_MOST:]
            home = "" if home == ROOT_TAP else next((h.home for h in self.of_tap.get(home, ())), ROOT_TAP)
        return []

    def _outputs(self) -> tuple[str, ...]:
        last = {key: listed[-1][1] for key, listed in self.givers.items()}
        found = [last[o.key] for o in (self.root.gives if self.root is not None else ()) if o.key in last]
        if not found and self.drawn:
            found = list(self.nodes[-1].outputs)
        return tuple(dict.fromkeys(found))


_MOST = 64
"""Tensors that code between two modules is looked for among: the last ones (chosen)."""
_BACK = 4096
"""Calls before a module that are looked at for them (chosen)."""
_LARGEST = 100_000
"""Calls that are drawn (chosen): Netron asks before it opens a tenth of that."""


def _attributes(c: TapCall, module: Module | None) -> Mapping[str, Any]:
    out: dict[str, Any] = {"tap": c.tap}
    if module is not None:
        out |= {k: v if not isinstance(v, bool) else int(v) for k, v in module.attrs.items()}
    for w in c.weights:
        out[w.role.removeprefix("param.")] = f"{w.dtype}[{', '.join(map(str, w.shape))}]"
    return out
