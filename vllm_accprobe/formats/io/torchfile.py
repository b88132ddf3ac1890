"""Tensors in files that torch.save wrote, without torch and without running what they say.

The problem: .pt and .pth files are pickles with payloads next to them, in a zip archive or, before torch 1.6, one after
the other; a pickle is a program that calls whatever it names. The idea: an interpreter for the opcodes that data needs,
whose only functions are on a short list: those that put a view on a storage, types of storages, dtypes, plain
containers. Nothing is imported; any other name ends in one line; keys must be plain values (nested tuples cost ages to
hash), every length is checked against the bytes that are there, every view against its storage. The result is the tree
that was saved, with a `TorchTensor` for each tensor; values are read by offset, a view of a large storage only its own
part. Source: torch/serialization.py, _utils.py, storage.py; torch_npu/utils/storage.py for tensors saved from a card.

Not here: what tools put into such files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io.plain_file import SHORTER, FileProblem, fill, opened
from vllm_accprobe.formats.io.zipindex import ZipMember, index

MAX_STACK = 10_000_000
"""Values that a pickle may hold at a time."""
_PLAIN = (str, int, float, bool, bytes, type(None))


class PickleError(FileProblem):
    """What is wrong with the pickle."""


class KnownFunction:
    """What a global of the pickle stands for. call: takes the arguments; None where it can only be handed on."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None):
        self.name, self.call = name, call


Find = Callable[[str, str], Any]
"""(module, name) → a KnownFunction or a plain value; raises PickleError for what is not on the list."""


def load_pickle(
    data: bytes | memoryview, find: Find, persistent: Callable[[Any], Any], start: int = 0
) -> tuple[Any, int]:  # fmt: skip
    """(value, offset behind it) of the pickle at ``start``. Raises PickleError for anything but plain data."""
    machine = _Machine(memoryview(data), find, persistent, start)
    try:
        return machine.run(), machine.at
    except PickleError:
        raise
    except (IndexError, struct.error):
        raise PickleError("a pickle in it ends too early or is damaged") from None
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError, UnicodeDecodeError):
        raise PickleError("a pickle in it is damaged") from None


class _Machine:
    def __init__(self, data: memoryview, find: Find, persistent: Callable[[Any], Any], start: int):
        self.data, self.at, self.find, self.persistent = data, start, find, persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.count = 0

    def run(self) -> Any:
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            step = _CODES.get(code)
            if step is None:
                raise PickleError(f"a pickle in it uses opcode 0x{code:02x}, which data does not need")
            step(self)
            self.count += 1
            if self.count > MAX_STACK:
                raise PickleError(f"a pickle in it has more than {MAX_STACK:,} steps")

    # --- bytes ---------------------------------------------------------------------------------------------------

    def take(self, n: int) -> memoryview:
        if n < 0 or self.at + n > len(self.data):
            raise PickleError("a pickle in it ends too early or is damaged")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, form: str) -> Any:
        packer = _FORMS[form]
        return packer.unpack(self.take(packer.size))[0]

    def line(self) -> str:
        end = self.at
        while self.data[end] != 10:
            end += 1
            if end - self.at > 10_000:
                raise PickleError("a pickle in it is damaged")
        text = str(self.take(end - self.at), "ascii")
        self.at += 1
        return text

    # --- values --------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def marked(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def tuple_of(self, n: int) -> None:
        items = tuple(self.stack[len(self.stack) - n :])
        if len(items) < n:
            raise IndexError
        del self.stack[len(self.stack) - n :]
        self.push(items)

    def look_up(self, module: str, name: str) -> None:
        self.push(self.find(module, name))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, KnownFunction) or function.call is None or not isinstance(arguments, tuple):
            raise PickleError("a pickle in it calls what is no function")
        try:
            self.push(function.call(*arguments))
        except (TypeError, ValueError, AttributeError):
            raise PickleError(f"a pickle in it calls {function.name} with arguments that do not fit") from None

    def build(self) -> None:
        """State of an object. Containers have none that matters (a state dict's version numbers); tensors neither."""
        self.stack.pop()
        self.stack[-1]

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise PickleError("a pickle in it is damaged")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[plain(key)] = value

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(plain(i) for i in items)
        else:
            raise PickleError("a pickle in it is damaged")

    def unmarked(self) -> list[Any]:
        return [self.stack.pop()]

    def unmarked_pair(self) -> list[Any]:
        value = self.stack.pop()
        return [self.stack.pop(), value]

    def long(self, n: int) -> None:
        if n > 64:
            raise PickleError("a pickle in it has a number of more than 512 bits")
        self.push(int.from_bytes(self.take(n), "little", signed=True))

    def named_by_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a pickle in it is damaged")
        self.look_up(module, name)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def text(self, form: str) -> None:
        self.push(str(self.take(self.number(form)), "utf-8", "surrogatepass"))

    def raw(self, form: str) -> None:
        self.push(bytes(self.take(self.number(form))))

    def decimal(self) -> None:
        text = self.line()
        self.push({"00": False, "01": True}.get(text) if text in ("00", "01") else int(text[:200].rstrip("L")))


def plain(key: Any) -> Any:
    """``key`` if it is a plain value or a tuple of such. Raises PickleError."""
    if isinstance(key, _PLAIN) or (isinstance(key, tuple) and all(isinstance(k, _PLAIN) for k in key)):
        return key
    raise PickleError("a pickle in it has a key that is no plain value")


_FORMS = {form: struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d")}
_STOP = ord(".")


def _frame(m: _Machine) -> None:
    m.number("<Q")


def _protocol(m: _Machine) -> None:
    if m.number("<B") > 5:
        raise PickleError("a pickle in it has a protocol of the future")


_CODES: Mapping[int, Callable[[_Machine], Any]] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("I"): _Machine.decimal,
    ord("L"): _Machine.decimal,
    0x8A: lambda m: m.long(m.number("<B")),
    0x8B: lambda m: m.long(m.number("<i")),
    ord("G"): lambda m: m.push(m.number(">d")),
    ord("X"): lambda m: m.text("<I"),
    0x8C: lambda m: m.text("<B"),
    0x8D: lambda m: m.text("<Q"),
    ord("U"): lambda m: m.text("<B"),  # a string of Python 2: torch's old files have ASCII there
    ord("T"): lambda m: m.text("<i"),
    ord("C"): lambda m: m.raw("<B"),
    ord("B"): lambda m: m.raw("<I"),
    0x8E: lambda m: m.raw("<Q"),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.marked()),
    ord("}"): lambda m: m.push({}),
    0x8F: lambda m: m.push(set()),
    ord("a"): lambda m: m.append(m.unmarked()),
    ord("e"): lambda m: m.append(m.marked()),
    0x90: lambda m: m.append(m.marked()),
    0x91: lambda m: m.push(frozenset(plain(i) for i in m.marked())),
    ord("s"): lambda m: m.set_items(m.unmarked_pair()),
    ord("u"): lambda m: m.set_items(m.marked()),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): _Machine.marked,
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("q"): lambda m: m.memo.__setitem__(m.number("<B"), m.stack[-1]),
    ord("r"): lambda m: m.memo.__setitem__(m.number("<I"), m.stack[-1]),
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    ord("h"): lambda m: m.push(m.memo[m.number("<B")]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
    ord("c"): lambda m: m.look_up(m.line(), m.line()),
    0x93: _Machine.named_by_stack,
    ord("R"): _Machine.reduce,
    0x81: _Machine.reduce,
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.push(m.persistent(m.stack.pop())),
}


EXPANDED = 256 << 20
"""Bytes that a tensor may have although its storage has fewer (torch's ``expand``)."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
"""Typed storages → dtypes."""
_STORAGES = {**STORAGES, "UntypedStorage": "uint8", "UntypedStorage_": "uint8"}
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

    def read(self) -> np.ndarray:
        """The bits: DTYPES[dtype].storage, C order, ``shape``. Raises DumpError."""
        info = DTYPES[self.dtype]
        if not prod(self.shape):
            return np.zeros(self.shape, info.storage)
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        count = last + 1
        start = self.offset * info.itemsize
        if start + count * info.itemsize > self.storage.nbytes:
            raise DumpError(f"{self.path}: a tensor reaches beyond its storage")
        with opened(self.path) as fd:
            flat = fill(self.path, fd, self.storage.start + start, np.empty(count, info.storage))
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


def storage_of(id: Any) -> Storage:
    """From ("storage", storage type, key, location, number of elements, ...)."""
    if not (isinstance(id, tuple) and len(id) >= 5 and id[0] == "storage" and isinstance(id[2], str)):
        raise PickleError("a pickle in it refers to something that is no storage")
    kind, numel = id[1], id[4]
    if not isinstance(kind, KnownFunction) or kind.name not in _STORAGES or type(numel) is not int or numel < 0:
        raise PickleError("a pickle in it describes a storage that does not exist")
    return Storage(id[2], _STORAGES[kind.name], numel)


def names_for(path: Path) -> Find:
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
        if not isinstance(function, KnownFunction) or function.call is None or not isinstance(arguments, tuple):
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
            return KnownFunction(f"{module}.{name}", calls[module, name])
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return KnownFunction(name)
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) in (("torch.nn.parameter", "Parameter"), ("torch", "Tensor"), ("torch._tensor", "Tensor")):
            return KnownFunction(name)
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
    return {plain(k): v for k, v in items}


def _set(items: Any = ()) -> set[Any]:
    return {plain(i) for i in items}


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError
    return text.encode("latin1")


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

    tree, _ = load_pickle(pickle, names_for(path), persistent)
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
    magic, at = load_pickle(data, find, persistent)
    version, at = load_pickle(data, find, persistent, at)
    info, at = load_pickle(data, find, persistent, at)
    if magic != _LEGACY_MAGIC or version != _LEGACY_PROTOCOL:
        raise PickleError(f"it has protocol {str(version)[:20]}, not {_LEGACY_PROTOCOL}")
    swap = isinstance(info, dict) and info.get("little_endian") is False
    tree, at = load_pickle(data, find, persistent, at)
    keys, at = load_pickle(data, find, persistent, at)
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
