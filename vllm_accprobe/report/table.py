"""compare.csv: one row per pair, columns in the order of ``Pair``'s fields.

The problem: people sort and filter this file in other tools, so it must be plain, complete and exact. The idea: the
fields of the dataclass are the columns, floats are written with all their digits (``repr``), None is an empty cell,
tuples are JSON lists (``[8, 64]``). Not here: which pairs there are (comparison/), what is worth saying (facts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.result import COLUMNS, Pair
from vllm_accprobe.whole_file import write_csv_lines

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison

_NUMBER = ("int", "float", "bool", "int | None", "float | None")
_WRITTEN = frozenset(f.name for f in fields(Pair) if str(f.type) not in _NUMBER)
"""Columns whose values are no numbers: the others are written as they are."""
_CHUNK = 4096
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
    left = iter(pairs)
    while chunk := list(islice(left, _CHUNK)):
        columns = zip(COLUMNS, zip(*map(get, chunk), strict=True), strict=True)
        yield from zip(*(_cells(values) if name in _WRITTEN else values for name, values in columns), strict=True)


def _cells(values: tuple[Any, ...]) -> list[Any]:
    """The cells of one column: most of its texts are the same few."""
    try:
        known = {value: cell(value) for value in set(values)}
    except TypeError:  # a list has no hash
        return list(map(cell, values))
    return [known[value] for value in values]


def write_csv(comparison: Comparison, path: str | Path) -> None:
    """Write ``comparison.pairs`` to ``path`` (UTF-8, header line, ``\\n`` line ends). The file appears whole or
    not at all.

    Raises OSError as the file system gives it.
    """
    other, ours = comparison.foreign, rows(comparison.pairs)
    if other is None:
        write_csv_lines(path, COLUMNS, ours)
    else:
        both = ((*a, *map(cell, b)) for a, b in zip(ours, other.rows, strict=True))
        write_csv_lines(path, (*COLUMNS, *other.columns), both)
