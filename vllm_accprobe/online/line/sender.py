"""Sends the ranks of a dump to a receiver, over lines that may break.

The problem: the receiver may be slower than the capture, restarted or out of reach for a while; the process that serves
must feel none of it. The idea: a process of its own that reads what is on the disk, a thread and a connection for each
rank. After at most four megabytes it asks for an answer, and sends no more than sixteen ahead of the answers: that the
receiver does not read is how it says wait. Whatever breaks, the next connection begins with what the receiver has. Not
here: what is sent (tail.py), what it comes to (mirror.py).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import RUN_JSON
from vllm_accprobe.online import frames
from vllm_accprobe.online.frames import END, HAVE, HELLO, PROTOCOL, READY, REFUSED, RUN, SYNC, WELCOME, FrameError
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.line import tls
from vllm_accprobe.online.line.wire import Broken, Wire
from vllm_accprobe.online.tail import RankTail, TailError

FIRST_SYNC, SYNC_BYTES, SYNC_S = 256 << 10, 4 << 20, 0.5
"""Chosen: bytes and seconds between two SYNCs; on a new line the first number, which doubles up to the second."""
AHEAD = 4
"""Chosen: SYNCs without an answer."""
POLL_S = 0.05
ALIVE_S = 10.0
"""Chosen: a line with nothing to say says so this often."""
ANSWER_S = 900.0
"""Chosen: how long a receiver may make a sender wait: it checks, and takes nothing while much is unchecked."""
IDLE_S = 30.0
"""Chosen: a journal that nobody has locked and that does not grow is over after this time."""


class NotSent(DumpError):
    """One line: why a rank was not sent."""


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
        self.context = tls.context(endpoint.tls, tls.CLIENT) if endpoint.tls is not None else None
        self.bytes = self.connections = 0
        self.tail = RankTail(dump, rank)

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
                    where = f"{self.endpoint.host}:{self.endpoint.port}"
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
            except (FrameError, TailError, OSError) as error:
                wire.cut()
                raise NotSent(f"rank {self.rank}: {error}") from None

    def _connect(self) -> Wire:
        """A line on which the receiver is READY. Raises Broken, OSError; NotSent where it refuses."""
        end = self.endpoint
        plain = socket.create_connection((end.host, end.port), timeout=10.0)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.context is None:
            wire = Wire(plain)
            wire.send([frames.head(READY, 0)])  # a receiver that awaits TLS answers this at once
            return self._ready(wire)
        try:
            return self._ready(Wire(self.context.wrap_socket(plain, server_hostname=end.host)))
        except ssl.SSLError as error:
            plain.close()
            if tls.is_refusal(error):
                raise NotSent(_refused(end, error)) from None
            if "WRONG_VERSION" in str(error.reason):
                raise NotSent(f"{end.host}:{end.port} does not speak TLS: leave --tls away, or give it one") from None
            raise Broken(tls.told(error)) from None

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
            if tls.is_refusal(error):
                raise NotSent(_refused(self.endpoint, error)) from None
            raise Broken(tls.told(error)) from None
        except FrameError:
            wire.cut()
            raise NotSent(f"{self.endpoint.host}:{self.endpoint.port} is no receiver of accprobe") from None
        self._expect(kind, body, READY)
        return wire

    def _expect(self, kind: int, body: bytearray, wanted: int) -> dict[str, Any]:
        if kind == REFUSED:
            said = frames.said_in(body)
            if said.get("again") is True:
                raise Broken(str(said.get("why"))[:500])
            raise NotSent(f"rank {self.rank}: the receiver refuses: {str(said.get('why'))[:500]}")
        if kind != wanted:
            raise FrameError("the receiver answers something else than was asked")
        return frames.said_in(body) if body else {}

    def _serve(self, wire: Wire) -> None:
        said: dict[str, Any] = {"protocol": PROTOCOL, "rank": self.rank, "totals": self.totals}
        wire.send(frames.words(HELLO, said))
        self.tail.begin(self._expect(*wire.receive(ANSWER_S), WELCOME))
        try:
            text = (self.dump / RUN_JSON).read_bytes()[: frames.CHUNK + 1]
            if len(text) <= frames.CHUNK:
                wire.send([frames.head(RUN, len(text)), text])
        except FileNotFoundError:
            pass
        waiting, unsaid, most = 0, 0, FIRST_SYNC
        quiet = heard = time.monotonic()
        while not self._stop.is_set():
            for parts, n in self.tail.pieces():
                wire.send(parts, ANSWER_S)
                self.bytes += n
                unsaid += n
                if unsaid >= most or time.monotonic() - heard > SYNC_S:
                    waiting, unsaid, heard = self._ask(wire, waiting), 0, time.monotonic()
                    most = min(most * 2, SYNC_BYTES)
                    while waiting >= AHEAD:
                        waiting = self._hear(wire, waiting)
                quiet = time.monotonic()
                if self._stop.is_set():
                    return
            now = time.monotonic()
            if unsaid or now - heard > ALIVE_S:
                waiting, unsaid, heard = self._ask(wire, waiting), 0, now
            while waiting:
                waiting = self._hear(wire, waiting)
            if self._over(now - quiet):
                wire.send(frames.words(END, {"journal": self.tail.at}))
                self._expect(*wire.receive(ANSWER_S), HAVE)
                return
            self._stop.wait(POLL_S)

    def _over(self, quiet: float) -> bool:
        if not self.follow or self.tail.ended:
            return True
        if quiet > IDLE_S and self.tail.abandoned():
            self._say(f"rank {self.rank}: its journal has no end and nobody writes it any more: sent as it is")
            return True
        return False

    def _ask(self, wire: Wire, waiting: int) -> int:
        wire.send([frames.head(SYNC, 0)], ANSWER_S)
        return waiting + 1

    def _hear(self, wire: Wire, waiting: int) -> int:
        self._expect(*wire.receive(ANSWER_S), HAVE)
        return waiting - 1


def _refused(end: Endpoint, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{end.host}:{end.port}: its {tls.told(error)}"
    said = tls.told(error).replace("it showed", "this side showed").replace("its certificate", "its own certificate")
    return f"{end.host}:{end.port} refuses this side: {said}"
