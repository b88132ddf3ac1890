"""Which call feeds which, from the tensors that a dump recorded, as a graph; and its tree of modules as lines.

The problem: a dump has inputs and outputs of calls, and no edges; what source code computes between two modules was
not recorded. The idea: a tensor is known by the hash of its bytes, or by dtype, shape and statistics; an input is
the latest earlier output of equal bytes, or the model's own input. What no call gave is searched among what the caller
had (align/derived.py); what is still missing comes from a node ``NotRecorded`` that says it is a guess, and for an
operator from outside. In the tree, neighbours that are alike inside share one line. Not here: files (model_graph.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from vllm_accprobe.align.derived import LARGEST, Relations
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import SEPARATOR, inputs, is_operator, tensors
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.record_table import of_moment
from vllm_accprobe.dump.schema import ROOT_TAP, Module, OpCall, Record, Stats
from vllm_accprobe.formats.io.plain_file import read_json
from vllm_accprobe.topology.model_graph import MAX_JSON, GraphNode, GraphTensor, ModelGraph

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A tensor at a call. key: equal for equal bytes, None where nothing tells; record: None where only a line of an
    operator's call names it; note: its statistics."""

    role: str
    key: Hashable | None
    dtype: str
    shape: tuple[int, ...]
    record: Record | None = None
    note: str = ""


@dataclass
class TapCall:
    """One call of a tap. begin, end: places in the step's order; home: the tap that it stands in, ROOT_TAP at last."""

    tap: str
    cls: str
    call: int
    begin: int
    end: int
    takes: list[CallTensor] = field(default_factory=list)
    gives: list[CallTensor] = field(default_factory=list)
    weights: list[CallTensor] = field(default_factory=list)
    home: str = ROOT_TAP
    operator: bool = False

    @property
    def name(self) -> str:
        return f"{self.tap}#{self.call}" if self.call else self.tap


def calls_of(dump: Dump, rank: int, step: int, tick: Tick = lambda: None) -> list[TapCall]:
    """All calls of ``step`` on ``rank``, modules and operators, in the order in which they began."""
    known = _Identities(dump, tick)
    operators = {(op.tap, op.call): op for op in dump.ops if (op.rank, op.step) == (rank, step) and op.inside is None}
    found: dict[tuple[str, int], TapCall] = {}
    own = list(of_moment(dump.records, rank, step))
    places = {(r.tap, r.call, r.role) for r in own}
    for r in sorted(own, key=lambda r: r.seq):
        kind = r.role.partition(".")[0]
        if kind not in ("input", "output", "value", "inplace"):
            continue
        if SEPARATOR in r.tap and (r.tap, r.call) not in operators:
            continue  # inside another operator's kernel
        call = found.setdefault((r.tap, r.call), TapCall(r.tap, r.cls, r.call, r.seq, r.seq))
        seen = CallTensor(r.role, known.of(r), r.dtype, r.shape, r, _stats_text(r.stats))
        if kind == "input":
            call.takes.append(seen)
            call.begin = min(call.begin, r.seq)
        elif kind == "inplace" and _alone(r, places):  # kept behind the operator only: what it took, as far as known
            call.takes.append(seen)
        elif kind != "inplace" or all(seen.key != g.key for g in call.gives):
            call.gives.append(seen)
            call.end = max(call.end, r.seq)
    for key, op in operators.items():
        _complete(found, key, op)
    for r in dump.records:
        if r.step is None and r.rank == rank and (r.tap, 0) in found:
            found[r.tap, 0].weights.append(CallTensor(r.role, None, r.dtype, r.shape))
    whole = getattr(dump, "family", "") in ("atb", "ge", "fx")
    for c in found.values():
        c.operator = whole or ":" in c.tap.rpartition(".")[2]
    calls = sorted(found.values(), key=lambda c: (c.begin, -c.end))
    taps = {c.tap for c in calls}
    for c in calls:
        c.home = _home(c, taps)
    return calls


def _alone(r: Record, places: set[tuple[str, int, str]]) -> bool:
    return (r.tap, r.call, f"input{r.role.removeprefix('inplace')}") not in places


def _home(c: TapCall, taps: set[str]) -> str:
    if c.tap == ROOT_TAP:
        return ""
    if SEPARATOR in c.tap:
        above = c.tap.partition(SEPARATOR)[0]
        places = [above, *enclosing(above)]
    else:
        places = list(enclosing(c.tap))
    return next((p for p in places if p in taps), ROOT_TAP)


def _complete(found: dict[tuple[str, int], TapCall], key: tuple[str, int], op: OpCall) -> None:
    call = found.setdefault(key, TapCall(op.tap, op.op, op.call, op.seq, op.seq))
    call.cls = op.op
    call.begin = min(call.begin, op.seq)
    call.end = max(call.end, op.seq)
    for side, listed in ((call.takes, list(inputs(op))), (call.gives, list(tensors(op.outputs)))):
        roles = {s.role for s in side}
        side += [_named(t) for t in listed if t.get("role") not in roles and "param" not in t]
    call.weights += [_named(t) for t in inputs(op) if "param" in t]
    for t in inputs(op):
        after = t.get("after")
        if isinstance(after, dict) and isinstance(after.get("hash"), str):
            call.gives.append(_named({**t, "role": f"inplace.{t['role']}", "hash": after["hash"]}))


def _named(t: dict[str, Any]) -> CallTensor:
    key = t["hash"] if isinstance(t.get("hash"), str) else None
    return CallTensor(str(t["role"]), key, str(t["dtype"]), tuple(t.get("shape") or ()))


class _Identities:
    def __init__(self, dump: Dump, tick: Tick):
        self._dump, self._tick = dump, tick

    def of(self, r: Record) -> Hashable | None:
        self._tick()
        if r.hash is not None:
            return r.hash
        if r.payload is not None and 0 < r.payload.nbytes <= LARGEST:
            try:
                bits = self._dump.read(r)
            except (DumpError, OSError):
                return None
            return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        s = r.stats
        if s is None or not s.l2 or r.dtype not in DTYPES:
            return None
        return (r.dtype, r.shape, s.min, s.max, s.mean, s.l2)


def _stats_text(s: Stats | None) -> str:
    if s is None or s.min is None or s.max is None:
        return ""
    text = f"min {s.min:.4g}, max {s.max:.4g}, mean {s.mean or 0:.4g}"
    return text + (f", {s.nan} NaN" if s.nan else "") + (f", {s.inf} Inf" if s.inf else "")


def fullest(records: Iterable[Record], ops: Iterable[OpCall]) -> tuple[int, int] | None:
    """(rank, step) in which most taps were seen, the first of several; None where nothing has a step."""
    taps: dict[tuple[int, int], set[str]] = {}
    listed: list[Record | OpCall] = [*records, *ops]
    for seen in listed:
        if seen.step is not None:
            taps.setdefault((seen.rank, seen.step), set()).add(seen.tap)
    return max(sorted(taps), key=lambda place: len(taps[place]), default=None)


def cut(calls: Sequence[TapCall], level: int | None) -> list[TapCall]:
    """The calls to draw: those ``level`` deep, and those above that have none inside; None: the innermost of all. The
    model itself is level 0, what it calls 1."""
    homes = {c.home for c in calls}
    depth = depths(calls)
    root = [c for c in calls if c.tap == ROOT_TAP]
    if level == 0 and root:
        return root
    if level is None:
        drawn = [c for c in calls if c.tap != ROOT_TAP and c.tap not in homes]
    else:
        at = max(level, 1)
        drawn = [c for c in calls if depth[c.tap] == at or (0 < depth[c.tap] < at and c.tap not in homes)]
    return drawn or root


def depths(calls: Iterable[TapCall]) -> dict[str, int]:
    """How many called taps enclose each; those that none encloses are 1 deep, the model itself 0."""
    home = {c.tap: c.home for c in calls}
    out = {ROOT_TAP: 0}
    for tap in home:
        chain = []
        at = tap
        while at not in out:
            chain.append(at)
            at = home.get(at, ROOT_TAP)
        for own in reversed(chain):
            out[own] = out[at] + 1
            at = own
    return out


GAP = "NotRecorded"
_GAP_NOTE = "computed between modules by code that the dump does not show; its inputs are a guess: what no module took"


def graph_of(
    dump: Dump, level: int | None = None, rank: int | None = None, step: int | None = None, tick: Tick = lambda: None
) -> ModelGraph:
    """One step of one rank as a graph; by default the step that shows most taps.

    level: how deep modules are opened, 1 for what the model itself calls; None: to the innermost call, operators where
    they were captured. tick: called per tensor that is examined. Raises DumpError where there is nothing to draw.
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
        self.gaps = self.by_values = 0
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
        if self.by_values:
            notes.append(
                f"{self.by_values} slices, picked rows, sums or products between modules were found by their values"
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
        """The tensor of equal bytes that was passed last, else the model's own input, else what a node between made."""
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
        known = self.borders.get(seen.key) if seen.key is not None else None
        if known is None:
            known = self._tensor(name, seen)
            self.inputs.append(known)
            if seen.key is not None:
                self.borders[seen.key] = known
        return known

    def _between(self, c: TapCall, missing: Sequence[CallTensor]) -> list[str]:
        had = self._had(c)
        out = [""] * len(missing)
        unknown: list[tuple[int, CallTensor]] = []
        for i, seen in enumerate(missing):
            explained = self.relations.explain(seen, [(name, self.seen[name]) for name in had])
            if explained is None:
                unknown.append((i, seen))
                continue
            self.by_values += 1
            name = self._tensor(f"{c.tap}/{seen.role} made", seen)
            self.nodes.append(
                GraphNode(f"{explained.kind} for {c.name} {seen.role}", explained.kind, explained.takes, (name,),
                          explained.attributes, "found by the values of the tensors around it")
            )  # fmt: skip
            self._give(c, seen, name, explained.takes)
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
        """What the code that calls ``c`` could use: what its home was given, then what was given inside the home before
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
"""Tensors that code between two modules is searched for among: the last ones (chosen)."""
_BACK = 4096
"""Calls before a module that are examined for them (chosen)."""
_LARGEST = 100_000
"""Calls that are drawn (chosen): Netron asks before it opens a tenth of that."""


def _attributes(c: TapCall, module: Module | None) -> Mapping[str, Any]:
    out: dict[str, Any] = {"tap": c.tap}
    if module is not None:
        out |= {k: v if not isinstance(v, bool) else int(v) for k, v in module.attrs.items()}
    for w in c.weights:
        out[w.role.removeprefix("param.")] = f"{w.dtype}[{', '.join(map(str, w.shape))}]"
    return out


_DEEPEST, _MOST = 60, 100_000
_LISTS = ("ModuleList", "ModuleDict")
"""Never called: no level of their own."""


@dataclass
class Branch:
    """name: below what stands above it; shapes: shapes and weights; children: in order."""

    name: str
    cls: str = ""
    shapes: str = ""
    children: list[Branch] = field(default_factory=list)


def of_dump(dump: Dump, rank: int | None = None, step: int | None = None) -> Branch:
    records = [r for r in dump.records if rank in (None, r.rank) and step in (None, r.step)]
    place = fullest(records, ())
    own = rank if rank is not None else place[0] if place else next(iter(dump.ranks), 0)
    listed = sorted(dump.modules.get(own, []), key=lambda m: m.index)
    classes = {m.tap: m.cls for m in listed if m.cls not in _LISTS}
    for r in dump.records:
        if r.rank == own and not is_operator(r.tap):
            classes.setdefault(r.tap, r.cls)
    shapes = _shapes_text([r for r in dump.records if r.rank == own and (r.step is None or (own, r.step) == place)])
    root = Branch(ROOT_TAP, classes.pop(ROOT_TAP, ""), shapes.get(ROOT_TAP, ""))
    known = {ROOT_TAP: root}
    for tap in sorted((t for t in classes if not is_operator(t)), key=lambda t: t.count(".")):
        above = next((up for up in enclosing(tap) if up in known), ROOT_TAP)
        name = tap if above == ROOT_TAP else tap[len(above) + 1 :]
        known[tap] = Branch(name, classes[tap], shapes.get(tap, ""))
    for tap in classes:  # in the order of declaration, whatever the depth
        if tap in known:
            above = next((up for up in enclosing(tap) if up in known), ROOT_TAP)
            known[above].children.append(known[tap])
    return root


def _shapes_text(records: Iterable[Record]) -> dict[str, str]:
    taken: dict[str, list[str]] = {}
    shapes: dict[str, list[str]] = {}
    weights: dict[str, list[str]] = {}
    for r in records:
        if r.call:
            continue
        shape = f"[{', '.join(map(str, r.shape))}]"
        if r.role.startswith("input"):
            taken.setdefault(r.tap, []).append(shape)
        elif r.role.startswith(("output", "value")):
            shapes.setdefault(r.tap, []).append(f"{shape} {r.dtype}")
        elif r.role.startswith("param."):
            weights.setdefault(r.tap, []).append(f"{r.role.removeprefix('param.')} {shape}")
    out = {}
    for tap in {**taken, **shapes, **weights}:
        flow = " ".join(filter(None, (" ".join(taken.get(tap, ())), "→", " ".join(shapes.get(tap, ())))))
        out[tap] = ", ".join(([flow] if tap in taken or tap in shapes else []) + weights.get(tap, []))
    return out


def of_atb(path: Path) -> Branch:
    """The tree in ATB's topology of a model or a layer. Raises DumpError for a file that is none."""
    data = read_json(path, MAX_JSON)
    if not isinstance(data, Mapping) or not isinstance(data.get("nodes"), list):
        raise DumpError(f"{path} is no topology of ATB's: it has no nodes")
    root = Branch(str(data.get("modelName") or data.get("opName") or path.stem), str(data.get("opType") or ""))
    _hang(root, data["nodes"], 1, [0])
    return root


def _hang(branch: Branch, nodes: Sequence[Any], depth: int, count: list[int]) -> None:
    for i, node in enumerate(nodes):
        count[0] += 1
        if depth > _DEEPEST or count[0] > _MOST:
            raise DumpError(f"a topology with more than {_DEEPEST} levels or {_MOST:,} nodes is not shown")
        if not isinstance(node, Mapping):
            continue
        child = Branch(f"{i}_{node.get('opName') or 'node'}", str(node.get("opType") or ""))
        branch.children.append(child)
        if isinstance(node.get("nodes"), list):
            _hang(child, node["nodes"], depth + 1, count)


def lines(root: Branch, level: int | None = None) -> list[str]:
    """The tree; nothing below ``level``: 0 is the model itself, 1 what it calls. Neighbours that are alike inside are
    one line."""
    marks: dict[int, tuple[Any, ...]] = {}
    out = [_line(root, 1, root)]
    _draw(root, "", 1, level, out, marks)
    return out


def _draw(
    branch: Branch, indent: str, depth: int, level: int | None, out: list[str], marks: dict[int, tuple[Any, ...]]
) -> None:
    if not branch.children:
        return
    if level is not None and depth > level:
        return
    groups: list[list[Branch]] = []
    for child in branch.children:
        if groups and _mark(groups[-1][0], marks) == _mark(child, marks):
            groups[-1].append(child)
        else:
            groups.append([child])
    for i, group in enumerate(groups):
        last = i == len(groups) - 1
        out.append(f"{indent}{'└─ ' if last else '├─ '}{_line(group[0], len(group), group[-1])}")
        _draw(group[0], indent + ("   " if last else "│  "), depth + 1, level, out, marks)


def _mark(branch: Branch, marks: dict[int, tuple[Any, ...]]) -> tuple[Any, ...]:
    """What must agree for two to share a line: the name but for its numbers, class, shapes, and all that is inside."""
    found = marks.get(id(branch))
    if found is None:
        name = re.sub(r"\d+", "#", branch.name)  # q_proj is not k_proj, and 0 is like 1
        found = marks[id(branch)] = (name, branch.cls, branch.shapes, tuple(_mark(c, marks) for c in branch.children))
    return found


def _line(first: Branch, n: int, last: Branch) -> str:
    name = first.name if n == 1 else f"{first.name} … {last.name}"
    cls = first.cls if n == 1 else f"{n} x {first.cls or 'the same'}"
    return "  ".join(filter(None, (name, cls, first.shapes)))
