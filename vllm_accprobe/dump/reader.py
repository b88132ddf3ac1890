"""Opens a dump: what was recorded, selection of records, and reading of tensors.

The problem: the files may come from a run that was killed, is still running, or was made up to do harm; lines may be
torn, damaged, from a newer release, or promise what the files do not hold. The idea: every line stands for itself; what
is not understood is counted and named in ``problems``. Afterwards each record is checked against the segment files and
the row maps, and loses what does not hold, so that no size is taken on trust. Reading is one positioned read into an
array that the caller may reuse, from any number of threads; dumps of other tools have the same interface
(formats/common/foreign.py). One description of a choice (names, steps, requests, ranks) serves all commands.

Not here: what bits mean (dtypes.py), the form of a line (journal.py), repair (repair.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from vllm_accprobe.dump import journal, schema as image_calls
from vllm_accprobe.dump.compiled_lines import LINES, CompiledLines, compiled_lines
from vllm_accprobe.dump.decode import object_in, value_at
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import (
    MISSING,
    DumpError,
    SegmentData,
    find_segment,
    journal_lines,
    open_regular,
    read_into,
)
from vllm_accprobe.dump.journal import (
    KINDS,
    CachedPrefix,
    Lives,
    StateFinding,
    StateTotals,
    superseded,
)
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.record_table import (
    BATCH,
    ChosenRecords,
    RecordTable,
    TensorSite,
    TensorSites,
    joined,
    numbers_of,
    places_of,
)
from vllm_accprobe.dump.schema import (
    JOURNAL,
    PADDING,
    RUN_JSON,
    SCHEMA,
    Armed,
    End,
    Mask,
    Module,
    OpCall,
    Record,
    Request,
    RowSpace,
    Skip,
    Step,
    Stop,
    rank_dir,
    segment_name,
)

_MAX_OPEN = 200


class Dump:
    """A dump of one or many ranks; made by ``open_dump``.

    run: run.json; starts: the first line of each rank's journal; records: all ranks, journal order within a rank; ops:
    calls of operators, all ranks, journal order within a rank; padding, padding_rows: tensors whose rows are of no
    request, which are in no comparison, and how many rows they have, by (rank, step); requests by (rank, req), steps by
    (rank, step), rows by (rank, step, space); masks by (rank, step, req), what changed the request's logits before
    sampling; labels, those in files of their own, by (rank, step, tap, role, call); modules, stops and ends by rank;
    armed: (rank, from which step on what selection held), where the server was armed while it ran; lives: what happened
    to the weights, and their fingerprints after it; problems: sentences on what is missing, damaged or ignored;
    bad_lines: how many of each rank's journal were not understood; unread: a sentence for each file that is there and
    cannot be read; data: where each (rank, segment) lies.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = path
        self.run = run
        self.ranks: tuple[int, ...] = ()
        self.records: Sequence[Record] = []
        self.ops: list[OpCall] = []
        self.requests: dict[tuple[int, int], Request] = {}
        self.steps: dict[tuple[int, int], Step] = {}
        self.rows: dict[tuple[int, int, str], RowSpace] = {}
        self.padding: Sequence[Record] = []
        self.padding_rows: dict[tuple[int, int], RowSpace] = {}
        self.masks: dict[tuple[int, int, int], Mask] = {}
        self.modules: dict[int, list[Module]] = {}
        self.labels: dict[tuple[int, int, str, str, int], Label] = {}
        self.lives = Lives()
        self.skips: list[Skip] = []
        self.armed: list[tuple[int, Armed]] = []
        self.states: list[tuple[int, StateFinding]] = []
        self.state_totals: dict[int, StateTotals] = {}
        self.cached: list[tuple[int, CachedPrefix]] = []
        self.stops: dict[int, Stop] = {}
        self.ends: dict[int, End] = {}
        self.errors: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.unread: list[str] = []
        self.bad_lines: dict[int, int] = {}
        self.starts: dict[int, dict[str, Any]] = {}
        self.data: dict[tuple[int, int], SegmentData] = {}
        self._fds: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._fds)

    def read(self, record: Record, out: np.ndarray | None = None) -> np.ndarray:
        """The stored bits of ``record``, C order, shape ``record.shape``, dtype ``DTYPES[record.dtype].storage``.

        ``out``: a contiguous array of at least as many bytes, whose memory is then used. Raises DumpError when the
        record has no payload or the file has changed, ValueError when ``out`` is too small.
        """
        return self._read(record, 0, record.shape, out)

    def read_rows(self, record: Record, rows: slice, out: np.ndarray | None = None) -> np.ndarray:
        """Like ``read``, only rows ``rows.start`` to ``rows.stop`` (step 1) along dimension 0. Raises ValueError for a
        tensor whose rows do not lie along dimension 0."""
        if record.row_dim != 0 or not record.shape:
            raise ValueError(f"{record.name}: rows do not lie along dimension 0")
        start, stop, step = rows.indices(record.shape[0])
        if step != 1:
            raise ValueError("rows must be a range without a step")
        shape = (max(stop - start, 0), *record.shape[1:])
        nbytes = record.payload.nbytes if record.payload else 0
        return self._read(record, start * (nbytes // max(record.shape[0], 1)), shape, out)

    def _read(self, record: Record, skip: int, shape: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
        if record.payload is None:
            raise DumpError(f"{record.name} of rank {record.rank}: only its statistics are in {self.path}")
        storage = DTYPES[record.dtype].storage
        if out is None:
            result = np.empty(shape, storage)
        else:
            flat = out.reshape(-1).view(np.uint8)
            nbytes = math.prod(shape) * storage.itemsize
            if flat.size < nbytes:
                raise ValueError(f"out has {flat.size} bytes, {record.name} needs {nbytes}")
            result = flat[:nbytes].view(storage).reshape(shape)
        if result.size:
            self._fill(record, skip, result.reshape(-1).view(np.uint8).data)
        return result

    def _fill(self, record: Record, skip: int, target: memoryview) -> None:
        assert record.payload is not None
        key = (record.rank, record.payload.seg)
        data = self.data.get(key)
        if data is None:
            raise DumpError(f"{record.name} is not a record of {self.path}")
        try:
            fd, shared = self._open(key, data)
            try:
                if not read_into(fd, data.start + record.payload.off + skip, target):
                    raise DumpError(f"{data.path} has become shorter since the dump was opened")
            finally:
                if not shared:
                    os.close(fd)
        except OSError as e:
            raise DumpError(f"cannot read {data.path}: {e.strerror or e}") from None

    def _open(self, key: tuple[int, int], data: SegmentData) -> tuple[int, bool]:
        with self._lock:
            fd = self._fds.get(key)
            if fd is not None:
                return fd, True
            try:
                fd = open_regular(data.path)
            except OSError:  # a running capture may have taken off ".part" since
                fd = open_regular(data.path.with_name(segment_name(key[1])))
            if len(self._fds) < _MAX_OPEN:
                self._fds[key] = fd
                return fd, True
            return fd, False

    def close(self) -> None:
        """Closes the files; the records stay. Reading opens them again."""
        with self._lock:
            _close_all(self._fds)


def _close_all(fds: dict[tuple[int, int], int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def row_space(dump: Dump, record: Record) -> RowSpace | None:
    """Which rows a record has, or None where that is not known."""
    if record.rows is None or record.step is None:
        return None
    return space_of(dump, record.rank, record.step, record.rows)


def space_of(dump: Dump, rank: int, step: int, name: str) -> RowSpace | None:
    return dump.padding_rows.get((rank, step)) if name == PADDING else dump.rows.get((rank, step, name))


def reopen(path: Path, data: dict[tuple[int, int], SegmentData]) -> Dump:
    """A dump that can read tensors of these files and knows nothing else: for another process, with what one that has
    opened it knows."""
    dump = Dump(path, {})
    dump.data = dict(data)
    return dump


_KEYED = {
    "request": ("requests", "req"), "rows": ("rows", "step", "space"), "step": ("steps", "step"),
    "label": ("labels", "step", "tap", "role", "call"),
}  # fmt: skip
"""By kind of line: the dump's dict, and the fields that follow the rank in its keys."""
_LISTED = {"state": "states", "cached": "cached", "armed": "armed"}
"""By kind of line: the dump's list of (rank, value)."""
_LATEST = {"states": "state_totals", "end": "ends"}
"""By kind of line: the dump's dict by rank, in which a later line replaces an earlier one."""
_CHECKED = ("site", "seg", "lost")
"""The columns in which a check of records against the files changes something."""
LOST = "payload that is not in its file"
"""The reason under which they are counted; their statistics and hashes are there still."""


def check_schema(e: dict[str, Any], where: Path) -> None:
    """Raises DumpError where the journal's first line names no schema, or one of a later accprobe."""
    schema = e.get("schema")
    if type(schema) is not int or schema < 1:
        raise DumpError(f"{where}: schema is {journal.short(schema)}, not a number: not a dump of accprobe")
    if schema > SCHEMA:
        raise DumpError(f"{where}: schema {schema} is newer than this accprobe, which reads {SCHEMA}: upgrade it")


def _parse(line: bytes) -> Any:
    """JSON as Python's encoder writes it. orjson is several times as fast, but refuses half a surrogate pair."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


class RankReader:
    """Reads one rank's journal into a dump; ``table`` are its tensors, ``padding`` those of rows of no request. sites:
    those of all ranks; compiled: what reads tensors' lines of large journals, or None. at: bytes of whole lines that
    were read, ``number`` that of the line behind them."""

    def __init__(self, dump: Dump, rank: int, sites: TensorSites, compiled: CompiledLines | None = None):
        self.dump, self.rank, self.sites, self.compiled = dump, rank, sites, compiled
        self.directory = dump.path / rank_dir(rank)
        self.table = self.padding = RecordTable.joined(sites, [])
        self.ops: list[OpCall] = []
        self.skips: list[Skip] = []
        self.lists: dict[str, list[Any]] = {
            "op": self.ops, "skip": self.skips, "life": dump.lives.events, "weight": dump.lives.prints,
        }  # fmt: skip
        self.bad: list[tuple[int, str]] = []
        self.unknown: Counter[str] = Counter()
        self.torn = 0
        self.unreadable: str | None = None
        self.at, self.number = 0, 1
        self._last, self._last_at = b"", 0
        self._before: RecordTable | None = None  # what earlier looks read
        self._parts: list[RecordTable] = []
        self._numbers: list[np.ndarray] = []

    def continues(self) -> bool:
        """Whether the journal still has the line that was read last where it was, and ends no sooner."""
        try:
            with os.fdopen(open_regular(self.directory / JOURNAL), "rb", buffering=0) as f:
                known = os.pread(f.fileno(), len(self._last), self._last_at) == self._last
                return known and (not self.at or os.pread(f.fileno(), 1, self.at - 1) == b"\n")
        except OSError:
            return False

    def read(self, after: int, kept: Callable[[TensorSite], bool]) -> None:
        """Reads the journal on to its end, or to where it is torn; what is not understood is counted. after, kept: as
        in `GrowingDump.look`."""
        self.torn, self.unreadable = 0, None
        size = LINES if self.compiled else BATCH
        try:
            for number, lines, length in journal_lines(self.directory / JOURNAL, size, self.number, self.at):
                if not number:
                    self.torn = length
                    break
                if lines:
                    self._read(np.arange(number, number + len(lines)), lines)
                else:
                    self.bad.append((number, f"{length} bytes long"))
                self.at, self.number = self.at + length, number + (len(lines) or 1)
                if lines:  # one that is too long is not kept
                    self._last, self._last_at = lines[-1], self.at - len(lines[-1])
        except OSError as error:
            self.unreadable = error.strerror or str(error)
        read = self._joined()
        if gone := superseded(self.ops):
            read = read.only(np.array([(r.step, r.tap, r.call) not in gone for r in read], bool))
        if after >= 0:
            read = read.only((read.columns["step"] > after) | read.of_sites(kept))
            self.ops[:] = [op for op in self.ops if op.step is None or op.step > after]
        self._before = read
        # The next look begins with what was read: what the files do not hold now they may hold then.
        self.table = RecordTable(self.sites, read.columns | {name: read.columns[name].copy() for name in _CHECKED})
        self.dump.skips += self.skips
        self._check_payloads()
        self._check_rows()
        padding = self.table.of_sites(lambda site: site.rows == PADDING)
        self.padding = self.table.only(padding)
        self.table = self.table.only(~padding) if padding.any() else self.table
        self.dump.ops += self.ops
        self._report()

    def _joined(self) -> RecordTable:
        """What was read, in the order of its lines."""
        read = RecordTable.joined(self.sites, self._parts)
        numbers = np.concatenate([np.zeros(0, np.int64), *self._numbers])
        self._parts.clear()
        self._numbers.clear()
        if (numbers[1:] < numbers[:-1]).any():
            read = read.only(np.argsort(numbers))
        return read if self._before is None else RecordTable.joined(self.sites, [self._before, read])

    def _read(self, numbers: np.ndarray, lines: Sequence[bytes]) -> None:
        """Lines with their numbers."""
        if self.compiled is not None:
            good, part = self.compiled.read(self.rank, lines)
            self._parts.append(part)
            self._numbers.append(numbers[good])
            numbers, lines = numbers[~good], list(compress(lines, (~good).tolist()))
        for start in range(0, len(lines), BATCH):
            self._lines(numbers[start : start + BATCH], lines[start : start + BATCH])

    def _lines(self, numbers: np.ndarray, lines: Sequence[bytes]) -> None:
        """Those of tensors are read together, the others go where they belong."""
        sites, tails = self.sites.known(lines)
        events: Any = [None] * len(lines)
        together: Sequence[int] = range(len(lines))
        if None in sites:
            for i in [i for i, site in enumerate(sites) if site is None]:
                sites[i] = self.sites.known(lines[i : i + 1])[0][0]  # a line before may have had its head
                if sites[i] is None:
                    self._line(int(numbers[i]), i, lines[i], sites, events)
            together = [i for i in together if sites[i] is not None and events[i] is None]
            tails = [tails[i] for i in together]
        found = self.sites.tails(tails)
        if found is not None and len(found) == len(lines):
            events = found
        elif found is not None:
            for i, e in zip(together, found, strict=True):
                events[i] = e
        else:
            for i, tail in zip(together, tails, strict=True):
                if (alone := self.sites.tails([tail])) is not None:
                    events[i] = alone[0]
                else:
                    sites[i] = None
                    self._line(int(numbers[i]), i, lines[i], sites, events)
        if None in sites:
            numbers = numbers[[e is not None for e in events]]
        if len(numbers):
            own = [s for s in sites if s is not None], [e for e in events if e is not None]
            part, bad = RecordTable.of_lines(self.sites, self.rank, *own)
            self.bad += [(int(numbers[i]), why) for i, why in bad]
            self._parts.append(part)
            self._numbers.append(np.delete(numbers, [i for i, _ in bad]) if bad else numbers)

    def _line(self, number: int, i: int, line: bytes, sites: list[int | None], events: Any) -> None:
        """Puts a line by itself where it belongs, that of a tensor into ``sites`` and ``events``."""
        try:
            e = _parse(line)
            if not isinstance(e, dict) or not isinstance(e.get("event"), str):
                raise ValueError("not an event")
            if e["event"] in ("tensor", "param"):
                sites[i], events[i] = self.sites.whole(line, e)
            elif e["event"] == "start":
                check_schema(e, self.directory / JOURNAL)
                self.dump.starts.setdefault(self.rank, e)
            else:
                self._event(e)
        except RecursionError:
            self.bad.append((number, "nested too deep"))
        except (ValueError, OverflowError) as error:  # JSON's errors, too
            self.bad.append((number, str(error)))

    def _event(self, e: dict[str, Any]) -> None:
        kind, dump, rank = e["event"], self.dump, self.rank
        if kind == "error":
            dump.errors.append({**e, "rank": rank})
            return
        found = KINDS.get(kind)
        if found is None:
            self.unknown[kind[:40]] += 1
            return
        value = found.from_line(e, **dict.fromkeys(found.external, rank))
        if kind == "rows" and value.space == PADDING:
            dump.padding_rows[rank, value.step] = value
        elif kind in _KEYED:
            name, *keys = _KEYED[kind]
            getattr(dump, name)[(rank, *(getattr(value, key) for key in keys))] = value
        elif kind in _LISTED:
            getattr(dump, _LISTED[kind]).append((rank, value))
        elif kind in _LATEST:
            getattr(dump, _LATEST[kind])[rank] = value
        elif kind in self.lists:
            self.lists[kind].append(value)
        elif kind == "module":
            dump.modules.setdefault(rank, []).append(value)
        elif kind == "masks":
            dump.masks.update({(rank, value.step, req): by for req, by in value.masked.items()})
        elif kind == "stop":
            dump.stops.setdefault(rank, value)

    def _check_payloads(self) -> None:
        """Only a payload that its file really holds stays with its record."""
        table, lost = self.table, []
        nbytes = table.by_site(lambda site: site.nbytes, np.int64)
        segments, ends = table.columns["seg"], table.columns["off"] + nbytes
        stored = (segments >= 0) & (nbytes > 0)
        for seg in np.unique(segments[stored]).tolist():
            here = np.flatnonzero(stored & (segments == seg))
            try:
                data = self.dump.data[self.rank, seg] = find_segment(self.directory, seg)
                here, reason = here[ends[here] > data.size], f"{data.path.name} ends before them"
            except DumpError as error:
                reason = str(error)
            if len(here):
                lost.append((int(here[0]), reason, here))
        for first, reason, here in sorted(lost, key=lambda one: one[0]):
            table.columns["seg"][here], table.columns["lost"][here] = -1, True
            text = f"rank {self.rank}: {_tensors(len(here))} lost the payload: {reason}"
            self.dump.problems.append(text)
            r = table[first]
            self.dump.skips.append(Skip(r.tap, LOST, r.step, r.role, len(here)))
            if not reason.endswith(MISSING):
                self.dump.unread.append(text)

    def _check_rows(self) -> None:
        """A row map that does not fit its tensor would lead analysis astray: the tensor then has no rows."""
        table = self.table
        names = list(dict.fromkeys(s.rows for s in self.sites.all if s.rows is not None and not s.parameter))
        number: dict[str | None, int] = {name: i for i, name in enumerate(names)}
        space = table.by_site(lambda site: -1 if site.parameter else number.get(site.rows, -1), np.int64)
        rows = table.by_site(lambda site: site.shape[site.row_dim] if site.shape else -1, np.int64)
        at = np.flatnonzero(space >= 0)
        steps, step = np.unique(table.columns["step"][at], return_inverse=True)
        places, which = np.unique(space[at] * len(steps) + step, return_inverse=True)
        found = [space_of(self.dump, self.rank, int(steps[i % len(steps)]), names[i // len(steps)])
                 for i in places.tolist()]  # fmt: skip
        due = np.array([-2 if one is None else one.n for one in found], np.int64)
        unexpected = at[due[which] != rows[at]]
        if len(unexpected):
            table.change(unexpected, rows=None)
            without = f"{_tensors(len(unexpected))} without a row map that fits"
            self.dump.problems.append(f"rank {self.rank}: {without}: rows not known")
        images = np.flatnonzero(table.of_sites(lambda site: (site.rows or "").startswith("vision")))
        for i in image_calls.unnamed(table.only(images), self.dump.rows):
            r = table[int(images[i])]
            table.change(images[i : i + 1], rows=None)
            self.dump.skips.append(Skip(r.tap, image_calls.REASON, r.step, r.role))

    def _report(self) -> None:
        say, rank = self.dump.problems.append, f"rank {self.rank}"
        tables = self.table, self.padding
        known = sum(map(len, tables))
        if self.unreadable:
            say(f"{rank}: {JOURNAL} cannot be read{' further' if known else ''}: {self.unreadable}")
            return
        if self.rank not in self.dump.starts:
            say(f"{rank}: the journal has no first line: not all of it may be here")
        if self.bad:
            n = self.dump.bad_lines[self.rank] = len(self.bad)
            first = "line {}: {}".format(*min(self.bad))
            say(f"{rank}: {n} line{'s' * (n > 1)} could not be understood and {'are' if n > 1 else 'is'} ignored "
                f"(first: {first[:200]})")  # fmt: skip
        if self.unknown:
            kinds = ", ".join(f"{k} ({n})" for k, n in self.unknown.most_common(5))
            say(f"{rank}: {sum(self.unknown.values())} events of unknown kind ignored: {kinds}")
        if self.torn:
            say(f"{rank}: the journal's last line is torn ({self.torn} bytes ignored)")
        if self.rank in self.dump.stops:
            say(f"{rank}: capture stopped early: {self.dump.stops[self.rank].reason}")
        if self.rank not in self.dump.ends:
            readable = sum(int((table.columns["seg"] >= 0).sum()) for table in tables)
            say(f"{rank} was not closed (killed, or still running): {_tensors(readable)} readable, {known} known")


def _tensors(n: int) -> str:
    return f"{n} tensor{'s' if n != 1 else ''}"


__all__ = ["Dump", "DumpError", "open_dump", "reopen"]

_MAX_RUN_JSON = 16 << 20
_MAX_RANKS = 1 << 16
"""Ranks that a run may claim to have had: more is no run, and a set of them should not fill the memory."""
_RANK = re.compile(r"rank(\d{4,9})", re.ASCII)


def open_dump(path: str | Path) -> Dump:
    """Opens the dump at ``path`` and reads all journals, no payload. Raises DumpError, one clear line."""
    return GrowingDump(path).look()


class GrowingDump:
    """A dump that is read while it grows. Ranks may come, segments get their names, a journal may be repaired; where
    one is another than what was read, all are read from their beginning."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._begin()

    def _begin(self) -> None:
        self._dump, self._sites = Dump(self.path, {}), TensorSites()
        self._readers: dict[int, RankReader] = {}
        self._compiled: CompiledLines | None = None

    def look(self, after: int = -1, kept: Callable[[TensorSite], bool] = lambda site: site.parameter) -> Dump:
        """The dump as it is now, the same object each time: of the journals only new lines are read. after: records and
        operator calls of the steps up to this one are let go, but records of sites that are ``kept``, and are in no
        later look. Raises DumpError, one clear line."""
        path = self.path
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "does not exist"
            raise DumpError(f"{path} {what}: expected the directory that VLLM_ACCPROBE_DIR named")
        run, missing_run = _read_run(path)
        ranks: list[int] = []
        unexpected: list[int] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    match = _RANK.fullmatch(entry.name)
                    if match and entry.name == rank_dir(int(match[1])):
                        (ranks if entry.is_dir(follow_symlinks=False) else unexpected).append(int(match[1]))
        except OSError as e:
            raise DumpError(f"cannot list {path}: {e.strerror or e}") from None
        if missing_run and not ranks:
            raise DumpError(f"{path} is no dump of accprobe: it has neither {RUN_JSON} nor a rank directory; "
                            "name the directory that VLLM_ACCPROBE_DIR named")  # fmt: skip
        if not all(rank in ranks and known.continues() for rank, known in self._readers.items()):
            self._begin()
        dump = self._dump
        dump.close()
        dump.run, dump.ranks = run, tuple(sorted(ranks))
        for made_anew in (dump.ops, dump.skips, dump.problems, dump.unread, dump.data, dump.bad_lines):
            made_anew.clear()
        if missing_run:
            dump.problems.append(f"{RUN_JSON} is missing: versions and settings of the run are not known")
        for r in sorted(unexpected):
            dump.problems.append(f"{rank_dir(r)} is not a directory of the dump itself (a link?): not read")
        if not self._readers:
            self._compiled = compiled_lines(self._sites, [path / rank_dir(rank) / JOURNAL for rank in dump.ranks])
        for rank in dump.ranks:
            if rank not in self._readers:
                self._readers[rank] = RankReader(dump, rank, self._sites, self._compiled)
            self._readers[rank].read(after, kept)
        readers = [self._readers[rank] for rank in dump.ranks]
        dump.padding = RecordTable.joined(self._sites, [r.padding for r in readers])
        tables = [r.table for r in readers]
        dump.records = tables[0] if len(tables) == 1 else RecordTable.joined(self._sites, tables)
        if not ranks:
            dump.problems.append("no rank has written anything")
        elif absent := _absent_ranks(dump):
            dump.problems.append(absent)
        return dump


def _absent_ranks(dump: Dump) -> str:
    """A sentence about ranks that the run had and the dump has not; "" where none is missing, or it cannot be known."""
    sizes = [n for start in dump.starts.values() if type(n := start.get("world_size")) is int and 0 < n <= _MAX_RANKS]
    absent = sorted(set(range(max(sizes, default=0))) - set(dump.ranks))
    if not absent:
        return ""
    chosen = value_at(dump.run, "probe", "ranks")
    why = "others were chosen" if chosen else "never started, or written elsewhere?"
    named = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    ranks, are = ("rank", "is") if len(absent) == 1 else ("ranks", "are")
    return f"{ranks} {named} of {max(sizes)} {are} missing ({why}): nothing of what was computed there is compared"


def _read_run(path: Path) -> tuple[dict[str, Any], bool]:
    file = path / RUN_JSON
    try:
        fd = open_regular(file)
    except FileNotFoundError:
        return {}, True
    except OSError as e:
        raise DumpError(f"cannot read {file}: {e.strerror or e}") from None
    with os.fdopen(fd, "rb") as f:
        text = f.read(_MAX_RUN_JSON + 1)
    try:
        run = json.loads(text) if len(text) <= _MAX_RUN_JSON else None
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict):
        raise DumpError(f"{file} is damaged: not the JSON object it should be; restore it, or delete it to go without")
    check_schema(run, file)
    return run, False


Ranges = tuple[tuple[int, int], ...]


def run_json(dump: Path) -> dict[str, Any]:
    """run.json of a directory; {} where it has none that can be read (opening the dump tells why)."""
    return object_in(dump / "run.json", 1 << 24)


def model_of(run: object) -> Path | None:
    """The model's directory by run.json, where it is on this machine."""
    path = value_at(run, "model", "path")
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    return Path(path) if Path(path).is_dir() else None


@dataclass(frozen=True)
class Selection:
    """Empty means all. names: globs over the tap, ``tap/role`` or the record's whole name, ``!`` excludes and the last
    that matches decides; steps, ranks, calls: ranges with both ends in; requests: globs over a request's id, or the
    beginning of its prompt's hash; roles: globs; in both ``!`` as with names. Parameters have no step: where steps are
    named they are chosen only if ``parameters`` is set."""

    names: tuple[str, ...] = ()
    steps: Ranges = ()
    ranks: Ranges = ()
    requests: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    calls: Ranges = ()
    parameters: bool = False

    def apply(self, dump: Dump, padding: bool = False) -> ChosenRecords:
        """The chosen records with their index in ``dump.records``; behind them those of ``dump.padding``."""
        records = joined(dump.records, dump.padding if padding else [])
        firsts, which = places_of(records)
        fits = cache(self._fits)
        keep = np.fromiter((fits(r.tap, r.role, r.call, r.name) for r in firsts), bool, len(firsts))[which]
        for ranges, name in ((self.ranks, "rank"), (self.steps, "step")):
            if ranges:
                values, of = np.unique(numbers_of(records, name), return_inverse=True)
                known = [within(ranges, v) if v >= 0 else self.parameters for v in values.tolist()]
                keep &= np.array(known, bool)[of]
        chosen = ChosenRecords(records, np.flatnonzero(keep))
        if not self.requests:
            return chosen
        wanted = self._requests(dump)
        of_requests = np.fromiter((holds(dump, r, wanted) for _, r in chosen), bool, len(chosen))
        return ChosenRecords(records, chosen.at[of_requests])

    def _fits(self, tap: str, role: str, call: int, name: str) -> bool:
        by_name = matches(self.names, (tap, f"{tap}/{role}", name))
        return by_name and matches(self.roles, (role,)) and within(self.calls, call)

    def _requests(self, dump: Dump) -> set[tuple[int, int]]:
        return {key for key, request in dump.requests.items() if names_request(self.requests, request)}


def names_request(globs: Sequence[str], request: Request) -> bool:
    """Whether ``globs`` choose ``request``: one matches an id of it, or is the beginning (6 digits or more) of its
    prompt's hash; ``!`` and several as in `matches`."""
    begun = [p for g in globs if len(p := g.lstrip("!")) >= 6 and request.prompt.startswith(p)]
    return matches(globs, (request.id, request.internal_id, *begun))


def holds(dump: Dump, record: Record, requests: set[tuple[int, int]]) -> bool:
    """Whether one of the record's rows belongs to one of ``requests``, as (rank, req)."""
    space = row_space(dump, record)
    return space is not None and any((record.rank, s.req) in requests for s in space.segments)


def rows_of(dump: Dump, record: Record, requests: Sequence[str], positions: Ranges = ()) -> np.ndarray:
    """Indices (int64, ascending) of the record's rows that belong to a request named by ``requests`` (all if empty) and
    lie at one of ``positions``."""
    space = row_space(dump, record)
    found = []
    for s, rows in space.stretches() if space else ():
        request = dump.requests.get((record.rank, s.req))
        if not requests or (request is not None and names_request(requests, request)):
            pos = np.arange(s.pos, s.pos + s.n)
            keep = np.zeros(s.n, bool) if positions else np.ones(s.n, bool)
            for low, high in positions:
                keep |= (pos >= low) & (pos <= high)
            found.append(rows.start + np.flatnonzero(keep))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def matches(globs: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of ``names`` is chosen: the last glob that matches decides; exclusions alone choose the rest."""
    chosen = all(g.startswith("!") for g in globs)
    for g in globs:
        if any(fnmatchcase(name, g.lstrip("!")) for name in names):
            chosen = not g.startswith("!")
    return chosen


def nearest(globs: Sequence[str], names: Iterable[str], most: int = 3) -> list[str]:
    """Of ``names``, those that globs which match none of them may have meant, names that hold one's letters first; some
    of all where none is near."""
    known = sorted(set(names))[:_COMPARED]
    found: list[str] = []
    for glob in globs:
        word = "".join(c for c in glob.strip() if c not in "!*?[]")
        if word:
            found += [n for n in known if word in n or word.lower() in n.lower()][:most]
            found += get_close_matches(word, known, n=most, cutoff=0.3)
    return list(dict.fromkeys(found))[:most] or known[:most]


_COMPARED = 4096
"""ChosenRecords: names that a mistyped one is compared with, a second's work."""


def within(ranges: Ranges, value: int) -> bool:
    """Whether ``value`` lies in one of the closed ``ranges``; in none at all everything does."""
    return not ranges or any(low <= value <= high for low, high in ranges)
