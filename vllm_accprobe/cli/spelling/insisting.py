"""A Ctrl-C that Python swallowed is given once more.

The problem: KeyboardInterrupt may rise inside a finalizer or a callback of a weak reference (h5py and numba have many),
where Python prints a traceback, drops it, and the command goes on for an hour as if nobody had pressed anything. The
idea: what Python drops there passes a hook; for an interrupt it says nothing and interrupts the main thread again, a
moment later, when that callback is over. Not here: what an interrupted command says (kept.py).
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_MOMENT_S = 0.05
"""Long enough for a callback to end, too short to be felt."""


@contextlib.contextmanager
def insisting() -> Iterator[None]:
    """While it lasts, no interrupt of the main thread is lost."""
    before = sys.unraisablehook

    def again(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        timer = threading.Timer(_MOMENT_S, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
