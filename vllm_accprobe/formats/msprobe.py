"""Dumps of msprobe (MindStudio-Probe): many steps and ranks, tensors, statistics or checksums, PyTorch and MindSpore.

The problem: its own comparison takes one step at a time, one that is named on both sides, and throws away what golden
has alone. The idea: all steps and ranks below a directory are one dump, each with its own index; an API's place is the
module that called it (construct.json), so that one call more elsewhere moves nothing. Backward runs are places of their
own, ``backward.<path>``.
Layout: ``[step<S>/][rank<R>|proc<PID>/]{dump,stack,construct}.json`` or ``debug.json``, payloads in
``dump_tensor_data/<data_name>`` beside it (``dump_data_dir`` is another machine's path and is not used).
Not here: a record's place and tensors (msprobe_records.py), the arguments of API calls (msprobe_calls.py), payloads
(msprobe_files.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.dump.schema import OpCall
from vllm_accprobe.formats.common import msprobe_calls
from vllm_accprobe.formats.common.foreign import PARAM, ForeignDump, Tensor, torch_dtype
from vllm_accprobe.formats.common.msprobe_files import names_in, payload
from vllm_accprobe.formats.common.msprobe_records import (
    PlacedRecord,
    in_order,
    place_of,
    record_stats,
)
from vllm_accprobe.formats.common.msprobe_words import CONSTRUCT, DATA, DEBUG, DUMP, SECTIONS, operator_name
from vllm_accprobe.formats.io import walk
from vllm_accprobe.formats.io.plain_file import read_json

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


def _add(dump: ForeignDump, file: Path, directory: Path, step: int, rank: int) -> None:
    head = _read(file)
    data = head.get("data") if isinstance(head, dict) else None
    if not isinstance(data, dict):
        raise DumpError(f"{file} is no dump of msprobe: it has no records under 'data'")
    for key in ("framework", "task", "level"):
        if isinstance(head.get(key), str):
            dump.run.setdefault(key, head[key])
    parents = _parents(dump, directory / CONSTRUCT) if file.name == DUMP else {}
    data_dir = str(directory / DATA)
    stored = names_in(dump, data_dir)
    places: list[PlacedRecord] = [
        (key, record, place_of(key, parents)) for key, record in data.items() if isinstance(record, dict)
    ]
    numbers: dict[str, tuple[int, int]] = {}
    for order, (key, place, leaf) in enumerate(in_order(places)):
        info = leaf.info
        dtype, shape = torch_dtype(str(info.get("dtype"))), info.get("shape")
        if not isinstance(shape, list) or any(type(n) is not int for n in shape):
            dump.skip(place.tap, "record without a shape", step, leaf.role)
            continue
        name = info.get("data_name")
        stats = record_stats(info, math.prod(shape))
        read = None
        if name:
            read = payload(dump, data_dir, name, stored, (dtype, tuple(shape)), (place.tap, step, leaf.role))
        record = dump.add(
            Tensor(
                name=f"{key}.{leaf.suffix}" if leaf.suffix else key,
                tap=place.tap,
                role=leaf.role,
                dtype=dtype,
                shape=tuple(shape),
                read=read,
                cls=place.cls,
                step=step,
                rank=rank,
                call=None if leaf.role.startswith(PARAM) else place.call,
                stats=stats,
                hash=f"crc32:{info['md5']}" if isinstance(info.get("md5"), str) else None,
                order=order,
            )
        )
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
        args, kwargs = msprobe_calls.arguments(record)
        name, (call, seq) = operator_name(place.cls, framework), numbers[key]
        dump.ops.append(OpCall(rank, step, place.tap, name, call, seq, place.inside or None, args, kwargs, ()))


def _read(file: Path) -> Any:
    try:
        return read_json(file, _MAX_JSON)
    except OSError as e:
        raise DumpError(f"cannot read {file}: {e.strerror or e}") from None
    except ValueError as e:
        raise DumpError(f"{file} is damaged: {str(e)[:120]}") from None


def _parents(dump: ForeignDump, file: Path) -> dict[str, str]:
    """Record → the record that called it."""
    if not file.is_file():
        dump.problem(f"{CONSTRUCT} is missing: API calls are not placed in the modules that made them")
        return {}
    try:
        found = _read(file)
        if not isinstance(found, dict):
            raise DumpError(f"{file} is damaged: not the JSON object it should be")
    except DumpError as e:
        dump.problem(f"{e}: API calls are not placed in the modules that made them")
        return {}
    return {k: (v[0] if isinstance(v, list) and v else v) for k, v in found.items()}
