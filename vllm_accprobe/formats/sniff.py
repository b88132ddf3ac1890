"""Which format a path is.

The problem: nobody should have to say which tool wrote a dump. The idea: each format's module has NAME, HOW (one line
for people: how it is recognised), ``recognise(path) -> bool``, which looks at names and at most at the first bytes of a
file, and ``open(path) -> Dump``. They are asked in order, the strict ones first; single files and plain folders, which
take almost anything, come last.
Not here: the formats themselves, paths that miss a dump by one folder (nearby.py).
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.reader import open_dump as open_own
from vllm_accprobe.formats import nearby
from vllm_accprobe.formats.foreign import ForeignDump
from vllm_accprobe.formats.nearby import is_own

OWN = "accprobe"
OWN_HOW = "run.json, or directories rank0000, rank0001 ... with journal.jsonl"
MODULES: tuple[str, ...] = ("xray", "msprobe", "sglang", "msit", "atb", "torchair", "single", "folder")
"""Modules of this package, in the order in which they are asked: each format adds itself here."""
_STRICT, _LOOSE = ("xray", "msprobe"), ("folder",)
"""What knows a dump by files at its top, so that one below a folder is found; what takes any folder."""


def formats() -> list[ModuleType]:
    """The modules of all foreign formats, in the order in which they are asked."""
    return [importlib.import_module(f"{__package__}.{name}") for name in MODULES]


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


def find(path: Path) -> tuple[Path, ModuleType | None, str]:
    """(where the dump is, its format's module or None for our own, what to say where that is not ``path``). A path that
    misses a dump by a folder is put right (nearby.py). Raises DumpError for what is none."""
    place, said = nearby.own(path)
    if is_own(place):
        return place, None, said
    if place.is_dir():
        try:
            os.listdir(place)
        except OSError as e:
            raise DumpError(f"cannot list {place}: {e.strerror or e}") from None
    module = recognise(place)
    if place.is_dir() and (module is None or module.__name__.rpartition(".")[2] in _LOOSE):
        strict = [importlib.import_module(f"{__package__}.{name}") for name in _STRICT]
        if found := nearby.below(place, lambda p: any(m.recognise(p) for m in strict)):
            place, said = nearby.only(place, found)
            module = recognise(place)
    if module is None:
        raise DumpError(_unknown(path))
    return place, module, said


def _unknown(path: Path) -> str:
    what = "no file of a kind that is known" if path.is_file() else "no dump of a format that is known"
    if path.is_dir() and not os.listdir(path):
        what = "an empty directory, not a dump"
    return f"{path} is {what}: `accprobe formats` lists them and how each is recognised"


def open_dump(path: str | Path) -> Dump:
    """Opens a dump of whatever format ``path`` is; reads no payload. Raises DumpError, one clear line, and its kind
    NothingReadable where the dump is one and none of its files can be read."""
    path, module, said = find(Path(path))
    dump = open_own(path) if module is None else _open_foreign(path, module)
    if said:
        dump.problems.insert(0, said)
    return dump


def _open_foreign(path: Path, module: ModuleType) -> Dump:
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
