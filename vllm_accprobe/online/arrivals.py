"""What has arrived, of all ranks, whichever way it came: the sender's dump again, file by file, read while it grows.

The problem: what arrives was written by whoever could connect; a line breaks, a receiver is killed, and nothing may be
lost or be there twice. The idea: a piece is twelve bytes (a word, a kind, a length) and a body of raw bytes or one flat
JSON object; its length is checked against the kind's limit before it is read, and nothing is unpickled. A `RankTail`
reads whole lines of a journal and first the payloads they name; a `RankMirror` appends them where they belong: what a
receiver has is the length of its files. At a SYNC payloads reach the disk before the lines that name them, so that
every line can be read after any kill. `ArrivedRanks` knows which ranks there are to be, and makes senders wait while
too much is unchecked.

Not here: sockets (connection.py), a shared folder (shared.py), the checks (serving.py, live.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import xxhash

from vllm_accprobe.dump import files
from vllm_accprobe.dump.decode import Count, DecodeError, at_most, between, decode, load, object_in, parse, value_at
from vllm_accprobe.dump.files import HEADER_BYTES, MAX_LINE, DumpError, open_regular
from vllm_accprobe.dump.journal_writer import lock
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON, rank_dir
from vllm_accprobe.refusals import full_disk
from vllm_accprobe.whole_file import NoSpace, no_space, write_private

HELLO, WELCOME, RUN, DATA, JOURNAL_FRAME, SYNC, HAVE, END, REFUSED, READY = range(1, 11)
PROTOCOL = 1
HEAD = struct.Struct("<3sBQ")
PLACE = struct.Struct("<QQ")
"""Before the bytes of a segment and of the journal: segment (0 of the journal), offset in its data."""
MAGIC = b"ap1"
CHUNK = 1 << 20
"""Chosen: bytes of a payload that travel in one piece."""
WORDS = 64 << 10
"""Chosen: the longest JSON object but WELCOME's and RUN's."""
_LIMITS = {
    HELLO: WORDS, WELCOME: CHUNK, RUN: CHUNK, DATA: CHUNK + PLACE.size, JOURNAL_FRAME: CHUNK + PLACE.size, SYNC: 0,
    HAVE: WORDS, END: WORDS, REFUSED: WORDS, READY: 0,
}  # fmt: skip
_NO_BYTES = xxhash.xxh3_128().hexdigest()
RANK_FOLDER = re.compile(r"rank(\d{4,5})", re.ASCII)
MOST_SEGMENTS = 1 << 14
"""Chosen: of one rank; at a gigabyte each more than any disk holds."""
MOST_RANKS = 1 << 16


class FrameError(Exception):
    """One line: what arrived is none of ours."""


def head(kind: int, length: int) -> bytes:
    return HEAD.pack(MAGIC, kind, length)


def words(kind: int, message: Hello | Have | Refusal) -> list[bytes]:
    """A piece of JSON. Raises FrameError where it is longer than its kind may be."""
    body = orjson.dumps({**asdict(message), "protocol": PROTOCOL} if isinstance(message, Hello) else message)
    if len(body) > _LIMITS[kind]:
        raise FrameError(f"{len(body):,} bytes of JSON are more than the {_LIMITS[kind]:,} that may be sent")
    return [head(kind, len(body)), body]


def placed(kind: int, segment: int, offset: int, body: bytes | memoryview) -> list[bytes | memoryview]:
    """A piece of a segment's data, or of the journal."""
    return [head(kind, PLACE.size + len(body)) + PLACE.pack(segment, offset), body]


def length_of(data: bytes, most: int | None = None) -> tuple[int, int]:
    """(kind, length of the body) of twelve bytes. most: a limit besides the kind's. Raises FrameError."""
    magic, kind, length = HEAD.unpack(data)
    if magic != MAGIC or kind not in _LIMITS:
        raise FrameError("it does not speak accprobe's protocol")
    limit = _LIMITS[kind] if most is None else min(most, _LIMITS[kind])
    if length > limit:
        raise FrameError(f"it announces {length:,} bytes where {limit:,} are allowed")
    return kind, length


def place_of(body: bytes | bytearray | memoryview) -> tuple[int, int, memoryview]:
    """(segment, offset, bytes) of a placed piece. Raises FrameError."""
    if len(body) < PLACE.size:
        raise FrameError("a piece is too short for its place")
    segment, offset = PLACE.unpack_from(body)
    return segment, offset, memoryview(body)[PLACE.size :]


@dataclass(frozen=True)
class Hello:
    """rank: of the dump that is sent. totals: its outputs and taps, None where its sender cannot know; run: the digest
    of its journal's first line, where it comes through a folder."""

    rank: Annotated[int, between(0, MOST_RANKS)]
    totals: tuple[Count, Count] | None = None
    run: str = ""


@dataclass(frozen=True)
class Have:
    """What a receiver has of a rank: the journal's length, its digest (XXH3-128), the length of each segment's data.
    The answer to a SYNC, and an END, say the journal's length alone."""

    journal: Annotated[int, between(0, 1 << 50)] = 0
    digest: str = _NO_BYTES
    segments: Annotated[tuple[tuple[Count, Count], ...], at_most(MOST_SEGMENTS)] = ()


@dataclass(frozen=True)
class Refusal:
    """why: in a line. again: another try may go better."""

    why: str
    again: bool = False


Said = TypeVar("Said")


def said_in(kind: type[Said], body: bytes | bytearray | memoryview) -> Said:
    """The JSON in a body as ``kind``. Raises FrameError."""
    try:
        return parse(kind, bytes(body), CHUNK, {"protocol": PROTOCOL} if kind is Hello else {})
    except DecodeError as why:
        raise FrameError(f"its words are not this protocol's ({why}): is it the same accprobe?") from None


def run_piece(dump: Path) -> list[bytes]:
    """run.json of a dump; [] where there is none, or one that is too long."""
    try:
        text = (dump / RUN_JSON).read_bytes()[: CHUNK + 1]
    except OSError:
        return []
    return [head(RUN, len(text)), text] if len(text) <= CHUNK else []


def pieces(read: Callable[[int], bytes], until: int) -> Iterator[tuple[int, bytes]]:
    """The pieces in ``until`` bytes that ``read`` gives. Raises FrameError."""
    left = until
    while left:
        if left < HEAD.size:
            raise FrameError("a batch ends within a piece")
        kind, length = length_of(read(HEAD.size))
        left -= HEAD.size + length
        if left < 0:
            raise FrameError("a batch ends within a piece")
        yield kind, read(length)


_PENDING = 8 << 20
"""Chosen: bytes of journal that wait for their SYNC, at most."""
_SEGMENT = re.compile(r"seg-(\d{5,9})\.safetensors\.part", re.ASCII)
_sync = getattr(os, "fdatasync", os.fsync)


class MirrorError(Exception):
    """One line: why nothing more of this rank is taken."""


@contextlib.contextmanager
def _room_on_disk(place: Path) -> Iterator[None]:
    """Makes a full disk a MirrorError: a piece that comes again does not fit either."""
    try:
        yield
    except OSError as error:
        if (code := no_space(error)) is None:
            raise
        raise MirrorError(full_disk(error if error.filename else NoSpace(code, place), code)) from None


class RankMirror:
    """The files of one rank below ``root``. budget: bytes that they may have. Raises OSError, MirrorError."""

    def __init__(self, root: Path, rank: int, budget: int):
        self.rank, self.budget = rank, budget
        self.directory = root / rank_dir(rank)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal = _opened(self.directory / JOURNAL)
        self.written = os.fstat(self._journal).st_size
        self._hash = xxhash.xxh3_128()
        _add(self._hash, self._journal, self.written)
        self._pending = bytearray()
        self._files: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        for entry in os.scandir(self.directory):
            match = _SEGMENT.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                self.segments[int(match[1])] = max(entry.stat(follow_symlinks=False).st_size - HEADER_BYTES, 0)

    @property
    def journal_bytes(self) -> int:
        """Of the journal, those that wait for a SYNC too."""
        return self.written + len(self._pending)

    @property
    def waits(self) -> bool:
        """Whether something waits for a SYNC."""
        return bool(self._pending)

    @property
    def nbytes(self) -> int:
        return self.journal_bytes + sum(self.segments.values())

    def have(self) -> Have:
        """What WELCOME says."""
        return Have(self.written, self._hash.hexdigest(), tuple(sorted(self.segments.items())))

    def data(self, segment: int, offset: int, body: memoryview) -> None:
        """Bytes of a segment's data. Raises FrameError, MirrorError, OSError."""
        here = self.segments.get(segment, 0)
        body = _new(body, offset, here, f"segment {segment}")
        if not len(body):
            return
        if segment >= MOST_SEGMENTS:
            raise FrameError(f"segment {segment} is beyond all that a rank may have")
        self._room(len(body))
        if segment not in self._files:
            fd = self._files[segment] = _opened(self.directory / files.part_name(segment))
            files.write_all(fd, (HEADER_BYTES - 8).to_bytes(8, "little"), 0)
        files.write_all(self._files[segment], body, HEADER_BYTES + here)
        self.segments[segment] = here + len(body)

    def journal(self, offset: int, body: memoryview) -> None:
        """Bytes of the journal; they count from the next SYNC on. Raises FrameError, MirrorError."""
        body = _new(body, offset, self.journal_bytes, "the journal")
        self._room(len(body))
        if len(self._pending) + len(body) > _PENDING:
            raise FrameError("too much of a journal without a SYNC")
        self._pending += body

    def sync(self) -> int:
        """Puts all that came on the disk; the journal's length then. Raises OSError."""
        for fd in self._files.values():
            _sync(fd)
        if self._pending:
            files.write_all(self._journal, bytes(self._pending), self.written)
            _sync(self._journal)
            self._hash.update(self._pending)
            self.written += len(self._pending)
            self._pending.clear()
        while len(self._files) > 2:  # a rank fills one segment after the other
            os.close(self._files.pop(min(self._files)))
        return self.written

    def drop(self) -> None:
        """What waits for a SYNC is let go: it will be sent again."""
        self._pending.clear()

    def close(self) -> None:
        self.drop()
        for fd in (*self._files.values(), self._journal):
            os.close(fd)
        self._files.clear()

    def _room(self, n: int) -> None:
        if self.nbytes + n > self.budget:
            raise MirrorError(f"the receiver's budget of {self.budget / 1e9:.3g} GB for a rank is spent (--max-gb)")


def keep_run(root: Path, text: bytes) -> None:
    """run.json, whole or not at all. Raises OSError, FrameError."""
    try:
        write_private(root / RUN_JSON, text.decode())
    except UnicodeDecodeError:
        raise FrameError("run.json is no text") from None


def digest_of(path: Path, length: int) -> str | None:
    """XXH3-128 of a file's first bytes; None where it is shorter. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        found = xxhash.xxh3_128()
        return found.hexdigest() if _add(found, fd, length) else None
    finally:
        os.close(fd)


def _add(hasher: Any, fd: int, length: int) -> bool:
    at = 0
    while at < length:
        block = os.pread(fd, min(CHUNK, length - at), at)
        if not block:
            return False
        hasher.update(block)
        at += len(block)
    return True


def _new(body: memoryview, offset: int, here: int, what: str) -> memoryview:
    """The bytes that are not here yet. Raises FrameError for a gap."""
    if offset > here:
        raise FrameError(f"{what} goes on at byte {offset:,}, where {here:,} are here")
    return body[here - offset :]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)


_AT_ONCE = 64 << 10
"""Chosen: bytes of journal whose payloads are sent together."""
Piece = list[bytes | memoryview]


class TailError(Exception):
    """One line: why this rank cannot be sent."""


class RankTail:
    """Rank ``rank`` of the dump at ``root``. Raises TailError where it has no journal."""

    def __init__(self, root: Path, rank: int):
        self.rank, self.directory = rank, root / rank_dir(rank)
        self.path = self.directory / JOURNAL
        try:
            self._journal = open_regular(self.path)
        except OSError as error:
            raise TailError(f"{self.path} cannot be read: {error.strerror or error}") from None
        self.at = 0
        self.ended = False
        """The journal's last line has been read, or sent before."""
        self.lines = 0
        self._sent: dict[int, int] = {}

    def begin(self, have: Have) -> None:
        """Goes on behind what the receiver has. Raises TailError where that is of another run."""
        if digest_of(self.path, have.journal) != have.digest:
            raise TailError(f"the receiver holds rank {self.rank} of another run: give it another --out")
        self.at, self._sent = have.journal, dict(have.segments)
        self.ended = self._ended_before(self.at)

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """What there is now, to the last whole line: pieces, each with how many bytes it has. Raises OSError,
        TailError."""
        while chunk := self._lines():
            need: dict[int, int] = {}
            for line in chunk.splitlines():
                self._note_payload(line, need)
            for segment, stop in sorted(need.items()):
                yield from self._data(segment, stop)
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK):
                part = view[start : start + CHUNK]
                yield placed(JOURNAL_FRAME, 0, self.at, part), len(part)
                self.at += len(part)

    def abandoned(self) -> bool:
        """Whether this journal is no longer written: its writer holds a lock on it until it ends. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return lock(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._journal)

    def _lines(self) -> bytes:
        """The next whole lines, b"" where there is none."""
        size = _AT_ONCE
        while True:
            block = os.pread(self._journal, size, self.at)
            end = block.rfind(b"\n") + 1
            if end or len(block) < size:
                return block[:end]
            if size > MAX_LINE:
                raise TailError(f"{self.path} has a line of more than {MAX_LINE >> 20} MiB")
            size *= 4

    def _note_payload(self, line: bytes, need: dict[int, int]) -> None:
        """Notes the bytes that a line names. A line that is not understood names none; the receiver counts it."""
        self.lines += 1
        try:
            e = orjson.loads(line)
        except ValueError:
            return
        if not isinstance(e, dict):
            return
        self.ended = self.ended or e.get("event") == "end"
        segment, off, nbytes = e.get("seg"), e.get("off"), e.get("nbytes")
        if type(segment) is int and type(off) is int and type(nbytes) is int and min(segment, off, nbytes) >= 0:
            need[segment] = max(need.get(segment, 0), off + nbytes)

    def _data(self, segment: int, stop: int) -> Iterator[tuple[Piece, int]]:
        at = self._sent.get(segment, 0)
        if at >= stop or segment >= MOST_SEGMENTS:
            return
        try:
            data = files.find_segment(self.directory, segment)
            fd = open_regular(data.path)
        except (DumpError, OSError):
            return  # the payloads are lost: whoever opens the copy says so of each
        try:
            while at < min(stop, data.size):
                block = os.pread(fd, min(CHUNK, stop - at), data.start + at)
                if not block:
                    break
                yield placed(DATA, segment, at, block), len(block)
                at = self._sent[segment] = at + len(block)
        finally:
            os.close(fd)

    def _ended_before(self, at: int) -> bool:
        if not at:
            return False
        start = max(at - _AT_ONCE, 0)
        self.ended, before = False, self.lines
        for line in os.pread(self._journal, at - start, start).splitlines():
            self._note_payload(line, {})
        self.lines = before
        return self.ended


HOLD_S = 600.0
"""Chosen: after this time a little more is taken even if nothing was checked: shorter than a sender's patience."""
_FIRST_LINE = 1 << 20
_KEPT = "arrival.json"


@dataclass(frozen=True)
class _Kept:
    """arrival.json: what a receiver that is started again is to know besides the files."""

    totals: tuple[Count, Count] | None = None
    ended: int | None = None


class RankArrival:
    """One rank. totals: outputs and taps of it, None where its sender cannot know; ended: all of it is here; wire: who
    brings it now; turn: held by whoever applies pieces."""

    def __init__(self, root: Path, rank: int, budget: int):
        self.mirror = RankMirror(root, rank, budget)
        self._root, self._kept = root, self.mirror.directory / _KEPT
        try:
            kept = load(_Kept, self._kept, _FIRST_LINE)
        except (OSError, DecodeError):
            kept = _Kept()
        self.totals = kept.totals
        self.ended = bool(self.mirror.written) and kept.ended == self.mirror.written
        self.wire: Any = None
        self.turn = threading.Lock()

    def keep(self, totals: tuple[int, int] | None) -> None:
        """What a receiver that is started again is to know besides the files. Raises OSError."""
        self.totals = totals
        kept = _Kept(totals, self.mirror.written if self.ended else None)
        write_private(self._kept, json.dumps(asdict(kept)) + "\n")

    def apply(self, kind: int, body: bytes | bytearray) -> Have | None:
        """Takes a piece; what is to be answered where it asks. Raises FrameError, MirrorError, OSError."""
        with _room_on_disk(self.mirror.directory):
            return self._taken(kind, body)

    def _taken(self, kind: int, body: bytes | bytearray) -> Have | None:
        if kind == DATA:
            self.mirror.data(*place_of(body))
        elif kind == JOURNAL_FRAME:
            _, offset, lines = place_of(body)
            self.mirror.journal(offset, lines)
            self.ended = self.ended and not self.mirror.waits
        elif kind == RUN:
            keep_run(self._root, bytes(body))
        elif kind == SYNC:
            return Have(self.mirror.sync())
        elif kind == END:
            have = self.mirror.sync()
            if said_in(Have, body).journal != have:
                raise FrameError("the end is not where the journal ends")
            self.ended = True
            self.keep(self.totals)
            return Have(have)
        else:
            raise FrameError("a piece that no sender sends")
        return None


class ArrivedRanks:
    """root: where the copy of the dump grows; ranks: those that are taken, None for all; budget: bytes for each rank;
    ahead: bytes that may lie unchecked; say: gets lines."""

    def __init__(
        self, root: Path, ranks: Sequence[int] | None, *, budget: int, ahead: int, say: Callable[[str], object]
    ):  # fmt: skip
        self.root, self.budget, self.ahead, self.say = root, budget, ahead, say
        self.wanted = None if ranks is None else frozenset(ranks)
        self.ranks: dict[int, RankArrival] = {}
        self.checked_bytes = 0
        self.busy = False
        """Whether a check is under way; while none is, nobody has to wait."""
        self.stop = threading.Event()
        self._lock = threading.Lock()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(root.iterdir()):
            match = RANK_FOLDER.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink() and (ranks is None or int(match[1]) in ranks):
                self.ranks[int(match[1])] = RankArrival(root, int(match[1]), budget)

    def begin(self, hello: Hello) -> RankArrival:
        """The rank that a HELLO names. Raises MirrorError, OSError."""
        rank = hello.rank
        if self.wanted is not None and rank not in self.wanted:
            raise MirrorError(f"rank {rank} is not selected (--ranks, rank_list)")
        with _room_on_disk(self.root):
            with self._lock:
                if rank not in self.ranks:
                    self.ranks[rank] = RankArrival(self.root, rank, self.budget)
                found = self.ranks[rank]
            if found.totals != hello.totals:
                found.keep(hello.totals)
        return found

    @property
    def nbytes(self) -> int:
        return sum(r.mirror.nbytes for r in list(self.ranks.values()))

    @property
    def ended(self) -> list[int]:
        return sorted(rank for rank, r in list(self.ranks.items()) if r.ended)

    def room(self) -> None:
        """Waits while too much is unchecked: no further piece is read meanwhile, so that its sender waits, too."""
        until = time.monotonic() + HOLD_S
        while (
            self.busy and self.nbytes - self.checked_bytes > self.ahead and time.monotonic() < until
            and not self.stop.wait(0.02)
        ):  # fmt: skip
            pass

    def expected(self) -> list[int]:
        """The ranks that there are to be: those asked for, or those of the run by its own words, else those seen."""
        if self.wanted is not None:
            return sorted(self.wanted)
        seen = set(self.ranks)
        sizes = [n for rank in seen if (n := _world(self.root / rank_dir(rank) / JOURNAL))]
        chosen = _chosen(self.root / RUN_JSON)
        world = range(max(sizes, default=0))
        return sorted(seen | {r for r in world if not chosen or any(a <= r <= b for a, b in chosen)})

    def complete(self) -> bool:
        """Whether all of all ranks is here."""
        return bool(self.ranks) and set(self.expected()) <= set(self.ended) and all(
            r.ended for r in list(self.ranks.values())
        )  # fmt: skip

    def totals(self) -> tuple[int, int] | None:
        """Outputs and taps of all ranks, where every sender knows them."""
        found = [self.ranks[r].totals if r in self.ranks else None for r in self.expected()]
        known = [t for t in found if t is not None]
        return (sum(t[0] for t in known), sum(t[1] for t in known)) if known and len(known) == len(found) else None


def _world(journal: Path) -> int:
    """The number of ranks by a journal's first line, 0 where it does not say."""
    try:
        _, lines, _ = next(files.journal_lines(journal, 1), (0, [], 0))
        n = value_at(json.loads(lines[0] if lines else b"{}"), "world_size")
    except (OSError, ValueError, RecursionError):
        return 0
    return n if type(n) is int and 0 < n <= MOST_RANKS else 0


def _chosen(run: Path) -> list[tuple[int, int]]:
    """The ranges of ranks that a probe was set to."""
    ranks = value_at(object_in(run, _FIRST_LINE), "probe", "ranks")
    with contextlib.suppress(DecodeError):
        return [(low, high) for low, high in decode(list[tuple[int, int]], ranks)]
    return []
