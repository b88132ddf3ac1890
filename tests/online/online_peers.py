"""Peers that mean harm, and peers with certificates that are not theirs to use."""

import socket
import ssl
import threading
import time
from collections import Counter
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
                line = context.wrap_socket(line, server_hostname="127.0.0.1")
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


def answered(port: int, context: ssl.SSLContext, words: bytes = b"") -> bool:
    """Whether a peer with this certificate that says ``words`` gets any byte, which a trusted one does at once."""
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.settimeout(5)
        with suppress(OSError):
            wire = context.wrap_socket(line, server_hostname="127.0.0.1")
            wire.sendall(words)
            return bool(wire.recv(1))
    return False


def forged(port: int, stop: threading.Event, contexts: dict[str, ssl.SSLContext], tries: Counter[str]) -> None:
    """Connects with each of these certificates again and again; ``tries`` counts them by name, those that got an answer
    as ``NAME got in``."""
    hello = b"".join(arrivals.words(arrivals.HELLO, arrivals.Hello(0)))
    while not stop.is_set():
        for name, context in contexts.items():
            with suppress(OSError):  # a receiver that is being started again
                tries[f"{name} got in" if answered(port, context, hello) else name] += 1
        time.sleep(0.05)
