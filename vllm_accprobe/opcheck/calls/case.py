"""A call outside of its dump: a JSON tree whose tensors lie in one safetensors file.

The problem: a call that failed must be run again elsewhere, without the dump and this package. The idea: whatever its
reference needs (inputs, parameters, attributes, the history of attention, what was captured inside a block) is written
as plain JSON and tensors, and becomes a `Call` again from these two alone. Of a block's inside only what its reference
reads is kept; of an output of which statistics were captured, shape and dtype (torch's device meta). No pickle. This
file is copied with the tests that gentest writes.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, MemoryLayout
from vllm_accprobe.opcheck.reference_table import References

_PLAIN = (bool, int, str, type(None))
_TORCH = {"dtype": torch.dtype, "device": torch.device, "layout": torch.layout, "memory_format": torch.memory_format}


@dataclass(frozen=True)
class CachedRun:
    """A run of rows of one request. at, positions: int64 [n]; past: rows by name from position 0 on."""

    at: Any
    positions: Any
    past: Mapping[str, Any]


class StoredCache:
    """What history.Cache gives, from tensors that were kept. why: as there."""

    def __init__(self, runs: Sequence[CachedRun], why: str):
        self.runs, self.why = runs, why

    def requests(self, causal: bool = True) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
        for run in self.runs:
            yield run.at, run.positions, run.past


def this_step(cache: Any, inputs: Mapping[str, Any]) -> StoredCache:
    """A cache whose rows of this step are those of ``inputs``, by name."""
    runs = []
    for at, positions, past in cache.requests():
        rows = dict(past)
        for name in rows.keys() & inputs.keys():
            if len(positions) and int(positions.max()) < len(rows[name]):
                rows[name] = rows[name].clone()
                rows[name][positions] = inputs[name][at].reshape(len(at), *rows[name].shape[1:]).to(rows[name].dtype)
        runs.append(CachedRun(at, positions, rows))
    return StoredCache(runs, cache.why)


@dataclass(frozen=True)
class Inside:
    """A tensor captured inside a block; value: None where the block's reference does not read it."""

    shape: tuple[int, ...]
    value: Any


def closed(call: Call, references: References) -> Call:
    """``call`` with all that it needs in itself: nothing of it refers to a dump any more."""
    extra = dict(call.extra)
    if "cache" in extra and not isinstance(extra["cache"], StoredCache):
        cache = extra["cache"]
        runs = [CachedRun(at, positions, {n: t for n, t in past.items() if isinstance(t, torch.Tensor)})
                for at, positions, past in cache.requests(call.cls != "EncoderOnlyAttention")]
        extra["cache"] = StoredCache(runs, cache.why)
    if "children" in extra and "read" in extra:
        read, used = extra["read"], set()

        def spy(record: Any) -> Any:
            used.add(id(record))
            return read(record)

        references.evaluate(replace(call, extra={**extra, "read": spy}))
        extra["children"] = [
            (path, role, Inside(tuple(r.shape), read(r) if id(r) in used else None))
            for path, role, r in extra["children"]
        ]
        extra["read"] = _value
    if "ranks" in extra:
        extra["ranks"] = [closed(rank, references) for rank in extra["ranks"]]
    views = {name: replace(v, memory=v.read()) for name, v in call.views.items()}
    return replace(call, extra=extra, views=views)


def _value(inside: Inside) -> Any:
    return inside.value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree, calls and caches included, with ``change`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Call):
        return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in fields(Call)})
    if isinstance(value, StoredCache):
        runs = [CachedRun(*(mapped(getattr(r, n), change) for n in ("at", "positions", "past"))) for r in value.runs]
        return StoredCache(runs, value.why)
    if isinstance(value, Inside):
        return Inside(value.shape, mapped(value.value, change))
    if isinstance(value, MemoryLayout):
        return replace(value, memory=mapped(value.read(), change))
    if isinstance(value, Mapping):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    return value


def encode(call: Call, tensors: dict[str, Any]) -> dict[str, Any]:
    """A closed call as JSON; its tensors are added to ``tensors``, equal ones once. Raises ValueError for a value that
    has no such form."""
    known = {_identity(t): name for name, t in tensors.items()}

    def tree(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            return {"like": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
        if isinstance(value, torch.Tensor):
            key = known.get(_identity(value))
            if key is None:
                key = f"{len(tensors):04d}.{name}"
                known[_identity(value)] = key
                tensors[key] = torch.view_as_real(value) if value.dtype == torch.complex128 else value
            return {"tensor": key, **({"complex": True} if value.dtype == torch.complex128 else {})}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, complex):
            return {"complex_number": [value.real, value.imag]}
        for kind, cls in _TORCH.items():
            if isinstance(value, cls):
                return {"torch": [kind, str(value).removeprefix("torch.")]}
        if isinstance(value, (list, tuple)):
            return {"list": [tree(v, f"{name}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, Mapping):
            return {"map": {str(k): tree(v, f"{name}.{k}") for k, v in value.items()}}
        if isinstance(value, Call):
            return {"call": {f: tree(getattr(value, f), f"{name}.{f}") for f in _fields(value)}}
        if isinstance(value, StoredCache):
            runs = [{"at": r.at, "positions": r.positions, "past": r.past} for r in value.runs]
            return {"cache": [tree(runs, name), value.why]}
        if isinstance(value, Inside):
            return {"inside": [list(value.shape), tree(value.value, name)]}
        if isinstance(value, MemoryLayout):
            return {"view": [list(value.stride), value.offset, tree(value.read(), f"{name}.memory")]}
        if value is _value:
            return {"reads_inside": True}
        raise ValueError(f"{name}: a {type(value).__name__} cannot be written down")

    return {name: tree(getattr(call, name), name) for name in _fields(call)}


def _fields(call: Call) -> list[str]:
    """What is written of a call: layouts where there are some."""
    return [f.name for f in fields(Call) if f.name != "views" or call.views]


def _identity(t: Any) -> tuple[Any, ...]:
    return t.data_ptr() if t.numel() else id(t), tuple(t.shape), tuple(t.stride()), t.dtype


def decode(tree: Mapping[str, Any], tensors: Mapping[str, Any]) -> Call:
    """What `encode` wrote. Raises ValueError or KeyError where it is damaged."""

    def value(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            found = tensors[node["tensor"]]
            return torch.view_as_complex(found) if node.get("complex") else found
        kind, content = next(iter(node.items()))
        if kind not in kinds:
            raise ValueError(f"a case holds an unknown {kind}")
        return kinds[kind](content)

    kinds: dict[str, Callable[[Any], Any]] = {
        "like": lambda c: torch.empty(c[1], dtype=_torch("dtype", c[0]), device="meta"),
        "float": float,
        "complex_number": lambda c: complex(*c),
        "torch": lambda c: _torch(*c),
        "list": lambda c: [value(v) for v in c],
        "map": lambda c: {k: value(v) for k, v in c.items()},
        "call": lambda c: Call(**{k: _field(k, value(v)) for k, v in c.items()}),
        "cache": lambda c: StoredCache([CachedRun(**r) for r in value(c[0])], str(c[1])),
        "inside": lambda c: Inside(tuple(c[0]), value(c[1])),
        "view": lambda c: MemoryLayout(tuple(c[0]), int(c[1]), value(c[2])),
        "reads_inside": lambda c: _value,
    }
    names = (f.name for f in fields(Call) if f.name != "views" or f.name in tree)
    return Call(**{name: _field(name, value(tree[name])) for name in names})


def _field(name: str, found: Any) -> Any:
    return tuple(found) if name == "args" else found


def _torch(kind: str, name: str) -> Any:
    if kind == "device":
        return torch.device(name)
    found = getattr(torch, name, None)
    if kind not in _TORCH or not isinstance(found, _TORCH[kind]):
        raise ValueError(f"this torch has no {kind} {name}")
    return found


_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_TYPES = {short: name for name, short in _NAMES.items()}
_MAX_HEADER = 64 << 20
_PIECE = 1 << 24


def save(tensors: Mapping[str, Any], path: Path) -> None:
    """Writes tensors of the dtypes above; whole or not at all. Raises ValueError for another dtype, and OSError."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _NAMES:
            raise ValueError(f"safetensors has no {dtype} ({name})")
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors.values():
                plain = tensor.detach().cpu().contiguous()
                nbytes = plain.numel() * plain.element_size()
                for start in range(0, nbytes, _PIECE):
                    f.write(ctypes.string_at(plain.data_ptr() + start, min(_PIECE, nbytes - start)))
        os.replace(part, path)
    finally:  # not by whole_file: the kit of gentest has this file and no such room
        part.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """All tensors of a file by name, on the CPU. Raises ValueError where it is damaged, and OSError."""
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: no safetensors file")
        header = json.loads(f.read(length))
        data = bytearray(f.read())
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = getattr(torch, _TYPES.get(entry["dtype"], ""), None)
        if dtype is None or not 0 <= begin <= end <= len(data):
            raise ValueError(f"{path}: {name} cannot be read")
        shape, empty = entry["shape"], torch.empty(0, dtype=dtype)
        if end == begin:
            found[name] = empty.reshape(shape)
            continue
        flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin)
        found[name] = flat.clone().view(dtype).reshape(shape)  # a clone is aligned, wherever the bytes lay
    return found
