"""Dumps of torch graphs on Ascend (torchair): binaries of the graph engine (GE), .npy files of the FX graph.

The problem: the two sides of one model share no name, and the graph engine fuses operators under joined names. The
idea: each file's name says what it holds, GE's header the tensors in it, and the graph that torchair wrote next to the
dump says, at each output, which FX tensor it is.
Layout, GE: ``[worldsize{W}_global_rank{R}/]dump_*/{time}/{device}/{graph}/{graph id}/{token}/`` with
``{OpType}.{OpName}.{task}.{stream}.{time}``, ``dynamo_original_graph_*.txt`` above; long names stand in mapping.csv.
FX: ``.../{token}/.../{node}-{aten op}.{INPUT|OUTPUT}.{k}.{time}.npy``, ``{k}.{j}`` for a list. GE's tokens begin with
0, FX's with 1, or with 0 in releases that write below ``worldsize{W}_global_rank{R}/``.
Not here: GE's binary format (ge_dump.py), which operator pairs with which (align/without_row_maps.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor
from vllm_accprobe.formats.io import ge_dump, plain_file, tensor_file
from vllm_accprobe.formats.io.plain_file import read_rows, read_text

NAME = "torchair"
HOW = "files <OpType>.<OpName>.<task>.<stream>.<time> (GE), or <node>-<aten op>.INPUT|OUTPUT.<k>.<time>.npy (FX)"
ORDER = 60
_GE = re.compile(r"([^.]+)\.(.+)\.(\d{1,12})\.(\d{1,12})\.(\d{10,20})", re.ASCII | re.DOTALL)
_GE_NPY = re.compile(r"([^.]+)\.(.+)\.(\d{1,12})\.(\d{1,12})\.(\d{10,20})\.(input|output)\.(\d{1,5})\.npy", re.ASCII)
_FX = re.compile(r"([^-]+)-(.+)\.(INPUT|OUTPUT)\.(\d{1,6})(?:\.(\d{1,6}))?\.(\d{8,24})\.npy", re.ASCII)
_RANK = re.compile(r"worldsize(\d{1,6})_global_rank(\d{1,6})", re.ASCII)
_GRAPH = re.compile(r"dynamo_(original|optimized)_graph_.*\.txt")
_FX_NAME = re.compile(r"([^-]+)-(.+)\.(INPUT|OUTPUT)\.(\d{1,6})")
_TIME = re.compile(r"\d{12,17}", re.ASCII)
MAPPING = "mapping.csv"


class GeDump(ForeignDump):
    """A dump of the graph engine. From the graphs next to it: fx: (operator, output) → (FX node, output); inputs:
    operator → where its inputs come from, ``Mm_8:0``; known: all operators."""

    family = "ge"

    def __init__(self, path: Path):
        super().__init__(path, NAME, {"graph": "GE"})
        self.fx: dict[tuple[str, int], tuple[str, int]] = {}
        self.known: set[str] = set()
        self.inputs: dict[str, list[str]] = {}


class FxDump(ForeignDump):
    """A dump of the FX graph; taps are its nodes."""

    family = "fx"

    def __init__(self, path: Path):
        super().__init__(path, NAME, {"graph": "FX"})


def recognise(path: Path) -> bool:
    if path.is_file():
        return _is_ge(path.name) is not None and _starts(path)
    return plain_file.probe(path, lambda parts: _FX.fullmatch(parts[-1]) is not None or _is_ge(parts[-1]) is not None)


def _is_ge(name: str) -> re.Match[str] | None:
    return None if name.endswith((".npy", ".pt", ".pth", ".json", ".csv", ".txt")) else _GE.fullmatch(name)


def _starts(path: Path) -> bool:
    try:
        ge_dump.parse(path)
    except DumpError:
        return path.suffix[1:].isdecimal()
    return True


def open(path: Path) -> ForeignDump:
    """Opens a dump of either graph, or one GE file; reads headers, no payload. Raises DumpError."""
    if path.is_file():
        dump = GeDump(path)
        match = _is_ge(path.name)
        assert match is not None
        _add_file(dump, plain_file.FoundFile((path.name,), str(path)), (match[1], match[2]), 0, 0, strict=True)
        return dump
    passed = plain_file.Passed()
    listed = list(plain_file.files(path, _wanted, passed))
    fx = [f for f in listed if _FX.fullmatch(f.parts[-1])]
    found: ForeignDump = _open_fx(path, fx) if fx else _open_ge(path, listed)
    passed.report(found)
    return found


def _wanted(name: str) -> bool:
    return bool(_is_ge(name) or name.endswith(".npy") or _GRAPH.fullmatch(name) or name == MAPPING or name.isdecimal())


# --- GE ---


@dataclass(frozen=True, slots=True)
class _GeFile:
    found: plain_file.FoundFile
    kind: str
    name: str
    task: int
    time: int
    role: str = ""  # of a converted file that holds one tensor


def _open_ge(path: Path, listed: list[plain_file.FoundFile]) -> GeDump:
    dump = GeDump(path)
    long_names = _long_names(dump, [f for f in listed if f.parts[-1] == MAPPING])
    files = [g for f in listed if (g := _ge_file(f, long_names)) is not None]
    ranks = {f.found.parts[:-1]: _rank(f.found.parts[:-1]) for f in files}
    for f in sorted(files, key=lambda f: (f.time, f.task, f.name)):
        where = f.found.parts[:-1]
        token = next((int(p) for p in reversed(where) if p.isdecimal() and len(p) < 10), 0)
        if f.role:
            _add_npy(dump, f.found, f.name, f.role, f.kind, token, ranks[where])
        else:
            _add_file(dump, f.found, (f.kind, f.name), token, ranks[where])
    for graph in listed:
        if _GRAPH.fullmatch(graph.parts[-1]):
            try:
                fx, inputs = read_graph(read_text(graph.path).splitlines())
                dump.fx.update(fx)
                dump.inputs.update(inputs)
                dump.known.update(inputs)
            except DumpError as e:
                dump.problem(f"{e}: FX names are not known")
    return dump


def _ge_file(f: plain_file.FoundFile, long_names: Mapping[tuple[tuple[str, ...], str], str]) -> _GeFile | None:
    name = long_names.get((f.parts[:-1], f.parts[-1]), f.parts[-1])
    if (m := _is_ge(name)) is not None:
        return _GeFile(f, m[1], m[2], int(m[3]), int(m[5]))
    if (m := _GE_NPY.fullmatch(name)) is not None:
        return _GeFile(f, m[1], m[2], int(m[3]), int(m[5]), f"{m[6]}.{int(m[7])}")
    return None


def _long_names(dump: GeDump, tables: Iterable[plain_file.FoundFile]) -> dict[tuple[tuple[str, ...], str], str]:
    """(directory, file name) → the name that was too long for the file system."""
    out = {}
    for f in tables:
        try:
            for row in read_rows(f.path):
                if len(row) >= 2:
                    out[(f.parts[:-1], row[0].strip())] = row[1].strip()
        except DumpError as e:
            dump.problem(str(e))
    return out


def _rank(parts: tuple[str, ...]) -> int:
    """The global rank where a directory says it, else the device: the number below the time."""
    for p in parts:
        if m := _RANK.fullmatch(p):
            return int(m[2])
    for above, p in pairwise(parts):
        if _TIME.fullmatch(above) and p.isdecimal() and len(p) < 6:
            return int(p)
    return 0


def _add_file(
    dump: GeDump, f: plain_file.FoundFile, names: tuple[str, str], step: int, rank: int, *, strict: bool = False
) -> None:
    kind, name = names
    try:
        header = ge_dump.parse(f.path)
    except DumpError as e:
        if strict:
            raise
        dump.unreadable(e, name, step)
        return
    tap = header.op or name
    for t in header.tensors:
        role = f"{t.kind}.{t.index}"
        problem = t.problem()
        if t.dtype is None or problem:
            dump.skip(tap, problem, step, role)
            if strict:
                dump.problem(f"{f.name}: {role}: {problem}")
            continue
        read = partial(ge_dump.read, f.path, t)
        dump.add(Tensor(f"{f.name}:{role}", tap, role, t.dtype, t.shape, read, kind, step, rank))


def _add_npy(dump: ForeignDump, f: plain_file.FoundFile, tap: str, role: str, cls: str, step: int, rank: int) -> None:
    """Adds the array of an .npy file."""
    try:
        item = tensor_file.first(f.path)
    except DumpError as e:
        dump.unreadable(e, tap, step, role)
        return
    dump.add(Tensor(f.name, tap, role, item.dtype, item.shape, item.read, cls, step, rank))


def read_graph(lines: Iterable[str]) -> tuple[dict[tuple[str, int], tuple[str, int]], dict[str, list[str]]]:
    """((operator, output) → (FX node, output), operator → where its inputs come from), from the text of a graph."""
    out: dict[tuple[str, int], tuple[str, int]] = {}
    inputs: dict[str, list[str]] = {}
    stack: list[str] = []
    op, output, key = "", -1, ""
    for line in lines:
        text = line.strip()
        if text.endswith("{"):
            stack.append(text[:-1].strip().rstrip(":").strip())
            if stack[-1] == "op":
                op, output = "", -1
            elif stack[-1] == "output_desc":
                output += 1
        elif text == "}":
            if stack:
                stack.pop()
        elif stack:
            field, _, value = text.partition(":")
            value = value.strip().strip('"')
            if stack[-1] == "op" and field == "name":
                op = value
                inputs.setdefault(op, [])
            elif stack[-1] == "op" and field == "input" and op:
                inputs[op].append(value)
            elif stack[-1] == "attr" and field == "key":
                key = value
            elif field == "s" and key == "_fx_tensor_name" and "output_desc" in stack and op:
                match = _FX_NAME.fullmatch(value)
                if match is not None:
                    out[(op, output)] = (match[1], int(match[4]))
    return out, inputs


def split_fused(name: str, known: set[str]) -> list[str]:
    """The operators whose names, one behind the other, are ``name``: always the longest that fits; [] where they do
    not fill it, or it is one operator's own."""
    parts: list[str] = []
    at = 0
    longest = max((len(k) for k in known), default=0)
    while at < len(name):
        stop = next((e for e in range(min(len(name), at + longest), at, -1) if name[at:e] in known), None)
        if stop is None:
            return []
        parts.append(name[at:stop])
        at = stop
        if at < len(name) and name[at] in "_/" and name[at:] not in known:
            at += 1 if any(name.startswith(k, at + 1) for k in known) else 0
    return parts if len(parts) > 1 else []


def fused_inputs(parts: list[str], inputs: Mapping[str, list[str]]) -> list[tuple[str, int]]:
    """What a fused operator takes, as (operator, which of its inputs): all that comes from outside, in the order of
    the operators; [] where the graph does not say."""
    if not all(p in inputs for p in parts):
        return []
    outside: dict[str, tuple[str, int]] = {}
    for p in parts:
        for k, source in enumerate(inputs[p]):
            if source.rpartition(":")[0] not in parts:
                outside.setdefault(source, (p, k))
    return list(outside.values())


# --- FX ---


def _open_fx(path: Path, listed: list[plain_file.FoundFile]) -> FxDump:
    dump = FxDump(path)
    tokens = {f.parts[:-1]: [int(p) for p in f.parts[:-1] if p.isdecimal() and len(p) < 10] for f in listed}
    ranked = any(_RANK.fullmatch(p) for parts in tokens for p in (*path.parts[-3:], *parts))
    first = 0 if ranked or any(t and t[-1] == 0 for t in tokens.values()) else 1
    rows = []
    for f in listed:
        m = _FX.fullmatch(f.parts[-1])
        assert m is not None
        token = tokens[f.parts[:-1]][-1] if tokens[f.parts[:-1]] else first
        rows.append(((token, m[6], m[3] == "OUTPUT", int(m[4]), int(m[5] or 0)), f, m))
    for (token, *_), f, m in sorted(rows, key=lambda r: r[0]):
        role = f"{m[3].lower()}.{int(m[4])}" + (f".{int(m[5])}" if m[5] else "")
        _add_npy(dump, f, m[1], role, m[2], token - first, _rank(f.parts[:-1]))
    return dump
