"""A tensor as torch's files describe it, and the names that may describe one.

The problem: a pickle says which functions make a tensor of a storage, and any name could stand there. The idea: a short
list: the functions of torch that put a view on a storage, the types of storages, dtypes, and plain containers; what
each of them checks is that the view lies within its storage. Everything else is refused by name.
Source: torch/_utils.py, torch/storage.py; torch_npu/utils/storage.py for tensors saved from a card.
Not here: the files (torchfile.py), the interpreter (unpickle.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.io import unpickle
from vllm_accprobe.formats.io.plain_file import fill, opened
from vllm_accprobe.formats.io.unpickle import KnownFunction, PickleError

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


def names_for(path: Path) -> unpickle.Find:
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
    return {unpickle.plain(k): v for k, v in items}


def _set(items: Any = ()) -> set[Any]:
    return {unpickle.plain(i) for i in items}


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError
    return text.encode("latin1")
