"""A model as a graph: operators or modules, and the tensors between them.

The problem: a dump of modules, one of operators and a library's json tell the same thing in three ways, and who draws
it should know none of them. The idea: plain values; a tensor is its name, and what takes it names it again.
Not here: where graphs come from (data_flow.py, atb_json.py), the file that viewers open (onnx_file.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any


@dataclass(frozen=True)
class GraphTensor:
    """name: unique in the graph; dtype: torch's name, "" where nobody knows; shape: None where nobody knows; note: one
    line for whoever looks at it."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    note: str = ""


@dataclass(frozen=True)
class GraphNode:
    """One operator or module. inputs, outputs: names of tensors; kind: its type; attributes: numbers, texts, booleans,
    and lists of these; note: one line."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class ModelGraph:
    """nodes: each behind those whose outputs it takes; tensors: what is known of each name; inputs and outputs: of the
    whole; facts: about the run, short texts; notes: sentences on what the graph does not show."""

    name: str
    nodes: tuple[GraphNode, ...]
    tensors: Mapping[str, GraphTensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def sound(graph: ModelGraph) -> ModelGraph:
    """The same graph as viewers want it: every name is given once and taken after it was given. A second giver's tensor
    gets a name of its own, which later takers mean; nodes that run in a ring keep the order they have, and what is
    taken before it is given becomes an input of the whole."""
    ordered = _ordered(graph.nodes, set(graph.inputs))
    tensors = dict(graph.tensors)
    inputs = list(dict.fromkeys(graph.inputs))
    means: dict[str, str] = {name: name for name in inputs}
    given = set(inputs)
    nodes = []
    for node in ordered:
        taken = []
        for name in node.inputs:
            if name and name not in means:
                inputs.append(name)
                given.add(name)
                means[name] = name
            taken.append(means.get(name, name))
        gives = []
        for name in node.outputs:
            own = _unused(name, given)
            if own != name:
                tensors[own] = replace(tensors.get(name, GraphTensor(name)), name=own)
            given.add(own)
            means[name] = own
            gives.append(own)
        nodes.append(replace(node, inputs=tuple(taken), outputs=tuple(gives)))
    outputs = tuple(dict.fromkeys(means[name] for name in graph.outputs if name in means))
    return replace(graph, nodes=tuple(nodes), tensors=tensors, inputs=tuple(inputs), outputs=outputs)


def _unused(name: str, taken: set[str]) -> str:
    unique, n = name or "tensor", 2
    while unique in taken:
        unique, n = f"{name}~{n}", n + 1
    return unique


def _ordered(nodes: Iterable[GraphNode], known: set[str]) -> list[GraphNode]:
    """Each node behind the giver of what it takes [A. B. Kahn, Commun. ACM 5 (1962) 558]; among those that may come
    next, the one that came first. A name's giver is the last one before the taker, or else the first one after it. A
    ring of waiting nodes begins with its first."""
    listed = list(nodes)
    givers: dict[str, list[int]] = {}
    for i, node in enumerate(listed):
        for name in node.outputs:
            givers.setdefault(name, []).append(i)

    def giver(name: str, i: int) -> int | None:
        among = givers.get(name, [])
        at = bisect_left(among, i)
        if at:
            return among[at - 1]
        return next((g for g in among[at : at + 2] if g != i), None) if name not in known else None

    waits = [{g for name in n.inputs if (g := giver(name, i)) is not None} for i, n in enumerate(listed)]
    if all(g < i for i, before in enumerate(waits) for g in before):
        return listed
    waiters: dict[int, list[int]] = {}
    for i, before in enumerate(waits):
        for g in before:
            waiters.setdefault(g, []).append(i)
    count = [len(before) for before in waits]
    ready = [i for i, n in enumerate(count) if not n]
    heapify(ready)
    out: list[GraphNode] = []
    done = [False] * len(listed)
    rest = iter(range(len(listed)))
    while len(out) < len(listed):
        i = heappop(ready) if ready else next(i for i in rest if not done[i])
        if done[i]:
            continue
        done[i] = True
        out.append(listed[i])
        for w in waiters.get(i, ()):
            count[w] -= 1
            if not count[w]:
                heappush(ready, w)
    return out
