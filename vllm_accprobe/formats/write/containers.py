"""A dump in the containers of other tools: HDF5 as torch_xray lays it out, npz, safetensors, and single files.

The problem: other people's scripts read HDF5 or npz, and neither knows bfloat16 or the 8-bit floats. The idea: records
are written one at a time in the order of execution, those dtypes widened to float32, which is exact, and the original
name and dtype kept as attributes where the container has some (notes.py).
Not here: msprobe's layout (msprobe_dump.py), which records (select.py), refusing to overwrite (cli/convert.py).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ROOT_TAP, Module, OpCall, Record
from vllm_accprobe.dump.segment import HeaderEntry, build_header, entry_room
from vllm_accprobe.formats.write import notes

Tick = Callable[[], None]
_NUMBERED = re.compile(r"\d{1,6}(?:\.\d{1,6})*", re.ASCII)


def portable(array: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bits as an array that any numpy reads: bfloat16 and 8-bit floats as float32, the rest unchanged."""
    if dtype == "bfloat16" or dtype.startswith("float8"):
        return widen(array, dtype)
    return array


def widened(records: Iterable[Record]) -> int:
    """How many of ``records`` are float32 in an export and were not in the dump."""
    return sum(r.dtype == "bfloat16" or r.dtype.startswith("float8") for r in records)


def write_h5(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` of one rank, with payload, as torch_xray's file: a group per step, creation order tracked, in it
    ``path.Class.n.forward_params.<name>``, ``...forward_input.<i>``, ``...forward_output.<i>``.

    n numbers the modules of one class under one parent. A parameter stands before its module's first tensor of the
    first step, or, if its module has none, at that step's end. A tap's later calls in a step have ``.call<c>`` after n.
    What these names cannot say is noted (notes.py) in an attribute ``accprobe`` of each dataset; of a module, and of an
    operator's call, in that of its first one. Returns how many calls had more to say than an attribute takes.
    """
    import h5py

    left = 0

    names = h5_names(dump, records)
    modules = {(rank, m.tap): m for rank, found in dump.modules.items() for m in found}
    calls = {(op.rank, op.step, op.tap, op.call): op for op in dump.ops}
    with h5py.File(path, "x", track_order=True) as file:
        for r, (group, name) in zip(_execution_order(records), names, strict=True):
            where = file.get(group)
            if where is None:
                where = file.create_group(group, track_order=True)
            data = where.create_dataset(name, data=portable(dump.read(r), r.dtype))
            data.attrs["tap"], data.attrs["role"], data.attrs["dtype"] = r.tap, r.role, r.dtype
            module, call = modules.pop((r.rank, r.tap), None), calls.pop((r.rank, r.step, r.tap, r.call), None)
            left += not _note(data, r, module, call)
            tick()
    return left


def _note(data: Any, r: Record, module: Module | None, op: OpCall | None) -> bool:
    """Whether all of it was noted."""
    found = notes.of_record(r)
    more = ({"module": notes.of_module(module)} if module else {}) | ({"op": notes.of_op(op)} if op else {})
    text = notes.text(found | more)
    whole = len(text) <= notes.LONGEST
    data.attrs[notes.NAME] = np.bytes_(text if whole else notes.text(found))
    return whole


def h5_names(dump: Dump, records: list[Record]) -> list[tuple[str, str]]:
    """(group, dataset) of each record, in the order of execution."""
    ordered = _execution_order(records)
    first = min((r.step for r in records if r.step is not None), default=0)
    ordinals = _class_ordinals(dump, ordered)
    numbers: dict[tuple[Any, ...], int] = defaultdict(int)
    for r in ordered:  # what has a name of its own gets the numbers behind those that are taken
        kind, _, rest = r.role.partition(".")
        if r.step is not None and _NUMBERED.fullmatch(rest):
            key = (r.step, r.tap, r.call, kind)
            numbers[key] = max(numbers[key], int(rest.partition(".")[0]) + 1)
    taken: set[tuple[str, str]] = set()
    result = []
    for r in ordered:
        kind, _, rest = r.role.partition(".")
        module = f"{'' if r.tap == ROOT_TAP else _plain(r.tap) + '.'}{_plain(r.cls) or 'Module'}.{ordinals[r.tap]}"
        if r.call:
            module += f".call{r.call}"
        if r.step is None:
            leaf = f"forward_params.{_plain(rest)}"
        else:
            key = (r.step, r.tap, r.call, kind)
            if not _NUMBERED.fullmatch(rest):
                rest, numbers[key] = str(numbers[key]), numbers[key] + 1
            leaf = f"forward_{_plain(kind)}.{rest}"
        place = (str(first if r.step is None else r.step), f"{module}.{leaf}")
        n = 2
        while place in taken:
            place = (place[0], f"{module}.{leaf}~{n}")
            n += 1
        taken.add(place)
        result.append(place)
    return result


def _plain(name: str) -> str:
    """A slash would make a group, a NUL ends a name."""
    return name.replace("/", "_").replace("\0", "_")


def _execution_order(records: list[Record]) -> list[Record]:
    steps = [r for r in records if r.step is not None]
    first = min((r.step for r in steps if r.step is not None), default=0)
    begins: dict[str, int] = {}
    for r in steps:
        if r.step == first:
            begins[r.tap] = min(begins.get(r.tap, r.seq), r.seq)

    def key(r: Record) -> tuple[int, float, int]:
        if r.step is None:
            return (first, begins.get(r.tap, float("inf")), 0)
        return (r.step, r.seq, 1)

    return sorted(records, key=key)


def _class_ordinals(dump: Dump, records: list[Record]) -> dict[str, int]:
    """tap → its number among the taps of the same class and parent, in the order of the module tree."""
    order = [(m.tap, m.cls) for rank in dump.ranks for m in dump.modules.get(rank, ())]
    order += [(r.tap, r.cls) for r in records]
    result: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for tap, cls in order:
        if tap not in result:
            key = (tap.rpartition(".")[0], cls)
            result[tap] = seen[key]
            seen[key] += 1
    return result


def write_npz(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` with payload as ``step/tap/role#call`` (``param/...`` for parameters; of several ranks
    ``rank/step/...``), readable by ``numpy.load``. One tensor at a time is in memory. Returns 0: nothing is
    left out."""
    with zipfile.ZipFile(path, "x", allowZip64=True) as file:
        for r, name in zip(records, _file_names(records), strict=True):
            with file.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, portable(dump.read(r), r.dtype), allow_pickle=False)
            tick()
    return 0


def _file_names(records: list[Record]) -> list[str]:
    """A name for each record, no two alike."""
    several = len({r.rank for r in records}) > 1
    names: dict[str, None] = {}
    for r in records:
        step = "param" if r.step is None else str(r.step)
        parts = [*([f"rank{r.rank}"] if several else []), step, _plain(r.tap), _plain(r.role)]
        name = "/".join(part.replace("..", "__") for part in parts) + (f"#{r.call}" if r.call else "")
        unique, n = name, 2
        while unique in names:
            unique, n = f"{name}~{n}", n + 1
        names[unique] = None
    return list(names)


def write_safetensors(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` with payload, in their own dtypes, named as in `write_npz`. One tensor at a time is in memory.

    Dtypes that the format does not know (complex, some 8-bit floats) are noted in its metadata, ``accprobe.dtypes``.
    Returns 0: nothing is left out."""
    entries, at, odd = [], 0, {}
    for r, name in zip(records, _file_names(records), strict=True):
        info = DTYPES[r.dtype]
        nbytes = prod(r.shape) * info.itemsize
        entries.append(HeaderEntry(name, r.dtype, tuple(r.shape), at, nbytes))
        at += nbytes
        if info.tail or (info.safetensors == "U8" and r.dtype != "uint8"):
            odd[name] = r.dtype
    metadata = {notes.DTYPES: notes.text(odd).decode()} if odd else {}
    room = sum(entry_room(e.key, "", len(e.shape)) for e in entries) + 4096 + 2 * sum(map(len, metadata.values()))
    room += -(8 + room) % 64
    with open(path, "xb") as f:
        f.write(room.to_bytes(8, "little") + build_header(entries, at, room, metadata, once=False))
        for r in records:
            f.write(np.ascontiguousarray(dump.read(r), DTYPES[r.dtype].storage).reshape(-1).view(np.uint8).data)
            tick()
    return 0


def save_npy(path: Path, array: np.ndarray, dtype: str) -> None:
    """One tensor of stored bits as .npy; raises FileExistsError where the file exists."""
    with open(path, "xb") as f:
        np.save(f, portable(array, dtype), allow_pickle=False)


def save_safetensors(path: Path, name: str, array: np.ndarray, dtype: str) -> None:
    """One tensor of stored bits as .safetensors, in its own dtype; raises FileExistsError where the file exists."""
    entry = HeaderEntry(name, dtype, tuple(array.shape), 0, array.nbytes)
    room = -(-len(json.dumps(name)) // 8) * 8 + 512
    with open(path, "xb") as f:
        f.write(room.to_bytes(8, "little") + build_header([entry], array.nbytes, room))
        f.write(np.ascontiguousarray(array, DTYPES[dtype].storage).tobytes())
