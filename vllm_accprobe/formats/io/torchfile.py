"""Tensors in files that torch.save wrote, without torch and without running what they say.

The problem: .pt and .pth files are pickles with payloads beside them, in a zip archive or, before torch 1.6, one behind
the other; loading one with pickle runs whatever its author wanted. The idea: the archive's directory is read, its
pickle interpreted with a short list of names (unpickle.py), and what comes out is the tree of plain containers that was
saved, with a `TorchTensor` for each tensor: dtype, shape, strides and where its storage lies in the file. Values are
read by offset when somebody wants them, never more than the file holds; a view of a large storage reads its own part.
Source: torch/serialization.py says what is written, docs.pytorch.org "Serialization semantics".
Not here: what a pickle may name (torchtensor.py), what tools put into such files.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.io import unpickle
from vllm_accprobe.formats.io.plain_file import SHORTER, opened
from vllm_accprobe.formats.io.torchtensor import Storage, TorchTensor, names_for, storage_of
from vllm_accprobe.formats.io.unpickle import PickleError
from vllm_accprobe.formats.io.zipindex import ZipMember, index

MAX_PICKLE = 256 << 20
MAX_TENSORS = 1_000_000
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LEGACY_START = b"\x80\x02\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little")


def load(path: Path) -> Any:
    """What was saved: plain containers and values, with a TorchTensor for each tensor. Reads no payload. Raises
    DumpError, one line."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        head = os.pread(fd, 16, 0)
        if head[:4] == b"PK\x03\x04":
            return _load_zip(path, fd, size)
        if head[: len(_LEGACY_START)] == _LEGACY_START[: len(head)] and len(head) >= 14:
            return _load_legacy(path, fd, size)
        what = "is no file of torch.save: it begins with neither a zip archive nor torch's magic number"
        raise DumpError(f"{path} {what if head else 'is empty'}")


def tensors(tree: Any, path: Path | str = "") -> list[tuple[str, TorchTensor]]:
    """The tensors of what `load` gave, as (key, tensor): keys and indices on the way joined by dots, "" for a file that
    is one tensor. Raises DumpError where there are more than a million, or places on the way to them."""
    found: list[tuple[str, TorchTensor]] = []
    waiting: list[tuple[str, Any]] = [("", tree)]
    seen = 0
    while waiting:
        key, value = waiting.pop()
        seen += 1
        if seen > MAX_TENSORS:
            raise DumpError(f"{path} holds more than {MAX_TENSORS:,} values")
        if isinstance(value, TorchTensor):
            found.append((key, value))
            continue
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            items = list(enumerate(value))
        else:
            continue
        if len(items) + len(waiting) > MAX_TENSORS:
            raise DumpError(f"{path} holds more than {MAX_TENSORS:,} values")
        waiting += [(f"{key}.{k}" if key else str(k), v) for k, v in reversed(items)]
    return found


def items(path: Path) -> list[tuple[str, TorchTensor]]:
    """The tensors of a file, as `tensors`. Reads no payload. Raises DumpError."""
    return tensors(load(path), path)


def _load_zip(path: Path, fd: int, size: int) -> Any:
    members = index(fd, size)
    name = next((n for n in members if n.endswith("/data.pkl") or n == "data.pkl"), None)
    if name is None:
        what = "a TorchScript program" if any(n.endswith("constants.pkl") for n in members) else "a zip archive"
        raise DumpError(f"{path} is {what} without data.pkl: not what torch.save writes")
    if any(n.endswith("/constants.pkl") for n in members):
        raise DumpError(f"{path} is a TorchScript program, not tensors")
    root = name.removesuffix("data.pkl")
    pickle = members[name].read(fd, MAX_PICKLE)
    order = members.get(root + "byteorder")
    swap = order is not None and order.read(fd, 16) == b"big"

    def persistent(id: Any) -> Storage:
        storage = storage_of(id)
        member: ZipMember | None = members.get(f"{root}data/{storage.key}")
        if member is None:
            raise PickleError(f"storage {storage.key[:40]!r} is missing in the archive")
        start = member.start(fd)
        nbytes = storage.numel * DTYPES[storage.dtype].itemsize
        if nbytes > member.size:
            raise PickleError(f"storage {storage.key[:40]!r} has {member.size:,} bytes where {nbytes:,} were announced")
        return Storage(storage.key, storage.dtype, storage.numel, start, nbytes, swap)

    tree, _ = unpickle.load(pickle, names_for(path), persistent)
    return tree


def _load_legacy(path: Path, fd: int, size: int) -> Any:
    """Pickles lie in front and payloads behind them, with nothing to say how far the pickles go: a longer part of the
    file is taken until they end in it."""
    room = 1 << 16
    while True:
        try:
            return _pickles_and_places(path, fd, size, os.pread(fd, min(room, size), 0))
        except PickleError:
            if room >= min(size, MAX_PICKLE):
                raise
            room *= 16


def _pickles_and_places(path: Path, fd: int, size: int, data: bytes) -> Any:
    storages: dict[str, Storage] = {}

    def persistent(id: Any) -> Storage:
        storage = storage_of(id)
        if len(id) > 5 and id[5] is not None:
            raise PickleError("it holds a view of a storage as torch 0.3 wrote it; save it again with a newer torch")
        return storages.setdefault(storage.key, storage)

    find = names_for(path)
    magic, at = unpickle.load(data, find, persistent)
    version, at = unpickle.load(data, find, persistent, at)
    info, at = unpickle.load(data, find, persistent, at)
    if magic != _LEGACY_MAGIC or version != _LEGACY_PROTOCOL:
        raise PickleError(f"it has protocol {str(version)[:20]}, not {_LEGACY_PROTOCOL}")
    swap = isinstance(info, dict) and info.get("little_endian") is False
    tree, at = unpickle.load(data, find, persistent, at)
    keys, at = unpickle.load(data, find, persistent, at)
    if not isinstance(keys, list) or any(not isinstance(k, str) for k in keys):
        raise PickleError("its list of storages is damaged")
    places: dict[str, Storage] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise PickleError(f"storage {key[:40]!r} belongs to no tensor")
        count = int.from_bytes(os.pread(fd, 8, at), "big" if swap else "little", signed=True)
        nbytes = storage.numel * DTYPES[storage.dtype].itemsize
        if count != storage.numel or at + 8 + nbytes > size:
            raise PickleError(f"it {SHORTER}")
        places[key] = replace(storage, start=at + 8, nbytes=nbytes, swap=swap)
        at += 8 + nbytes
    return _placed(tree, places)


def _placed(tree: Any, places: dict[str, Storage]) -> Any:
    """``tree`` with each tensor's storage as it was found behind the pickles. Shared containers are walked once."""
    done: dict[int, Any] = {}

    def walk(value: Any, depth: int) -> Any:
        if isinstance(value, TorchTensor):
            if value.storage.key not in places:
                raise PickleError(f"storage {value.storage.key[:40]!r} is missing")
            return replace(value, storage=places[value.storage.key])
        if not isinstance(value, (dict, list, tuple)):
            return value
        if depth > 200:
            raise PickleError("it is nested too deep")
        if id(value) not in done:
            if isinstance(value, dict):
                done[id(value)] = {k: walk(v, depth + 1) for k, v in value.items()}
            else:
                done[id(value)] = type(value)(walk(v, depth + 1) for v in value)
        return done[id(value)]

    return walk(tree, 0)
