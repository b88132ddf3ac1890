"""A model's tree of modules, or of ATB's operators, as lines for a terminal.

The problem: sixty layers of ten modules each are six hundred lines, of which fifteen say something. The idea:
neighbours that are alike inside share one line, and nothing is opened below a level. Not here: what feeds what
(data_flow.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import is_operator
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, Record
from vllm_accprobe.formats.io.plain_file import read_json
from vllm_accprobe.topology.data_flow import fullest
from vllm_accprobe.topology.model_graph import MAX_JSON

_DEEPEST, _MOST = 60, 100_000
_LISTS = ("ModuleList", "ModuleDict")
"""Never called: no level of their own."""


@dataclass
class Branch:
    """name: below what stands above it; said: shapes and weights; children: in order."""

    name: str
    cls: str = ""
    said: str = ""
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
    said = _said([r for r in dump.records if r.rank == own and (r.step is None or (own, r.step) == place)])
    root = Branch(ROOT_TAP, classes.pop(ROOT_TAP, ""), said.get(ROOT_TAP, ""))
    known = {ROOT_TAP: root}
    for tap in sorted((t for t in classes if not is_operator(t)), key=lambda t: t.count(".")):
        above = next((up for up in enclosing(tap) if up in known), ROOT_TAP)
        name = tap if above == ROOT_TAP else tap[len(above) + 1 :]
        known[tap] = Branch(name, classes[tap], said.get(tap, ""))
    for tap in classes:  # in the order of declaration, whatever the depth
        if tap in known:
            above = next((up for up in enclosing(tap) if up in known), ROOT_TAP)
            known[above].children.append(known[tap])
    return root


def _said(records: Iterable[Record]) -> dict[str, str]:
    taken: dict[str, list[str]] = {}
    given: dict[str, list[str]] = {}
    weights: dict[str, list[str]] = {}
    for r in records:
        if r.call:
            continue
        shape = f"[{', '.join(map(str, r.shape))}]"
        if r.role.startswith("input"):
            taken.setdefault(r.tap, []).append(shape)
        elif r.role.startswith(("output", "value")):
            given.setdefault(r.tap, []).append(f"{shape} {r.dtype}")
        elif r.role.startswith("param."):
            weights.setdefault(r.tap, []).append(f"{r.role.removeprefix('param.')} {shape}")
    out = {}
    for tap in {**taken, **given, **weights}:
        flow = " ".join(filter(None, (" ".join(taken.get(tap, ())), "→", " ".join(given.get(tap, ())))))
        out[tap] = ", ".join(([flow] if tap in taken or tap in given else []) + weights.get(tap, []))
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
        found = marks[id(branch)] = (name, branch.cls, branch.said, tuple(_mark(c, marks) for c in branch.children))
    return found


def _line(first: Branch, n: int, last: Branch) -> str:
    name = first.name if n == 1 else f"{first.name} … {last.name}"
    cls = first.cls if n == 1 else f"{n} x {first.cls or 'the same'}"
    return "  ".join(filter(None, (name, cls, first.said)))
