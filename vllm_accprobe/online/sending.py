"""A dump sent: all of its ranks, each by its own sender, from a process that serves no requests.

The problem: a line breaks, a folder has no line, and a receiver may be slower than the capture. The idea: one sender
for both, with a thread for each rank. It asks for an answer (SYNC) after at most four megabytes, and sends no more than
sixteen before the answers. After a break it connects again and begins with what the receiver has.

Not here: a connection (connection.py), a folder in its place (shared.py), what is sent (arrivals.py).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import JOURNAL
from vllm_accprobe.online import arrivals as frames
from vllm_accprobe.online.connection import CLIENT, Broken, NotSent, TlsError, Wire, context, is_refusal, reason_of
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.shared import POLL_S, FolderWire
from vllm_accprobe.refusals import full_disk
from vllm_accprobe.whole_file import no_space

FIRST_SYNC, SYNC_BYTES, SYNC_S = 256 << 10, 4 << 20, 0.5
"""Chosen: bytes and seconds between two SYNCs; on a new line the first number, which doubles up to the second."""
AHEAD = 4
"""Chosen: SYNCs without an answer."""
ALIVE_S = 10.0
"""Chosen: a line with nothing to say says so this often."""
ANSWER_S = 900.0
"""Chosen: how long a receiver may make a sender wait: it checks, and takes nothing while much is unchecked."""
IDLE_S = 30.0
"""Chosen: a journal that is not locked and that does not grow is over after this time."""


class RankSender:
    """Sends one rank. totals: outputs and taps (chance.Budget's) of this rank where the dump is complete, else None;
    follow: until the journal ends; patience: seconds without a connection after which it is given up; say: gets lines.
    """

    def __init__(
        self, dump: Path, rank: int, endpoint: Endpoint, *, totals: tuple[int, int] | None, follow: bool,
        patience: float, say: Callable[[str], object], stop: threading.Event,
    ):  # fmt: skip
        self.dump, self.rank, self.endpoint, self.totals, self.follow = dump, rank, endpoint, totals, follow
        self.patience, self._say, self._stop = patience, say, stop
        self.context = context(endpoint.tls, CLIENT) if endpoint.tls is not None else None
        self.bytes = self.connections = 0
        self.tail = frames.RankTail(dump, rank)

    def run(self) -> None:
        """Raises NotSent."""
        lost = time.monotonic()
        pause, why = 0.1, ""
        while not self._stop.is_set():
            try:
                wire = self._connect()
            except (Broken, OSError) as error:
                why = str(getattr(error, "strerror", None) or error)
                if time.monotonic() - lost > self.patience:
                    where = self.endpoint.shared or f"{self.endpoint.host}:{self.endpoint.port}"
                    raise NotSent(f"rank {self.rank}: no line to {where} for {self.patience:.0f} s: {why}") from None
                self._stop.wait(pause)
                pause = min(pause * 2, 2.0)
                continue
            self.connections += 1
            if self.connections > 1:
                self._say(f"rank {self.rank}: connected again")
            try:
                self._serve(wire)
                wire.close()
                return
            except Broken as error:
                self._say(f"rank {self.rank}: the line broke ({error}): connecting again")
                wire.cut()
                lost, pause = time.monotonic(), 0.1
                self._stop.wait(pause)
            except (frames.FrameError, frames.TailError, OSError) as error:
                wire.cut()
                code = no_space(error)
                why = str(error) if code is None else full_disk(error, code)
                raise NotSent(f"rank {self.rank}: {why}") from None

    def _connect(self) -> Wire | FolderWire:
        """A line on which the receiver is READY. Raises Broken, OSError; NotSent where it refuses."""
        end = self.endpoint
        if end.shared is not None:
            return FolderWire(end.shared, self.rank, self.tail.path, self.patience, self._stop)
        plain = socket.create_connection((end.host, end.port), timeout=10.0)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.context is None:
            wire = Wire(plain)
            wire.send([frames.head(frames.READY, 0)])  # a receiver that awaits TLS answers this at once
            return self._ready(wire)
        try:
            return self._ready(Wire(self.context.wrap_socket(plain, server_hostname=end.host)))
        except ssl.SSLError as error:
            plain.close()
            if is_refusal(error):
                raise NotSent(_refused(end, error)) from None
            if "WRONG_VERSION" in str(error.reason):
                raise NotSent(f"{end.host}:{end.port} does not speak TLS: leave --tls away, or give it one") from None
            raise Broken(reason_of(error)) from None

    def _ready(self, wire: Wire) -> Wire:
        """TLS 1.3 tells a client only now that its certificate was refused."""
        try:
            wire.socket.settimeout(15.0)
            first = wire.socket.recv(1)
            if not first:
                raise Broken("the receiver closed the line")
            wire.unread(first)
            kind, body = wire.receive(15.0)
        except ssl.SSLError as error:
            wire.cut()
            if is_refusal(error):
                raise NotSent(_refused(self.endpoint, error)) from None
            raise Broken(reason_of(error)) from None
        except frames.FrameError:
            wire.cut()
            raise NotSent(f"{self.endpoint.host}:{self.endpoint.port} is no receiver of accprobe") from None
        self._expect(kind, body, frames.READY)
        return wire

    def _expect(self, kind: int, body: bytes | bytearray, wanted: int) -> frames.Have:
        if kind == frames.REFUSED:
            refusal = frames.said_in(frames.Refusal, body)
            if refusal.again:
                raise Broken(refusal.why[:500])
            raise NotSent(f"rank {self.rank}: the receiver refuses: {refusal.why[:500]}")
        if kind != wanted:
            raise frames.FrameError("the receiver's answer does not fit the request")
        return frames.said_in(frames.Have, body) if body else frames.Have()

    def _serve(self, wire: Wire | FolderWire) -> None:
        wire.send(frames.words(frames.HELLO, frames.Hello(self.rank, self.totals)))
        self.tail.begin(self._expect(*wire.receive(ANSWER_S), frames.WELCOME))
        wire.send(frames.run_piece(self.dump))
        waiting, unsaid, most, sync = 0, 0, FIRST_SYNC, [frames.head(frames.SYNC, 0)]
        quiet = last = time.monotonic()
        while not self._stop.is_set():
            for parts, n in self.tail.pieces():
                wire.send(parts, ANSWER_S)
                self.bytes += n
                unsaid += n
                if unsaid >= most or time.monotonic() - last > SYNC_S:
                    wire.send(sync, ANSWER_S)
                    waiting, unsaid, last = waiting + 1, 0, time.monotonic()
                    most = min(most * 2, SYNC_BYTES)
                    waiting = self._answers(wire, waiting, AHEAD - 1)
                quiet = time.monotonic()
                if self._stop.is_set():
                    return
            now = time.monotonic()
            if unsaid or now - last > ALIVE_S:
                wire.send(sync, ANSWER_S)
                waiting, unsaid, last = waiting + 1, 0, now
            waiting = self._answers(wire, waiting, 0)
            if self._over(now - quiet):
                wire.send(frames.words(frames.END, frames.Have(self.tail.at)))
                self._expect(*wire.receive(ANSWER_S), frames.HAVE)
                return
            self._stop.wait(POLL_S)

    def _over(self, quiet: float) -> bool:
        if not self.follow or self.tail.ended:
            return True
        if quiet > IDLE_S and self.tail.abandoned():
            self._say(f"rank {self.rank}: its journal has no end and is no longer written: sent as it is")
            return True
        return False

    def _answers(self, wire: Wire | FolderWire, waiting: int, most: int) -> int:
        """Takes answers until no more than ``most`` of those that are ``waiting`` are missing; how many that are."""
        while waiting > most:
            self._expect(*wire.receive(ANSWER_S), frames.HAVE)
            waiting -= 1
        return waiting


def _refused(end: Endpoint, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{end.host}:{end.port}: its {reason_of(error)}"
    reason = reason_of(error).replace("it showed", "this side showed").replace("its certificate", "its own certificate")
    return f"{end.host}:{end.port} refuses this side: {reason}"


_POLL_S = 0.2


def send_dump(
    dump: Path, endpoint: Endpoint, ranks: Sequence[int] | None, *, follow: bool, patience: float,
    say: Callable[[str], object],
) -> str:  # fmt: skip
    """Sends ``ranks``, all if None; what was sent, in a line. Raises DumpError where a rank could not be sent."""
    totals = {} if follow else _totals(dump)
    stop = threading.Event()
    senders: dict[int, RankSender] = {}
    threads: list[threading.Thread] = []
    errors: list[DumpError] = []
    begun = time.monotonic()

    def start(rank: int) -> None:
        more = {"totals": totals.get(rank), "follow": follow, "patience": patience, "say": say, "stop": stop}
        try:
            sender = RankSender(dump, rank, endpoint, **more)  # type: ignore[arg-type]
        except (frames.TailError, TlsError) as why:
            raise DumpError(str(why)) from None
        senders[rank] = sender

        def run() -> None:
            try:
                sender.run()
            except DumpError as error:
                errors.append(error)
            except Exception as error:
                errors.append(NotSent(f"rank {rank}: {type(error).__name__}: {error}"))

        threads.append(threading.Thread(target=run, name=f"accprobe-rank-{rank}", daemon=True))
        threads[-1].start()

    try:
        waited = time.monotonic()
        while not errors:
            for rank in _ranks(dump):
                if rank not in senders and (ranks is None or rank in ranks):
                    start(rank)
            if senders and not any(t.is_alive() for t in threads):
                break
            if not senders:
                if not follow:
                    raise DumpError(f"{dump} is no dump of accprobe with such ranks: nothing can be sent; another "
                                    "tool's dump is checked with `accprobe opcheck`")  # fmt: skip
                if time.monotonic() - waited > patience:
                    raise DumpError(f"{dump}: no rank has begun to write for {patience:.0f} s")
            time.sleep(_POLL_S if follow or not senders else 0.02)
    finally:
        stop.set()
    for thread in threads:
        thread.join(5.0)
    if errors:
        raise errors[0]
    missing = sorted(set(ranks or ()) - set(senders))
    if missing:
        say(f"note: rank {missing[0]} and {len(missing) - 1} more are not in {dump}" if len(missing) > 1 else
            f"note: rank {missing[0]} is not in {dump}")  # fmt: skip
    lines = sum(s.tail.lines for s in senders.values())
    sent = sum(s.bytes for s in senders.values())
    return (f"sent: {len(senders)} rank{'s' * (len(senders) != 1)}, {lines:,} lines, {sent / 1e6:,.1f} MB in "
            f"{time.monotonic() - begun:.1f} s")  # fmt: skip


def _ranks(dump: Path) -> list[int]:
    """Those that have a journal with a line in it."""
    found = [(int(m[1]), p / JOURNAL) for p in dump.glob("rank*") if (m := frames.RANK_FOLDER.fullmatch(p.name))]
    return sorted(rank for rank, journal in found if journal.is_file() and journal.stat().st_size)


def _totals(dump: Path) -> dict[int, tuple[int, int]]:
    """By rank: outputs and taps, counted as opcheck's budget counts them (calls/records.py)."""
    outputs: dict[int, int] = defaultdict(int)
    taps: dict[int, set[tuple[str, str]]] = defaultdict(set)
    found = open_dump(dump)
    for r in found.records:
        if r.step is not None and r.role.startswith(("output", "inplace")):
            outputs[r.rank] += 1
            taps[r.rank].add((r.tap, r.role))
    return {rank: (outputs[rank], len(taps[rank])) for rank in found.ranks}
