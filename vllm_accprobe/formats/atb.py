"""Dumps of Ascend's transformer boost library (ATB), as ait and msit make them: one .bin per tensor.

The problem: an operator is known by its path of numbered directories, releases differ in what lies above these, and a
tensor file says nothing of transposeB or epsilon. The idea: a tensor file is any ``(in|out)tensor<k>.bin``, the
numbered directories right above it are the operator, above these the execution (token) and the process. Parameters come
from what is nearest to the call: ``op_param.json`` next to it, ait's ``operation_tensors_<execution>.csv``, the
topology ``model/{pid}/*.json``. Two graphs of one model, one quantised, are matched level by level. Layout:
``tensors/{device}_{pid}/{token}/{i}_{Op}/{j}_{SubOp}/{before,after}/{intensor,outtensor}{k}.bin``, or ``{pid}/{tid}``;
``statistic.csv``: statistics alone.

Not here: what a parameter means (opcheck/references/atb), the files (io/atb_file.py), two dumps
(align/without_row_maps.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import DecodeError, object_at, parse
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, torch_dtype
from vllm_accprobe.formats.io import plain_file
from vllm_accprobe.formats.io.atb_file import number, read_header, read_tensor, stats_of
from vllm_accprobe.formats.io.plain_file import read_json, read_rows

FILE = "op_param.json"
TABLE = re.compile(r"operation_tensors_(\d{1,9})\.csv", re.ASCII)
_DIRECTORY = "operation_io_tensors"
_LARGEST = 1 << 20
_OPERATOR = re.compile(r"(.+?)((?:_\d+)+)", re.ASCII)
_NAME, _PARAM = "OpName", "OpParam"
Operator = tuple[int, int, str]
"""(rank, execution, tap)"""


class AtbParameters:
    """files: each operator's own; tables: (execution or None, operator's id and class) → parameters of a table;
    problems: sentences on what cannot be read."""

    def __init__(self, topology: Mapping[str, Mapping[str, Any]]):
        self._topology = topology
        self._files: dict[Operator, Path] = {}
        self._tables: dict[tuple[int | None, str, str], Mapping[str, Any]] = {}
        self._known: dict[Operator, Mapping[str, Any] | None] = {}
        self.problems: list[str] = []

    def add_file(self, operator: Operator, path: Path) -> None:
        self._files[operator] = path

    def add_table(self, path: Path, execution: int | None = None) -> int:
        """Reads a table of operators; execution: that it belongs to, None for all. Gives how many operators it has.
        Raises DumpError where it is none."""
        head, *rows = read_rows(path) or [[]]
        names = [n.strip() for n in head]
        if _NAME not in names or _PARAM not in names:
            raise DumpError(f"{path} is no table of ATB's operators: it has no columns {_NAME} and {_PARAM}")
        at, param = names.index(_NAME), names.index(_PARAM)
        found = [self._row(row, at, param, execution) for row in rows if any(cell.strip() for cell in row)]
        if bad := found.count(False):
            self.problems.append(f"{path.name}: {bad} lines are not understood")
        self._known.clear()
        return found.count(True)

    def _row(self, row: list[str], at: int, param: int, execution: int | None) -> bool:
        if len(row) <= max(at, param):
            return False
        match = _OPERATOR.fullmatch(row[at].strip())
        value = _parsed(row[param].strip().strip("'"))
        if match is None or value is None:
            return False
        self._tables[execution, match[2].strip("_"), match[1]] = value
        return True

    def find_tables(self, path: Path) -> None:
        """Reads the tables that lie next to the tensors: ``operation_io_tensors`` at, below or above ``path``."""
        for root in (path, *(p for p in path.parents[:4] if (p / "tensors").is_dir())):
            place = root / _DIRECTORY
            if not place.is_dir():
                continue
            for f in plain_file.files(place, lambda n: TABLE.fullmatch(n) is not None, plain_file.Passed()):
                match = TABLE.fullmatch(f.parts[-1])
                assert match is not None
                try:
                    self.add_table(f.path, int(match[1]))
                except DumpError as why:
                    self.problems.append(str(why))
            return

    def of(self, rank: int, execution: int, tap: str) -> Mapping[str, Any] | None:
        """The parameters of an operator's call; None where nothing tells them."""
        place = rank, execution, tap
        if place not in self._known:
            self._known[place] = self._found(place)
        return self._known[place]

    def _found(self, place: Operator) -> Mapping[str, Any] | None:
        _, execution, tap = place
        path = self._files.get(place)
        if path is not None:
            try:
                value = read_json(path, _LARGEST)
            except DumpError as e:
                self.problems.append(f"{e}: no parameters")
                return None
            return object_at(value)
        ids, kind = id_of(tap), tap.rpartition(".")[2].partition("_")[2]
        for when in (execution, None):
            if (when, ids, kind) in self._tables:
                return self._tables[when, ids, kind]
        return object_at(self._topology, tap, "param")


def id_of(tap: str) -> str:
    """``3_layer.1_Attention`` → ``3_1``: an operator's id as ait writes it."""
    return "_".join(part.partition("_")[0] for part in tap.split("."))


def _parsed(text: str) -> Mapping[str, Any] | None:
    try:
        return parse(dict[str, Any], text or "{}", _LARGEST)
    except DecodeError:
        return None


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
    """tap → node of the topology that lies next to the tensors and fits most of ``taps``, as plain values; {} where
    none does. problem: is called with what does not parse."""
    best: dict[str, Mapping[str, Any]] = {}
    try:
        files = _json_files(path)
    except OSError as e:
        problem(f"{e.filename or path} cannot be listed ({e.strerror or e}): no topology")
        return best
    for file in files:
        try:
            data = read_json(file, _MAX_JSON)
        except DumpError as e:
            problem(f"{e}: no topology")
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
                found = plain_file.files(head / "model", lambda n: n.endswith(".json"), plain_file.Passed())
                return [f.path for f in found]
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
    while len(golden) == 1 and len(mine) > 1 and golden[0].children:
        golden = golden[0].children
    kinds = [[_signature(n) for n in side] for side in (golden, mine)]
    for block in SequenceMatcher(None, kinds[0], kinds[1], autojunk=False).get_matching_blocks():
        for i in range(block.size):
            g, m = golden[block.a + i], mine[block.b + i]
            out |= {m.tap: g.tap, **atb_to_atb(g.children, m.children)}
    return out


def _signature(n: Node) -> str:
    """What must agree: an operator that quantises, or what its elementwise type is, is not one that adds."""
    kind = n.param.get("elewiseType")
    own = plain_kind(n.kind)
    if not own.startswith("Elewise"):
        return own
    return f"{own}:{kind}:{n.counts}"


NAME = "atb"
HOW = "a directory with */before|after/intensor<k>.bin|outtensor<k>.bin, or ATB's statistic.csv"
ORDER = 50
UNKNOWN_LINE = "line of a table that is not understood"
_FILE = re.compile(r"(in|out)tensor(\d{1,6})\.bin", re.I | re.ASCII)
_ATB_OPERATOR = re.compile(r"(\d{1,9})_(.+)", re.ASCII)
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
        self.parameters = AtbParameters(self.topology)

    def call_inputs(self, rank: int, step: int, tap: str) -> Mapping[str, Record]:
        """All inputs of a call by number, whatever roles they have as records."""
        return {str(k): r for k, r in sorted(self.operands.get((rank, step, tap), {}).items())}

    def call_attributes(self, rank: int, step: int, tap: str) -> Mapping[str, Any]:
        """``param``: what the operator was created with, where something tells it; ``kept_after``: the inputs that
        were kept behind the operator only."""
        param = self.parameters.of(rank, step, tap)
        for sentence in self.parameters.problems:
            self.problem(sentence)
        operands = self.operands.get((rank, step, tap), {})
        after = [str(k) for k, r in operands.items() if r.role.startswith("inplace.")]
        return ({} if param is None else {"param": param}) | ({"kept_after": after} if after else {})


def recognise(path: Path) -> bool:
    return plain_file.probe(path, lambda parts: _is_tensor(parts) or parts[-1] == STATISTICS)


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
    # ``{device}_{pid}`` has the form of an operator with a number for a name.
    while cut and _ATB_OPERATOR.fullmatch(parts[cut - 1]) and not _DEVICE.fullmatch(parts[cut - 1]):
        cut -= 1
    if cut == len(parts):
        return None
    token = parts[cut - 1] if cut and parts[cut - 1].isdecimal() else ""
    return AtbPlace(parts[: cut - 1] if token else parts[:cut], int(token or 0), parts[cut:])


def open(path: Path) -> AtbDump:
    """Opens an ATB dump: reads every header, no payload. Raises DumpError where nothing can be read."""
    dump = AtbDump(path)
    passed = plain_file.Passed()
    entries: list[tuple[AtbPlace, tuple[float, ...], plain_file.FoundFile]] = []
    tables: list[plain_file.FoundFile] = []
    beside: list[tuple[AtbPlace, plain_file.FoundFile]] = []
    for f in plain_file.files(path, lambda n: bool(_FILE.fullmatch(n)) or n in (STATISTICS, FILE), passed):
        if f.parts[-1] == STATISTICS:
            tables.append(f)
        elif f.parts[-1] == FILE:
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
    passed.report(dump)
    return dump


def one_run(heads: set[tuple[str, ...]], path: Path) -> None:
    """Raises DumpError where a directory holds the dumps of several runs."""
    if len(heads) > 1:
        names = sorted("/".join(h) or "." for h in heads)
        more = ", ..." if len(names) > 3 else ""
        raise DumpError(f"{path} holds {len(heads)} dumps ({', '.join(names[:3])}{more}): name one of them")


def number_ranks(processes: list[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Processes as ranks: by their devices where these differ, else in order of their names."""
    known = sorted(set(processes), key=lambda p: plain_file.natural("/".join(p)))
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


def _add(dump: AtbDump, f: plain_file.FoundFile, where: AtbPlace, rank: int) -> None:
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
        Tensor(f.name, tap, role, header.dtype, header.shape, read, operator, step, rank, stats=header.stats)
    )
    if kind == "in" and record is not None:
        operands = dump.operands.setdefault((rank, step, tap), {})
        if f.parts[-2] == "before" or index not in operands:
            operands[index] = record


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


def _add_table(dump: AtbDump, f: plain_file.FoundFile) -> None:
    """``statistic.csv``: Device and PID, Execution Count, Op Name, Op Type, Op Id, Input/Output, Tensor Index, Dtype,
    Format, Shape, Max, Min, Mean, Norm, Tensor Path."""
    try:
        rows = read_rows(f.path)
    except DumpError as e:
        dump.unreadable(e, f.name)
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
        dump.skip(f.name, UNKNOWN_LINE, count=bad)
        dump.problem(f"{f.name}: {bad} lines are not understood")
