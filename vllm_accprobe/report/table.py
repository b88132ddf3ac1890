"""compare.csv: one row per pair, columns in the order of ``Pair``'s fields.

The problem: people sort and filter this file in other tools, so it must be plain, complete and exact. The idea: the
fields of the dataclass are the columns, floats are written with all their digits (``repr``), None is an empty cell,
tuples are JSON lists (``[8, 64]``). Not here: which pairs there are (compare/), what is worth saying (facts.py).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.compare.result import COLUMNS, Pair

if TYPE_CHECKING:
    from vllm_accprobe.compare.result import Comparison

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> Any:
    """One csv cell. Text that a spreadsheet would run as a formula gets a leading apostrophe: dumps may be hostile."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(str(v) for v in value) + "]"
    text = str(value)
    return "'" + text if text.startswith(_FORMULA) else text


def rows(pairs: Iterable[Pair]) -> Iterator[tuple[Any, ...]]:
    """The cells of each pair in the order of COLUMNS."""
    get: Callable[[Pair], tuple[Any, ...]] = attrgetter(*COLUMNS)
    for pair in pairs:
        yield tuple(map(cell, get(pair)))


def write_csv(comparison: Comparison, path: str | Path) -> None:
    """Write ``comparison.pairs`` to ``path`` (UTF-8, header line, ``\\n`` line ends). The file appears whole or
    not at all.

    Raises OSError as the file system gives it.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        other = comparison.foreign
        writer.writerow(COLUMNS if other is None else (*COLUMNS, *other.columns))
        ours = rows(comparison.pairs)
        if other is not None:
            ours = ((*a, *map(cell, b)) for a, b in zip(ours, other.rows, strict=True))
        writer.writerows(ours)
    os.replace(part, path)
