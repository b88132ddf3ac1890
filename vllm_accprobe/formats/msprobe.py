"""Dumps of msprobe (MindStudio-Probe): many steps and ranks, tensors, statistics or checksums, PyTorch and MindSpore.

The problem: a record is a module or an API call, numbered over the whole step, written when it ends, with its tensors
in nested lists; its own comparison takes one step at a time and throws away what golden has alone. The idea: a module's
place is its path; an API's place is the module that called it (construct.json), so that its number counts there and one
call more elsewhere moves nothing; inputs stand in the order of execution before what ran inside. Backward runs are
places of their own, ``backward.<path>``.
Layout: ``[step<S>/][rank<R>|proc<PID>/]{dump,stack,construct}.json`` or ``debug.json``, payloads in
``dump_tensor_data/<data_name>`` beside it (``dump_data_dir`` is another machine's path and is not used).
Not here: the arguments of API calls (msprobe_calls.py), the payloads' files (msprobe_files.py), writing
(formats/write/msprobe_dump.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.dump.schema import ROOT_TAP, Layout, OpCall, Stats
from vllm_accprobe.formats.common import msprobe_calls
from vllm_accprobe.formats.common.foreign import PARAM, UNKNOWN, VALUE, ForeignDump, Tensor, torch_dtype
from vllm_accprobe.formats.common.msprobe_files import DATA, LOST, OUTSIDE, names_in, payload
from vllm_accprobe.formats.io import walk
from vllm_accprobe.formats.write import notes

__all__ = ["HOW", "LOST", "NAME", "OUTSIDE", "open", "recognise"]
NAME = "msprobe"
HOW = "dump.json or debug.json in the directory, or in [step<S>/][rank<R>|proc<PID>/] below it"
ORDER, STRICT = 20, True
DUMP, DEBUG, CONSTRUCT = "dump.json", "debug.json", "construct.json"
_STEP = re.compile(r"step(\d{1,9})", re.ASCII)
_RANK = re.compile(r"rank(\d{0,9})", re.ASCII)
_PROC = re.compile(r"proc(\d+)", re.ASCII)
_MODULE = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.(forward|backward|parameters_grad)(?:\.(\d+))?")
_API = re.compile(r"(.+)\.(\d+)\.(forward|backward)")
_SECTIONS = {
    "input_args": ("input", "input"),
    "input": ("input", "input"),
    "input_kwargs": ("input", "kwargs"),
    "output": ("output", "output"),
    "parameters": ("param", "parameters"),
}
"""Section of a record → (what a role begins with, what the name of its tensors has)."""
_ORDER = ("parameters", "input_args", "input", "input_kwargs", "output")
_MAX_NESTED = 16
_MAX_JSON = 2 << 30


def recognise(path: Path) -> bool:
    if path.is_file():
        return path.name in (DUMP, DEBUG)
    return walk.probe(path, lambda parts: parts[-1] in (DUMP, DEBUG) and _fits(parts[:-1]), depth=2)


def _fits(parts: tuple[str, ...]) -> bool:
    """[step<S>][, rank or process]"""
    rest = parts[1:] if parts and _STEP.fullmatch(parts[0]) else parts
    return len(rest) <= 1 and all(_RANK.fullmatch(p) or _PROC.fullmatch(p) for p in rest)


def open(path: Path) -> ForeignDump:
    """path: the dump's root, a step's directory, a rank's directory, or a dump.json. Raises DumpError."""
    root = path.parent if path.is_file() else path
    dump = ForeignDump(path, NAME)
    passed = walk.Passed()
    found = [f for f in walk.files(root, lambda n: n in (DUMP, DEBUG), passed) if _fits(f.parts[:-1])]
    if path.is_file():
        found = [f for f in found if f.path == path]
    processes: dict[str, int] = {}
    refused: list[DumpError] = []
    for f in found:
        directory = f.path.parent
        names = [*root.absolute().parts[-2:], *f.parts[:-1]]
        step = next((int(m[1]) for n in reversed(names) if (m := _STEP.fullmatch(n))), 0)
        rank = _rank(names, processes)
        try:
            _add(dump, f.path, directory, step, rank)
        except DumpError as e:  # one rank's index; the others' are whole, perhaps
            dump.unreadable(e, f.name, step, rank=rank)
            refused.append(e)
    if refused and len(refused) == len(found):
        raise refused[0]
    if len(processes) > 1:
        dump.problem(f"{len(processes)} processes without a rank's number: taken for ranks in the order of their ids")
    passed.tell(dump)
    return dump


def _rank(names: list[str], processes: dict[str, int]) -> int:
    """From ``rank3``; a process without a number (``proc123``, ``rank``) is the next one."""
    own = next((n for n in reversed(names) if _RANK.fullmatch(n) or _PROC.fullmatch(n)), "")
    match = _RANK.fullmatch(own)
    return int(match[1]) if match and match[1] else processes.setdefault(own, len(processes))


# --- one rank of one step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a record stands. inside: path of the module it is or was called by; module: whether it is one."""

    tap: str
    cls: str
    call: int | None
    inside: str
    module: bool
    grads: bool = False


@dataclass(frozen=True)
class _Leaf:
    """One tensor of a record. suffix: its name behind the record's."""

    role: str
    suffix: str
    info: Mapping[str, Any]


def _add(dump: ForeignDump, file: Path, directory: Path, step: int, rank: int) -> None:
    head = _json(file)
    data = head.get("data") if isinstance(head, dict) else None
    if not isinstance(data, dict):
        raise DumpError(f"{file} is no dump of msprobe: it has no records under 'data'")
    for key in ("framework", "task", "level"):
        if isinstance(head.get(key), str):
            dump.run.setdefault(key, head[key])
    parents = _parents(dump, directory / CONSTRUCT) if file.name == DUMP else {}
    noted = _Notes(head.get(notes.NAME), rank, step)
    data_dir = str(directory / DATA)
    stored = names_in(dump, data_dir)
    places: list[tuple[str, Mapping[str, Any], _Place]] = [
        (key, record, noted.place(key, _place(key, parents))) for key, record in data.items()
        if isinstance(record, dict)
    ]  # fmt: skip
    numbers: dict[str, tuple[int, int]] = {}
    for order, (key, place, leaf) in enumerate(_in_order(places)):
        info, role = leaf.info, noted.role(key, leaf)
        dtype, shape = torch_dtype(str(info.get("dtype"))), info.get("shape")
        if not isinstance(shape, list) or any(type(n) is not int for n in shape):
            dump.skip(place.tap, "record without a shape", step, leaf.role)
            continue
        name = info.get("data_name")
        stats = _stats(info, math.prod(shape))
        if not name and stats is None and noted.knows(key):
            continue  # what an operator was given to write into: nothing of it was captured
        read = None
        if name:
            read = payload(dump, data_dir, name, stored, (dtype, tuple(shape)), (place.tap, step, leaf.role))
        record = dump.add(
            Tensor(
                name=f"{key}.{leaf.suffix}" if leaf.suffix else key,
                tap=place.tap,
                role=role,
                dtype=dtype,
                shape=tuple(shape),
                read=read,
                cls=place.cls,
                step=step,
                rank=rank,
                call=None if leaf.role.startswith(PARAM) else place.call,
                stats=stats,
                hash=f"crc32:{info['md5']}" if isinstance(info.get("md5"), str) else None,
                layout=noted.layout(key, role),
                order=order,
            )
        )
        if record is not None:
            numbers.setdefault(key, (record.call, order))
    _add_calls(dump, places, numbers, noted, step, rank)
    noted.describe(dump)


def _add_calls(
    dump: ForeignDump, places: list[tuple[str, Mapping[str, Any], _Place]], numbers: Mapping[str, tuple[int, int]],
    noted: _Notes, step: int, rank: int,
) -> None:  # fmt: skip
    """The API calls of a rank and step. numbers: by record, the call's number and its place in the order."""
    framework = str(dump.run.get("framework", ""))
    for key, record, place in places:
        if place.module or key not in numbers or not record.keys() & _SECTIONS.keys() or not key.endswith(".forward"):
            continue
        if (op := noted.op(key)) is not None:
            dump.ops.append(replace(op, seq=numbers[key][1]))
            continue
        args, kwargs = msprobe_calls.arguments(record)
        name, (call, seq) = msprobe_calls.operator_name(place.cls, framework), numbers[key]
        dump.ops.append(OpCall(rank, step, place.tap, name, call, seq, place.inside or None, args, kwargs, ()))


class _Notes:
    """What `accprobe convert` noted in a dump.json (formats/write/notes.py); nothing where another tool wrote it."""

    def __init__(self, found: Any, rank: int, step: int):
        found = found if isinstance(found, dict) else {}
        records = found.get("records")
        self._records: Mapping[str, Any] = records if isinstance(records, dict) else {}
        modules = found.get("modules")
        self._modules = [m for m in map(notes.module, modules if isinstance(modules, list) else ()) if m is not None]
        self._rank, self._step = rank, step

    def _of(self, key: str) -> Mapping[str, Any]:
        found = self._records.get(key)
        return found if isinstance(found, dict) else {}

    def knows(self, key: str) -> bool:
        return key in self._records

    def place(self, key: str, place: _Place) -> _Place:
        said = notes.record({**self._of(key), "role": ""})
        if said is None:
            return place
        inside = said.tap if place.module else place.inside
        return replace(place, tap=said.tap, cls=said.cls, call=said.call, inside=inside)

    def role(self, key: str, leaf: _Leaf) -> str:
        roles = self._of(key).get("roles")
        said = roles.get(leaf.suffix) if isinstance(roles, dict) else None
        return said if isinstance(said, str) else leaf.role

    def layout(self, key: str, role: str) -> Layout:
        if key not in self._records:
            return UNKNOWN
        layouts = self._of(key).get("layouts")
        said = notes.record({"tap": "", "role": "", "layout": layouts.get(role) if isinstance(layouts, dict) else None})
        return said.layout if said is not None else UNKNOWN

    def op(self, key: str) -> OpCall | None:
        said = self._of(key).get("op")
        return notes.op(self._rank, {**said, "step": self._step}) if isinstance(said, dict) else None

    def describe(self, dump: ForeignDump) -> None:
        """Gives the modules their numbers."""
        known = {m.tap: m for m in self._modules}
        modules = dump.modules.setdefault(self._rank, [])
        seen = {m.tap for m in modules}
        modules[:] = [known.get(m.tap, m) for m in modules] + [m for t, m in known.items() if t not in seen]


def _json(file: Path) -> Any:
    import orjson

    try:
        text = walk.read_text(file, _MAX_JSON)
        try:
            return orjson.loads(text)
        except ValueError:  # orjson takes no NaN and no Infinity, which msprobe writes
            return json.loads(text)
    except OSError as e:
        raise DumpError(f"cannot read {file}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise DumpError(f"{file} is damaged: {str(e)[:120]}") from None


def _parents(dump: ForeignDump, file: Path) -> dict[str, str]:
    """Record → the record that called it."""
    if not file.is_file():
        dump.problem(f"{CONSTRUCT} is missing: API calls are not placed in the modules that made them")
        return {}
    try:
        found = _json(file)
        if not isinstance(found, dict):
            raise DumpError(f"{file} is damaged: not the JSON object it should be")
    except DumpError as e:
        dump.problem(f"{e}: API calls are not placed in the modules that made them")
        return {}
    return {k: (v[0] if isinstance(v, list) and v else v) for k, v in found.items()}


def _place(key: str, parents: Mapping[str, Any]) -> _Place:
    if match := _MODULE.fullmatch(key):
        path = match[1] or ROOT_TAP
        tap = path if match[3] == "forward" else f"backward.{path}"
        return _Place(tap, match[2], int(match[4] or 0), tap, True, match[3] == "parameters_grad")
    if match := _API.fullmatch(key):
        cls = match[1]
        head, _, name = cls.partition(".")
        leaf = f"{head}:{name.replace('.', '_')}" if name else head
        backward = match[3] == "backward"
        caller = parents.get(key) or parents.get(f"{match[1]}.{match[2]}.forward")
        inside = _MODULE.fullmatch(caller) if isinstance(caller, str) else None
        path = "" if inside is None else inside[1] or ROOT_TAP
        tap = f"{path}.{leaf}" if path and path != ROOT_TAP else leaf
        prefix = "backward." if backward else ""
        # Numbered where it was called: the number in the name counts calls of the whole step.
        return _Place(prefix + tap, cls, None if path else int(match[2]), prefix + path if path else "", False)
    return _Place(key.removesuffix(".debug"), "", None, "", False)


def _in_order(places: list[tuple[str, Mapping[str, Any], _Place]]) -> Iterator[tuple[str, _Place, _Leaf]]:
    """The tensors in the order of execution. Records are written when they end; a module began, with its weights and
    its inputs, before the first record inside it."""
    began: dict[str, int] = {}
    keyed: list[tuple[tuple[int, int, int, int], str, _Place, _Leaf]] = []
    for i, (key, record, place) in enumerate(places):
        above = place.inside
        while above:
            began.setdefault(above, i)
            above = above.rpartition(".")[0]
        start = began.pop(place.inside, i) if place.module and not place.grads else i
        depth = place.inside.count(".") if place.module else 1 << 20
        for n, leaf in enumerate(_leaves(record, place)):
            early = leaf.role.startswith(("input", PARAM))
            keyed.append(((start, 0, depth, n) if early else (i, 1, 0, n), key, place, leaf))
    for _, key, place, leaf in sorted(keyed, key=lambda item: item[0]):
        yield key, place, leaf


def _leaves(record: Mapping[str, Any], place: _Place) -> Iterator[_Leaf]:
    if "dtype" in record:  # what save() of level debug wrote
        yield _Leaf(VALUE, "", record)
        return
    if place.grads:
        for name, value in record.items():
            for suffix, info in _tensors(value, ()):
                rest = suffix[1:] if suffix[:1] == ("0",) else suffix
                yield _Leaf(".".join(("output", str(name), *rest)), ".".join((str(name), *rest)), info)
        return
    known = [s for s in (_ORDER if record.keys() & _SECTIONS.keys() else ()) if s in record]
    for section in known:
        role, word = _SECTIONS[section]
        for suffix, info in _tensors(record[section], ()):
            yield _Leaf(".".join((role, *suffix)), ".".join((word, *suffix)), info)
    if not known:
        for suffix, info in _tensors(record, ()):
            yield _Leaf(".".join((VALUE, *suffix)), ".".join(suffix), info)


def _tensors(value: Any, suffix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if len(suffix) > _MAX_NESTED:
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _tensors(item, (*suffix, str(i)))
    elif isinstance(value, dict):
        if "dtype" in value and "shape" in value:
            yield suffix or ("0",), value
            return
        if "type" in value and "value" in value:
            return  # a number or a text
        for key, item in value.items():
            yield from _tensors(item, (*suffix, str(key)))


def _stats(info: Mapping[str, Any], count: int) -> Stats | None:
    """msprobe takes its statistics in the tensor's own dtype, infinities and NaN included, and none of bool."""
    values = [info.get(k) for k in ("Min", "Max", "Mean", "Norm")]
    if all(v is None for v in values):
        return None
    numbers = [float(v) if isinstance(v, (int, float)) else None for v in values]
    ends = [v for v in numbers[:2] if v is not None]
    nan = int(any(math.isnan(v) for v in ends))
    finite = [v if v is not None and math.isfinite(v) else None for v in numbers]
    return Stats(count, finite[0], finite[1], finite[2], finite[3], nan, sum(math.isinf(v) for v in ends))
