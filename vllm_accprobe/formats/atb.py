"""Dumps of Ascend's transformer boost library (ATB), as ait and msit make them: one .bin per tensor.

The problem: an operator is known by its path of numbered directories, and releases differ in what lies above these.
The idea: a tensor file is any ``(in|out)tensor<k>.bin``, the numbered directories right above it are the operator, the
directory above these is the execution (token), and what lies above that names the process.
Layout: ``tensors/{device}_{pid}/{token}/{i}_{Op}/{j}_{SubOp}/{before,after}/{intensor,outtensor}{k}.bin``, the same
with ``{pid}/{tid}`` or ``thread_{tid}`` instead, ``inTensor0.bin`` in old releases; ``model/{pid}/*.json`` holds the
topology, ``statistic.csv`` statistics without tensors.
Beside them may lie what the operators were created with (common/atb_params.py).
Not here: the files (atb_file.py), which operator is which module of another dump (atb_topology.py, atb_torch.py).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats.common import atb_params
from vllm_accprobe.formats.common.atb_topology import load_topology
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, torch_dtype
from vllm_accprobe.formats.io import walk
from vllm_accprobe.formats.io.atb_file import number, read_header, read_tensor, stats_of
from vllm_accprobe.formats.io.plain_file import read_text

NAME = "atb"
HOW = "a directory with */before|after/intensor<k>.bin|outtensor<k>.bin, or ATB's statistic.csv"
ORDER = 50
ODD_LINE = "line of a table that is not understood"
_FILE = re.compile(r"(in|out)tensor(\d{1,6})\.bin", re.I | re.ASCII)
_OPERATOR = re.compile(r"(\d{1,9})_(.+)", re.ASCII)
_WHEN = ("before", "after")
_DEVICE = re.compile(r"(\d{1,6})_(\d+)", re.ASCII)
STATISTICS = "statistic.csv"
ELSEWHERE = "its values lie in another file"


class AtbDump(ForeignDump):
    """topology: tap (``3_layer.1_Attention``) → its node of the topology, where there is one; operands: (rank, step,
    tap) → the call's inputs by their numbers, weights included, as they were before it, or after it where only that was
    kept."""

    family = "atb"

    def __init__(self, path: Path):
        super().__init__(path, NAME)
        self.topology: dict[str, Mapping[str, Any]] = {}
        self.operands: dict[tuple[int, int, str], dict[int, Record]] = {}
        self.parameters = atb_params.AtbParameters(self.topology)

    def call_inputs(self, rank: int, step: int, tap: str) -> Mapping[str, Record]:
        """All inputs of a call by number, whatever roles they have as records."""
        return {str(k): r for k, r in sorted(self.operands.get((rank, step, tap), {}).items())}

    def call_attributes(self, rank: int, step: int, tap: str) -> Mapping[str, Any]:
        """``param``: what the operator was created with, where something tells it; ``kept_after``: the inputs that
        were kept behind the operator only."""
        param = self.parameters.of(rank, step, tap)
        held = self.operands.get((rank, step, tap), {})
        after = [str(k) for k, r in held.items() if r.role.startswith("inplace.")]
        return ({} if param is None else {"param": param}) | ({"kept_after": after} if after else {})


def recognise(path: Path) -> bool:
    return walk.probe(path, lambda parts: _is_tensor(parts) or parts[-1] == STATISTICS)


def _is_tensor(parts: tuple[str, ...]) -> bool:
    return len(parts) >= 2 and parts[-2] in _WHEN and _FILE.fullmatch(parts[-1]) is not None


@dataclass(frozen=True, slots=True)
class AtbPlace:
    """Where a tensor file stands. process: names above the execution; step: the execution; operator: names."""

    process: tuple[str, ...]
    step: int
    operator: tuple[str, ...]


def place(parts: tuple[str, ...]) -> AtbPlace | None:
    """From the names of the directories above ``before`` or ``after``; None where there is no numbered operator."""
    cut = len(parts)
    # ``{device}_{pid}`` looks like an operator with a number for a name.
    while cut and _OPERATOR.fullmatch(parts[cut - 1]) and not _DEVICE.fullmatch(parts[cut - 1]):
        cut -= 1
    if cut == len(parts):
        return None
    token = parts[cut - 1] if cut and parts[cut - 1].isdecimal() else ""
    return AtbPlace(parts[: cut - 1] if token else parts[:cut], int(token or 0), parts[cut:])


def open(path: Path) -> AtbDump:
    """Opens an ATB dump: reads every header, no payload. Raises DumpError where nothing can be read."""
    dump = AtbDump(path)
    passed = walk.Passed()
    entries: list[tuple[AtbPlace, tuple[float, ...], walk.FoundFile]] = []
    tables: list[walk.FoundFile] = []
    beside: list[tuple[AtbPlace, walk.FoundFile]] = []
    for f in walk.files(path, lambda n: bool(_FILE.fullmatch(n)) or n in (STATISTICS, atb_params.FILE), passed):
        if f.parts[-1] == STATISTICS:
            tables.append(f)
        elif f.parts[-1] == atb_params.FILE:
            found = place(f.parts[:-1])
            beside += [] if found is None else [(found, f)]
        elif _is_tensor(f.parts):
            where = place(f.parts[:-2])
            if where is None:
                dump.skip(f.name, "file outside of a numbered operator")
            else:
                entries.append((where, _order(where.operator, f.parts[-2], f.parts[-1]), f))
    one_run({w.process[:-1] for w, _, _ in entries}, path)
    ranks = number_ranks([w.process for w, _, _ in entries])
    entries.sort(key=lambda e: (ranks[e[0].process], e[0].step, e[1]))
    dump.topology.update(load_topology({".".join(w.operator) for w, _, _ in entries}, path, dump.problem))
    for where, f in beside:
        if where.process in ranks:
            dump.parameters.add_file((ranks[where.process], where.step, ".".join(where.operator)), f.path)
    dump.parameters.find_tables(path)
    for sentence in dump.parameters.problems:
        dump.problem(sentence)
    for where, _, f in entries:
        _add(dump, f, where, ranks[where.process])
    if not entries:
        for table in tables:
            _add_table(dump, table)
    passed.tell(dump)
    return dump


def one_run(heads: set[tuple[str, ...]], path: Path) -> None:
    """Raises DumpError where a directory holds the dumps of several runs."""
    if len(heads) > 1:
        names = sorted("/".join(h) or "." for h in heads)
        more = ", ..." if len(names) > 3 else ""
        raise DumpError(f"{path} holds {len(heads)} dumps ({', '.join(names[:3])}{more}): name one of them")


def number_ranks(processes: list[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Processes as ranks: by their devices where these differ, else in order of their names."""
    known = sorted(set(processes), key=lambda p: walk.natural("/".join(p)))
    devices = [m[1] if p and (m := _DEVICE.fullmatch(p[-1])) else "" for p in known]
    if all(devices) and len(set(devices)) == len(devices):
        return {p: int(d) for p, d in zip(known, devices, strict=True)}
    return {p: i for i, p in enumerate(known)}


def _order(operator: tuple[str, ...], when: str, file: str) -> tuple[float, ...]:
    """Inputs before what runs inside, outputs behind it."""
    match = _FILE.fullmatch(file)
    assert match is not None
    path = [float(o.partition("_")[0]) for o in operator]
    return (*path, -1.0 if match[1].lower() == "in" else math.inf, 0.0 if when == "before" else 1.0, float(match[2]))


def _add(dump: AtbDump, f: walk.FoundFile, where: AtbPlace, rank: int) -> None:
    step = where.step
    match = _FILE.fullmatch(f.parts[-1])
    assert match is not None
    kind = match[1].lower()
    operator = where.operator[-1].partition("_")[2]
    role = f"{kind}put.{int(match[2])}"
    if (kind == "in") != (f.parts[-2] == "before"):
        # An input seen after the operator, where it may have been changed in place, is another thing than before it.
        role = f"inplace.{int(match[2])}" if kind == "in" else f"before.{role}"
    tap, index = ".".join(where.operator), int(match[2])
    if role.startswith("input."):
        node = dump.topology.get(tap, {})
        param = dump.parameters.of(rank, step, tap) if _NORM.search(operator) else node.get("param")
        role = weight_role(operator, index, {**node, "param": param}) or role
    try:
        header = read_header(f.path)
    except DumpError as e:
        dump.unreadable(e, tap, step, role)
        return
    if not header.stored and header.stats is None:
        dump.skip(tap, ELSEWHERE, step, role)
        return
    read = (lambda: read_tensor(f.path, header)) if header.stored else None
    record = dump.add(
        Tensor(
            name=f.name,
            tap=tap,
            role=role,
            dtype=header.dtype,
            shape=header.shape,
            read=read,
            cls=operator,
            step=step,
            rank=rank,
            stats=header.stats,
        )
    )
    if kind == "in" and record is not None:
        held = dump.operands.setdefault((rank, step, tap), {})
        if f.parts[-2] == "before" or index not in held:
            held[index] = record


_LINEAR = re.compile(r"linear|lmhead|lm_head", re.I)
_NORM = re.compile(r"(rms|layer)_?norm", re.I)
_WORDS = re.compile(r"word_?embedding", re.I)


def weight_role(kind: str, index: int, node: Mapping[str, Any]) -> str | None:
    """The parameter that an operator's input is, by its type; None for an activation. node: of the topology."""
    param = node.get("param")
    biased = isinstance(param, Mapping) and param.get("hasBias") is True
    if node.get("nodes"):
        return None
    if _NORM.search(kind):
        return "param.weight" if index == _norm_weight(param) else None
    if _LINEAR.search(kind) and index == 1:
        return "param.weight"
    if _LINEAR.search(kind) and index == 2 and biased:
        return "param.bias"
    return "param.weight" if _WORDS.search(kind) and index == 0 else None


def _norm_weight(param: Any) -> int:
    """Which input of a norm its weight is: one that adds first (layerType 2, 3) has what it adds before it."""
    param = param if isinstance(param, Mapping) else {}
    if param.get("layerType") not in (2, 3):
        return 1
    own = param.get("preNormParam" if param["layerType"] == 2 else "postNormParam")
    return 3 if isinstance(own, Mapping) and own.get("hasBias") is True else 2


_COLUMNS = 15


def _add_table(dump: AtbDump, f: walk.FoundFile) -> None:
    """``statistic.csv``: Device and PID, Execution Count, Op Name, Op Type, Op Id, Input/Output, Tensor Index, Dtype,
    Format, Shape, Max, Min, Mean, Norm, Tensor Path."""
    try:
        rows = list(csv.reader(io.StringIO(read_text(f.path))))
    except (OSError, ValueError, csv.Error) as e:
        why = e.strerror or e if isinstance(e, OSError) else e
        dump.unreadable(f"{f.name} cannot be read: {why}", f.name)
        return
    processes = number_ranks([(*f.parts[:-1], r[0]) for r in rows[1:] if len(r) >= _COLUMNS - 1])
    bad = 0
    for r in rows[1:]:
        try:
            rank = processes[(*f.parts[:-1], r[0])]
            ids, names = r[4].split("_"), r[2].split("/")
            tap = ".".join(f"{i}_{n}" for i, n in zip(ids[-len(names) :], names, strict=True))
            shape = tuple(int(d) for d in re.findall(r"\d{1,15}", r[9]))
            role = f"{'input' if r[5].strip().lower().startswith('in') else 'output'}.{int(r[6])}"
            stats = stats_of(shape, number(r[11]), number(r[10]), number(r[12]), number(r[13]))
            step = int(r[1])
        except (ValueError, IndexError, KeyError):
            bad += 1
            continue
        label = f"{f.name}:{r[0]}/{r[1]}/{r[2]}/{role}"
        dump.add(Tensor(label, tap, role, torch_dtype(r[7]), shape, cls=names[-1], step=step, rank=rank, stats=stats))
    if bad:
        dump.skip(f.name, ODD_LINE, count=bad)
        dump.problem(f"{f.name}: {bad} lines are not understood")
