"""A dump in the containers of other tools: HDF5 as torch_xray lays it out, npz, safetensors, and single files.

The problem: other people's scripts read HDF5 or npz, which know no bfloat16 and no 8-bit floats, and have one text for
a tensor where ours have six parts. The idea: records are written one at a time in the order of execution, those dtypes
widened to float32, which is exact. Writing a name and taking it apart stand side by side: torch_xray's
``path.Class.n.forward_output.i``, ``step/tap/role#call`` in npz and safetensors, ``globalrank-<r>_localrank-<l>`` for a
rank's file. What a layout cannot say (an input's name, an operator's call, a module's numbers, how ranks cut a tensor)
is noted next to it in our journal's words; whoever reads the notes trusts nothing.

Not here: which records (dump/reader.py), refusing to overwrite (cli/convert.py).
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vllm_accprobe.dump.decode import DecodeError, parse
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.files import HeaderEntry, build_header, entry_room
from vllm_accprobe.dump.journal import MODULE, OP, LineKind, layout_of
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import REPLICATED, ROOT_TAP, Layout, Module, OpCall, Record
from vllm_accprobe.whole_file import whole

RANK_FILE = re.compile(r"globalrank-(\d{1,9})_localrank-\d{1,9}", re.ASCII)
H5_FILE = re.compile(r"globalrank-(\d{1,9})(?:_localrank-\d+)?.*\.(?:h5|hdf5)", re.ASCII)
"""A rank's file of torch_xray, in any of its releases."""
_KEY = re.compile(
    r"(?:rank(\d{1,9})/)?(\d{1,9}|param)/([^/]+)/((?:input|output|inplace|param|grad|value)(?:\.[^/#]+)?)(?:#(\d{1,9}))?(?:~\d+)?",
    re.ASCII,
)
_NUMBERED = re.compile(r"\d{1,6}(?:\.\d{1,6})*", re.ASCII)
_PART = re.compile(r"(?:^|\.)(forward|backward)_(input|output|params?|inplace|grad(?:_(?:in|out)put)?|value)s?\.(.+)$")
_CALL = re.compile(r"(.*)\.call(\d{1,9})$", re.ASCII)


def rank_file(rank: int, local: int, ending: str) -> str:
    """One rank's file, where there are several."""
    return f"globalrank-{rank}_localrank-{local}.{ending}"


def unused(name: str, taken: set[str]) -> str:
    """``name``, or with ``~2``, ``~3`` behind it where that is among ``taken``, which it then is."""
    unique, n = name, 2
    while unique in taken:
        unique, n = f"{name}~{n}", n + 1
    taken.add(unique)
    return unique


def _plain(name: str) -> str:
    """A slash would make a group, a NUL ends a name."""
    return name.replace("/", "_").replace("\0", "_")


# --- npz and safetensors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyPlace:
    """Where a key says that a tensor belongs. rank: None where it does not say."""

    rank: int | None
    step: int | None
    tap: str
    role: str
    call: int


def record_keys(records: Sequence[Record]) -> list[str]:
    """A key for each record, no two alike."""
    several = len({r.rank for r in records}) > 1
    taken: set[str] = set()
    found = []
    for r in records:
        step = "param" if r.step is None else str(r.step)
        parts = [*([f"rank{r.rank}"] if several else []), step, _plain(r.tap), _plain(r.role)]
        name = "/".join(part.replace("..", "__") for part in parts) + (f"#{r.call}" if r.call else "")
        found.append(unused(name, taken))
    return found


def key_place(key: str) -> KeyPlace | None:
    """None for a key that is none of ours."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    rank, step, tap, role, call = match.groups()
    return KeyPlace(int(rank) if rank else None, None if step == "param" else int(step), tap, role, int(call or 0))


# --- HDF5 as torch_xray lays it out ----------------------------------------------------------------------------------


def datasets(dump: Dump, records: Sequence[Record]) -> list[tuple[str, str]]:
    """(group, dataset) of each record of one rank; these are in the order of execution.

    n numbers the modules of one class under one parent. A tap's later calls in a step have ``.call<c>`` after n."""
    first = min((r.step for r in records if r.step is not None), default=0)
    ordinals = _class_ordinals(dump, records)
    numbers: dict[tuple[int, str, int, str], int] = defaultdict(int)
    for r in records:  # what has a name of its own gets the numbers behind those that are taken
        kind, _, rest = r.role.partition(".")
        if r.step is not None and _NUMBERED.fullmatch(rest):
            key = (r.step, r.tap, r.call, kind)
            numbers[key] = max(numbers[key], int(rest.partition(".")[0]) + 1)
    taken: dict[str, set[str]] = defaultdict(set)
    result = []
    for r in records:
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
        group = str(first if r.step is None else r.step)
        result.append((group, unused(f"{module}.{leaf}", taken[group])))
    return result


def _class_ordinals(dump: Dump, records: Sequence[Record]) -> dict[str, int]:
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


def dataset_place(name: str) -> tuple[str, str, str, int | None]:
    """(tap, class, role, call) of a dataset's name. A name of another kind is its own tap, with one output."""
    match = _PART.search(name)
    if match is None:
        return name, "", "output.0", None
    module, kind = name[: match.start()], match[2]
    role = {"params": "param", "param": "param", "grad_input": "input", "grad_output": "output"}.get(kind, kind)
    call: int | None = None
    if called := _CALL.fullmatch(module):
        module, call = called[1], int(called[2])
    parts = module.split(".") if module else []
    cls = ""
    if len(parts) > 1 and parts[-1].isdecimal() and not parts[-2].isdecimal() and _is_class(parts[-2], len(parts)):
        cls, parts = parts[-2], parts[:-2]
    elif parts and _is_class(parts[-1], 0):
        cls, parts = parts[-1], parts[:-1]
    tap = ".".join(parts) or ROOT_TAP
    if match[1] == "backward":
        tap = f"backward.{tap}"
    return tap, cls, role if role == "value" else f"{role}.{match[3]}", call


def _is_class(word: str, parts: int) -> bool:
    """A class has a capital letter at its beginning; a module path hardly ever has."""
    return word.lstrip("_")[:1].isupper()


NOTE_NAME = "accprobe"
"""Of the attribute, or the key, that holds notes."""
DTYPES_NOTE = "accprobe.dtypes"
"""In a safetensors header's metadata: dtypes by name, where the format has none for them."""
LONGEST_NOTE = 60_000
"""Bytes of one attribute: HDF5 takes 64 kB."""


@dataclass(frozen=True)
class Noted:
    """Where a tensor belongs. dtype: the dump's own; "" where the container's is it."""

    tap: str
    role: str
    call: int
    cls: str
    dtype: str = ""
    layout: Layout = REPLICATED


def note_of_record(r: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"tap": r.tap, "role": r.role, "call": r.call, "class": r.cls, "dtype": r.dtype}
    return found | ({} if r.layout.kind == "replicated" and r.layout.size == 1 else {"layout": r.layout.to_event()})


def _noted(kind: LineKind, value: Module | OpCall) -> dict[str, Any]:
    return {key: value for key, value in kind.to_line(value).items() if key != "event"}


def narrow(dtype: str) -> bool:
    """Whether HDF5 and npz have no such dtype: its numbers are float32 there, which is exact."""
    return dtype == "bfloat16" or dtype.startswith("float8")


def note_text(note: Mapping[str, Any]) -> bytes:
    return json.dumps(note, separators=(",", ":"), allow_nan=False).encode("ascii")


def parsed_note(data: bytes) -> Mapping[str, Any]:
    """{} for what is no note."""
    try:
        return parse(dict[str, Any], data, len(data))
    except DecodeError:
        return {}


NOTED = LineKind(
    "", Noted, needs=("tap", "role"),
    readers={"layout": lambda e, _: layout_of(e), "dtype": lambda name, _: name if str(name) in DTYPES else ""},
)  # fmt: skip


def read_note(kind: LineKind, e: Any, **external: Any) -> Any:
    """What an export noted: a `Noted`, a `Module` or an `OpCall`, by its kind; None for what is none."""
    try:
        return kind.from_line(e, **external)
    except (ValueError, TypeError, AttributeError):
        return None


Tick = Callable[[], None]


def portable(array: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bits as an array that any numpy reads: bfloat16 and 8-bit floats as float32, the rest unchanged."""
    return widen(array, dtype) if narrow(dtype) else array


def widened(records: Iterable[Record]) -> int:
    """How many of ``records`` are float32 in an export and were not in the dump."""
    return sum(narrow(r.dtype) for r in records)


def write_h5(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` of one rank, with payload, as torch_xray's file: a group per step, creation order tracked, in it
    ``path.Class.n.forward_params.<name>``, ``...forward_input.<i>``, ``...forward_output.<i>``.

    A parameter stands before its module's first tensor of the first step, or, if its module has none, at that step's
    end. What these names cannot say is noted in an attribute ``accprobe`` of each dataset; of a module, and
    of an operator's call, in that of its first one. Returns how many calls had more to say than an attribute takes.
    """
    import h5py

    left = 0
    modules = {(rank, m.tap): m for rank, found in dump.modules.items() for m in found}
    calls = {(op.rank, op.step, op.tap, op.call): op for op in dump.ops}
    with open(path, "x+b") as raw, _UntilFull(raw) as space, h5py.File(space, "w", track_order=True) as file:
        for r, group, name in h5_names(dump, records):
            if space.error is not None:
                break
            where = file.get(group)
            if where is None:
                where = file.create_group(group, track_order=True)
            data = where.create_dataset(name, data=portable(dump.read(r), r.dtype))
            data.attrs["tap"], data.attrs["role"], data.attrs["dtype"] = r.tap, r.role, r.dtype
            module, call = modules.pop((r.rank, r.tap), None), calls.pop((r.rank, r.step, r.tap, r.call), None)
            left += not _note(data, r, module, call)
            tick()
    return left


class _UntilFull:
    """A file for HDF5, whose library crashes where a write fails: the first error ends the writing and is raised at the
    end, when the library has closed what it believes to be a file."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        self._unless_full(lambda: self._file.write(data))
        return len(data)

    def truncate(self, size: int) -> int:
        self._unless_full(lambda: self._file.truncate(size))
        return size

    def flush(self) -> None:
        self._unless_full(self._file.flush)

    def _unless_full(self, do: Callable[[], object]) -> None:
        try:
            if self.error is None:
                do()
        except OSError as e:
            self.error = e

    def __enter__(self) -> _UntilFull:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self.error is not None:
            raise self.error


def h5_names(dump: Dump, records: list[Record]) -> list[tuple[Record, str, str]]:
    """``records`` in the order of execution, each with its group and its name there."""
    ordered = _execution_order(records)
    return [(r, *place) for r, place in zip(ordered, datasets(dump, ordered), strict=True)]


def _note(data: Any, r: Record, module: Module | None, op: OpCall | None) -> bool:
    """Whether all of it was noted."""
    found = note_of_record(r)
    more = ({"module": _noted(MODULE, module)} if module else {}) | ({"op": _noted(OP, op)} if op else {})
    text = note_text(found | more)
    whole = len(text) <= LONGEST_NOTE
    data.attrs[NOTE_NAME] = np.bytes_(text if whole else note_text(found))
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
        for r, name in zip(records, record_keys(records), strict=True):
            with file.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, portable(dump.read(r), r.dtype), allow_pickle=False)
            tick()
    return 0


def write_safetensors(dump: Dump, records: list[Record], path: Path, tick: Tick = lambda: None) -> int:
    """``records`` with payload, in their own dtypes, named as in `write_npz`. One tensor at a time is in memory.

    Dtypes that the format does not know (complex, some 8-bit floats) are noted in its metadata, ``accprobe.dtypes``.
    Returns 0: nothing is left out."""
    entries, at, unaligned = [], 0, {}
    for r, name in zip(records, record_keys(records), strict=True):
        info = DTYPES[r.dtype]
        nbytes = prod(r.shape) * info.itemsize
        entries.append(HeaderEntry(name, r.dtype, tuple(r.shape), at, nbytes))
        at += nbytes
        if info.tail or (info.safetensors == "U8" and r.dtype != "uint8"):
            unaligned[name] = r.dtype
    metadata = {DTYPES_NOTE: note_text(unaligned).decode()} if unaligned else {}
    room = sum(entry_room(e.key, "", len(e.shape)) for e in entries) + 4096 + 2 * sum(map(len, metadata.values()))
    room += -(8 + room) % 64
    with open(path, "xb") as f:
        f.write(room.to_bytes(8, "little") + build_header(entries, at, room, metadata, once=False))
        for r in records:
            f.write(np.ascontiguousarray(dump.read(r), DTYPES[r.dtype].storage).reshape(-1).view(np.uint8).data)
            tick()
    return 0


@contextlib.contextmanager
def _new(path: Path) -> Iterator[BinaryIO]:
    """A file that is complete or not there. Raises FileExistsError."""
    with open(path, "xb"):
        pass
    try:
        with whole(path) as part, open(part, "wb") as f:
            yield f
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def save_npy(path: Path, array: np.ndarray, dtype: str) -> None:
    """One tensor of stored bits as .npy; raises FileExistsError where the file exists."""
    with _new(path) as f:
        np.save(f, portable(array, dtype), allow_pickle=False)


def save_safetensors(path: Path, name: str, array: np.ndarray, dtype: str) -> None:
    """One tensor of stored bits as .safetensors, in its own dtype; raises FileExistsError where the file exists."""
    entry = HeaderEntry(name, dtype, tuple(array.shape), 0, array.nbytes)
    room = -(-len(json.dumps(name)) // 8) * 8 + 512
    with _new(path) as f:
        f.write(room.to_bytes(8, "little") + build_header([entry], array.nbytes, room))
        f.write(np.ascontiguousarray(array, DTYPES[dtype].storage).tobytes())
