"""Takes lines, says who may speak, and puts what they bring where it belongs.

The problem: whoever can reach the port can connect: with no certificate, with a foreign one, with garbage, with half a
line, ten thousand times. The idea: a peer has seconds for TLS and its first words, and memory for what the limits say;
of those that have not said who they are only so many are kept, the oldest of them goes first, so that an honest one,
which needs milliseconds, always comes through. A thread for each rank reads, writes and answers; it reads nothing while
it writes, or waits for the checks. Not here: what the pieces mean (mirror.py, arrivals.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

from vllm_accprobe.online import frames
from vllm_accprobe.online.arrivals import ArrivedRanks, RankArrival
from vllm_accprobe.online.frames import END, HAVE, HELLO, READY, SYNC, WELCOME, WORDS, FrameError
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.line import tls
from vllm_accprobe.online.line.refusals import Refusals
from vllm_accprobe.online.line.wire import Broken, Wire
from vllm_accprobe.online.mirror import MirrorError

FIRST_S = 10.0
"""Chosen: for TLS, and again for the first words."""
SILENT_S = 60.0
"""Chosen: without a word; a sender says so every ten seconds that it is there."""
UNKNOWN = 128
"""Chosen: peers that have not said who they are, at once."""
KNOWN = 1024
"""Chosen: ranks at once."""
_TURN_S = 60.0


class Receiver:
    """Listens at ``endpoint`` (port 0: any) until `close`. Raises OSError, TlsError."""

    def __init__(self, endpoint: Endpoint, arrivals: ArrivedRanks, say: Callable[[str], object]):
        self.arrivals, self._say = arrivals, say
        self.refusals = Refusals(say)
        self._context = tls.context(endpoint.tls, tls.SERVER) if endpoint.tls is not None else None
        if self._context is None:
            tls.require_loopback(endpoint.host, "--host")
        family = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((endpoint.host, endpoint.port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._unknown: dict[Wire, None] = {}
        self._known: dict[Wire, None] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="accprobe-accept", daemon=True).start()

    def close(self) -> None:
        """Takes no more lines, and ends those that are there."""
        self.arrivals.stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            open_ones = [*self._unknown, *self._known]
        for wire in open_ones:
            wire.cut()

    def _accept(self) -> None:
        while not self.arrivals.stop.is_set():
            try:
                plain, address = self._listener.accept()
            except OSError:
                if self.arrivals.stop.wait(0.05) or self._listener.fileno() < 0:
                    return
                continue  # no file handle is left, perhaps: those that are open go on
            wire = Wire(plain)
            with self._lock:
                oldest = next(iter(self._unknown)) if len(self._unknown) >= UNKNOWN else None
                if oldest is not None:
                    self._unknown.pop(oldest)
                self._unknown[wire] = None
            if oldest is not None:
                oldest.cut()
            threading.Thread(target=self._peer, args=(wire, str(address[0])), daemon=True).start()

    def _peer(self, wire: Wire, address: str) -> None:
        try:
            self._greeted(wire, address)
        except Exception as error:  # whatever one peer brings about, the others are served
            self.refusals.add(address, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._unknown.pop(wire, None)
                self._known.pop(wire, None)
            wire.cut()

    def _greeted(self, wire: Wire, address: str) -> None:
        if self._context is not None and not self._secured(wire, address):
            return
        try:
            wire.send([frames.head(READY, 0)], FIRST_S)
            kind, body = wire.receive(FIRST_S, WORDS)
            if kind == READY:  # over a plain line the sender speaks first
                kind, body = wire.receive(FIRST_S, WORDS)
            if kind != HELLO:
                raise FrameError("its first words are no greeting")
            rank, arrival = self.arrivals.begin(frames.said_in(body))
        except Broken as why:
            self.refusals.add(address, str(why))
            return
        except (FrameError, MirrorError, OSError) as why:
            self.refusals.add(address, str(why))
            wire.refuse(str(why))
            return
        with self._lock:
            if self._unknown.pop(wire, 0) == 0 or len(self._known) >= KNOWN:  # it was the oldest, and had to go
                return
            self._known[wire] = None
        self._rank(wire, rank, arrival, address)

    def _secured(self, wire: Wire, address: str) -> bool:
        assert self._context is not None
        plain = wire.socket
        try:
            plain.settimeout(FIRST_S)
            if plain.recv(len(frames.MAGIC), socket.MSG_PEEK) == frames.MAGIC:  # a sender of ours, without TLS
                self.refusals.add(address, "it does not speak TLS")
                wire.refuse("it wants TLS: name the folder of certificates with --tls")
                return False
            wire.socket = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            wire.socket.do_handshake()  # type: ignore[attr-defined]
        except (OSError, ValueError) as error:
            self.refusals.add(address, tls.told(error))
            if isinstance(error, ssl.SSLError):
                wire.close()  # its alert is to arrive
            return False
        return True

    def _rank(self, wire: Wire, rank: int, arrival: RankArrival, address: str) -> None:
        """Everything that one line brings."""
        before, arrival.wire = arrival.wire, wire
        if before is not None:
            before.cut()  # a line that nobody speaks on any more: its sender has made a new one
        if not arrival.turn.acquire(timeout=_TURN_S):
            wire.refuse(f"rank {rank} is still being written by another line", again=True)
            return
        try:
            arrival.mirror.drop()
            have = arrival.mirror.have()
            self._say(f"rank {rank}: a line from {address}" + (f", on from byte {have['journal']:,} of its journal"
                                                             if have["journal"] else ""))  # fmt: skip
            wire.send(frames.words(WELCOME, have))
            while not self.arrivals.stop.is_set():
                kind, body = wire.receive(SILENT_S)
                answer = arrival.apply(kind, body)
                if kind in (SYNC, END) and answer is not None:
                    self.arrivals.room()
                    wire.send(frames.words(HAVE, answer))
                    if kind == END:
                        self._say(f"rank {rank}: all is here, {arrival.mirror.nbytes / 1e6:,.1f} MB")
                        return
        except Broken as why:
            with contextlib.suppress(OSError):
                arrival.mirror.sync()  # all of it came in order: a line that often breaks is to get somewhere
            if not arrival.ended and arrival.wire is wire and not self.arrivals.stop.is_set():
                self._say(f"rank {rank}: the line broke ({why})")
        except (FrameError, MirrorError, OSError) as why:
            self.refusals.add(address, f"rank {rank}: {why}")
            wire.refuse(str(why))
        finally:
            arrival.turn.release()
