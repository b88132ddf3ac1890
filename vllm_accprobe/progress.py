"""A line from time to time, while something takes long: on stderr, where no result is.

The problem: a server starts for minutes and a comparison reads for hours; whoever sees no line believes that it hangs,
and a log with a line every second cannot be read. The idea: `waiting` says one line every 5 s on a terminal and every
30 s in a pipe or a file, from a thread, so that a call that never returns is seen too. What ends sooner says nothing.
`progress` is a bar on a terminal, of what can be counted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

TERMINAL_S, PIPE_S = 5.0, 30.0
"""Chosen: seconds between two lines."""


@dataclass(frozen=True)
class Pace:
    """Says a line. often: every 5 s in a pipe, too (--progress)."""

    often: bool = False

    @property
    def seconds(self) -> float:
        return TERMINAL_S if self.often or on_terminal() else PIPE_S

    def __call__(self, line: str) -> None:
        print(f"accprobe: {line}", file=sys.stderr, flush=True)


USUAL = Pace()


def on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # None, or closed
        return False


@contextmanager
def waiting(text: Callable[[], str], pace: Pace = USUAL) -> Iterator[None]:
    """While the context lasts, says ``text()`` and the seconds since it began."""
    over, began = threading.Event(), time.monotonic()

    def run() -> None:
        while not over.wait(pace.seconds):
            pace(f"{text()} ({time.monotonic() - began:.0f} s)")

    thread = threading.Thread(target=run, name="accprobe-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def progress(title: str, total: int, steps: bool = False, pace: Pace = USUAL) -> Iterator[Any]:
    """A function that counts one more done, or with ``steps`` gets how many are: with a bar where stderr is a
    terminal, with lines at their pace in a pipe."""
    now = 0

    def step(done: int | None = None) -> None:
        nonlocal now
        now = now + 1 if done is None else done

    if not on_terminal() or total < 2:
        with waiting(lambda: f"{title}: {now:,} of {total:,}" if total > 1 else title, pace):
            yield step
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield (lambda done: bar.update(task, completed=done)) if steps else (lambda: bar.advance(task))
