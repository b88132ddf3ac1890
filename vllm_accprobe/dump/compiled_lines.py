"""Tensors' lines of large journals, read by machine code into columns.

The problem: a journal of a million lines takes seconds as Python objects. The idea: the loops of line_loops.py read the
lines whose heads are known (record_table.TensorSites) and that are as capture writes them; all others go the general
way, whose errors are then those of any journal. Loading the code takes as long as ten thousand lines, so that smaller
journals are read without it. Not here: the general way (record_table.py, reader.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path

import numpy as np
import orjson

from vllm_accprobe import machine_code
from vllm_accprobe.dump.line_loops import FIELDS, KEYS
from vllm_accprobe.dump.record_table import MOST_HEADS, Columns, RecordTable, TensorSites, numbers_with_fractions
from vllm_accprobe.machine_code import address

LINES = 2048
"""That are read together."""
WORTH = 8 << 20
"""Bytes of journals from which on the code is loaded."""
_MOST_BYTES = 64 << 20
"""Of all heads; other lines go the general way."""


def compiled_lines(sites: TensorSites, journals: Iterable[Path]) -> CompiledLines | None:
    """What reads these journals' lines; None for small ones, and where no code can be made."""
    size = 0
    for path in journals:
        with contextlib.suppress(OSError):
            size += path.lstat().st_size
    if size < WORTH:
        return None
    try:
        return CompiledLines(sites)
    except machine_code.Unusable:
        return None


class CompiledLines:
    """Of one dump. Raises machine_code.Unusable."""

    def __init__(self, sites: TensorSites):
        self.sites = sites
        self._code = machine_code.loops("vllm_accprobe.dump.line_loops", ("dump/line_loops.py",))
        self._keys = np.frombuffer(b"".join(KEYS), np.uint8)
        self._cuts = np.cumsum([0, *map(len, KEYS)])
        self._heads, self._spans = np.zeros(1 << 16, np.uint8), np.zeros(MOST_HEADS + 1, np.int64)
        self._table, self._after = np.full(2 * MOST_HEADS, -1), np.full(MOST_HEADS, -1)
        self._site = np.zeros(MOST_HEADS, np.int32)
        self._n = 0
        self._used = np.full(3, -1)

    def read(self, rank: int, lines: Sequence[bytes]) -> tuple[np.ndarray, RecordTable]:
        """(bool [lines]: which were read so, their records)."""
        self._enter()
        n, text = len(lines), np.frombuffer(b"".join(lines), np.uint8)
        starts = np.zeros(n + 1, np.int64)
        np.cumsum(np.fromiter(map(len, lines), np.int64, n), out=starts[1:])
        out, floats, hashes = np.empty((len(FIELDS), n), np.int64), np.empty_like(text), np.empty_like(text)
        self._used[:2] = 0
        arrays = (text, starts, self._heads, self._spans, self._table, self._after, self._keys, self._cuts, out, floats,
                  hashes, self._used)  # fmt: skip
        self._code.call["read"](*(x for array in arrays for x in (address(array), array.size)))
        good = out[0] >= 0
        written = [x[:n].tobytes() for x, n in zip((floats, hashes), self._used[:2].tolist(), strict=True)]
        columns = self._columns(rank, out[:, good], *written)
        if columns is None:
            return np.zeros(n, bool), RecordTable.joined(self.sites, [])
        table = RecordTable(self.sites, columns)
        known = dict(zip(FIELDS, out[:, good], strict=True))
        nbytes = table.by_site(attrgetter("nbytes"), np.int64)
        parameter = table.by_site(attrgetter("parameter"), bool)
        fits = ((known["seg"] < 0) | (known["nbytes"] == nbytes)) & (parameter | (known["step"] >= 0))
        columns["step"][parameter] = -1
        if not fits.all():
            good[good], table = fits, table.only(fits)
        return good, table

    def _enter(self) -> None:
        """The heads that came to be known since."""
        for head, site in islice(self.sites.heads.items(), self._n, None):
            begin = int(self._spans[self._n])
            end = begin + len(head)
            if end > _MOST_BYTES:
                return
            if end > len(self._heads):
                self._heads = np.append(self._heads, np.zeros(end, np.uint8))
            self._heads[begin:end] = np.frombuffer(head, np.uint8)
            self._spans[self._n + 1], self._site[self._n] = end, site
            arrays = self._heads, self._spans, self._table
            self._code.call["enter"](*(x for a in arrays for x in (address(a), a.size)), self._n, self._n + 1)
            self._n += 1

    def _columns(self, rank: int, out: np.ndarray, floats: bytes, hashes: bytes) -> Columns | None:
        """None where a number is none: the general way says which."""
        try:
            values = orjson.loads(b"[%s]" % floats[:-1])
        except ValueError:
            return None
        known = dict(zip(FIELDS, out, strict=True))
        n, counted = out.shape[1], known["count"] >= 0
        columns: Columns = {name: known[name] for name in FIELDS[1:] if name not in ("nbytes", "hash")}
        for i, name in enumerate(("min", "max", "mean", "l2")):
            columns[name] = np.full(n, np.nan)
            columns[name][counted] = numbers_with_fractions(values[i::4])
        columns["hash"] = np.full(n, None, object)
        hashed = np.flatnonzero(known["hash"])
        columns["hash"][hashed] = list(_cut(hashes.decode(), known["hash"][hashed].tolist()))
        return columns | {
            "site": self._site[known["head"]], "rank": np.full(n, rank, np.int32), "lost": np.zeros(n, bool),
        }  # fmt: skip


def _cut(text: str, lengths: Sequence[int]) -> Iterable[str]:
    ends = np.cumsum([0, *lengths]).tolist()
    return (text[start:end] for start, end in pairwise(ends))
