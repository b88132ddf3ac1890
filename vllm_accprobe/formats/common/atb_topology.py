"""The graph of an ATB model: its operators as a tree, from the names of directories and the topology beside them.

The problem: a directory says an operator's type and place, but not its parameters; two graphs of one model, one of them
quantised, number their operators differently. The idea: the tree comes from the names, which are always there, its
parameters from ``model/<pid>/*.json`` where that fits (child k of a node is the directory ``k_<opType>``); two trees
are laid over one another level by level, a quantised operator counting as the one that it stands for.
Not here: tensors (atb.py), torch models (atb_torch.py), applying what is found here (align/graph_pairs.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from vllm_accprobe.formats.io import walk
from vllm_accprobe.formats.io.plain_file import read_json

_MAX_JSON = 64 << 20


@dataclass
class Node:
    """An operator and what runs inside, in order of execution. kind: its type; param, names (of tensors): of the
    topology; counts: whether its first output holds integers of 8 bits."""

    tap: str
    kind: str
    index: int
    param: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    children: list[Node] = field(default_factory=list)
    counts: bool = False

    def leaves(self) -> list[Node]:
        return [leaf for c in self.children for leaf in c.leaves()] if self.children else [self]


def load_topology(taps: set[str], path: Path, problem: Callable[[str], None]) -> dict[str, Mapping[str, Any]]:
    """tap → node of the topology that lies beside the tensors and fits most of ``taps``, as plain values; {} where none
    does. problem: is told what does not parse."""
    best: dict[str, Mapping[str, Any]] = {}
    try:
        files = _json_files(path)
    except OSError as e:
        problem(f"{e.filename or path} cannot be listed ({e.strerror or e}): no topology")
        return best
    for file in files:
        try:
            data = read_json(file, _MAX_JSON)
        except (OSError, ValueError) as e:
            problem(f"{file.name}: no topology can be read from it ({str(e)[:80]})")
            continue
        found: dict[str, Mapping[str, Any]] = {}
        if isinstance(data, Mapping):
            _flatten(data, "", found, 0)
        hits, known = len(taps & found.keys()), len(taps & best.keys())
        if hits > known:
            best = found
    return best


def _json_files(path: Path) -> list[Path]:
    """Of ``model`` and ``layer`` directories at, below or up to four levels above ``path``."""
    roots = [path, *(p for p in path.parents[:4] if (p / "tensors").is_dir())]
    for root in roots:
        heads = [root, *(d for d in _directories(root) if (d / "tensors").is_dir())]
        for head in heads:
            if head.name != "tensors" and (head / "model").is_dir():
                return [f.path for f in walk.files(head / "model", lambda n: n.endswith(".json"), walk.Passed())]
    return []


def _directories(root: Path) -> list[Path]:
    try:
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def _flatten(node: Mapping[str, Any], above: str, out: dict[str, Mapping[str, Any]], depth: int) -> None:
    nodes = node.get("nodes")
    if not isinstance(nodes, list) or depth > 40:
        return
    for i, child in enumerate(nodes):
        if isinstance(child, Mapping):
            tap = f"{above}{i}_{child.get('opType', '')}"
            out[tap] = child
            _flatten(child, f"{tap}.", out, depth + 1)


def tree(taps: Iterable[str], topology: Mapping[str, Mapping[str, Any]], counting: Container[str] = ()) -> list[Node]:
    """The operators that ``taps`` name, as a forest in order of execution. counting: those that give int8."""
    root = Node("", "", 0)
    known = {"": root}

    def at(tap: str) -> Node:
        if tap not in known:
            above, _, own = tap.rpartition(".")
            index, _, kind = own.partition("_")
            spec = topology.get(tap, {})
            param = spec.get("param")
            names = [n for key in ("inTensors", "outTensors") for n in _texts(spec.get(key))]
            node = Node(tap, kind, int(index) if index.isdecimal() else 0, param if isinstance(param, Mapping) else {},
                        tuple(names), counts=tap in counting)  # fmt: skip
            known[tap] = node
            at(above).children.append(node)
        return known[tap]

    for tap in taps:
        at(tap)
    for node in known.values():
        node.children.sort(key=lambda n: n.index)
    return root.children


def _texts(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


_QUANT = re.compile(r"w\d+a\d+|quant(ized)?|dequant(only)?|perchannel|pertoken|dynamic", re.I)


def plain_kind(kind: str) -> str:
    """The type that a quantised operator stands for: LinearQuantOperation is LinearOperation."""
    return _QUANT.sub("", kind.replace("NoQuant", "")).replace("NoAdd", "AndAdd")


def atb_to_atb(golden: Sequence[Node], mine: Sequence[Node]) -> dict[str, str]:
    """mine's tap → golden's, for operators of two graphs that are the same, level by level in order."""
    out: dict[str, str] = {}
    _lay(golden, mine, out)
    return out


def _lay(golden: Sequence[Node], mine: Sequence[Node], out: dict[str, str]) -> None:
    while len(golden) == 1 and len(mine) > 1 and golden[0].children:
        golden = golden[0].children
    kinds = [[_signature(n) for n in side] for side in (golden, mine)]
    for block in SequenceMatcher(None, kinds[0], kinds[1], autojunk=False).get_matching_blocks():
        for i in range(block.size):
            g, m = golden[block.a + i], mine[block.b + i]
            out[m.tap] = g.tap
            _lay(g.children, m.children, out)


def _signature(n: Node) -> str:
    """What must agree: an operator that quantises, or what its elementwise type is, is not one that adds."""
    kind = n.param.get("elewiseType")
    own = plain_kind(n.kind)
    if not own.startswith("Elewise"):
        return own
    return f"{own}:{kind}:{n.counts}"
