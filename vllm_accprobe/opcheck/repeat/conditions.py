"""Conditions under which a race or an unwritten output shows: what memory held before, and who else is running.

The problem: an operator that forgets to write a part of its output, or whose threads write to one place, gives the
same numbers again and again on an idle machine, where the allocator hands it the same clean memory and the threads
run one after another. The idea: before each run the memory that it will be given is filled with a byte that changes
from run to run (`PATTERNS`), and every other run has threads beside it that take its cores, and on CUDA a stream of
its own beside a busy one. What an element is then, is compared by whoever ran it (repeated.py).

Memory: glibc fills what it hands out by itself (mallopt(3), M_PERTURB), but for small pieces that each thread keeps;
those, and the caching allocators of devices, are filled by allocating the sizes that are expected, writing to them and
giving them back. Where neither reaches (another C library, a kernel that keeps a workspace), nothing is found, and
nothing is said that is not so.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

PATTERNS = (0xFF, 0x7B, 0xBE)
"""Chosen: bytes that memory is filled with in turn. 0xFF is NaN in every float format of 8 to 64 bits but e5m2's kin
and -1 in integers; 0x7B a number far above activations (1.3e36 in bfloat16); 0xBE a small negative one (-0.37), which
no check for large numbers would see."""
_PERTURB = -6
_MOST_FILLED = 1 << 30
"""Bytes, chosen: what is filled in advance for one run at most."""
_COPIES = 4
"""Chosen: pieces of each size, and of twice it, since the first ones go to what the operator allocates besides."""
_SWITCH = 1e-5
"""Seconds, chosen: how soon the interpreter hands itself to another thread in a busy run; 0.005 otherwise."""


def pattern(run: int) -> int:
    """The byte of the ``run``-th run, from 0."""
    return PATTERNS[run % len(PATTERNS)]


def busy(run: int) -> bool:
    """Whether that run has company. Each pattern comes with and without it."""
    return run // len(PATTERNS) % 2 == 1


@contextlib.contextmanager
def memory(byte: int, sizes: Iterable[int], device: Any) -> Iterator[None]:
    """Within it, what is allocated holds ``byte`` as far as that can be had. sizes: bytes of the outputs that are
    expected; device: torch's."""
    libc = _glibc() if device.type == "cpu" else None
    if libc is not None:
        libc.mallopt(_PERTURB, byte ^ 0xFF or 0x100)  # the low byte inverted is what is written; 0 would switch it off
    try:
        _fill(byte, sizes, device)
        yield
    finally:
        if libc is not None:
            libc.mallopt(_PERTURB, 0)


def _fill(byte: int, sizes: Iterable[int], device: Any) -> None:
    left, held = _MOST_FILLED, []
    for size in sizes:
        for n in (size, 2 * size):
            for _ in range(_COPIES):
                if 0 < n <= left:
                    held.append(torch.empty(n, dtype=torch.uint8, device=device).fill_(byte))
                    left -= n
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del held


def _glibc() -> Any | None:
    try:
        if not os.confstr("CS_GNU_LIBC_VERSION"):
            return None
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") else None
    except (ValueError, OSError, AttributeError):
        return None


@contextlib.contextmanager
def company(device: Any) -> Iterator[None]:
    """Within it, other threads take this machine's cores, the interpreter changes threads often, and on CUDA the work
    is put on a stream of its own beside a busy one."""
    stop, before = threading.Event(), sys.getswitchinterval()
    block = bytes(1 << 18)

    def burn() -> None:
        while not stop.is_set():
            hashlib.sha256(block)  # gives the interpreter's lock back while it computes

    threads = [threading.Thread(target=burn, daemon=True) for _ in range(max(1, os.cpu_count() or 1))]
    sys.setswitchinterval(_SWITCH)
    for t in threads:
        t.start()
    try:
        with _stream(device):
            yield
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for t in threads:
            t.join()


@contextlib.contextmanager
def _stream(device: Any) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    noise, mine = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(noise):
        a = torch.ones(1024, 1024, device=device)
        for _ in range(32):
            a = a @ a * 1e-3
    mine.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(mine):
        yield
    torch.cuda.synchronize(device)
