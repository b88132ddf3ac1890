"""Walks through a directory that somebody else wrote, within limits and without leaving it.

The problem: a dump of many ranks and tokens has a hundred thousand files, and a made-up one has links that lead out of
it or directories without end. The idea: plain directories and plain files only, never through a link, to a bounded
depth, in the order of names where numbers count as numbers; what is passed over is remembered (`Passed`), because a
dump must say what it leaves out; `probe` looks for one file of a kind and gives up early.
Not here: what the names mean (each format's module).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_accprobe.formats.common.foreign import ForeignDump

MAX_DEPTH = 48
_PROBE = 4000
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FoundFile:
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


@dataclass
class Passed:
    """What a walk passed over. links: names of links; odd: (name, why) of what has a wanted file's name and is none,
    and of directories that cannot be listed."""

    links: list[str] = field(default_factory=list)
    odd: list[tuple[str, str]] = field(default_factory=list)

    def tell(self, dump: ForeignDump) -> None:
        """Puts all of it into the dump's skips and problems."""
        for name, why in self.odd:
            dump.unreadable(f"{name}: {why}", name)
        if self.links:
            more = f" and {len(self.links) - 1} more" if len(self.links) > 1 else ""
            dump.problem(f"{self.links[0]}{more}: a link, not followed (a dump's files lie in the dump)")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which ``9_x`` comes before ``10_x``."""
    pieces = _NUMBER.split(name)
    return tuple((1, int(p), p) if i % 2 else (0, 0, p) for i, p in enumerate(pieces) if p)


def files(root: Path, wanted: Callable[[str], bool] | None = None, passed: Passed | None = None) -> Iterator[FoundFile]:
    """Every plain file under ``root`` whose own name is ``wanted``, directories in natural order. passed: gets what was
    left out. Raises OSError where ``root`` itself cannot be listed."""
    stack: list[tuple[tuple[str, ...], str]] = [((), str(root))]
    while stack:
        parts, directory = stack.pop()
        below = []
        try:
            with os.scandir(directory) as entries:
                listed = list(entries)
        except OSError as e:
            if not parts or passed is None:
                raise
            passed.odd.append(("/".join(parts), f"cannot be listed: {e.strerror or e}"))
            continue
        if len(listed) > 1:
            listed.sort(key=lambda e: natural(e.name))
        for entry in listed:
            here = (*parts, entry.name)
            if entry.is_symlink():
                if passed is not None:
                    passed.links.append("/".join(here))
            elif entry.is_dir(follow_symlinks=False):
                if passed is not None and wanted is not None and "." in entry.name and wanted(entry.name):
                    passed.odd.append(("/".join(here), "a directory in place of a file"))
                if len(parts) < MAX_DEPTH:
                    below.append((here, entry.path))
            elif wanted is None or wanted(entry.name):
                if entry.is_file(follow_symlinks=False):
                    yield FoundFile(here, entry.path)
                elif passed is not None:
                    passed.odd.append(("/".join(here), "not a plain file"))
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
