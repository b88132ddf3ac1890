"""Which format a path is, and which dump lies near a path that is none.

The problem: nobody should have to say which tool wrote a dump, and people name the folder above it, a rank's folder in
it, or its run.json; read as a folder of single files, each of these opens under names that match nothing. The idea:
each module at the top of formats/ is a format, and so is each that another package's entry point names (`DumpFormat`);
they are tried in their order, single files and plain folders last. Before a folder is taken for a plain one, a dump
around it or in it goes first: one is opened, with a note; several are named. Only names are read, links are not
followed, and the search ends after some thousand names.

Not here: the formats, entry points (extensions.py).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe import extensions
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import Dump, open_dump as open_own
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON
from vllm_accprobe.formats.common.foreign import ForeignDump
from vllm_accprobe.formats.io import pack_file
from vllm_accprobe.formats.msprobe import CONSTRUCT, DATA, DUMP, STACK

RANK_DIR = re.compile(r"rank\d{4,9}", re.ASCII)
_PARTS = (DATA, CONSTRUCT, STACK)
"""Of msprobe: what lies next to the dump.json that a dump of it is known by."""
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


def enclosing(path: Path) -> Path | None:
    """The dump that ``path`` is a part of by its name: a rank's folder, run.json, a journal, msprobe's data folder."""
    name, parent = Path(os.path.abspath(path)).name, path.parent if path.name else path / ".."
    if name == RUN_JSON or RANK_DIR.fullmatch(name):
        return parent if is_own(parent) else None
    if name == JOURNAL:
        above = enclosing(parent)
        return above if above is not None and RANK_DIR.fullmatch(parent.name) else None
    if name in _PARTS and (parent / DUMP).is_file():
        return parent
    return None


def dumps_below(path: Path, is_dump: Callable[[Path], bool]) -> list[Path]:
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
    if (dump := enclosing(path)) is not None:
        return dump, f"{path} is a part of a dump: all of {dump} was opened"
    if path.is_dir() and (found := dumps_below(path, is_own)):
        return only(path, found)
    return path, ""


OWN = "accprobe"
OWN_HOW = "run.json, or directories rank0000, rank0001 ... with journal.jsonl"


@dataclass(frozen=True)
class DumpFormat:
    """What a format's module says, each a name of the module in capitals or a function.

    name: NAME; how: HOW, one line for people, how it is recognised; order: ORDER, a number: formats with smaller ones
    are tried first; strict: STRICT, True where it knows a dump by files at its top, so that one below a folder is
    found; loose: LOOSE, True where it takes any folder, so that a dump below the folder goes before it. recognise:
    examines names and at most the first bytes of a file. open: raises DumpError. package: the one that added it, ""
    for ours.
    """

    name: str
    how: str
    order: int
    recognise: Callable[[Path], bool]
    open: Callable[[Path], ForeignDump]
    strict: bool = False
    loose: bool = False
    package: str = ""

    @classmethod
    def of(cls, module: Any, package: str = "") -> DumpFormat:
        """Raises ValueError where the module lacks something, or a name is of another type."""
        for name, kind in (("NAME", str), ("HOW", str), ("ORDER", int)):
            value = getattr(module, name, None)
            if not isinstance(value, kind) or value == "":
                raise ValueError(f"{name} is {value!r}")
        for name in ("recognise", "open"):
            if not callable(getattr(module, name, None)):
                raise ValueError(f"it has no function {name}")
        flags = {name.lower(): bool(getattr(module, name, False)) for name in ("STRICT", "LOOSE")}
        return cls(module.NAME, module.HOW, module.ORDER, module.recognise, module.open, package=package, **flags)


def ours() -> list[DumpFormat]:
    """The foreign formats of this package, in the order in which they are tried."""
    room, package = Path(__file__).parents[1], __package__.rpartition(".")[0]
    names = [m.name for m in pkgutil.iter_modules([str(room)]) if not m.ispkg]
    found = [DumpFormat.of(importlib.import_module(f"{package}.{name}")) for name in names]
    return sorted(found, key=lambda f: (f.order, f.name))


def formats(problems: list[str]) -> list[DumpFormat]:
    """Those of other packages too. problems: takes a sentence for each that cannot be used."""
    found = ours()
    for extension in extensions.added(extensions.FORMATS, problems):
        try:
            one = DumpFormat.of(extension.what, extension.package)
            if one.name in (OWN, *(f.name for f in found)):
                raise ValueError(f"another format is called {one.name}")
            found.append(one)
        except ValueError as error:
            problems.append(extensions.unusable("formats", extension.name, error))
    return sorted(found, key=lambda f: (f.order, f.package, f.name))


def recognise(path: Path, among: Iterable[DumpFormat], problems: list[str]) -> DumpFormat | None:
    """The format of ``among`` that ``path`` is, or None."""
    for one in among:
        try:
            if one.recognise(path):
                return one
        except OSError:
            continue
        except Exception as error:  # another package's code
            if not one.package:
                raise
            problems.append(extensions.unusable("formats", one.name, error))
    return None


class NothingReadable(DumpError):
    """A dump whose index is whole, and of whose files none can be read. Exit code 3: there is nothing to work on."""


def nothing_readable(dump: Dump) -> str:
    """The sentence for such a dump."""
    n = len(dump.unread)
    what = "its one file cannot be read:" if n == 1 else f"none of its {n:,} files can be read, the first:"
    return f"{dump.path}: {what} {dump.unread[0][:300]}"


def find(path: Path) -> tuple[Path, DumpFormat | None, list[str]]:
    """(where the dump is, its format or None for our own, what to say: where that is not ``path``, and which other
    package's format cannot be used). A path that misses a dump by a folder is put right. Raises DumpError
    for what is none."""
    place, reason = own(path)
    if is_own(place):
        return place, None, [reason] if reason else []
    if place.is_dir():
        try:
            os.listdir(place)
        except OSError as e:
            raise DumpError(f"cannot list {place}: {e.strerror or e}") from None
    problems: list[str] = []
    known = formats(problems)
    found = recognise(place, known, problems)
    if place.is_dir() and (found is None or found.loose):
        strict = [f for f in known if f.strict]
        if below := dumps_below(place, lambda p: recognise(p, strict, problems) is not None):
            place, reason = only(place, below)
            found = recognise(place, known, problems)
    problems = list(dict.fromkeys(problems))
    if found is None:
        raise DumpError("; ".join((_unknown(path), *problems)))
    return place, found, [reason, *problems] if reason else problems


def _unknown(path: Path) -> str:
    from vllm_accprobe.formats.common import result_tables  # its readers take 14 ms to import, and no dump needs them

    if kind := result_tables.kind_of(result_tables.header_of(path)):
        return f"{path} is no dump but {kind.what}: {kind.then}; `accprobe inspect` says what is in it"
    what = "no file of a kind that is known" if path.is_file() else "no dump of a format that is known"
    if path.is_dir() and not os.listdir(path):
        what = "an empty directory, not a dump"
    return f"{path} is {what}: `accprobe inspect --formats` lists them and how each is recognised"


def open_dump(path: str | Path) -> Dump:
    """Opens a dump of whatever format ``path`` is; reads no payload. Raises DumpError, one clear line, and its kind
    NothingReadable where the dump is one and none of its files can be read."""
    if pack_file.is_pack(Path(path)):
        return pack_file.open_rows(Path(path))
    path, found, notes = find(Path(path))
    dump = open_own(path) if found is None else _open_foreign(path, found)
    dump.problems[:0] = notes
    return dump


def _open_foreign(path: Path, found: DumpFormat) -> Dump:
    try:
        dump = found.open(path)
        dump.opened()
    except OSError as e:
        raise DumpError(f"cannot read {e.filename or path}: {e.strerror or e}") from None
    except (RecursionError, MemoryError):
        raise DumpError(f"{path} is damaged: nested too deep or larger than memory") from None
    except DumpError:
        raise
    except Exception as error:  # another package's code
        if not found.package:
            raise
        raise DumpError(f"cannot read {path}: {extensions.unusable('formats', found.name, error)}") from error
    if dump.unread and not dump.records and path.is_dir():
        raise NothingReadable(nothing_readable(dump))
    if not dump.records:
        why = [*dump.problems, *(f"{s.tap}: {s.reason}" for s in dump.skips), "it is empty"]
        raise DumpError(f"{path} ({found.name}) has no tensor that can be read: {why[0][:300]}")
    return dump
