"""Which format a path is.

The problem: nobody should have to say which tool wrote a dump. The idea: each format's module has NAME, HOW (one line
for people: how it is recognised), ``recognise(path) -> bool``, which looks at names and at most at the first bytes of a
file, and ``open(path) -> Dump``. They are asked in order, the strict ones first; single files and plain folders, which
take almost anything, come last.
Not here: the formats themselves.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.reader import open_dump as open_own
from vllm_accprobe.dump.schema import RUN_JSON
from vllm_accprobe.formats.foreign import ForeignDump

OWN = "accprobe"
OWN_HOW = "run.json, or directories rank0000, rank0001 ... with journal.jsonl"
MODULES: tuple[str, ...] = ("xray", "msprobe", "sglang", "msit", "atb", "torchair", "single", "folder")
"""Modules of this package, in the order in which they are asked: each format adds itself here."""
_RANK = re.compile(r"rank\d{4,9}", re.ASCII)


def formats() -> list[ModuleType]:
    """The modules of all foreign formats, in the order in which they are asked."""
    return [importlib.import_module(f"{__package__}.{name}") for name in MODULES]


def is_own(path: Path) -> bool:
    """Whether ``path`` is a dump of accprobe itself."""
    if (path / RUN_JSON).is_file():
        return True
    try:
        with os.scandir(path) as entries:
            return any(_RANK.fullmatch(e.name) for e in entries)
    except OSError:
        return False


def recognise(path: Path) -> ModuleType | None:
    """The module of the foreign format that ``path`` is, or None."""
    for module in formats():
        try:
            if module.recognise(path):
                return module
        except OSError:
            continue
    return None


class NothingReadable(DumpError):
    """A dump whose index is whole, and of whose files none can be read. Exit code 3: there is nothing to work on."""


def nothing_readable(dump: Dump) -> str:
    """The sentence for such a dump."""
    n = len(dump.unread)
    what = "its one file cannot be read:" if n == 1 else f"none of its {n:,} files can be read, the first:"
    return f"{dump.path}: {what} {dump.unread[0][:300]}"


def open_dump(path: str | Path) -> Dump:
    """Opens a dump of whatever format ``path`` is; reads no payload. Raises DumpError, one clear line, and its kind
    NothingReadable where the dump is one and none of its files can be read."""
    path = Path(path)
    if not path.exists() or is_own(path):
        return open_own(path)
    if path.is_dir():
        try:
            os.listdir(path)
        except OSError as e:
            raise DumpError(f"cannot list {path}: {e.strerror or e}") from None
    module = recognise(path)
    if module is None:
        what = "no file of a kind that is known" if path.is_file() else "no dump of a format that is known"
        raise DumpError(f"{path} is {what}: `accprobe formats` lists them and how each is recognised")
    try:
        dump: ForeignDump = module.open(path)
        dump.opened()
    except OSError as e:
        raise DumpError(f"cannot read {e.filename or path}: {e.strerror or e}") from None
    except (RecursionError, MemoryError):
        raise DumpError(f"{path} is damaged: nested too deep or larger than memory") from None
    if dump.unread and not dump.records and path.is_dir():
        raise NothingReadable(nothing_readable(dump))
    if not dump.records:
        why = [*dump.problems, *(f"{s.tap}: {s.reason}" for s in dump.skips), "it is empty"]
        raise DumpError(f"{path} ({module.NAME}) has no tensor that can be read: {why[0][:300]}")
    return dump
