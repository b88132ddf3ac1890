"""Where a command may write: into a new directory, an empty one, or over its own earlier results.

The problem: ``--out`` may name a dump, whose files are then read as part of it, or a folder with somebody's own
``compare.csv``, which is then gone. The idea: before anything is computed, the directory and what encloses it are
looked at: a dump is refused; so is a file of a name that the command writes whose first bytes are not what it writes.
Not here: what the commands write.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_accprobe.cli.common.options import CommandError, writable

_HEAD = 64 << 10
Ours = Callable[[bytes], bool]
"""Whether a file that begins with these bytes, at most 64 KiB, is one that we wrote."""


def csv_with(*columns: str) -> Ours:
    """A table whose header begins with these columns."""
    line = ",".join(columns).encode()
    return lambda head: head.removeprefix(b"\xef\xbb\xbf").startswith(line) and head[len(line) :][:1] in b",\r\n"


def matching(pattern: str) -> Ours:
    """What has this regular expression in its beginning."""
    compiled = re.compile(pattern.encode(), re.DOTALL)
    return lambda head: compiled.search(head) is not None


SCHEMA_AND_VERDICT = matching(r"\A\s*\{\s*\"schema\":\s*\d+,\s*\"verdict\":")
"""compare.json and labels.json."""


def check(out: Path, ours: Mapping[str, Ours], *, dumps: Iterable[Path] = (), option: str = "--out") -> None:
    """Raises CommandError where ``out`` is no place for results, or cannot be written. ours: the files that the command
    writes there, by name, each with what tells that an older one is its own. dumps: what the command reads, and never
    writes into."""
    if out.exists() and not out.is_dir():
        raise CommandError(f"{option} {out} is a file: name a directory, a new one perhaps")
    if (found := enclosing_dump(out, dumps)) is not None:
        where = "is a dump" if _same(found, out) else f"lies in the dump {found}"
        raise CommandError(f"{option} {out} {where}, which is never written into: name another directory with {option}")
    for name, known in ours.items():
        path = out / name
        if path.is_symlink():
            raise CommandError(
                f"{option} {out} has a link {name}: nothing is written through it; name another directory"
            )
        if path.exists() and not is_ours(path, known):
            raise CommandError(f"{option} {out} has a {name} that is not of this command: nothing is overwritten; name "
                               "another directory")  # fmt: skip
    writable(out, option)


def check_place(path: Path, dumps: Iterable[Path] = (), option: str = "--out") -> None:
    """The same for what is new anyway, a file or a directory: raises CommandError where it would lie in a dump."""
    if (found := enclosing_dump(path, dumps)) is not None:
        raise CommandError(f"{option} {path} lies in the dump {found}, which is never written into: name another place")


def enclosing_dump(path: Path, dumps: Iterable[Path] = ()) -> Path | None:
    """The dump that ``path`` is or lies in: one of ``dumps``, or one of accprobe's own, or of a tool's whose dumps are
    recognised by more than the endings of their files."""
    real = Path(os.path.realpath(path))
    for dump in dumps:
        if dump.is_dir() and real.is_relative_to(os.path.realpath(dump)):
            return dump
    for place in (real, *real.parents):
        if _is_dump(place):
            return place
    if real.is_dir():
        from vllm_accprobe.formats.common import sniff

        found = sniff.recognise(real, sniff.ours(), [])
        if found is not None and not found.loose:
            return path
    return None


def _is_dump(directory: Path) -> bool:
    """One of accprobe's: a journal in it, or our run.json. Another program may have a run.json, too."""
    try:
        if any((d / "journal.jsonl").is_file() for d in directory.glob("rank[0-9][0-9][0-9][0-9]*")):
            return True
        run = directory / "run.json"
        if not run.is_file() or run.stat().st_size > 1 << 24:
            return False
        said = json.loads(run.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and type(said.get("schema")) is int


def _same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def is_ours(path: Path, ours: Ours) -> bool:
    """An empty file is anybody's, and holds nothing that could be lost."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        head = f.read(_HEAD)
    return not head or ours(head)
