"""Lines of tensors as numbers, in loops that are compiled (machine_code.py).

The problem: of a line of 400 bytes all but a dozen numbers is what other lines of its site say, too, and Python objects
for the numbers cost ten times as much as the bytes. The idea: a line's head is compared with the head that followed
last time, or looked up; behind it, keys are expected as capture writes them, in its order. What is not exactly so is
left to the general reader, which says what is wrong with it. Numbers with fractions are copied, for orjson to read.
Not here: which lines are read so, what their numbers become (compiled_lines.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Index: TypeAlias = NDArray[np.int64]

FIELDS = ("head", "call", "seq", "step", "seg", "off", "nbytes", "count", "nan", "inf", "hash")
"""Rows of what ``read`` writes; head: -1 for a line that is left; hash: its length; -1 for what a line has not, but
off and hash: 0."""
KEYS = (b',"call":', b',"seq":', b',"step":', b',"hash":"', b',"seg":', b',"off":', b',"nbytes":',
        b',"stats":{"count":', b',"min":', b',"max":', b',"mean":', b',"l2":', b',"nan":', b',"inf":')  # fmt: skip
MOST_TRIES = 64
"""Places of the table that are searched for a head: a stranger may have chosen heads that all want one."""
MOST_DIGITS = 15
"""Of a whole number: fewer than `journal.MAX_INT` has."""


def _same(text: Any, at: int, keys: Any, start: int, stop: int) -> int:
    """Where the text goes on behind a key; -1 where it is another one. No key has a newline, and each line ends so."""
    while start < stop and text[at] == keys[start]:
        at += 1
        start += 1
    return at if start == stop else -1


def _whole(text: Any, at: int) -> tuple[int, int]:
    """(a whole number, where the text goes on; -1 where there is none as JSON has it)."""
    first = at
    value = 0
    while text[at] >= 48 and text[at] <= 57 and at - first <= MOST_DIGITS:
        value = value * 10 + text[at] - 48
        at += 1
    good = at > first and at - first <= MOST_DIGITS and (text[first] != 48 or at == first + 1)
    return value, (at if good else -1)


def _copied(text: Any, at: int, out: Any, to: int) -> tuple[int, int]:
    """(where the text goes on, where ``out`` does) behind what a number may consist of, or null, and a comma."""
    if text[at] == 110 and text[at + 1] == 117 and text[at + 2] == 108 and text[at + 3] == 108:
        for k in range(4):
            out[to + k] = text[at + k]
        at += 4
        to += 4
    else:
        byte = text[at]
        while (byte >= 48 and byte <= 57) or byte == 45 or byte == 46 or byte == 43 or byte == 101 or byte == 69:
            out[to] = byte
            at += 1
            to += 1
            byte = text[at]
    out[to] = 44
    return at, to + 1


def _key(text: Any, at: int, keys: Any, cuts: Any, key: int) -> int:
    return _same(text, at, keys, cuts[key], cuts[key + 1])


def _field(text: Any, at: int, keys: Any, cuts: Any, key: int) -> tuple[int, int]:
    """`_whole` behind a key."""
    value = -1
    at = _key(text, at, keys, cuts, key)
    if at >= 0:
        value, at = _whole(text, at)
    return value, at


def _tail(text: Any, at: int, keys: Any, cuts: Any, out: Any, n: int, i: int, floats: Any, hashes: Any,
          used: Any) -> int:  # fmt: skip
    """Whether the text from the first key of `KEYS` on ends as a line of a tensor; its numbers are in ``out``."""
    to, end_hash, length = used[0], used[1], 0
    step = seg = nbytes = count = nan = inf = -1
    off = 0
    call, at = _field(text, at, keys, cuts, 0)
    seq = -1
    if at >= 0:
        seq, at = _field(text, at, keys, cuts, 1)
    if at >= 0 and _key(text, at, keys, cuts, 2) >= 0:
        step, at = _field(text, at, keys, cuts, 2)
    there = -1
    if at >= 0:
        there = _key(text, at, keys, cuts, 3)
    if there >= 0:
        at = there
        while (text[at] >= 48 and text[at] <= 57) or (text[at] >= 97 and text[at] <= 102):
            hashes[end_hash + length] = text[at]
            at += 1
            length += 1
        at = at + 1 if text[at] == 34 and length > 0 else -1
    if at >= 0 and _key(text, at, keys, cuts, 4) >= 0:
        seg, at = _field(text, at, keys, cuts, 4)
        if at >= 0:
            off, at = _field(text, at, keys, cuts, 5)
        if at >= 0:
            nbytes, at = _field(text, at, keys, cuts, 6)
    if at >= 0 and _key(text, at, keys, cuts, 7) >= 0:
        count, at = _field(text, at, keys, cuts, 7)
        for key in range(8, 12):
            if at >= 0:
                at = _key(text, at, keys, cuts, key)
            if at >= 0:
                at, to = _copied(text, at, floats, to)
        if at >= 0:
            nan, at = _field(text, at, keys, cuts, 12)
        if at >= 0:
            inf, at = _field(text, at, keys, cuts, 13)
        if at >= 0:
            at = at + 1 if text[at] == 125 else -1
    good = 0
    if at >= 0 and text[at] == 125 and text[at + 1] == 10:
        good = 1
        used[0], used[1] = to, end_hash + length
        out[n + i], out[2 * n + i], out[3 * n + i], out[4 * n + i], out[5 * n + i] = call, seq, step, seg, off
        out[6 * n + i], out[7 * n + i], out[8 * n + i], out[9 * n + i] = nbytes, count, nan, inf
        out[10 * n + i] = length
    return good


def _begins(text: Any, at: int, stop: int, heads: Any, start: int, end: int) -> int:
    """Whether the text has the bytes of a head there, and more behind it."""
    size = end - start
    differ = np.uint8(1)
    if at + size + 8 < stop:
        differ = np.uint8(0)
        for k in range(size):
            differ |= text[at + k] ^ heads[start + k]
    return 1 if differ == 0 else 0


def _place(text: Any, at: int, end: int, room: int) -> int:
    """Of some bytes in a table of ``room`` places [FNV-1a]."""
    value = np.uint64(14695981039346656037)
    for k in range(at, end):
        value = (value ^ text[k]) * np.uint64(1099511628211)
    place: Any = (value >> np.uint64(20)) % np.uint64(room)
    return place


def _found(text: Any, at: int, stop: int, heads: Any, spans: Any, table: Any, keys: Any, cuts: Any) -> int:
    """The number of a line's head, -1 where it is not known. table: numbers by `_place`, -1 for a place that is free;
    half of them are."""
    end = at
    while end + 8 < stop and _key(text, end, keys, cuts, 0) < 0:
        end += 1
    number = -1
    if end + 8 < stop:
        place = _place(text, at, end, table.size)
        number = table[place]
        tries = 1
        while number >= 0 and (spans[number + 1] - spans[number] != end - at
                               or _begins(text, at, stop, heads, spans[number], spans[number + 1]) == 0):  # fmt: skip
            place = (place + 1) % table.size
            number = table[place] if tries < MOST_TRIES else -1
            tries += 1
    return number


def enter(heads: Bytes, spans: Index, table: Index, first: int, stop: int) -> None:
    """Puts heads into ``table``, or leaves them out where there is no room near their place. heads: their bytes; spans:
    where each begins, and the last ends."""
    for number in range(first, stop):
        place = _place(heads, spans[number], spans[number + 1], table.size)
        tries = 1
        while table[place] >= 0 and tries < MOST_TRIES:
            place = (place + 1) % table.size
            tries += 1
        if table[place] < 0:
            table[place] = number


def read(text: Bytes, starts: Index, heads: Bytes, spans: Index, table: Index, after: Index, keys: Bytes, cuts: Index,
         out: Index, floats: Bytes, hashes: Bytes, used: Index) -> None:  # fmt: skip
    """The lines of a text, each of which ends with a newline. starts: of each, and the text's end; after: the head that
    followed each head last, -1 for none; out: `FIELDS` by lines; floats: four for each line with statistics, with
    commas; hashes: those of all lines; used: how much of both is written, and the head of the last line or -1."""
    n = starts.size - 1
    last = used[2]
    for i in range(n):
        at, stop = starts[i], starts[i + 1]
        number = -1
        if last >= 0:
            number = after[last]
        if number >= 0 and _begins(text, at, stop, heads, spans[number], spans[number + 1]) == 0:
            number = -1
        if number < 0:
            number = _found(text, at, stop, heads, spans, table, keys, cuts)
        out[i] = -1
        if number >= 0:
            if last >= 0:
                after[last] = number
            last = number
            good = _tail(text, at + spans[number + 1] - spans[number], keys, cuts, out, n, i, floats, hashes, used)
            if good == 1:
                out[i] = number
    used[2] = last


LOOPS = (enter, read)
