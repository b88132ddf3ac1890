"""Tensors in files that torch.save wrote, without torch and without running what they say.

The problem: .pt and .pth files are pickles with payloads beside them, in a zip archive or, before torch 1.6, one behind
the other; loading one with pickle runs whatever its author wanted. The idea: the archive's directory is read, its
pickle interpreted with a short list of names (unpickle.py), and what comes out is the tree of plain containers that was
saved, with a `TorchTensor` for each tensor: dtype, shape, strides and where its storage lies in the file. Values are
read by offset when somebody wants them, never more than the file holds; a view of a large storage reads its own part.
Sources: torch/serialization.py and torch/_utils.py say what is written, docs.pytorch.org "Serialization semantics".
Not here: what tools put into such files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import open_regular
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import unpickle
from vllm_accprobe.formats.unpickle import Function, PickleError
from vllm_accprobe.formats.zipindex import Member, ZipError, index

SUFFIXES = (".pt", ".pth", ".bin")
MAX_PICKLE = 256 << 20
EXPANDED = 256 << 20
"""Bytes that a tensor may have although its storage has fewer (torch's ``expand``)."""
MAX_TENSORS = 1_000_000
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LEGACY_START = b"\x80\x02\x8a\x0a" + _LEGACY_MAGIC.to_bytes(10, "little")
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8", "UntypedStorage_": "uint8",
}  # fmt: skip
_PLAIN_NPU_FORMATS = (-1, 0, 2)
"""ACL_FORMAT_UNDEFINED, NCHW and ND: values in the order of the shape; the others are tiled for the card."""


@dataclass(frozen=True, slots=True)
class Storage:
    """``nbytes`` bytes from ``start`` on in a file; dtype: as the file's pickle calls its elements; swap: the file is
    of a machine with the other byte order."""

    key: str
    dtype: str
    numel: int
    start: int = 0
    nbytes: int = 0
    swap: bool = False


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of such a file: shape, stride and offset in elements, as torch's."""

    path: Path
    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self, fd: int | None = None) -> np.ndarray:
        """The bits: DTYPES[dtype].storage, C order, ``shape``. fd: the file, where it is open already. Raises
        DumpError, OSError."""
        info = DTYPES[self.dtype]
        if not prod(self.shape):
            return np.zeros(self.shape, info.storage)
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        count = last + 1
        start = self.offset * info.itemsize
        if start + count * info.itemsize > self.storage.nbytes:
            raise DumpError(f"{self.path}: a tensor reaches beyond its storage")
        flat = np.empty(count, info.storage)
        _fill(self.path, self.storage.start + start, flat, fd)
        if self.storage.swap:
            flat.byteswap(inplace=True)
        if self.stride == contiguous(self.shape) or count == prod(self.shape) == 1:
            return flat.reshape(self.shape)
        if prod(self.shape) * info.itemsize > max(EXPANDED, 4 * flat.nbytes):
            raise DumpError(f"{self.path}: a tensor of {list(self.shape)} would repeat {flat.nbytes:,} bytes too often")
        strides = tuple(s * info.itemsize for s in self.stride)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, self.shape, strides))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def load(path: Path) -> Any:
    """What was saved: plain containers and values, with a TorchTensor for each tensor. Reads no payload. Raises
    DumpError, one line."""
    with _opened(path) as fd:
        return _load(path, fd)


def read_tensor(path: Path, key: str = "") -> tuple[np.ndarray, str]:
    """(bits, dtype) of the one tensor in the file, or of the one called ``key`` (see `tensors`), opening it once."""
    with _opened(path) as fd:
        found = dict(tensors(_load(path, fd), path))
        if key not in found and not (key == "" and len(found) == 1):
            raise DumpError(f"{path} holds {len(found)} tensors, none called {key!r}")
        tensor = found[key] if key in found else next(iter(found.values()))
        return tensor.read(fd), tensor.dtype


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


# --- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = open_regular(path)
    except OSError as e:
        raise DumpError(f"cannot read {path}: {e.strerror or e}") from None
    try:
        yield fd
    except PickleError as e:
        raise DumpError(f"{path} cannot be read: {e}") from None
    except OSError as e:
        raise DumpError(f"cannot read {path}: {e.strerror or e}") from None
    finally:
        os.close(fd)


def _fill(path: Path, offset: int, target: np.ndarray, fd: int | None) -> None:
    if fd is None:
        with _opened(path) as own:
            _fill(path, offset, target, own)
        return
    view = target.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise DumpError(f"{path} is shorter than it says: not all of it was written or copied")
        done += n


def _load(path: Path, fd: int) -> Any:
    size = os.fstat(fd).st_size
    head = os.pread(fd, 16, 0)
    if head[:4] == b"PK\x03\x04":
        return _load_zip(path, fd, size)
    if head[: len(_LEGACY_START)] == _LEGACY_START[: len(head)] and len(head) >= 14:
        return _load_legacy(path, fd, size)
    if not head:
        raise DumpError(f"{path} is empty")
    raise DumpError(f"{path} is no file of torch.save: it begins with neither a zip archive nor torch's magic number")


def _load_zip(path: Path, fd: int, size: int) -> Any:
    try:
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
    except ZipError as e:
        raise DumpError(f"{path} cannot be read: {e}") from None

    def persistent(id: Any) -> Storage:
        storage = _storage(id)
        member: Member | None = members.get(f"{root}data/{storage.key}")
        if member is None:
            raise PickleError(f"storage {storage.key[:40]!r} is missing in the archive")
        try:
            start = member.start(fd)
        except ZipError as e:
            raise PickleError(str(e)) from None
        nbytes = storage.numel * DTYPES[storage.dtype].itemsize
        if nbytes > member.size:
            raise PickleError(f"storage {storage.key[:40]!r} has {member.size:,} bytes where {nbytes:,} were announced")
        return Storage(storage.key, storage.dtype, storage.numel, start, nbytes, swap)

    tree, _ = unpickle.load(pickle, _names(path), persistent)
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
        storage = _storage(id)
        if len(id) > 5 and id[5] is not None:
            raise PickleError("it holds a view of a storage as torch 0.3 wrote it; save it again with a newer torch")
        return storages.setdefault(storage.key, storage)

    find = _names(path)
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
            raise PickleError("it is shorter than it says: not all of it was written or copied")
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


# --- the names that a pickle may use ---------------------------------------------------------------------------------


def _storage(id: Any) -> Storage:
    """From ("storage", storage type, key, location, number of elements, ...)."""
    if not (isinstance(id, tuple) and len(id) >= 5 and id[0] == "storage" and isinstance(id[2], str)):
        raise PickleError("a pickle in it refers to something that is no storage")
    kind, numel = id[1], id[4]
    if not isinstance(kind, Function) or kind.name not in _STORAGES or type(numel) is not int or numel < 0:
        raise PickleError("a pickle in it describes a storage that does not exist")
    return Storage(id[2], _STORAGES[kind.name], numel)


def _names(path: Path) -> unpickle.Find:
    """The list of names. Everything else is refused."""

    def tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: str | None = None) -> TorchTensor:
        if not isinstance(storage, Storage) or type(offset) is not int or offset < 0:
            raise PickleError("a pickle in it describes a tensor that does not exist")
        if not _sizes(shape) or not _sizes(stride) or len(shape) != len(stride) or len(shape) > 64:
            raise PickleError("a pickle in it describes a tensor of an impossible shape")
        name = dtype or storage.dtype
        info = DTYPES[name]
        count = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if prod(shape) else 0
        if (offset + count) * info.itemsize > storage.numel * DTYPES[storage.dtype].itemsize:
            raise PickleError("a tensor reaches beyond its storage")
        return TorchTensor(path, storage, name, tuple(shape), tuple(stride), offset)

    def v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TorchTensor:
        return tensor(storage, offset, shape, stride)

    def v3(storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
        if not isinstance(dtype, str):
            raise PickleError("a pickle in it describes a tensor without a dtype")
        return tensor(storage, offset, shape, stride, dtype)

    def npu(storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, info: Any = None) -> Any:
        form = info[0] if isinstance(info, (list, tuple)) and info else -1
        if type(form) is int and form not in _PLAIN_NPU_FORMATS:
            raise PickleError(f"it holds a tensor in the card's own format {form}; save it as .cpu()")
        return tensor(storage, offset, shape, stride)

    def from_type(function: Any, _type: Any, arguments: Any, _state: Any) -> Any:
        if not isinstance(function, Function) or function.call is None or not isinstance(arguments, tuple):
            raise PickleError("a pickle in it calls what is no function")
        return function.call(*arguments)

    calls: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch._utils", "_rebuild_tensor"): v2,
        ("torch._utils", "_rebuild_tensor_v2"): v2,
        ("torch._utils", "_rebuild_tensor_v3"): v3,
        ("torch._utils", "_rebuild_parameter"): _first,
        ("torch._utils", "_rebuild_parameter_with_state"): _first,
        ("torch._tensor", "_rebuild_from_type_v2"): from_type,
        ("torch_npu.utils.storage", "_rebuild_npu_tensor"): npu,
        ("torch_npu.utils._storage", "_rebuild_npu_tensor"): npu,
        ("torch", "Size"): _tuple,
        ("torch", "device"): _device,
        ("collections", "OrderedDict"): _dict,
        ("builtins", "set"): _set,
        ("__builtin__", "set"): _set,
        ("_codecs", "encode"): _encode,
    }

    def find(module: str, name: str) -> Any:
        if (module, name) in calls:
            return Function(f"{module}.{name}", calls[module, name])
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return Function(name)
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) in (("torch.nn.parameter", "Parameter"), ("torch", "Tensor"), ("torch._tensor", "Tensor")):
            return Function(name)
        raise PickleError(f"it asks for {module[:60]}.{name[:60]}, which is no plain tensor: only tensors, numbers, "
                          "text and containers of these are read")  # fmt: skip

    return find


def _sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _first(data: Any, *_: Any) -> Any:
    return data


def _tuple(value: Any = ()) -> tuple[Any, ...]:
    return tuple(value)


def _device(*parts: Any) -> str:
    return ":".join(str(p)[:40] for p in parts if isinstance(p, (str, int)))


def _dict(items: Any = ()) -> dict[Any, Any]:
    return {unpickle.plain(k): v for k, v in items}


def _set(items: Any = ()) -> set[Any]:
    return {unpickle.plain(i) for i in items}


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError
    return text.encode("latin1")
