"""Whether two paths are one dump, and the refusal of that.

The problem: a dump against itself passes whatever is wrong with it, and a slip of the hand in a script, or a link, is
enough. The idea: real paths and inodes are compared, and a part of a dump is the dump. A copy is another dump: people
compare copies to see that nothing was lost. Not here: what is in the dumps; equal dumps in two places pass.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm_accprobe.cli.common.options import CommandError


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
    """Whether what is read of ``inner`` is read of ``outer``, too. What lies in a dump of ours beside the ranks is
    another dump (`accprobe run --atb` puts ATB's there), and so is a dump of another tool in any dump."""
    from vllm_accprobe.formats.common import nearby, sniff

    if nearby.is_own(outer):
        return any(nearby.RANK_DIR.fullmatch(part) for part in inner.relative_to(outer).parts[:1])
    if inner.is_file():
        return True
    known = sniff.formats([])
    names = [None if f is None else f.name for f in (sniff.recognise(p, known, []) for p in (inner, outer))]
    return names[0] is not None and names[1] not in (None, "folder") and names[0] in (names[1], "folder")
