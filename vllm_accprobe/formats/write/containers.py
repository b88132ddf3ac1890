"""A dump in the containers of other tools: HDF5 as torch_xray lays it out, npz, safetensors, and single files.

The problem: other people's scripts read HDF5 or npz, and neither knows bfloat16 or the 8-bit floats. The idea: records
are written one at a time in the order of execution, those dtypes widened to float32, which is exact, and the original
name and dtype kept as attributes where the container has some (notes.py).
Not here: which records (select.py), refusing to overwrite (cli/convert.py).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Module, OpCall, Record
from vllm_accprobe.dump.segment import HeaderEntry, build_header, entry_room
from vllm_accprobe.formats.write import names, notes

Tick = Callable[[], None]


def portable(array: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bits as an array that any numpy reads: bfloat16 and 8-bit floats as float32, the rest unchanged."""
    return widen(array, dtype) if notes.narrow(dtype) else array


def widened(records: Iterable[Record]) -> int:
    """How many of ``records`` are float32 in an export and were not in the dump."""
    return sum(notes.narrow(r.dtype) for r in records)


def write_h5(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` of one rank, with payload, as torch_xray's file: a group per step, creation order tracked, in it
    ``path.Class.n.forward_params.<name>``, ``...forward_input.<i>``, ``...forward_output.<i>``.

    A parameter stands before its module's first tensor of the first step, or, if its module has none, at that step's
    end. What these names cannot say is noted (notes.py) in an attribute ``accprobe`` of each dataset; of a module, and
    of an operator's call, in that of its first one. Returns how many calls had more to say than an attribute takes.
    """
    import h5py

    left = 0
    modules = {(rank, m.tap): m for rank, found in dump.modules.items() for m in found}
    calls = {(op.rank, op.step, op.tap, op.call): op for op in dump.ops}
    with h5py.File(path, "x", track_order=True) as file:
        for r, group, name in h5_names(dump, records):
            where = file.get(group)
            if where is None:
                where = file.create_group(group, track_order=True)
            data = where.create_dataset(name, data=portable(dump.read(r), r.dtype))
            data.attrs["tap"], data.attrs["role"], data.attrs["dtype"] = r.tap, r.role, r.dtype
            module, call = modules.pop((r.rank, r.tap), None), calls.pop((r.rank, r.step, r.tap, r.call), None)
            left += not _note(data, r, module, call)
            tick()
    return left


def h5_names(dump: Dump, records: list[Record]) -> list[tuple[Record, str, str]]:
    """``records`` in the order of execution, each with its group and its name there."""
    ordered = _execution_order(records)
    return [(r, *place) for r, place in zip(ordered, names.datasets(dump, ordered), strict=True)]


def _note(data: Any, r: Record, module: Module | None, op: OpCall | None) -> bool:
    """Whether all of it was noted."""
    found = notes.of_record(r)
    more = ({"module": notes.of_module(module)} if module else {}) | ({"op": notes.of_op(op)} if op else {})
    text = notes.text(found | more)
    whole = len(text) <= notes.LONGEST
    data.attrs[notes.NAME] = np.bytes_(text if whole else notes.text(found))
    return whole


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


def write_npz(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` with payload as ``step/tap/role#call`` (``param/...`` for parameters; of several ranks
    ``rank/step/...``), readable by ``numpy.load``. One tensor at a time is in memory. Returns 0: nothing is
    left out."""
    with zipfile.ZipFile(path, "x", allowZip64=True) as file:
        for r, name in zip(records, names.keys(records), strict=True):
            with file.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, portable(dump.read(r), r.dtype), allow_pickle=False)
            tick()
    return 0


def write_safetensors(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` with payload, in their own dtypes, named as in `write_npz`. One tensor at a time is in memory.

    Dtypes that the format does not know (complex, some 8-bit floats) are noted in its metadata, ``accprobe.dtypes``.
    Returns 0: nothing is left out."""
    entries, at, odd = [], 0, {}
    for r, name in zip(records, names.keys(records), strict=True):
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
