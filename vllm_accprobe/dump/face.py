"""The face of a dump: what was recorded, and reading of its tensors.

Reading is one positioned read into an array that the caller may reuse, from any number of threads. Our own dumps have
this face and those of other tools get it (formats/common/foreign.py). Not here: what fills it (reader.py,
journal/reading.py), what bits mean (dtypes.py).
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError, SegmentData, open_regular, read_into
from vllm_accprobe.dump.journal.state_lines import CachedPrefix, StateFinding, StateTotals
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.schema import (
    PADDING,
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
    segment_name,
)
from vllm_accprobe.dump.weights.weight_life import Lives

_MAX_OPEN = 200


class Dump:
    """A dump of one or many ranks; made by ``open_dump``.

    run: run.json; starts: the first line of each rank's journal; records: all ranks, journal order within a rank;
    ops: calls of operators, all ranks, journal order within a rank;
    padding, padding_rows: tensors whose rows are nobody's, which are in no comparison, and how many rows they have, by
    (rank, step);
    requests by (rank, req), steps by (rank, step), rows by (rank, step, space); masks by (rank, step, req),
    what changed the request's logits before sampling; labels, those in files of their own, by
    (rank, step, tap, role, call); modules, stops and ends by rank; armed: (rank, from which step on what selection
    held), where the server was armed while it ran;
    lives: what happened to the weights, and their fingerprints after it;
    problems: sentences on what is missing, damaged or ignored; bad_lines: how many of each rank's journal were not
    understood; unread: a sentence for each file that is there and cannot be read; data: where each (rank, segment)
    lies.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = path
        self.run = run
        self.ranks: tuple[int, ...] = ()
        self.records: list[Record] = []
        self.ops: list[OpCall] = []
        self.requests: dict[tuple[int, int], Request] = {}
        self.steps: dict[tuple[int, int], Step] = {}
        self.rows: dict[tuple[int, int, str], RowSpace] = {}
        self.padding: list[Record] = []
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
    if record.rows == PADDING:
        return dump.padding_rows.get((record.rank, record.step))
    return dump.rows.get((record.rank, record.step, record.rows))


def reopen(path: Path, data: dict[tuple[int, int], SegmentData]) -> Dump:
    """A dump that can read tensors of these files and knows nothing else: for another process, told by one that has
    opened it."""
    dump = Dump(path, {})
    dump.data = dict(data)
    return dump
