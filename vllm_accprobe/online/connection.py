"""A dump over the line: connections, certificates, and who receives.

The problem: captured tensors are users' prompts, and whoever can reach the port can connect: without a certificate,
with garbage, with half a line, ten thousand times; lines break, and a receiver may be slower than the capture. The
idea: Python's TLS, at least 1.2, with certificates of one ca.crt on both sides, or this machine alone. A piece has a
deadline as a whole; a peer has seconds for TLS and its first words, and of those that have not said who they are only
so many are kept. A reason of refusal is printed once and counted.

Not here: the pieces and what they mean (arrivals.py), a sender (sending.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.online import arrivals as frames
from vllm_accprobe.online.keys import Endpoint

HALF_S = 30.0
"""Chosen: for the rest of a piece that has begun; a megabyte over a line of 300 kbit/s."""


class Broken(Exception):
    """The line is broken, or the other side says nothing any more: another connection may go on."""


class NotSent(DumpError):
    """One line: why a rank was not sent."""


class Wire:
    """A socket, with or without TLS, that pieces go through."""

    def __init__(self, plain: socket.socket):
        self.socket = plain
        self._back = b""

    def unread(self, first: bytes) -> None:
        """Bytes that somebody has read already, and that come first again."""
        self._back = first + self._back

    def send(self, parts: Iterable[bytes | memoryview], within: float = HALF_S) -> None:
        """Raises Broken."""
        try:
            self.socket.settimeout(within)
            for part in parts:
                self.socket.sendall(part)
        except (OSError, ValueError) as error:
            raise Broken(_why(error)) from None

    def receive(self, within: float, most: int | None = None) -> tuple[int, bytes | bytearray]:
        """The next piece, whose first byte comes ``within`` seconds. Raises Broken and FrameError."""
        first = self._exactly(1, time.monotonic() + within)
        until = time.monotonic() + min(HALF_S, within)
        kind, length = frames.length_of(bytes(first + self._exactly(frames.HEAD.size - 1, until)), most)
        return kind, self._exactly(length, until)

    def _exactly(self, n: int, until: float) -> bytearray:
        found = bytearray(n)
        view, done = memoryview(found), min(n, len(self._back))
        view[:done], self._back = self._back[:done], self._back[done:]
        while done < n:
            left = until - time.monotonic()
            if left <= 0:
                raise Broken("half a piece, and then nothing" if done else "nothing came")
            try:
                self.socket.settimeout(left)
                got = self.socket.recv_into(view[done:])
            except TimeoutError:
                continue
            except (OSError, ValueError) as error:
                raise Broken(_why(error)) from None
            if not got:
                raise Broken("the other side has closed the line")
            done += got
        return found

    def refuse(self, why: str, again: bool = False) -> None:
        """Says why and closes. again: another try may go better. Never raises."""
        try:
            self.send(frames.words(frames.REFUSED, frames.Refusal(why[:500], again)), 2.0)
        except (Broken, frames.FrameError):
            pass
        self.close()

    def close(self) -> None:
        """Closes so that what was said last arrives: what the other side still sends is read for a moment."""
        try:
            self.socket.settimeout(0.3)
            self.socket.shutdown(socket.SHUT_WR)
            until = time.monotonic() + 0.5
            while time.monotonic() < until and self.socket.recv(1 << 16):
                pass
        except (OSError, ValueError):
            pass
        self.cut()

    def cut(self) -> None:
        """Ends the connection at once, also where another thread waits for it."""
        for end in (lambda: self.socket.shutdown(socket.SHUT_RDWR), self.socket.close):
            try:
                end()
            except (OSError, ValueError):
                pass


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


_KINDS = 200
"""Chosen: pairs of address and reason that are distinguished; beyond them all are one."""


class Refusals:
    """say: gets a line."""

    def __init__(self, say: Callable[[str], object]):
        self._say = say
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, address: str, why: str) -> None:
        why = " ".join(why.split())[:200]
        with self._lock:
            key = address, why
            if key not in self._seen and len(self._seen) >= _KINDS:
                key = "others", ""
            self._seen[key] += 1
            first = self._seen[key] == 1
        if first:
            self._say(f"refused {address}: {why}" if why else "further peers are refused; they are counted")

    @property
    def total(self) -> int:
        return self._seen.total()

    def lines(self) -> list[str]:
        """For the end: how often, where a reason came more than once."""
        return [f"refused {where}, {n:,} times{': ' + why if why else ''}"
                for (where, why), n in self._seen.most_common(10) if n > 1]  # fmt: skip


CA = "ca.crt"
SERVER, CLIENT = "server", "client"
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it showed no certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    "CERTIFICATE_EXPIRED": "its certificate has expired", "UNKNOWN_CA": "its certificate is not signed by this ca.crt",
    "BAD_CERTIFICATE": "its certificate is not accepted", "CERTIFICATE_UNKNOWN": "its certificate is not accepted",
    "HTTP_REQUEST": "it speaks HTTP, not TLS", "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS from 1.2 on", "UNEXPECTED_EOF": "it closed the line",
    "HTTPS_PROXY_REQUEST": "it speaks HTTP, not TLS", "UNSUPPORTED_CERTIFICATE": "its certificate is for another use",
}  # fmt: skip


class TlsError(Exception):
    """One line: what is wrong with the certificates here, or with the other side's."""


def context(folder: Path, side: str) -> ssl.SSLContext:
    """folder: has ca.crt and SIDE.crt, SIDE.key; side: SERVER or CLIENT. Raises TlsError."""
    names = [folder / name for name in (CA, f"{side}.crt", f"{side}.key")]
    missing = [path.name for path in names if not path.is_file()]
    if missing:
        more = " (msprobe's server.key and server.crt alone encrypt, and do not prove who is there)"
        raise TlsError(f"{folder} has no {', no '.join(missing)}: docs/online.md tells how to make them"
                       f"{more if CA in missing or side == CLIENT else ''}")  # fmt: skip
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == SERVER else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.verify_mode = ssl.CERT_REQUIRED  # of the client, too; the client's context checks the host's name besides
    ca, crt, key = map(str, names)
    pair = f"{side}.crt and {side}.key", lambda: made.load_cert_chain(crt, key, password=lambda: "")
    for what, load in ((CA, lambda: made.load_verify_locations(ca)), pair):
        try:
            load()
        except (ssl.SSLError, OSError, ValueError, TypeError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise TlsError(f"{folder}: {what} cannot be used: {str(reason).lower().replace('_', ' ')}") from None
    return made


def secured(endpoint: Endpoint) -> ssl.SSLContext | None:
    """Of a receiver; None for this machine alone. Raises TlsError."""
    if endpoint.tls is not None:
        return context(endpoint.tls, SERVER)
    require_loopback(endpoint.host, "--host")
    return None


def reason_of(error: Exception) -> str:
    """Why a handshake failed, or a line that had just begun, in words of the one who was refused or refuses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message.rstrip('.')}"
    if isinstance(error, TimeoutError):
        return "no handshake in time"
    reason = str(getattr(error, "reason", "") or "")
    if known := next((text for word, text in _ALERTS.items() if word in reason), ""):
        return known
    return reason.lower().replace("_", " ") or str(getattr(error, "strerror", None) or error or "it closed the line")


def is_refusal(error: Exception) -> bool:
    """Whether the other side's TLS refused this one's certificate: trying again would not help."""
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in str(getattr(error, "reason", ""))


def require_loopback(host: str, what: str) -> None:
    """Raises TlsError where ``host`` is not this machine alone."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise TlsError(f"{what} {host}: {getattr(error, 'strerror', None) or error}") from None
    if not all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found):
        raise TlsError(f"{what} {host} is not this machine, and without certificates nothing goes over a network: name "
                       "their folder with --tls (msprobe's tls_path)")  # fmt: skip


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

    def __init__(self, endpoint: Endpoint, arrivals: frames.ArrivedRanks, say: Callable[[str], object]):
        self.arrivals, self._say = arrivals, say
        self.refusals = Refusals(say)
        self._context = secured(endpoint)
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
            wire.send([frames.head(frames.READY, 0)], FIRST_S)
            kind, body = wire.receive(FIRST_S, frames.WORDS)
            if kind == frames.READY:  # over a plain line the sender speaks first
                kind, body = wire.receive(FIRST_S, frames.WORDS)
            if kind != frames.HELLO:
                raise frames.FrameError("its first words are no greeting")
            hello = frames.said_in(frames.Hello, body)
            arrival = self.arrivals.begin(hello)
        except Broken as why:
            self.refusals.add(address, str(why))
            return
        except (frames.FrameError, frames.MirrorError, OSError) as why:
            self.refusals.add(address, str(why))
            wire.refuse(str(why))
            return
        with self._lock:
            if self._unknown.pop(wire, 0) == 0 or len(self._known) >= KNOWN:  # it was the oldest, and had to go
                return
            self._known[wire] = None
        self._rank(wire, hello.rank, arrival, address)

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
            self.refusals.add(address, reason_of(error))
            if isinstance(error, ssl.SSLError):
                wire.close()  # its alert is to arrive
            return False
        return True

    def _rank(self, wire: Wire, rank: int, arrival: frames.RankArrival, address: str) -> None:
        """Everything that one line brings."""
        before, arrival.wire = arrival.wire, wire
        if before is not None:
            before.cut()  # a connection that is no longer used: its sender has made a new one
        if not arrival.turn.acquire(timeout=_TURN_S):
            wire.refuse(f"rank {rank} is still being written by another line", again=True)
            return
        try:
            arrival.mirror.drop()
            have = arrival.mirror.have()
            on = f", on from byte {have.journal:,} of its journal" if have.journal else ""
            self._say(f"rank {rank}: a line from {address}{on}")
            wire.send(frames.words(frames.WELCOME, have))
            while not self.arrivals.stop.is_set():
                kind, body = wire.receive(SILENT_S)
                answer = arrival.apply(kind, body)
                if kind in (frames.SYNC, frames.END) and answer is not None:
                    self.arrivals.room()
                    wire.send(frames.words(frames.HAVE, answer))
                    if kind == frames.END:
                        self._say(f"rank {rank}: all is here, {arrival.mirror.nbytes / 1e6:,.1f} MB")
                        return
        except Broken as why:
            with contextlib.suppress(OSError):
                arrival.mirror.sync()  # all of it came in order: a line that often breaks is to get somewhere
            if not arrival.ended and arrival.wire is wire and not self.arrivals.stop.is_set():
                self._say(f"rank {rank}: the line broke ({why})")
        except (frames.FrameError, frames.MirrorError, OSError) as why:
            self.refusals.add(address, f"rank {rank}: {why}")
            wire.refuse(str(why))
        finally:
            arrival.turn.release()
