"""What another process does: it opens the dumps, measures the units that it gets, and answers in bytes.

The problem: a worker begins with nothing, must hold no more of a dump than the command would, and must report files
that cannot be read. The idea: a `Station` is made from a `Briefing` (where the files are, the row maps), so that
nothing is planned twice; it answers a batch with frames of bytes (store.py). The briefing is a pickle from the parent
process through a pipe that only these two have; nothing that comes from a dump, or from a worker, is unpickled. Not
here: who starts it, and whether it lives (distributed.py).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vllm_accprobe.align.tokens import SideRows
from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.measurer import CACHE, UnitMeasurer
from vllm_accprobe.comparison.measure.read import unread
from vllm_accprobe.comparison.plan.make_plan import Indices
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.dump.files import DumpError, SegmentData
from vllm_accprobe.dump.reader import reopen
from vllm_accprobe.formats.common.foreign import ForeignDump
from vllm_accprobe.formats.common.sniff import open_dump

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class DumpPlaces:
    """Where one dump's tensors are. data: of our own dumps, each (rank, segment); print: of another tool's, which has
    to be opened again, what its tensors were (`_print`); else ""."""

    path: Path
    data: dict[tuple[int, int], SegmentData]
    print: str = ""


@dataclass(frozen=True)
class Briefing:
    """What a worker has to know before it measures. cache: bytes of whole tensors that it may keep."""

    places: tuple[DumpPlaces, DumpPlaces]
    rows: tuple[SideRows, SideRows]
    kl: bool
    cache: int = CACHE


def side_of(dump: Any) -> DumpPlaces:
    """Raises CompareError for a dump that lies in no file."""
    if isinstance(dump, ForeignDump):
        return DumpPlaces(dump.path, {}, _print(dump))
    if not getattr(dump, "data", None) and any(r.payload is not None for r in dump.records):
        raise CompareError(f"{dump.path} was not opened from files: only this process can compare it")
    return DumpPlaces(dump.path, dict(getattr(dump, "data", {})))


class Station:
    """Raises DumpError where a dump cannot be opened, or is another than it was."""

    def __init__(self, briefing: Briefing):
        self._dumps = tuple(_open(side) for side in briefing.places)
        golden, mine = self._dumps
        self._measurer = UnitMeasurer((golden, mine), Indices(briefing.rows), briefing.cache, kl=briefing.kl)
        self._reported = [len(d.unread) for d in self._dumps]

    def answer(self, units: Sequence[Unit]) -> bytes:
        try:
            found = store.pack(self._measurer.measure(units))
        except DumpError as error:
            return store.frame({"error": str(error)})
        fresh = [d.unread[n:] for d, n in zip(self._dumps, self._reported, strict=True)]
        self._reported = [len(d.unread) for d in self._dumps]
        return found + store.frame({"unread": fresh})


def units_of_answer(answer: bytes, dumps: tuple[Any, Any], known: store.Known) -> list[MeasuredUnit]:
    """The units of a `Station`'s answer; what it could not read is remembered in ``dumps``. known: see store.unpack.
    Raises DumpError."""
    (text, data, _), *rest = store.frames(answer)
    if "error" in text:
        raise DumpError(str(text["error"]))
    for dump, sentences in zip(dumps, rest[0][0]["unread"], strict=True):
        for sentence in sentences:
            unread(dump, DumpError(sentence))
    return store.unpack(text, data, known)


def send(pipe: BinaryIO, message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes | None:
    """One message; None where whoever sends has gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    message = pipe.read(size)
    return message if len(message) == size else None


def main() -> None:
    """The protocol: a pickled `Briefing`, then pickled lists of units; each is answered. Ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command was interrupted, and ends its children itself
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints must not meet the answers
    station: Station | None = None
    while (message := receive(sys.stdin.buffer)) is not None:
        try:
            if station is None:
                station = Station(pickle.loads(message))
            else:
                send(out, station.answer(pickle.loads(message)))
        except Exception as error:  # it would fail again
            known = isinstance(error, (DumpError, CompareError))
            send(out, store.frame({"error": str(error) if known else f"{type(error).__name__}: {error}"}))
            return


def _open(side: DumpPlaces) -> Any:
    if not side.print:
        return reopen(side.path, side.data)
    dump = open_dump(side.path)
    if not isinstance(dump, ForeignDump) or _print(dump) != side.print:
        raise DumpError(f"{side.path} has changed since it was opened")
    return dump


def _print(dump: ForeignDump) -> str:
    """Equal for two openings of one dump: by these numbers its tensors are requested."""
    known = hashlib.blake2b(digest_size=16)
    for record in sorted((r for r in dump.records if r.payload is not None), key=lambda r: r.payload.off):  # type: ignore[union-attr]
        known.update(repr((record.payload, record.name, record.dtype, record.shape)).encode(errors="surrogatepass"))
    return known.hexdigest()
