"""A command line of a document, what stands for it here, and what that must say.

The problem: a document's command was "supported" because its neighbour was tried once. Here each line of each
document is listed in the document's order, with the command that a reader types instead of it; ``tests/e2e/
test_seeds.py`` types them all. A module ``seed_NNN`` holds ``prepare(home)``, which makes what the lines read below an
empty folder, and ``LINES``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One command line; ``argv`` is run in the folder that ``prepare`` filled, in the document's order.

    A line that needs what no machine here has (a card, a vendor's package) runs up to it, and ``ends_at`` says where
    that is. ``check`` looks at what the command left; it gets the folder and what was printed.
    """

    at: int  # the document's line
    says: str  # as the document has it, cut to the command
    argv: tuple[str, ...] | Callable[[Path], None]  # after "accprobe"; or Python, for a line of Python
    code: int = 0
    prints: tuple[str, ...] = ()
    ends_at: str = ""
    also: tuple[int, ...] = ()  # further lines of the document that are typed with it
    as_in: str = ""  # the document whose line of the same words is typed in place of this one
    check: Callable[[Path, str], None] | None = field(default=None, compare=False)
