"""Reads a golden pack, which a stranger may have made: checked against its manifest before anything is inflated."""

from __future__ import annotations

from pathlib import Path


def opened(path: Path, into: Path) -> Path:
    """A directory in ``into`` that dump/reader opens as an ordinary dump (full rows only), checked against the
    manifest. Raises DumpError."""
    raise NotImplementedError
