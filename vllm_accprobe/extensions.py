"""What other installed packages add: modules that their entry points name.

The problem: a vendor's format or operator belongs into the vendor's package, and a package that is broken must not keep
anybody from working. The idea: each room that can be added to names a group of entry points (the standard library's
importlib.metadata); `added` loads what stands there, in the order of names, and what cannot be loaded is one sentence.
Nothing is loaded before it is needed. Not here: what a module must have (common/sniff.py, opcheck/reference.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

FORMATS, REFERENCES, CAUSES = "vllm_accprobe.formats", "vllm_accprobe.references", "vllm_accprobe.causes"
"""The groups of entry points: other tools' dumps, references of operators, causes of their errors."""


@dataclass(frozen=True)
class Extension:
    """What an entry point gave. name: the entry point's; package: the distribution that has it; what: a module, or a
    function where the group takes these."""

    name: str
    package: str
    what: Any


def added(group: str, problems: list[str]) -> Iterator[Extension]:
    """What installed packages add to ``group``; a sentence in ``problems`` for each that cannot be loaded."""
    kind = group.rpartition(".")[2]
    for point in sorted(_points(tuple(sys.path)).select(group=group), key=lambda p: (p.name, p.value)):
        try:
            what = point.load()
        except Exception as error:  # anybody's code
            problems.append(unusable(kind, point.name, error))
            continue
        yield Extension(point.name, point.dist.name if point.dist else point.module, what)


@lru_cache(1)
def _points(path: tuple[str, ...]) -> Any:
    """The entry points of all that is installed on ``path``: finding them takes 0.03 s."""
    from importlib.metadata import entry_points  # a tenth of the time that a small comparison takes to begin

    return entry_points()


def unusable(kind: str, name: str, error: Exception) -> str:
    """The sentence for what an entry point names and cannot be used. kind: formats, references or causes."""
    return f"{kind} of {name} cannot be used: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
