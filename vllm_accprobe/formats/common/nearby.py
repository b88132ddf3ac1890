"""A path beside a dump: one folder too high, one too low, or one of its files.

The problem: who types a path often names the folder that holds the dump, a rank's folder in it, or its run.json. Read
as a folder of single files, each of these opens, under names that meet nothing. The idea: before such a folder is taken
for what it looks like, see whether a dump with a form of its own lies around it or in it. One that is alone there is
taken, and the dump says so; of several the names are told. Only names are looked at, links are not followed, and the
search ends after some thousand names. Not here: what each format looks like (sniff.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON
from vllm_accprobe.formats.common.msprobe_words import CONSTRUCT, DATA, DUMP, STACK

RANK_DIR = re.compile(r"rank\d{4,9}", re.ASCII)
_PARTS = (DATA, CONSTRUCT, STACK)
"""Of msprobe: what lies beside the dump.json that a dump of it is known by."""
_DEPTH, _MOST = 3, 4000
_NAMED = 3


def is_own(path: Path) -> bool:
    """Whether ``path`` is a dump of accprobe itself."""
    if (path / RUN_JSON).is_file():
        return True
    try:
        with os.scandir(path) as entries:
            return any(RANK_DIR.fullmatch(e.name) for e in entries)
    except OSError:
        return False


def around(path: Path) -> Path | None:
    """The dump that ``path`` is a part of by its name: a rank's folder, run.json, a journal, msprobe's data folder."""
    name, parent = Path(os.path.abspath(path)).name, path.parent if path.name else path / ".."
    if name == RUN_JSON or RANK_DIR.fullmatch(name):
        return parent if is_own(parent) else None
    if name == JOURNAL:
        above = around(parent)
        return above if above is not None and RANK_DIR.fullmatch(parent.name) else None
    if name in _PARTS and (parent / DUMP).is_file():
        return parent
    return None


def below(path: Path, is_dump: Callable[[Path], bool]) -> list[Path]:
    """The folders in ``path`` that ``is_dump``, at most three levels down, ordered by name; none inside another."""
    found: list[Path] = []
    level, seen = [path], 0
    for _ in range(_DEPTH):
        deeper: list[Path] = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
            except OSError:
                continue
            seen += len(names)
            if seen > _MOST:
                return found
            for child in (directory / name for name in names):
                (found if is_dump(child) else deeper).append(child)
        level = deeper
    return found


def only(path: Path, found: list[Path]) -> tuple[Path, str]:
    """The one dump in ``path``, and what to say about it. Raises DumpError where there are several."""
    if len(found) > 1:
        names = ", ".join(str(p) for p in found[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise DumpError(f"{path} is no dump but holds {len(found)} of them ({names}{more}): name one")
    return found[0], f"{path} is no dump but holds one: {found[0]} was opened"


def own(path: Path) -> tuple[Path, str]:
    """The dump of accprobe that ``path`` is, lies in or holds, and what to say where that is another path; else
    ``path`` itself. Raises DumpError where it holds several, or does not exist."""
    if not path.exists():
        raise DumpError(f"{path} does not exist: name a dump's directory or file")
    if is_own(path):
        return path, ""
    if (dump := around(path)) is not None:
        return dump, f"{path} is a part of a dump: all of {dump} was opened"
    if path.is_dir() and (found := below(path, is_own)):
        return only(path, found)
    return path, ""
