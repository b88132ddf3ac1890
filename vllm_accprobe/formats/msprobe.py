"""Dumps of msprobe (MindStudio-Probe): many steps and ranks, tensors, statistics or checksums, PyTorch and MindSpore.

The problem: its own comparison takes one step at a time, named on both sides, and drops what golden has alone; a record
is a module or an API call with its tensors in nested lists, written when it ends. The idea: all steps and ranks below a
directory are one dump. A module's place is its path, an API's the module that called it (construct.json), inputs stand
before what ran inside, outputs after it; backward runs are ``backward.<path>``. API records are operator calls in our
journal's VALUES, so that they can be run again. Each payload is opened for what it says of itself; one that is no
tensor, or another than the index says, is left out with its reason. Layout:
``[step<S>/][rank<R>|proc<PID>/]{dump,stack,construct}.json`` or ``debug.json``, ``dump_tensor_data/<data_name>``
(``dump_data_dir`` is another machine's path and is not used).

Not here: the containers (io/), which function a name means (opcheck/references/api.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.decode import Count, DecodeError, decode, fits
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import ROOT_TAP, OpCall, Stats
from vllm_accprobe.formats.common.foreign import PARAM, VALUE, ForeignDump, Read, Tensor, torch_dtype
from vllm_accprobe.formats.io import plain_file, tensor_file, torchfile
from vllm_accprobe.formats.io.plain_file import FileTensor, read_json
from vllm_accprobe.formats.io.torchfile import TorchTensor

DUMP, DEBUG, STACK, CONSTRUCT = "dump.json", "debug.json", "stack.json", "construct.json"
DATA = "dump_tensor_data"
"""The folder of payloads, next to the dump.json that names them."""
INPUTS, KEYWORDS, OUTPUTS, PARAMETERS = "input_args", "input_kwargs", "output", "parameters"
SECTIONS = {
    PARAMETERS: ("param", "parameters"),
    INPUTS: ("input", "input"),
    "input": ("input", "input"),
    KEYWORDS: ("input", "kwargs"),
    OUTPUTS: ("output", "output"),
}
"""Section of a record → (what a role begins with, what the name of its tensors has), in the order of execution."""
STATS = {"max": "Max", "min": "Min", "mean": "Mean", "l2": "Norm"}
"""Our statistics → msprobe's, in the order in which it writes them."""
BACKWARD = "backward."
"""What the places of backward runs begin with."""
MINDSPORE = "mindspore"
_OF_MINDSPORE = {"Tensor": "mindspore.Tensor", "Functional": "mindspore.ops"}


def operator_name(api: str, framework: str) -> str:
    """The name of an API in ``OpCall.op``: msprobe's own, ``Functional.linear``, ``Mint.add``; of ``Aten.mm.default``
    the operator's, ``aten.mm.default``; of MindSpore's
    ``Tensor.add`` and ``Functional.add`` ``mindspore.Tensor.add`` and ``mindspore.ops.add``."""
    head, dot, rest = api.partition(".")
    if head == "Aten" and rest:
        return f"aten.{rest}"
    return f"{_OF_MINDSPORE[head]}.{rest}" if framework == MINDSPORE and dot and head in _OF_MINDSPORE else api


LOST = f"payload missing in {DATA}"
OUTSIDE = "payload outside the dump"


def names_in(dump: ForeignDump, directory: str) -> set[str]:
    """The names of what lies in ``dump_tensor_data``, whatever it is."""
    try:
        with os.scandir(directory) as entries:
            return {e.name for e in entries}
    except FileNotFoundError:  # statistics only
        return set()
    except OSError as e:
        dump.unreadable(f"{directory} cannot be listed: {e.strerror or e}", DATA)
        return set()


def payload(
    dump: ForeignDump, directory: str, name: Any, stored: set[str], announced: tuple[str, tuple[int, ...]],
    place: tuple[str, int, str],
) -> Read | None:  # fmt: skip
    """What reads a record's file. said: dtype and shape by the index; place: tap, step, role. Opens the file for what
    it says of itself: one that cannot be read is known before anything is compared, as in all other formats."""
    tap, step, role = place
    if not isinstance(name, str) or os.path.basename(name) != name or "\\" in name or name in ("", ".", ".."):
        dump.skip(tap, OUTSIDE, step, role)
        dump.problem(f"{tap} {role}: its data_name {str(name)[:80]!r} leads out of the dump: not read")
        return None
    if name not in stored:
        dump.skip(tap, LOST, step, role)
        return None
    path = Path(directory, name)
    try:
        found = tensor_file.first(path) if name.endswith(".npy") else _torch_item(path)
        read = _reader(found, announced[0], path)
    except DumpError as e:
        dump.unreadable(e, tap, step, role)
        return None
    if math.prod(found.shape) != math.prod(announced[1]):
        what = f"{list(found.shape)} where {list(announced[1])} was announced"
        dump.unreadable(f"{path} holds {what}", tap, step, role)
        return None
    return read


def _torch_item(path: Path) -> TorchTensor:
    found = torchfile.items(path)
    if len(found) != 1:
        raise DumpError(f"{path} holds {len(found)} tensors, not one")
    return found[0][1]


def _reader(item: FileTensor | TorchTensor, dtype: str, path: Path) -> Read:
    """What reads the bits of ``dtype``: the file's own, or of a bfloat16 that numpy stored as float32, which takes
    its values to tell. Raises DumpError where the file's dtype is another."""
    if item.dtype == dtype or dtype not in DTYPES:
        return item.read
    other = f"{path} holds {item.dtype} where {dtype} was announced"
    if (item.dtype, dtype) != ("float32", "bfloat16"):
        raise DumpError(other)

    def read() -> np.ndarray:
        whole = np.ascontiguousarray(item.read()).view(np.uint32)
        if (whole & 0xFFFF).any():
            raise DumpError(other)
        return (whole >> 16).astype(np.uint16)

    return read


_MODULE = re.compile(r"(?:Module|Cell)\.(?:(.+)\.)?([^.]+)\.(forward|backward|parameters_grad)(?:\.(\d+))?")
_API = re.compile(r"(.+)\.(\d+)\.(forward|backward)")
_MAX_NESTED = 16


@dataclass(frozen=True)
class RecordPlace:
    """Where a record stands. inside: path of the module it is or was called by; module: whether it is one."""

    tap: str
    cls: str
    call: int | None
    inside: str
    module: bool
    grads: bool = False


@dataclass(frozen=True)
class RecordTensor:
    """One tensor of a record. suffix: its name behind the record's."""

    role: str
    suffix: str
    info: Mapping[str, Any]


def place_of(key: str, parents: Mapping[str, Any]) -> RecordPlace:
    """parents: record → the record that called it."""
    if match := _MODULE.fullmatch(key):
        path = match[1] or ROOT_TAP
        tap = path if match[3] == "forward" else BACKWARD + path
        return RecordPlace(tap, match[2], int(match[4] or 0), tap, True, match[3] == "parameters_grad")
    if match := _API.fullmatch(key):
        cls = match[1]
        head, _, name = cls.partition(".")
        leaf = f"{head}:{name.replace('.', '_')}" if name else head
        backward = match[3] == "backward"
        caller = parents.get(key) or parents.get(f"{match[1]}.{match[2]}.forward")
        inside = _MODULE.fullmatch(caller) if isinstance(caller, str) else None
        path = "" if inside is None else inside[1] or ROOT_TAP
        tap = f"{path}.{leaf}" if path and path != ROOT_TAP else leaf
        prefix = BACKWARD if backward else ""
        # Numbered where it was called: the number in the name counts calls of the whole step.
        return RecordPlace(prefix + tap, cls, None if path else int(match[2]), prefix + path if path else "", False)
    return RecordPlace(key.removesuffix(".debug"), "", None, "", False)


PlacedRecord = tuple[str, Mapping[str, Any], RecordPlace]
"""(name, record, place)."""


def in_order(places: list[PlacedRecord]) -> Iterator[tuple[str, RecordPlace, RecordTensor]]:
    """The tensors in the order of execution. Records are written when they end; a module began, with its weights and
    its inputs, before the first record inside it."""
    began: dict[str, int] = {}
    keyed: list[tuple[tuple[int, int, int, int], str, RecordPlace, RecordTensor]] = []
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


def _leaves(record: Mapping[str, Any], place: RecordPlace) -> Iterator[RecordTensor]:
    if "dtype" in record:  # what save() of level debug wrote
        yield RecordTensor(VALUE, "", record)
        return
    if place.grads:
        for name, value in record.items():
            for suffix, info in _tensors(value, ()):
                rest = suffix[1:] if suffix[:1] == ("0",) else suffix
                yield RecordTensor(".".join(("output", str(name), *rest)), ".".join((str(name), *rest)), info)
        return
    known = [section for section in SECTIONS if section in record]
    for section in known:
        role, word = SECTIONS[section]
        for suffix, info in _tensors(record[section], ()):
            yield RecordTensor(".".join((role, *suffix)), ".".join((word, *suffix)), info)
    if not known:
        for suffix, info in _tensors(record, ()):
            yield RecordTensor(".".join((VALUE, *suffix)), ".".join(suffix), info)


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


def record_stats(info: Mapping[str, Any], count: int) -> Stats | None:
    """msprobe takes its statistics in the tensor's own dtype, infinities and NaN included, and none of bool."""
    values = [info.get(STATS[k]) for k in ("min", "max", "mean", "l2")]
    if all(v is None for v in values):
        return None
    numbers = [_as_float(v) if isinstance(v, (int, float)) else None for v in values]
    ends = [v for v in numbers[:2] if v is not None]
    nan = int(any(math.isnan(v) for v in ends))
    finite = [v if v is not None and math.isfinite(v) else None for v in numbers]
    return Stats(count, finite[0], finite[1], finite[2], finite[3], nan, sum(math.isinf(v) for v in ends))


_PLAIN = ("int", "bool", "str", "NoneType", "None")
_SLICE = tuple[int | None, int | None, int | None]
_DEEPEST = 6


def arguments(record: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, by keyword) VALUES of a record's arguments; a tensor's role is its record's, ``input.<place>``."""
    inputs = record.get(INPUTS, record.get("input"))
    args = tuple(_value(v, f"input.{i}", 0) for i, v in enumerate(_listed(inputs)))
    kwargs = record.get(KEYWORDS)
    named = kwargs.items() if isinstance(kwargs, dict) else ()
    return args, {str(k): _value(v, f"input.{k}", 0) for k, v in named}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else () if value is None else (value,)


def _value(value: Any, role: str, depth: int) -> Any:
    if depth > _DEEPEST:
        return {"skipped": "nested too deeply", "role": role}
    if isinstance(value, list):
        return {"list": [_value(v, f"{role}.{i}", depth + 1) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return _float(value)
    if not isinstance(value, dict):
        return {"skipped": "of an unknown kind", "role": role}
    if "dtype" in value and "shape" in value:
        return _tensor(value, role)
    if "type" in value and "value" in value:
        return _described(str(value["type"]), value["value"], role)
    return {"skipped": "a dictionary", "role": role}


def _tensor(info: Mapping[str, Any], role: str) -> Any:
    shape = info["shape"]
    if not fits(list[Count], shape):
        return {"skipped": "a tensor without a shape", "role": role}
    dtype = torch_dtype(str(info["dtype"]))
    found: dict[str, Any] = {"role": role, "dtype": dtype, "shape": shape, "count": math.prod(shape)}
    for ours in ("min", "max", "mean", "l2"):
        number = info.get(STATS[ours])
        if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(_as_float(number)):
            found[ours] = number
    return {"tensor": found}


def _described(kind: str, value: Any, role: str) -> Any:
    """``{"type": kind, "value": value}``."""
    if kind in _PLAIN and (value is None or isinstance(value, (bool, int, str))):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _float(_as_float(value))
    if kind.endswith(".dtype") and isinstance(value, str):
        return {"dtype": torch_dtype(value)}
    if kind == "torch.device" and isinstance(value, str):
        return {"device": value}
    if kind in ("torch.memory_format", "torch.layout") and isinstance(value, str):
        return {kind.removeprefix("torch."): value.removeprefix("torch.")}
    if kind == "complex" and isinstance(value, list) and [type(v) in (int, float) for v in value] == [True, True]:
        return {"complex": [_float(_as_float(v)) for v in value]}
    if kind == "torch.Size" and fits(list[int], value):
        return {"list": list(value)}
    if kind == "slice" and fits(_SLICE, value):
        return {"slice": list(value)}
    if kind == "ellipsis":
        return {"ellipsis": True}
    return {"skipped": f"a {kind[:40]}", "role": role}


def _as_float(value: float) -> float:
    """JSON's integers have any size: infinite beyond float64."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


NAME = "msprobe"
HOW = "dump.json or debug.json in the directory, or in [step<S>/][rank<R>|proc<PID>/] below it"
ORDER, STRICT = 20, True
_STEP = re.compile(r"step(\d{1,9})", re.ASCII)
_RANK = re.compile(r"rank(\d{0,9})", re.ASCII)
_PROC = re.compile(r"proc(\d+)", re.ASCII)
_MAX_JSON = 2 << 30


def recognise(path: Path) -> bool:
    if path.is_file():
        return path.name in (DUMP, DEBUG)
    return plain_file.probe(path, lambda parts: parts[-1] in (DUMP, DEBUG) and _fits(parts[:-1]), depth=2)


def _fits(parts: tuple[str, ...]) -> bool:
    """[step<S>][, rank or process]"""
    rest = parts[1:] if parts and _STEP.fullmatch(parts[0]) else parts
    return len(rest) <= 1 and all(_RANK.fullmatch(p) or _PROC.fullmatch(p) for p in rest)


def open(path: Path) -> ForeignDump:
    """path: the dump's root, a step's directory, a rank's directory, or a dump.json. Raises DumpError."""
    root = path.parent if path.is_file() else path
    dump = ForeignDump(path, NAME)
    passed = plain_file.Passed()
    found = [f for f in plain_file.files(root, lambda n: n in (DUMP, DEBUG), passed) if _fits(f.parts[:-1])]
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
    passed.report(dump)
    return dump


def _rank(names: list[str], processes: dict[str, int]) -> int:
    """From ``rank3``; a process without a number (``proc123``, ``rank``) is the next one."""
    own = next((n for n in reversed(names) if _RANK.fullmatch(n) or _PROC.fullmatch(n)), "")
    match = _RANK.fullmatch(own)
    return int(match[1]) if match and match[1] else processes.setdefault(own, len(processes))


def _add(dump: ForeignDump, file: Path, directory: Path, step: int, rank: int) -> None:
    head = read_json(file, _MAX_JSON)
    data = head.get("data") if isinstance(head, dict) else None
    if not isinstance(data, dict):
        raise DumpError(f"{file} is no dump of msprobe: it has no records under 'data'")
    for key in ("framework", "task", "level"):
        if isinstance(head.get(key), str):
            dump.run.setdefault(key, head[key])
    parents = _parents(dump, directory / CONSTRUCT) if file.name == DUMP else {}
    data_dir = str(directory / DATA)
    stored = names_in(dump, data_dir)
    places: list[PlacedRecord] = []
    unnamed: list[str] = []
    for key, record in data.items():
        if not isinstance(record, dict):
            dump.skip(key, "record that is no object", step)
            continue
        places.append((key, record, place_of(key, parents)))
        if file.name == DUMP and not places[-1][2].cls:
            unnamed.append(key)
    if unnamed:
        dump.problem(f"{len(unnamed):,} of {len(data):,} names cannot be parsed and are taps of their own, the first "
                     f"{unnamed[0][:80]!r}")  # fmt: skip
    numbers: dict[str, tuple[int, int]] = {}
    for order, (key, place, leaf) in enumerate(in_order(places)):
        info = leaf.info
        dtype, shape = torch_dtype(str(info.get("dtype"))), info.get("shape")
        if shape is None or not fits(list[int], shape):
            dump.skip(place.tap, "record without a shape", step, leaf.role)
            continue
        name = info.get("data_name")
        stats = record_stats(info, math.prod(shape))
        read = None
        if name:
            read = payload(dump, data_dir, name, stored, (dtype, tuple(shape)), (place.tap, step, leaf.role))
        label = f"{key}.{leaf.suffix}" if leaf.suffix else key
        call = None if leaf.role.startswith(PARAM) else place.call
        digest = f"crc32:{info['md5']}" if isinstance(info.get("md5"), str) else None
        record = dump.add(
            Tensor(label, place.tap, leaf.role, dtype, tuple(shape), read, place.cls, step, rank, call, stats, digest,
                   order=order)
        )  # fmt: skip
        if record is not None:
            numbers.setdefault(key, (record.call, order))
    _add_calls(dump, places, numbers, step, rank)


def _add_calls(
    dump: ForeignDump, places: list[PlacedRecord], numbers: Mapping[str, tuple[int, int]], step: int, rank: int
) -> None:
    """The API calls of a rank and step. numbers: by record, the call's number and its place in the order."""
    framework = str(dump.run.get("framework", ""))
    for key, record, place in places:
        if place.module or key not in numbers or not record.keys() & SECTIONS.keys() or not key.endswith(".forward"):
            continue
        args, kwargs = arguments(record)
        name, (call, seq) = operator_name(place.cls, framework), numbers[key]
        dump.ops.append(OpCall(rank, step, place.tap, name, call, seq, place.inside or None, args, kwargs, ()))


def _parents(dump: ForeignDump, file: Path) -> dict[str, str]:
    """Record → the record that called it."""
    if not file.is_file():
        dump.problem(f"{CONSTRUCT} is missing: API calls are not placed in the modules that made them")
        return {}
    try:
        found = decode(dict[str, Any], read_json(file, _MAX_JSON), file.name)
    except (DumpError, DecodeError) as e:
        dump.problem(f"{e}: API calls are not placed in the modules that made them")
        return {}
    return {k: (v[0] if isinstance(v, list) and v else v) for k, v in found.items()}
