"""Another tool's dump behind the interface of our own, its missing statistics, and the dtype of its numbers.

The problem: every tool names, numbers and stores tensors in its own way, most write no statistics, and HDF5 and numpy
have no bfloat16. The idea: a format's module describes each tensor once, as a `Tensor`; `ForeignDump` makes records
with the interface of our own, and checks what is read, so that a file which changed, or lied, is one clear line.
Opening reads indices and headers, never payloads. Statistics that are missing are computed when they are listed, a few
tensors at a time. Of some outputs a few thousand numbers say which dtype they were computed in: a random float32 lies
on bfloat16's grid with probability 2**-16. Half of the outputs that tell must be of the coarser dtype, because
embeddings of a bfloat16 checkpoint always are.

Not here: how a format is laid out (its own module), which one a path is (sniff.py), single calls
(opcheck/calls/grid.py).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES, put_into
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import MAX_INT
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Layout, Module, OpCall, Payload, Record, Skip, Stats, Step
from vllm_accprobe.dump.stats import tensor_stats

_AT_ONCE = 4
"""Tensors in memory at a time, at most (chosen: reading and summing overlap; a few of the largest must fit)."""


def missing(record: Record) -> bool:
    """Whether its values are there and its statistics are not, or not all: msprobe takes no mean of integers."""
    s = record.stats
    return record.payload is not None and (s is None or None in (s.min, s.max, s.mean, s.l2))


def computed(
    dump: Dump, records: Sequence[Record], done: Callable[[], object] = lambda: None
) -> tuple[list[Record], list[str]]:
    """``records``, those that lack statistics with computed ones, and a sentence where some could not be read.

    done: called after each tensor that was read. At most four tensors are in memory at a time."""
    found = list(records)
    failed: list[str] = []
    waiting: deque[tuple[int, Future[Stats]]] = deque()

    def take() -> None:
        index, future = waiting.popleft()
        try:
            found[index] = replace(found[index], stats=_filled(found[index].stats, future.result()))
        except (DumpError, OSError, ValueError) as e:
            failed.append(str(e))
        done()

    workers = min(_AT_ONCE, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        for index, record in enumerate(found):
            if missing(record):
                waiting.append((index, pool.submit(_of, dump, record)))
            if len(waiting) >= workers:
                take()
        while waiting:
            take()
    return found, [f"no statistics of {len(failed):,} tensors: {failed[0]}"] if failed else []


def _filled(theirs: Stats | None, ours: Stats) -> Stats:
    """What the tool has taken, and where it took none, what was computed."""
    if theirs is None:
        return ours
    return replace(theirs, **{k: getattr(ours, k) for k in ("min", "max", "mean", "l2") if getattr(theirs, k) is None})


def _of(dump: Dump, record: Record) -> Stats:
    return tensor_stats(dump.read(record), record.dtype)


FOREIGN = -2
"""The segment number of a payload that lies in another tool's file."""
UNKNOWN = Layout("unknown")
"""How most tools' tensors lie over ranks: it was not recorded."""
PARAM = "param."
VALUE = "value"
"""The role of a tensor of which it is not known what it is: a file's."""
INDEPENDENT = "independent"
"""In ``Dump.run``: true where the tensors are not those of one run, so that one says nothing about another."""
UNREADABLE = "file that cannot be read"
"""The reason under which such files are counted; the dump's problems name the first ones."""
_NAMED = 3
UNKNOWN_DTYPE = "dtype that is not known here"
IMPOSSIBLE_SHAPE = "shape that no tensor has"
IMPOSSIBLE_NUMBER = "rank, step or call with a number that no run has"
_MOST_ELEMENTS, _MOST_RANKS = 1 << 56, 1 << 31
"""As in our own journals; records are columns of int64, ranks of int32 (dump/record_table.py)."""
VALUES = "values"
"""In ``Dump.run``: the dtype whose numbers the tensors hold, where the file's own is wider."""
Read = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """One tensor of another tool's dump.

    name: in the tool's own spelling; of a file, its path relative to the dump. tap, role, cls, call: as a Record's; a
    weight's role begins with ``param.``; call None: numbered in order of appearance. step None: of no step.
    dtype: a name in dump.dtypes.DTYPES (see `torch_dtype`), or anything else, which is counted as skipped. read: gives
    the stored bits (DTYPES[dtype].storage, shape ``shape`` or as many elements in C order), raising DumpError or
    OSError; None where only statistics or a hash were stored. hash: equal texts mean equal bytes; begin it with the
    kind (``crc32:``), so that two kinds never meet. layout: how it lies over ranks. order: its place in the order of
    execution within step and rank; None: in order of appearance.
    """

    name: str
    tap: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    read: Read | None = None
    cls: str = ""
    step: int | None = 0
    rank: int = 0
    call: int | None = None
    stats: Stats | None = None
    hash: str | None = None
    layout: Layout = UNKNOWN
    order: int | None = None


@dataclass(frozen=True, slots=True)
class ForeignRecord(Record):
    """A record with its own tool's spelling for a name."""

    label: str = ""

    @property
    def name(self) -> str:
        return self.label


class ForeignDump(Dump):
    """A dump of another tool. kind: the format's NAME; run: what the tool wrote about the run, if anything.

    A format's module makes one, calls `add` for each tensor in the order of execution, and returns it."""

    def __init__(self, path: Path, kind: str, run: Mapping[str, Any] | None = None):
        super().__init__(path, {"format": kind, **(run or {})})
        self.kind = kind
        self.records: list[Record] = []
        self._reads: list[Read] = []
        self._places: set[tuple[Any, ...]] = set()
        self._calls: dict[tuple[Any, ...], int] = {}
        self._seq: dict[tuple[int, int | None], int] = {}
        self._modules_seen: set[tuple[int, str]] = set()

    def add(self, t: Tensor) -> ForeignRecord | None:
        """The tensor's record; None where it was skipped, which is counted by reason."""
        if t.dtype not in DTYPES:
            self.skip(t.tap, f"{UNKNOWN_DTYPE} ({t.dtype[:40]})", t.step, t.role)
            return None
        if len(t.shape) > 64 or any(n < 0 for n in t.shape) or prod(max(n, 1) for n in t.shape) >= _MOST_ELEMENTS:
            self.skip(t.tap, IMPOSSIBLE_SHAPE, t.step, t.role)
            return None
        if not (0 <= t.rank < _MOST_RANKS and all(0 <= (n or 0) <= MAX_INT for n in (t.step, t.call, t.order))):
            self.skip(t.tap, IMPOSSIBLE_NUMBER, role=t.role)
            return None
        # A weight is one thing however many steps show it; a later step's is its next call.
        step = None if t.role.startswith(PARAM) else t.step
        call = self._call(t, step)
        payload = None
        if t.read is not None:
            payload = Payload(FOREIGN, len(self._reads), prod(t.shape) * DTYPES[t.dtype].itemsize)
            self._reads.append(t.read)
        before = self._seq.get((t.rank, step), 0)
        seq = before if t.order is None else t.order
        self._seq[t.rank, step] = max(seq, before) + 1
        record = ForeignRecord(
            t.rank, step, t.tap, t.cls, t.role, call, seq, t.dtype, tuple(t.shape), None, 0, t.stats, t.hash,
            t.layout, payload, label=t.name,
        )  # fmt: skip
        self.records.append(record)
        self._see(t.rank, t.step, t.tap, t.cls)
        return record

    def skip(self, tap: str, reason: str, step: int | None = None, role: str | None = None, count: int = 1) -> None:
        """Counts what the dump has and cannot be compared, by a short stable ``reason``."""
        self.skips.append(Skip(tap, reason, step, role, count))

    def unreadable(
        self, why: object, tap: str, step: int | None = None, role: str | None = None, rank: int | None = None
    ) -> None:
        """Leaves out a file. why: a sentence that names it: a DumpError, or text; rank: the rank of which it is all, so
        that the others still meet the other side's by their numbers."""
        self.skip(tap, UNREADABLE, step, role)
        self.unread.append(str(why))
        if rank is not None:
            self._has_rank(rank)

    def opened(self) -> None:
        """Called when all files were examined: names those that cannot be read. There may be thousands."""
        for sentence in self.unread[:_NAMED]:
            self.problem(sentence)
        if more := len(self.unread[_NAMED:]):
            files = "file" if more == 1 else "files"
            self.problem(f"{more:,} more {files} that cannot be read: the first are named above, all are left out")

    def problem(self, sentence: str) -> None:
        """Something missing, damaged or ignored; said before any number."""
        if sentence not in self.problems:
            self.problems.append(sentence)

    def noted(self, rank: int, module: Module | None, op: OpCall | None, record: ForeignRecord) -> None:
        """What an export of ours noted next to ``record``: the module of its tap, the operator's call that it is of."""
        modules = self.modules[rank]
        if module is not None and module.tap == record.tap:
            at = next(i for i, m in enumerate(modules) if m.tap == module.tap)
            modules[at] = module
        if op is not None and (op.tap, op.call, op.step) == (record.tap, record.call, record.step):
            self.ops.append(replace(op, seq=record.seq))

    def _call(self, t: Tensor, step: int | None) -> int:
        place = (t.rank, step, t.tap, t.role)
        call = self._calls.get(place, 0) if t.call is None else t.call
        while (*place, call) in self._places:
            call += 1
        self._places.add((*place, call))
        self._calls[place] = call + 1
        return call

    def _has_rank(self, rank: int) -> None:
        if rank not in self.ranks:
            self.ranks = tuple(sorted((*self.ranks, rank)))

    def _see(self, rank: int, step: int | None, tap: str, cls: str) -> None:
        self._has_rank(rank)
        if step is not None and (rank, step) not in self.steps:
            self.steps[rank, step] = Step(step)
        if (rank, tap) not in self._modules_seen:
            self._modules_seen.add((rank, tap))
            modules = self.modules.setdefault(rank, [])
            modules.append(Module(tap, cls, len(modules)))

    def read(self, record: Record, out: np.ndarray | None = None) -> np.ndarray:
        """As dump.reader's. Raises DumpError for a payload that is not what the index said."""
        return self._into(record, self._bits(record), out)

    def read_rows(self, record: Record, rows: slice, out: np.ndarray | None = None) -> np.ndarray:
        if record.row_dim != 0 or not record.shape:
            raise ValueError(f"{record.name}: rows do not lie along dimension 0")
        return self._into(record, self._bits(record)[rows], out)

    def _bits(self, record: Record) -> np.ndarray:
        if record.payload is None:
            raise DumpError(f"{record.name}: only statistics were stored, no values")
        if record.payload.seg != FOREIGN or not 0 <= record.payload.off < len(self._reads):
            raise DumpError(f"{record.name} is not a record of {self.path}")
        try:
            bits = self._reads[record.payload.off]()
        except OSError as e:
            raise DumpError(f"cannot read {record.name} in {self.path}: {e.strerror or e}") from None
        storage = DTYPES[record.dtype].storage
        if bits.dtype != storage or bits.size != prod(record.shape):
            raise DumpError(f"{record.name} in {self.path} holds {list(bits.shape)} of {bits.dtype}, "
                            f"where {list(record.shape)} of {record.dtype} was announced")  # fmt: skip
        return bits.reshape(record.shape)

    @staticmethod
    def _into(record: Record, bits: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            return np.ascontiguousarray(bits).reshape(bits.shape)
        return put_into(out, bits, record.name)


def torch_dtype(name: str) -> str:
    """torch's name without prefix for the many spellings of a dtype: ``torch.bfloat16``, ``BF16``, ``DT_FLOAT``,
    ``Float32``, ``<f4``. What is not known comes back in lower case."""
    plain = name.strip().rpartition(".")[2].lower().removeprefix("dt_").removeprefix("acl_")
    if plain in DTYPES:
        return plain
    if plain in _SPELLINGS:
        return _SPELLINGS[plain]
    try:
        return numpy_dtype(np.dtype(name.strip()))
    except (TypeError, ValueError, SyntaxError):
        return plain


def numpy_dtype(dtype: np.dtype[Any]) -> str:
    """torch's name of a numpy dtype, whatever its byte order; numpy's own name where torch has none."""
    return _NUMPY.get(f"{dtype.kind}{dtype.itemsize}", dtype.name)


_NUMPY = {"f8": "float64", "f4": "float32", "f2": "float16", "b1": "bool", "c8": "complex64", "c16": "complex128"}


_SPELLINGS = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "short": "int16",
    "char": "int8", "byte": "uint8", "f64": "float64", "f32": "float32", "fp32": "float32", "f16": "float16",
    "fp16": "float16", "bf16": "bfloat16", "bool_": "bool", "boolean": "bool", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8",
    "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2", "float8_e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "float8_e8m0": "float8_e8m0fnu", "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip


SAMPLED, LARGEST, ENOUGH = 16, 16 << 20, 64
"""Tensors that are examined, bytes of one, different numbers of one that it takes (chosen)."""
_SEEN = 4096
_CONTAINERS = ("float32", "float64")
_COARSER = {"float32": ("bfloat16", "float16"), "float64": ("bfloat16", "float16", "float32")}


def note_values(dump: Dump) -> str:
    """The coarser dtype whose numbers the outputs hold, "" where there is none, and for files that belong to no one
    run. Said among the dump's problems and kept in ``dump.run``."""
    if not isinstance(dump, ForeignDump) or VALUES in dump.run or dump.run.get(INDEPENDENT):
        return str(dump.run.get(VALUES, ""))
    found = coarser_dtype(dump)
    if found:
        name, container = found
        dump.run[VALUES] = name
        dump.problem(f"its {container} values are {name} numbers: judged by what {name} can hold")
        return name
    return ""


def coarser_dtype(dump: Dump) -> tuple[str, str] | None:
    """(the coarser dtype, the container's)."""
    declared = {r.dtype for r in dump.records}
    for container in _CONTAINERS:
        grids = [s for r in _sample(dump, container) if (s := _grid_of(dump, r, container))]
        for name in _COARSER[container]:
            if name not in declared and grids and 2 * sum(s == name for s in grids) >= len(grids):
                return name, container
    return None


def _sample(dump: Dump, container: str) -> list[Record]:
    """Outputs of different taps, evenly from the first to the last."""
    by_tap: dict[str, Record] = {}
    for r in dump.records:
        fits = r.dtype == container and r.payload is not None and r.payload.nbytes <= LARGEST
        if fits and r.role.startswith(("output", "value")):
            by_tap.setdefault(r.tap, r)
    found = list(by_tap.values())
    return [found[i * len(found) // SAMPLED] for i in range(SAMPLED)] if len(found) > SAMPLED else found


def _grid_of(dump: Dump, r: Record, container: str) -> str:
    """The coarsest dtype that holds the finite values, the container's own, or "" where they do not tell: too few, or
    all of them multiples of one step as small integers are."""
    try:
        values = dump.read(r).reshape(-1)[:_SEEN]
    except (DumpError, OSError):
        return ""
    with np.errstate(all="ignore"):
        values = np.unique(np.abs(values[np.isfinite(values) & (values != 0)]).astype(np.float64))
        if len(values) < ENOUGH:
            return ""
        for name, bits in (("bfloat16", 8), ("float16", 11), ("float32", 24)):
            if name in _COARSER[container] and _is_on_grid(values, name):
                return "" if _bits_needed(values) <= bits else name
    return container


def _is_on_grid(values: np.ndarray, name: str) -> bool:
    wide = values.astype(np.float32)
    if name == "bfloat16":
        return bool((wide == values).all() and not (wide.view(np.uint32) & 0xFFFF).any())
    return bool((wide.astype(np.float16).astype(np.float64) == values).all()) if name == "float16" else bool(
        (wide == values).all())  # fmt: skip


def _bits_needed(values: np.ndarray) -> int:
    """How many bits it takes to count the values in steps of the largest power of two that divides all of them."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    lowest = np.log2((whole & -whole).astype(np.float64)).astype(np.int64) + exponent - 53
    return int(exponent.max() - lowest.min())
