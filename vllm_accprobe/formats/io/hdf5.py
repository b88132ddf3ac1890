"""Datasets of an HDF5 file: what they are, and their bits.

The problem: HDF5 can point anywhere (external files, links, virtual datasets), announce sizes that were never written,
and opening ten thousand datasets one by one through its library costs seconds. The idea: one pass over the links in the
order of creation, hard links only; a dataset that lies in one piece is read by offset from the file itself, past the
library and without its lock, others through it; nothing is larger than what the file could hold. Not here: what names
mean (xray.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.common.foreign import numpy_dtype
from vllm_accprobe.formats.io import containers
from vllm_accprobe.formats.io.plain_file import descriptor, fill, natural
from vllm_accprobe.formats.io.zipindex import too_much

MAGIC = b"\x89HDF\r\n\x1a\n"
SUFFIXES = (".h5", ".hdf5")
_MAX_DEPTH = 32
_LIBRARY = threading.Lock()
NAME = containers.NOTE_NAME.encode()
"""The attribute with what `accprobe convert` noted."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """group: path of the group it stands in, "" for the root; name: its own; dtype: torch's name, or numpy's where
    torch has none; offset: of its bits in the file where they lie in one piece, else None; problem: why it cannot be
    read, or ""; narrow: the dtype that its values had before HDF5, where `accprobe convert` noted it; notes: what else
    that noted (formats/io/containers.py)."""

    path: Path
    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    swap: bool
    offset: int | None
    problem: str = ""
    narrow: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.group}/{self.name}"

    def read(self) -> np.ndarray:
        """The bits: DTYPES[dtype].storage, C order. Raises DumpError, OSError."""
        if self.problem:
            raise DumpError(f"{self.path}: {self.place} {self.problem}")
        info = DTYPES["float32" if self.narrow else self.dtype]  # a narrow dtype's numbers are float32 in the file
        out = np.empty(self.shape, info.storage)
        if self.offset is None:
            self._through_library(out)
            return self._narrowed(out)
        with descriptor(self.path) as fd:
            fill(self.path, fd, self.offset, out)
        if self.narrow:
            return self._narrowed(out)
        if self.swap:
            (out.view(info.storage.type().real.dtype) if info.kind == "complex" else out).byteswap(inplace=True)
        return out

    def _narrowed(self, values: np.ndarray) -> np.ndarray:
        """The bits of ``narrow`` from float32 values; as they are where there is none. Raises DumpError."""
        if not self.narrow:
            return values
        if self.narrow == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        table = widen(np.arange(256, dtype=np.uint8), self.narrow).astype(np.float32).view(np.uint32)
        order = np.argsort(table, kind="stable")
        words = values.view(np.uint32)
        at = np.minimum(np.searchsorted(table[order], words), 255)
        if not (table[order][at] == words).all():
            raise DumpError(f"{self.path}: {self.place} is noted as {self.narrow} and holds other numbers")
        return order[at].astype(np.uint8)

    def _through_library(self, out: np.ndarray) -> None:
        import h5py

        try:
            with _LIBRARY, h5py.File(self.path, "r") as file:
                dataset = file[self.place]
                out[...] = dataset[()]
        except (OSError, KeyError, RuntimeError, ValueError, TypeError) as e:
            raise DumpError(f"{self.path}: {self.place} cannot be read: {_short(e)}") from None


def is_hdf5(path: Path) -> bool:
    """Whether the file begins as HDF5 files do."""
    with descriptor(path) as fd:
        return os.pread(fd, 8, 0) == MAGIC


def datasets(path: Path, problem: Callable[[str], None]) -> Iterator[Dataset]:
    """All datasets, groups and what is in them in the order of creation where the file has one, else by name (which
    ``problem`` is called). Raises DumpError."""
    import h5py

    try:
        size = path.stat().st_size
        if not is_hdf5(path):
            raise DumpError(f"{path} {'is no HDF5 file' if size else 'is empty'}")
        with _LIBRARY, h5py.File(path, "r") as file:
            root = h5py.h5o.get_info(file.id)
            found = list(_walk(path, file.id, "", size, problem, 0, {(root.fileno, root.addr)}))
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as e:
        raise DumpError(f"{path} cannot be read as HDF5: {_short(e)}") from None
    yield from found


def _walk(
    path: Path, group: Any, prefix: str, size: int, problem: Callable[[str], None], depth: int, seen: set[Any]
) -> Iterator[Dataset]:
    import h5py

    for name in _names(path, group, prefix, problem):
        link = group.links.get_info(name)
        text = name.decode("utf-8", "replace")
        if link.type != h5py.h5l.TYPE_HARD:
            problem(f"{path.name}: {prefix}/{text} is a link to elsewhere: not followed")
            continue
        kind = h5py.h5o.get_info(group, name)
        if kind.type == h5py.h5o.TYPE_GROUP:
            if (kind.fileno, kind.addr) in seen or depth >= _MAX_DEPTH:
                problem(f"{path.name}: {prefix}/{text} contains itself or is nested too deep: not read again")
                continue
            seen.add((kind.fileno, kind.addr))
            inner = h5py.h5g.open(group, name)
            yield from _walk(path, inner, f"{prefix}/{text}", size, problem, depth + 1, seen)
        elif kind.type == h5py.h5o.TYPE_DATASET:
            yield _dataset(path, h5py.h5d.open(group, name), prefix, text, size)


def _names(path: Path, group: Any, prefix: str, problem: Callable[[str], None]) -> list[bytes]:
    import h5py

    names: list[bytes] = []
    if group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED:
        group.links.iterate(names.append, idx_type=h5py.h5.INDEX_CRT_ORDER)
        return names
    group.links.iterate(names.append)
    if len(names) > 1 and not all(n.isdigit() for n in names):
        problem(f"{path.name}: {prefix or '/'} does not record the order of creation: tensors are in order of name")
    return sorted(names, key=lambda n: natural(n.decode("utf-8", "replace")))


def _dataset(path: Path, dataset: Any, group: str, name: str, size: int) -> Dataset:
    import h5py

    try:
        dtype, shape = dataset.dtype, tuple(int(n) for n in dataset.shape or ())
    except (TypeError, ValueError) as e:
        return Dataset(path, group, name, f"HDF5 type ({_short(e)})", (), False, None)
    torch_name = numpy_dtype(dtype)
    info = DTYPES.get(torch_name)
    if info is None:
        return Dataset(path, group, name, torch_name, shape, False, None)
    nbytes = prod(shape) * info.itemsize
    plist = dataset.get_create_plist()
    layout, offset, why = plist.get_layout(), dataset.get_offset(), ""
    if layout not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED, h5py.h5d.COMPACT):
        why = "is made of other files, which are not opened"
    elif plist.get_external_count():
        why = "lies in another file, which is not opened"
    elif layout == h5py.h5d.CONTIGUOUS and nbytes and (offset is None or offset + nbytes > size):
        why = "was never written, or the file is shorter than it says"
    elif layout == h5py.h5d.CHUNKED and too_much(dataset.get_storage_size(), nbytes):
        why = "was never written, or is packed as no tensor of numbers is (h5repack -f NONE unpacks it)"
    elif layout == h5py.h5d.COMPACT and nbytes > 1 << 16:
        why = "holds less than it says"
    plain = layout == h5py.h5d.CONTIGUOUS and info.kind in ("float", "int") and not why and bool(nbytes)
    swap = dtype.byteorder == ">" and plain
    noted = _notes(dataset)
    narrow = ""
    if torch_name == "float32" and not swap and not why:
        narrow = str(noted.get("dtype")) if noted else _noted(dataset) if plain else ""
        narrow = narrow if containers.narrow(narrow) and narrow in DTYPES else ""
    return Dataset(path, group, name, narrow or torch_name, shape, swap, int(offset) if plain else None, why, narrow,
                   noted)  # fmt: skip


def _notes(dataset: Any) -> Mapping[str, Any]:
    """What our own export noted, {} otherwise: one attribute of text of a fixed length."""
    import h5py

    if not h5py.h5a.exists(dataset, NAME):
        return {}
    try:
        attribute = h5py.h5a.open(dataset, NAME)
        if attribute.dtype.kind != "S" or attribute.shape != () or attribute.dtype.itemsize > containers.LONGEST_NOTE:
            return {}
        text = np.empty((), attribute.dtype)
        attribute.read(text)
    except (OSError, TypeError, ValueError, RuntimeError):
        return {}
    return containers.parsed_note(text.item())


def _noted(dataset: Any) -> str:
    """``bfloat16`` where an export of ours without notes widened that."""
    import h5py

    if not h5py.h5a.exists(dataset, b"dtype"):
        return ""
    try:
        dtype = h5py.Dataset(dataset).attrs["dtype"]
    except (OSError, TypeError, ValueError, KeyError, RuntimeError):
        return ""
    return "bfloat16" if isinstance(dtype, str) and dtype == "bfloat16" else ""


def _short(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    text = str(reason or (error.args[0] if error.args else error))
    return " ".join(text.split())[:160]
