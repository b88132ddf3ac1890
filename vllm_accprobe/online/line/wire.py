"""One connection, piece by piece, with a deadline for each.

The problem: a socket's timeout starts anew with each byte, so that a peer that sends one a minute holds its place for
ever. The idea: whoever waits for a piece says until when all of it must be there; the buffer is made for a length that
the limits allow. Not here: the pieces (frames.py), who connects (sender.py, receiver.py).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

from vllm_accprobe.online import frames
from vllm_accprobe.online.frames import FrameError

HALF_S = 30.0
"""Chosen: for the rest of a piece that has begun; a megabyte over a line of 300 kbit/s."""


class Broken(Exception):
    """The line is broken, or the other side says nothing any more: another connection may go on."""


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

    def receive(self, within: float, most: int | None = None) -> tuple[int, bytearray]:
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
            self.send(frames.words(frames.REFUSED, {"why": why[:500], "again": again}), 2.0)
        except (Broken, FrameError):
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
