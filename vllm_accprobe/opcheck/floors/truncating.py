"""Which operators of a replay round toward zero: said once for each operator or class, and not at every output.

Not here: how it is recognised in numbers (rounding.py). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, Checked

_SHARE = 0.3
"""Chosen: of an operator's outputs, those that show it. Narrow ones cannot (of truncating ones, 16 to 192 wide, 47 to
100 % did); and where an error is shared by a whole row, some of an operator that rounds to nearest do (up to 11 %)."""
_NO_GRID = ("float32", "float64", "complex64", "complex128", "bool", "int8", "int16", "int32", "int64")
"""Outputs that cannot show it."""
HONEST = "honest rounding of a machine, allowed for in their limits; opcheck's standard strict fails it"


@dataclass(frozen=True, slots=True)
class Truncating:
    """An operator or a module's class that rounds toward zero. modules: how many of it; outputs: that show it, of how
    many that were judged."""

    cls: str
    modules: int
    outputs: int
    of: int

    def __str__(self) -> str:
        where = f" of {self.modules} {'module' if self.modules == 1 else 'modules'}"
        return f"{self.cls} ({self.outputs:,} of {self.of:,} outputs{where})"


def truncating(rows: Iterable[Checked]) -> list[Truncating]:
    """In the order in which they are met."""
    found: dict[str, tuple[set[tuple[int, str]], list[int]]] = {}
    for r in rows:
        if r.status in (PASS, FAIL) and not r.dtype.endswith(_NO_GRID):
            taps, counts = found.setdefault(r.cls, (set(), [0, 0]))
            counts[1] += 1
            if r.rounding:
                counts[0] += 1
                taps.add((r.rank, r.tap))
    return [Truncating(cls, len(t), n, of) for cls, (t, (n, of)) in found.items() if n > _SHARE * of]


def sentence(rows: Iterable[Checked], where: str = "") -> str:
    """All of them in one; "" where there is none. where: whose rows, `` in mine``."""
    found = truncating(rows)
    return f"rounds toward zero{where}: {', '.join(map(str, found))}: {HONEST}" if found else ""
