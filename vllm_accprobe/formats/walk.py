"""Walks through a directory that somebody else wrote, within limits and without leaving it.

The problem: a dump of many ranks and tokens has a hundred thousand files, and a made-up one has links that lead out of
it or directories without end. The idea: plain directories and plain files only, never through a link, to a bounded
depth, in the order of names where numbers count as numbers; `probe` looks for one file of a kind and gives up early.
Not here: what the names mean (each format's module).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_DEPTH = 48
_PROBE = 4000
_MAX_TEXT = 256 << 20
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """A plain file. parts: the names of the directories between the root and it, then its own."""

    parts: tuple[str, ...]
    where: str

    @property
    def path(self) -> Path:
        return Path(self.where)

    @property
    def name(self) -> str:
        """The path relative to the root, with slashes."""
        return "/".join(self.parts)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which ``9_x`` comes before ``10_x``."""
    pieces = _NUMBER.split(name)
    return tuple((1, int(p), p) if i % 2 else (0, 0, p) for i, p in enumerate(pieces) if p)


def files(root: Path, wanted: Callable[[str], bool] | None = None, links: list[str] | None = None) -> Iterator[Found]:
    """Every plain file under ``root`` whose own name is ``wanted``, directories in natural order. links: gets the
    names of what was passed over because it is a link. Raises OSError for a directory that cannot be listed."""
    stack: list[tuple[tuple[str, ...], str]] = [((), str(root))]
    while stack:
        parts, directory = stack.pop()
        below = []
        with os.scandir(directory) as entries:
            listed = list(entries)
        if len(listed) > 1:
            listed.sort(key=lambda e: natural(e.name))
        for entry in listed:
            if entry.is_symlink():
                if links is not None:
                    links.append("/".join((*parts, entry.name)))
            elif entry.is_dir(follow_symlinks=False):
                if len(parts) < MAX_DEPTH:
                    below.append(((*parts, entry.name), entry.path))
            elif entry.is_file(follow_symlinks=False) and (wanted is None or wanted(entry.name)):
                yield Found((*parts, entry.name), entry.path)
        stack += reversed(below)


def probe(root: Path, found: Callable[[tuple[str, ...]], bool], depth: int = 20) -> bool:
    """Whether there is a file whose parts are ``found``, looking at no more than some thousand names: depth first, so
    that one file at the bottom of a large dump is met soon."""
    if not root.is_dir():
        return False
    stack: list[tuple[tuple[str, ...], Path]] = [((), root)]
    seen = 0
    while stack and seen < _PROBE:
        parts, directory = stack.pop()
        below = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _PROBE or entry.is_symlink():
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if len(parts) < depth:
                            below.append(((*parts, entry.name), Path(entry.path)))
                    elif found((*parts, entry.name)):
                        return True
        except OSError:
            continue
        stack += sorted(below, reverse=True)
    return False


def links_sentence(links: list[str]) -> str:
    """What to say about links that were passed over; "" where there is none."""
    if not links:
        return ""
    more = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return f"{links[0]}{more}: a link, not followed (a dump's files lie in the dump)"


def read_text(path: Path, limit: int = _MAX_TEXT) -> str:
    """A text file as UTF-8, what is no UTF-8 replaced. Raises ValueError where it is larger than ``limit``, OSError."""
    from vllm_accprobe.dump.files import open_regular

    with os.fdopen(open_regular(path), "rb") as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit >> 20} MiB")
    return data.decode("utf-8", "replace")
