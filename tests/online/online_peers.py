"""A peer that means harm."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress

from vllm_accprobe.online import arrivals


def hostile(port: int, stop: threading.Event, context: ssl.SSLContext | None) -> None:
    """Connections without end: garbage, half a head, lengths of 2**60, a greeting of garbage; every other one is left
    open."""
    kept = []
    words = [
        b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 40, arrivals.HEAD.pack(arrivals.MAGIC, arrivals.HELLO, 1 << 60),
        arrivals.HEAD.pack(arrivals.MAGIC, arrivals.HELLO, 9)[:7],
        arrivals.HEAD.pack(arrivals.MAGIC, arrivals.HELLO, 2) + b"[]",
        arrivals.HEAD.pack(arrivals.MAGIC, arrivals.DATA, 1 << 20) + b"x" * 1000,
        b"".join(arrivals.words(arrivals.HELLO, {"protocol": 1, "rank": 1 << 60})),
        b"".join(arrivals.words(arrivals.HELLO, {"protocol": 1, "rank": -1})),
    ]  # fmt: skip
    n = 0
    while not stop.is_set():
        with suppress(OSError, ValueError):
            line: socket.socket = socket.create_connection(("127.0.0.1", port), 2)
            if context is not None and n % 3:
                line.settimeout(2)
                line = context.wrap_socket(line)
            line.sendall(words[n % len(words)])
            if n % 2:
                kept.append(line)
            else:
                line.close()
        n += 1
        if len(kept) > 200:
            kept.pop(0).close()
        time.sleep(0.002)
    for line in kept:
        line.close()
