"""Which paths a command may read together, and where it may write.

**Writing.** ``--out`` may name a dump, whose files are then read as part of it, or a folder with somebody's own
``compare.csv``, which is then gone. Before anything is computed, `check` examines the directory and what encloses it: a
dump is refused; so is a file of a name that the command writes whose first bytes are not what it writes.

**Reading.** A dump against itself passes whatever is wrong with it. `refuse_same` compares real paths and inodes, and a
part of a dump counts as the dump. A copy is another dump: people compare copies to see that nothing was lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_accprobe.dump.decode import object_in
from vllm_accprobe.refusals import CommandError


def require_directory(path: Path | None, option: str) -> None:
    """Raises CommandError where there is a ``path`` and it is no directory."""
    if path is not None and not path.is_dir():
        raise CommandError(f"{option}: {path} is no directory")


def writable(directory: Path, option: str = "--out") -> None:
    """Raises CommandError where nothing can be written into ``directory``, which need not exist: before the work, not
    after hours of it. It is tried, for permissions do not tell (a read-only disk, /proc); nothing of it stays."""
    import tempfile

    made: list[Path] = []
    above = Path(os.path.abspath(directory))
    missing = []
    while not os.path.lexists(above):
        missing.append(above)
        above = above.parent
    try:
        for place in reversed(missing):
            place.mkdir()
            made.append(place)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as e:
        raise CommandError(
            f"{option}: nothing can be written into {directory} ({e.strerror or e}): name another directory"
        ) from None
    finally:
        for place in reversed(made):
            place.rmdir()


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


def check_begun(out: Path, begun: bool, what: str) -> None:
    """Raises CommandError where ``out`` is no place for answers, or has other files and is not ``begun`` by ``what``. A
    server's logs may be there: it may not have come so far as to answer."""
    check(out, {})
    if out.is_dir() and not begun and any(not p.name.startswith(("engine-", "steps-")) for p in out.iterdir()):
        raise CommandError(f"--out {out} has other files: name a new directory, or one that a {what} began")


def check_place(path: Path, dumps: Iterable[Path] = (), option: str = "--out") -> None:
    """The same for what is new anyway, a file or a directory: raises CommandError where it would lie in a dump, or
    cannot be written."""
    if (found := enclosing_dump(path, dumps)) is not None:
        raise CommandError(f"{option} {path} lies in the dump {found}, which is never written into: name another place")
    writable(path if path.is_dir() else path.parent, option)


def check_own(path: Path, ours: Ours, option: str = "") -> None:
    """Raises CommandError where a file is there already that is not of this command."""
    named = f"{option}: {path}" if option else f"{path}"
    if path.is_dir():
        raise CommandError(f"{named} is a directory; name a file")
    if path.is_symlink() or (path.exists() and not is_ours(path, ours)):
        raise CommandError(f"{named} is not of this command: nothing is overwritten; name another file")


def check_table(path: Path, option: str, columns: Iterable[str], dumps: Iterable[Path] = ()) -> None:
    """Raises CommandError where a table with these columns cannot be written to ``path``."""
    check_place(path, dumps, option)
    check_own(path, csv_with(*columns))


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
    except OSError:
        return False
    return type(object_in(directory / "run.json", 1 << 24).get("schema")) is int


def _same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def is_ours(path: Path, ours: Ours) -> bool:
    """An empty file is anybody's, and holds nothing that could be lost."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        head = f.read(_HEAD)
    return not head or ours(head)


def refuse_same(first: tuple[str, Path], second: tuple[str, Path], what: str = "dump") -> None:
    """first, second: (what the command calls it, where it is). Raises CommandError where they are one ``what``."""
    if not is_same(first[1], second[1]):
        return
    (name, path), (other, again) = first, second
    where = f"{path}" if os.path.realpath(path) == os.path.realpath(again) else f"{path} and {again}"
    raise CommandError(
        f"{name} and {other} are the same dump, {where}: a dump differs from itself nowhere; name two runs"
    )


def is_same(a: Path, b: Path) -> bool:
    """One path by way of links, one inode, or one a part of the other. False where either is not there."""
    try:
        if os.path.samefile(a, b):
            return True
    except OSError:
        return False
    inner, outer = (Path(os.path.realpath(_opened(p))) for p in (a, b))
    if inner == outer:
        return True
    if outer.is_relative_to(inner):
        inner, outer = outer, inner
    return inner.is_relative_to(outer) and _is_part(inner, outer)


def _opened(path: Path) -> Path:
    """The dump that is opened for ``path``, which may miss it by a folder."""
    from vllm_accprobe.formats import DumpError
    from vllm_accprobe.formats.common import sniff

    try:
        return sniff.find(path)[0]
    except (DumpError, OSError):
        return path


def _is_part(inner: Path, outer: Path) -> bool:
    """Whether what is read of ``inner`` is read of ``outer``, too. What lies in a dump of ours next to the ranks is
    another dump (`accprobe run --atb` puts ATB's there), and so is a dump of another tool in any dump."""
    from vllm_accprobe.formats.common import sniff

    if sniff.is_own(outer):
        return any(sniff.RANK_DIR.fullmatch(part) for part in inner.relative_to(outer).parts[:1])
    if inner.is_file():
        return True
    known = sniff.formats([])
    names = [None if f is None else f.name for f in (sniff.recognise(p, known, []) for p in (inner, outer))]
    return names[0] is not None and names[1] not in (None, "folder") and names[0] in (names[1], "folder")
