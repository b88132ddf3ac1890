"""Measured units as bytes and files: what a comparison saves, resumes and sends.

The problem: a saved, an interrupted and a distributed comparison hold the same values; results must survive a kill, and
a file may be damaged or hostile. The idea: units become lists that JSON can hold, in which an array is a word for where
it lies; sets of rows are stored once. A frame (`pack`) is two lengths, a hash, JSON and bytes: one that is not whole is
not there. measured.npz (`save`) holds one long array per kind, read with allow_pickle=False. `Finished` appends frames
beside the results, begins anew where dumps, choices or release changed, and writes only what takes seconds. Not here:
what the fields mean (measure/measured.py).
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
from dataclasses import fields
from dataclasses import fields as names_of
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison.gaps import NOTHING, Untapped
from vllm_accprobe.comparison.measure.measured import ComparisonContext, Measured, MeasuredUnit, Part
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.dump.decode import decode
from vllm_accprobe.whole_file import no_space, whole

ROWS = {"keys": np.int64, "decode": np.bool_}
"""Part.rows: int64 [n] and bool [n]."""
TABLES = {"table": np.float64, "choices": np.int64, "margins": np.float64}
"""Arrays with a row for each row of the part, or None."""
TUPLES = ("feature", "moment", "stats", "worst", "elements", "figures")
PLAIN = tuple(f.name for f in fields(Part) if f.name != "rows" and f.name not in TABLES)
UNIT = ("key", "cls", "rule", "order", "depth", "is_param", "vision", "gap")

_plain_of, _tables_of, _unit_of = attrgetter(*PLAIN), attrgetter(*TABLES), attrgetter(*UNIT)
Put = Callable[["np.ndarray | None"], Any]
"""Keeps an array and says where; None for none."""
Get = Callable[[Any], Any]
"""The array that lies there."""


def to_lists(units: Iterable[MeasuredUnit], put: Put) -> list[Any]:
    """``units`` as JSON (see `plain`)."""
    known: dict[RowSet, list[Any]] = {}

    def rows(of: RowSet) -> list[Any]:
        if of not in known:
            known[of] = [put(getattr(of, name)) for name in ROWS]
        return known[of]

    out = []
    for u in units:
        parts = [[_plain_of(p), [*rows(p.rows), *map(put, _tables_of(p))]] for p in u.parts]
        out.append([_unit_of(u), parts, [put(u.columns), None]])  # None: sums that earlier releases kept
    return out


def from_lists(said: Sequence[Any], get: Get, rows_at: Callable[[list[Any]], RowSet]) -> list[MeasuredUnit]:
    """The units that `say` made ``said`` of. rows_at: `rows_of` the arrays at two places. Raises ValueError, or what
    Python says of a list that is none of ours, for anything else."""
    units = []
    for head, parts, (columns, _) in said:
        made = []
        for plain, arrays in parts:
            values = dict(zip(PLAIN, plain, strict=True))
            values |= {name: _tuple(values[name]) for name in TUPLES if values[name] is not None}
            for name, table in zip(TABLES, map(get, arrays[len(ROWS) :]), strict=True):
                values[name] = None if table is None else _checked(name, table, TABLES)
            made.append(Part(**values, rows=rows_at(arrays[: len(ROWS)])))
        unit = dict(zip(UNIT, head, strict=True))
        units.append(MeasuredUnit(**unit | {"key": _tuple(unit["key"])}, parts=made, columns=get(columns)))
    return units


def rows_of(keys: np.ndarray, decode: np.ndarray) -> RowSet:
    """Raises ValueError for what no file of ours holds."""
    return RowSet(_checked("keys", keys, ROWS), _checked("decode", decode, ROWS))


def plain(value: Any) -> Any:
    """What JSON does not know of a unit's and a setting's values: json.dumps' ``default``."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def _tuple(value: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)


def _checked(name: str, array: np.ndarray, dtypes: Mapping[str, Any]) -> np.ndarray:
    if array.dtype != dtypes[name]:
        raise ValueError(f"{name} of {array.dtype}")
    return array


_HEAD = struct.Struct("<QQ16s")
LAYOUT = " ".join(["2", *PLAIN, *TABLES, "|", *UNIT])
"""Changes whenever old frames would be misread."""
Known = dict[tuple[bytes, bytes], RowSet]
"""Sets of rows by the bytes of their keys and flags."""


def pack(units: Sequence[MeasuredUnit]) -> bytes:
    out = _Arrays()
    said = to_lists(units, out.put)
    return frame({"units": said, "arrays": out.described}, b"".join(out.data))


def unpack(text: dict[str, Any], data: bytes, known: Known | None = None) -> list[MeasuredUnit]:
    """The units of a frame. Raises ValueError for anything that `pack` does not write.

    known: remembers sets of rows: those of a step belong to all its tensors.
    """
    known = {} if known is None else known

    def rows_at(where: list[int]) -> RowSet:
        keys, decode = (arrays[i] for i in where)
        name = keys.tobytes(), decode.tobytes()
        if name not in known:
            known[name] = rows_of(keys.copy(), decode.copy())
        return known[name]

    try:
        arrays = [_array(data, dtype, shape, start) for dtype, shape, start in text["arrays"]]
        return from_lists(text["units"], lambda i: None if i is None else arrays[i], rows_at)
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


class _Arrays:
    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.described: list[list[Any]] = []
        self._end = 0

    def put(self, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        data = np.ascontiguousarray(array).tobytes()
        self.described.append([array.dtype.str, list(array.shape), self._end])
        self.data.append(data)
        self._end += len(data)
        return len(self.described) - 1


def _array(data: bytes, dtype: str, shape: list[int], start: int) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind not in "fiub":
        raise ValueError(f"arrays of {dtype} are not stored here")
    count = int(np.prod(shape, dtype=np.int64))
    if start < 0 or count < 0 or start + count * kind.itemsize > len(data):
        raise ValueError("an array lies outside its frame")
    return np.frombuffer(data, kind, count, start).reshape(shape)


MEASURED = "measured.npz"
VERSION = 5
_OFTEN = 32 << 20
_POOLS = {"f": np.float64, "i": np.int64, "b": np.bool_}


class _Writer:
    """Says where each array will lie, and remembers which; nothing is copied before `write`."""

    def __init__(self) -> None:
        self.pools: dict[str, list[np.ndarray]] = {k: [] for k in _POOLS}
        self.ends = dict.fromkeys(_POOLS, 0)
        self.known: dict[tuple[str, bytes], list[Any]] = {}

    def put(self, array: np.ndarray | None) -> list[Any] | None:
        """[kind, start, shape] of an array, or None for none."""
        if array is None:
            return None
        kind = {"f": "f", "i": "i", "b": "b"}[array.dtype.kind]
        flat: np.ndarray = np.ascontiguousarray(array, _POOLS[kind]).reshape(-1)
        name = (kind, hashlib.blake2b(flat.tobytes(), digest_size=16).digest()) if kind != "f" else None
        if name is not None and name in self.known:
            return [*self.known[name][:2], list(array.shape)]
        where = [kind, self.ends[kind], list(array.shape)]
        self.pools[kind].append(flat)
        self.ends[kind] += len(flat)
        if name is not None:
            self.known[name] = where
        return where

    def write(self, archive: zipfile.ZipFile, rest: Callable[[], None]) -> None:
        """Each pool as a member, array by array, as numpy.savez would write it. rest: called now and then."""
        for kind, arrays in self.pools.items():
            head = {"descr": np.dtype(_POOLS[kind]).str, "fortran_order": False, "shape": (self.ends[kind],)}
            with archive.open(f"{kind}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)
                written = 0
                for array in arrays:
                    member.write(array.data.cast("B") if len(array) else b"")
                    written += array.nbytes
                    if written > _OFTEN:
                        written = 0
                        rest()


def save(measured: Measured, directory: Path) -> Path:
    out = _Writer()
    s = measured.setting
    setting = {f.name: getattr(s, f.name) for f in names_of(ComparisonContext) if f.name not in ("places", "moments")}
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
    units = [said for u in measured.each() for said in to_lists([u], out.put)]
    text = json.dumps({"version": VERSION, "plain": PLAIN, "setting": setting, "units": units}, default=plain)
    path = directory / MEASURED
    shelf = measured.shelf
    with whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open("meta.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.frombuffer(text.encode(), np.uint8), allow_pickle=False)
        out.write(archive, shelf.rest if shelf is not None else lambda: None)
    return path


def load(directory: Path) -> Measured:
    """What `save` wrote. Raises CompareError, one line, for anything else."""
    path = directory / MEASURED if directory.is_dir() else directory
    again = "; compare the dumps again"
    try:
        with np.load(path, allow_pickle=False) as data:
            pools = {k: data[k] for k in _POOLS}
            meta = json.loads(data["meta"].tobytes())
        if meta.get("version") != VERSION or tuple(meta["plain"]) != PLAIN:
            raise CompareError(f"{path} was written by another version of accprobe{again}")
        return _measured(meta, pools)
    except FileNotFoundError:
        raise CompareError(
            f"{path} does not exist: --rejudge takes a directory that `accprobe compare` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, zipfile.BadZipFile) as e:
        why = f" ({str(e)[:100]})" if isinstance(e, OSError) else ""
        raise CompareError(f"{path} is no whole measured.npz of `accprobe compare`{why}{again}") from None


def _measured(meta: dict[str, Any], pools: dict[str, np.ndarray]) -> Measured:
    def get(where: list[Any] | None) -> Any:
        if where is None:
            return None
        kind, start, shape = where
        size = int(np.prod(shape, dtype=np.int64))
        if start < 0 or start + size > len(pools[kind]):
            raise ValueError("an array lies outside the file")
        return pools[kind][start : start + size].reshape(shape)

    raw = dict(meta["setting"])
    raw["children"] = {k: list(v) for k, v in raw["children"]}
    raw["names"] = {int(k): (v[0], v[1]) for k, v in raw["names"]}
    raw["images"] = {int(k): [tuple(x) for x in v] for k, v in raw["images"]}
    raw["batches"] = {int(k): (v[0], v[1]) for k, v in raw["batches"]}
    raw["graphs"] = {int(k): (v[0], v[1]) for k, v in raw.get("graphs", [])}
    raw["links"] = decode(dict[Key, tuple[Key, str]], raw.get("links", []), "links")
    raw["sources"] = decode(dict[str, tuple[str | None, str | None]], raw.get("sources", {}), "sources")
    raw["untapped"] = Untapped.of_plain(raw["untapped"]) if "untapped" in raw else NOTHING
    raw["places"] = tuple(get(a) for a in raw["places"])
    raw["moments"] = {(m[0], m[1]): get(keys) for m, keys in raw["moments"]}
    known: dict[str, RowSet] = {}

    def rows_at(where: list[Any]) -> RowSet:
        name = str(where)
        if name not in known:
            known[name] = rows_of(*map(get, where))
        return known[name]

    return Measured(ComparisonContext(**raw), from_lists(meta["units"], get, rows_at))


UNFINISHED = "measured.part"
PATIENCE = 2.0
"""Seconds before anything is written."""
PIECE = 4 << 20
"""Bytes of row tables that are packed together, or more where one unit has more."""


def identity(dumps: Sequence[Any], *choices: Any) -> str:
    """A hash of everything that measured units depend on. choices: plain values or text."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("vllm-accprobe")
    except PackageNotFoundError:
        release = "?"
    files = []
    for dump in dumps:
        root = Path(dump.path)
        files.append([str(root.resolve()), len(dump.records), sorted(_files(root))])
    text = json.dumps([release, LAYOUT, files, [repr(c) for c in choices]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _files(root: Path) -> list[list[Any]]:
    found = []
    if root.is_file():
        state = root.stat()
        return [[root.name, state.st_size, state.st_mtime_ns]]
    for directory, _, names in os.walk(root):
        for name in names:
            if name == UNFINISHED:  # results may be written into the dump's own directory
                continue
            path = Path(directory, name)
            try:
                state = path.stat()
            except OSError:
                continue
            found.append([str(path.relative_to(root)), state.st_size, state.st_mtime_ns])
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
