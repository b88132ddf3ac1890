"""A Ctrl-C that rises in a finalizer ends the command all the same."""

from __future__ import annotations

import sys
import time

import pytest

from vllm_accprobe.cli.spelling.insisting import insisting


class Finalized:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def finalize(error: type[BaseException], until: float = 0.0) -> None:
    Finalized(error)
    while time.monotonic() < until:
        time.sleep(0.01)


def test_an_interrupt_that_was_dropped_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    with insisting(), pytest.raises(KeyboardInterrupt):
        finalize(KeyboardInterrupt, begun + 20)
    assert time.monotonic() < begun + 10
    assert "Exception ignored" not in capfd.readouterr().err


def test_anything_else_is_said_as_ever() -> None:
    seen = []
    before, sys.unraisablehook = sys.unraisablehook, seen.append
    try:
        with insisting():
            finalize(ValueError)
        assert sys.unraisablehook == seen.append
    finally:
        sys.unraisablehook = before
    assert [lost.exc_type for lost in seen] == [ValueError]
