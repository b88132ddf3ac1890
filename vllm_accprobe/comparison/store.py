"""Measured units as bytes and files: what a comparison saves, resumes and sends.

The problem: a saved, an interrupted and a distributed comparison hold the same values; results must survive a kill, and
a file may be damaged or hostile. The idea: units become lists that JSON can hold, in which an array is a word for where
it lies in one long array per kind of number; what is equal is stored once. A frame (`pack`) is two lengths, a hash,
JSON and the long arrays: one that is not whole is not there. measured.npz (`save`) holds the same as members, read with
allow_pickle=False. `Finished` appends frames beside the results, begins anew where dumps, choices or release changed,
and writes only what takes seconds. Not here: what the fields mean (measure/measured.py).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from vllm_accprobe import __version__
from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison.measure.measured import ComparisonContext, Measured, MeasuredUnit, Part
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.dump.decode import decode
from vllm_accprobe.dump.record_table import LazyTable, alike, column
from vllm_accprobe.whole_file import no_space, whole

ROWS = {"keys": np.int64, "decode": np.bool_}
"""Part.rows: int64 [n] and bool [n]."""
TABLES = {"table": np.float64, "choices": np.int64, "margins": np.float64}
"""Arrays with a row for each row of the part, or None."""
TUPLES = ("feature", "moment", "stats", "worst", "elements", "figures")
PLAIN = tuple(f.name for f in fields(Part) if f.name != "rows" and f.name not in TABLES)
UNIT = ("key", "cls", "rule", "order", "depth", "is_param", "vision", "gap")

_unit_of = attrgetter(*UNIT)
Known = dict[tuple[bytes, bytes], RowSet]
"""Sets of rows by the bytes of their keys and flags."""
POOLS = {"f": np.float64, "i": np.int64, "b": np.bool_}


def _columns(columns: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Of a column with one object in all rows, but for the first, that object alone."""
    return [c[:1] if i and len(c) > 1 and alike(c) else c for i, c in enumerate(columns)]


def _rows(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """As many as the first column is long: no number that a file states makes a list."""
    n = len(columns[0]) if columns else 0
    return zip(*(repeat(c[0], n) if len(c) == 1 else c for c in columns), strict=True)


class ArrayPools:
    """One long array per kind of number. Says where each array will lie, and remembers which of integers and flags it
    has; nothing is copied before it is written."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[np.ndarray]] = {k: [] for k in POOLS}
        self.ends = dict.fromkeys(POOLS, 0)
        self.known: dict[tuple[str, bytes], list[Any]] = {}
        self._rows: dict[RowSet, list[Any]] = {}

    def put(self, array: np.ndarray | None) -> list[Any] | None:
        """[kind, start, shape] of an array, or None for none."""
        if array is None:
            return None
        kind = {"f": "f", "i": "i", "b": "b"}[array.dtype.kind]
        flat: np.ndarray = np.ascontiguousarray(array, POOLS[kind]).reshape(-1)
        name = (kind, hashlib.blake2b(flat.tobytes(), digest_size=16).digest()) if kind != "f" else None
        if name is not None and name in self.known:
            return [*self.known[name][:2], list(array.shape)]
        where = [kind, self.ends[kind], list(array.shape)]
        self.arrays[kind].append(flat)
        self.ends[kind] += len(flat)
        if name is not None:
            self.known[name] = where
        return where

    def units(self, units: Iterable[MeasuredUnit]) -> list[Any]:
        """``units`` as JSON (see `plain`)."""
        known = self._rows

        def rows(of: RowSet) -> list[Any]:
            if of not in known:
                known[of] = [self.put(getattr(of, name)) for name in ROWS]
            return known[of]

        out = []
        for u in units:
            # Of what all have alike one is enough: see `_columns`.
            same = u.parts.same if isinstance(u.parts, LazyTable) else {}
            some = {name: [value] for name, value in same.items() if name != PLAIN[0]}
            tables = [list(map(self.put, some.get(name) or column(u.parts, name))) for name in TABLES if u.parts]
            arrays = [*zip(*map(rows, column(u.parts, "rows")), strict=True), *tables]
            plain = [some.get(name) or column(u.parts, name) for name in PLAIN if u.parts]
            out.append([_unit_of(u), _columns(plain), _columns(arrays), self.put(u.columns)])
        return out

    def write(self, archive: zipfile.ZipFile, rest: Callable[[], None]) -> None:
        """Each pool as a member, array by array, as numpy.savez would write it. rest: called now and then."""
        for kind, arrays in self.arrays.items():
            head = {"descr": np.dtype(POOLS[kind]).str, "fortran_order": False, "shape": (self.ends[kind],)}
            with archive.open(f"{kind}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)
                written = 0
                for array in arrays:
                    member.write(array.data.cast("B") if len(array) else b"")
                    written += array.nbytes
                    if written > _OFTEN:
                        written = 0
                        rest()


class StoredArrays:
    """The same, as they were written. known: sets of rows that others have, too: those of a step belong to all its
    tensors. Everything raises ValueError, or what Python says of a list that is none of ours, for what `ArrayPools` did
    not write."""

    def __init__(self, pools: Mapping[str, np.ndarray], known: Known):
        self._pools, self._known = pools, known
        self._rows: dict[str, RowSet] = {}

    def get(self, where: list[Any] | None) -> Any:
        """The array that lies there."""
        if where is None:
            return None
        kind, start, shape = where
        size = int(np.prod(shape, dtype=np.int64))
        if start < 0 or start + size > len(self._pools[kind]):
            raise ValueError("an array lies outside its pool")
        return self._pools[kind][start : start + size].reshape(shape)

    def _rows_at(self, where: list[Any]) -> RowSet:
        name = str(where)
        if name not in self._rows:
            keys, decode = (_checked(n, self.get(w), ROWS) for n, w in zip(ROWS, where, strict=True))
            made = RowSet(keys.copy(), decode.copy())
            self._rows[name] = self._known.setdefault((keys.tobytes(), decode.tobytes()), made)
        return self._rows[name]

    def units(self, packed: Sequence[Any]) -> list[MeasuredUnit]:
        units = []
        for head, plain, arrays, columns in packed:
            named = zip(PLAIN, plain, strict=bool(plain))
            values = [[_tuple(v) for v in c] if name in TUPLES else c for name, c in named]
            made = []
            for row, (keys, flags, *words) in zip(_rows(values), _rows(arrays), strict=True):
                tables = zip(TABLES, map(self.get, words), strict=True)
                found: dict[str, Any] = {name: None if t is None else _checked(name, t, TABLES) for name, t in tables}
                made.append(Part(**dict(zip(PLAIN, row, strict=True)), **found, rows=self._rows_at([keys, flags])))
            unit = dict(zip(UNIT, head, strict=True))
            units.append(MeasuredUnit(**unit | {"key": _tuple(unit["key"])}, parts=made, columns=self.get(columns)))
        return units


def plain(value: Any) -> Any:
    """What JSON does not know of a unit's and a setting's values: json.dumps' ``default``."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _checked(name: str, array: np.ndarray, dtypes: Mapping[str, Any]) -> np.ndarray:
    if array.dtype != dtypes[name]:
        raise ValueError(f"{name} of {array.dtype}")
    return array


_HEAD = struct.Struct("<QQ16s")
LAYOUT = " ".join(["4", *PLAIN, *TABLES, "|", *UNIT])
"""Changes whenever old frames would be misread."""


def pack(units: Sequence[MeasuredUnit]) -> bytes:
    pools = ArrayPools()
    packed = pools.units(units)
    return frame({"units": packed, "ends": pools.ends}, b"".join(a.tobytes() for k in POOLS for a in pools.arrays[k]))


def unpack(text: dict[str, Any], data: bytes, known: Known | None = None) -> list[MeasuredUnit]:
    """The units of a frame. Raises ValueError for anything that `pack` does not write. known: see `StoredArrays`."""
    try:
        pools: dict[str, np.ndarray] = {}
        at, view = 0, memoryview(data)
        for kind, dtype in POOLS.items():
            end = at + text["ends"][kind] * np.dtype(dtype).itemsize
            pools[kind], at = np.frombuffer(view[at:end], dtype), end
        return StoredArrays(pools, {} if known is None else known).units(text["units"])
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as e:
        raise ValueError(f"not a frame of measured units: {e}") from None


def frame(text: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(text, default=plain).encode()
    return _HEAD.pack(len(head), len(data), _digest(head, data)) + head + data


def frames(stored: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """(text, data, end) of each whole frame at the beginning of ``stored``; ends at the first that is not whole."""
    at = 0
    while at + _HEAD.size <= len(stored):
        n, m, digest = _HEAD.unpack_from(stored, at)
        start, middle, end = at + _HEAD.size, at + _HEAD.size + n, at + _HEAD.size + n + m
        if end > len(stored):
            return
        head, data = bytes(stored[start:middle]), bytes(stored[middle:end])
        if _digest(head, data) != digest:
            return
        yield json.loads(head), data, end
        at = end


def _digest(head: bytes, data: bytes) -> bytes:
    import xxhash

    value = xxhash.xxh3_128(head)
    value.update(data)
    return value.digest()


MEASURED = "measured.npz"
VERSION = 6
_OFTEN = 32 << 20


def save(measured: Measured, directory: Path) -> Path:
    out = ArrayPools()
    s = measured.setting
    setting = {f.name: getattr(s, f.name) for f in fields(ComparisonContext) if f.name not in ("places", "moments")}
    setting |= {
        # JSON's keys are text: tables whose keys are not are lists of pairs.
        "children": list(s.children.items()),
        "names": list(s.names.items()),
        "images": list(s.images.items()),
        "batches": list(s.batches.items()),
        "graphs": list(s.graphs.items()),
        "places": [out.put(a) for a in s.places],
        "links": list(s.links.items()),
        "untapped": s.untapped.plain(),
        "moments": [[list(m), out.put(keys)] for m, keys in s.moments.items()],
    }
    units = b",".join([_unit_text(u.parts, packed) for u in measured.each() for packed in out.units([u])])
    head = json.dumps({"version": VERSION, "plain": PLAIN, "setting": setting}, default=plain)
    text = b'%s, "units": [%s]}' % (head[:-1].encode(), units)
    path = directory / MEASURED
    buffer = measured.shelf
    with whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open("meta.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.frombuffer(text, np.uint8), allow_pickle=False)
        out.write(archive, buffer.rest if buffer is not None else lambda: None)
    return path


def _unit_text(parts: Sequence[Part], packed: list[Any]) -> bytes:
    """orjson, several times as fast, has no infinity: of what lines decided, only ``stats`` may be infinite. It refuses
    half a surrogate pair, which a name may hold."""
    if isinstance(parts, LazyTable):
        stats = [own for own in parts.column("stats") if own is not None]
        if np.isfinite(np.array(stats, np.float64)).all():
            with suppress(TypeError):
                return orjson.dumps(packed, default=plain)
    return json.dumps(packed, default=plain).encode()


def load(directory: Path) -> Measured:
    """What `save` wrote. Raises CompareError, one line, for anything else."""
    path = directory / MEASURED if directory.is_dir() else directory
    again = "; compare the dumps again"
    try:
        with np.load(path, allow_pickle=False) as data:
            pools = StoredArrays({k: data[k] for k in POOLS}, {})
            meta = json.loads(data["meta"].tobytes())
        if meta.get("version") != VERSION or tuple(meta["plain"]) != PLAIN:
            raise CompareError(f"{path} was written by another version of accprobe{again}")
        raw = dict(meta["setting"])
        raw["places"] = [pools.get(a) for a in raw["places"]]
        raw["moments"] = [[moment, pools.get(keys)] for moment, keys in raw["moments"]]
        return Measured(decode(ComparisonContext, raw, "setting"), pools.units(meta["units"]))
    except FileNotFoundError:
        raise CompareError(
            f"{path} does not exist: --rejudge takes a directory that `accprobe compare` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, zipfile.BadZipFile) as e:
        why = f" ({str(e)[:100]})" if isinstance(e, OSError) else ""
        raise CompareError(f"{path} is no whole measured.npz of `accprobe compare`{why}{again}") from None


UNFINISHED = "measured.part"
PATIENCE = 2.0
"""Seconds before anything is written."""
PIECE = 4 << 20
"""Bytes of row tables that are packed together, or more where one unit has more."""


_CODE = Path(__file__).resolve().parents[1]
"""This package, whose sources decide what is paired and measured: of one release there may be several, and of several
releases files of one time and size, where whoever packs them sets the time."""


def identity(dumps: Sequence[Any], *choices: Any) -> str:
    """A hash of everything that measured units depend on. choices: plain values or text."""
    files = []
    for dump in dumps:
        root = Path(dump.path)
        files.append([str(root.resolve()), len(dump.records), sorted(_files(root))])
    code = sorted(file for file in _files(_CODE) if file[0].endswith(".py"))
    text = json.dumps([__version__, LAYOUT, code, files, [repr(c) for c in choices]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files(root: Path) -> list[list[Any]]:
    found = []
    if root.is_file():
        state = root.stat()
        return [[root.name, state.st_size, state.st_mtime_ns]]
    for directory, inner, names in os.walk(root):
        inner[:] = (name for name in inner if name != "__pycache__")
        for name in names:
            if name == UNFINISHED:  # results may be written into the dump's own directory
                continue
            path = os.path.join(directory, name)
            try:
                state = os.stat(path)
            except OSError:
                continue
            found.append([path[len(str(root)) :], state.st_size, state.st_mtime_ns])
    return found


class Finished:
    """The units of one comparison that are measured. ``done``: those of an earlier, interrupted run.

    Where the file cannot be written (a full disk), the comparison goes on without; `problem` then says why.
    """

    def __init__(self, directory: Path, identity: str):
        self.done: dict[Key, MeasuredUnit] = {}
        self.problem = ""
        self.directory = directory
        self._waiting: list[MeasuredUnit] = []
        self._begin = time.monotonic() + PATIENCE
        self._path = directory / UNFINISHED
        self._fd = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
            end = self._read(identity)
            os.ftruncate(self._fd, end)
            if not end:
                self._append(frame({"identity": identity}))
        except OSError as e:
            self._fail(e)

    def add(self, units: Sequence[MeasuredUnit]) -> None:
        self._waiting += units
        if time.monotonic() >= self._begin:
            self._write()

    def close(self, *, needed: bool = True) -> None:
        """needed: False where the results are there, so that what has not been written need not be."""
        if needed:
            self._write()
        self._waiting.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        units, self._waiting = self._waiting, []
        if self._fd >= 0 and units:
            try:
                for some in _pieces(units):
                    self._append(pack(some))
            except OSError as e:
                self._fail(e)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _fail(self, error: OSError) -> None:
        self.problem = f"{self._path}: {error.strerror or error}; an interrupted comparison would begin anew"
        self.close(needed=False)
        if no_space(error) is not None:
            forget(self.directory)

    def _read(self, identity: str) -> int:
        size = os.fstat(self._fd).st_size
        if not size:
            return 0
        stored = memoryview(mmap.mmap(self._fd, size, prot=mmap.PROT_READ))
        end = 0
        known: Known = {}
        for text, data, stop in frames(stored):
            if not end and text.get("identity") != identity:
                return 0
            try:
                units = unpack(text, data, known) if end else []
            except ValueError:
                return end
            self.done.update((u.key, u) for u in units)
            end = stop
        return end


def _pieces(units: Sequence[MeasuredUnit]) -> Iterator[list[MeasuredUnit]]:
    """``units`` by some megabytes: what waited for PATIENCE seconds, packed at once, would be a second copy of it."""
    piece: list[MeasuredUnit] = []
    size = 0
    for unit in units:
        piece.append(unit)
        size += sum(p.table.nbytes for p in unit.parts if p.table is not None)
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def forget(directory: Path) -> None:
    (directory / UNFINISHED).unlink(missing_ok=True)
