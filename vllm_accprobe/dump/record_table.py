"""The tensors of a dump as columns: lines of the journal in, a `Record` out where one is needed.

The problem: a dump has up to millions of tensors, and an object for each costs more time and memory than all that is
done with most of them. The idea: what the tap says of a tensor (names, dtype, shape, layout) is a `TensorSite`, checked
once; what differs from call to call (step, hash, statistics, where the bytes lie) is a column, checked as one. A table
is a sequence of records, each made when it is requested; loops that need a record of each site, or the records of a few
sites, use `first_of_each_site` and `of_sites`, which take plain lists too, as other tools' dumps have them. Not here:
files (reader.py), other lines (journal.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.journal import MAX_DIMS, MAX_INT, Event, integer, layout_of, optional_string, short, string
from vllm_accprobe.dump.schema import Layout, Payload, Record, Stats, which

BATCH = 512
"""Lines, or records, that are handled together: few enough for the cache of a processor."""


NONE: Mapping[str, Any] = {}


def by_column(kind: Any, n: int, fields: Mapping[str, Iterable[Any]], same: Mapping[str, Any] = NONE) -> list[Any]:
    """``n`` values of a dataclass with slots, each field's values in turn: in a third of the time that its constructor
    takes for a frozen one. same: the fields that all of them have alike."""
    made = list(map(kind.__new__, repeat(kind, n)))
    for name, put in _setters(kind).items():
        deque(map(put, made, fields[name] if name in fields else repeat(same[name], n)), maxlen=0)
    return made


@cache
def _setters(kind: Any) -> dict[str, Callable[[Any, Any], None]]:
    return {f.name: getattr(kind, f.name).__set__ for f in dataclasses.fields(kind)}


T = TypeVar("T")


class LazyTable(Sequence[T]):
    """``n`` values of a dataclass with slots: columns, and the values where one is needed."""

    def __init__(self, kind: type[T], n: int, columns: Mapping[str, Sequence[Any]], same: Mapping[str, Any] = NONE):
        """columns: fields, a value for each; same: the fields that all have alike."""
        self._kind, self._n, self._columns, self._same = kind, n, dict(columns), same

    @cached_property
    def _made(self) -> list[Any]:
        """None for what was not needed yet."""
        return [None] * self._n

    def _of(self, start: int) -> list[T]:
        """The BATCH values from there, made together: a column costs a few microseconds however short it is."""
        here = slice(start, start + BATCH)
        if self._made[start] is None:
            columns = {name: values[here] for name, values in self._columns.items()}
            self._made[here] = by_column(self._kind, min(BATCH, self._n - start), columns, self._same)
        return self._made[here]

    @cached_property
    def first(self) -> T:
        own = {name: values[0] for name, values in self._columns.items()}
        return self._kind(**{**self._same, **own})

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(self._n)[at]]
        i = range(self._n)[at]
        return self._made[i] or self._of(i - i % BATCH)[i % BATCH]

    def __iter__(self) -> Iterator[T]:
        for start in range(0, self._n, BATCH):
            yield from self._of(start)

    def stretch(self, start: int, stop: int) -> LazyTable[T]:
        columns = {name: values[start:stop] for name, values in self._columns.items()}
        return LazyTable(self._kind, stop - start, columns, self._same)

    @property
    def same(self) -> dict[str, Any]:
        """The fields that all have alike."""
        return {name: value for name, value in self._same.items() if name not in self._columns}

    def column(self, name: str) -> Sequence[Any]:
        return self._columns[name] if name in self._columns else [self._same[name]] * self._n


def alike(values: Sequence[Any]) -> bool:
    """Whether all are one object; False for none."""
    return len(values) > 0 and all(map(is_, values, repeat(values[0])))


def column(values: Sequence[Any], name: str) -> Sequence[Any]:
    """A field of each."""
    return values.column(name) if isinstance(values, LazyTable) else list(map(attrgetter(name), values))


class TensorSite(NamedTuple):
    """What all tensors of one tap and role in one form have in common, see `Record`. parameter: without a step; nbytes:
    of the payload."""

    tap: str
    cls: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    rows: str | None
    row_dim: int
    layout: Layout
    sample: str | None
    mutated: bool
    stride: tuple[int, ...] | None
    offset: int
    parameter: bool
    nbytes: int
    rounded: str | None = None

    @staticmethod
    def of_line(e: Event, layouts: dict[str, Layout] | None = None) -> TensorSite:
        """Raises ValueError for a ``tensor`` or ``param`` event that is none. layouts: those read before, by their
        text: a dump has thousands of sites and a dozen layouts."""
        layouts = {} if layouts is None else layouts
        laid = repr(e.get("layout"))
        if laid not in layouts:
            layouts[laid] = layout_of(e.get("layout"))
        dtype = string(e, "dtype")
        info = DTYPES.get(dtype)
        if info is None:
            raise ValueError(f"dtype {dtype[:40]} is not known to this release")
        raw_shape = e.get("shape")
        if not isinstance(raw_shape, list) or len(raw_shape) > MAX_DIMS or not _whole_numbers(raw_shape):
            raise ValueError(f"shape is {short(raw_shape)}")
        shape = tuple(raw_shape)
        size = math.prod(shape) * info.itemsize
        if size >= 1 << 60 or (size == 0 and math.prod(max(d, 1) for d in shape) >= 1 << 56):
            raise ValueError(f"shape is {short(raw_shape)}")
        row_dim = e.get("row_dim", 0)
        if type(row_dim) is not int or not 0 <= row_dim <= max(len(shape) - 1, 0):
            raise ValueError(f"row_dim is {short(row_dim)} for shape {list(shape)}")
        stride = e.get("stride")
        if stride is not None and not (isinstance(stride, list) and len(stride) == len(shape)
                                       and _whole_numbers(stride)):  # fmt: skip
            raise ValueError(f"stride is {short(stride)} for shape {list(shape)}")
        return TensorSite(
            string(e, "tap"), string(e, "class", ""), string(e, "role"), dtype, shape, optional_string(e, "rows"),
            row_dim, layouts[laid], optional_string(e, "sample"), bool(e.get("mutated", False)),
            None if stride is None else tuple(stride), integer(e, "offset", 0), e["event"] == "param", size,
            optional_string(e, "rounded"),
        )  # fmt: skip


def _whole_numbers(values: list[Any]) -> bool:
    return all(type(n) is int and 0 <= n <= MAX_INT for n in values)


_CUT = b',"call":'
_PARTED = methodcaller("partition", _CUT)
_OWN = frozenset(("call", "seq", "step", "hash", "seg", "off", "nbytes", "stats"))
"""What a line has behind the cut."""
MOST_HEADS = 1 << 16


class TensorSites:
    """The sites of one dump, by number; those that are equal have one.

    All lines of a site begin with the same bytes, up to ``"call"``, because capture writes them from a template: these
    are parsed once."""

    def __init__(self) -> None:
        self.all: list[TensorSite] = []
        self._numbers: dict[TensorSite, int] = {}
        self.heads: dict[bytes, int] = {}
        self._layouts: dict[str, Layout] = {}

    def number(self, site: TensorSite) -> int:
        found = self._numbers.setdefault(site, len(self.all))
        if found == len(self.all):
            self.all.append(site)
        return found

    def known(self, lines: Iterable[bytes]) -> tuple[list[int | None], list[bytes]]:
        """(the site's number of each line, None where its head is not known; what is behind the cut)."""
        heads, _, tails = zip(*map(_PARTED, lines), strict=True)
        return list(map(self.heads.get, heads)), list(tails)

    @staticmethod
    def tails(lines: Sequence[bytes]) -> list[Event] | None:
        """The other keys of lines with known heads, parsed together; None where they do not say that by themselves:
        whole lines say what is wrong, and NaN and half a surrogate pair are not."""
        text = b',{"call":'.join([b"", *lines])
        if b"[" in text:  # without one, no line can take in the next: each ends, or the whole is no JSON
            return None
        try:
            found = orjson.loads(b"[%s]" % text[1:])
        except ValueError:
            return None
        return found if len(found) == len(lines) and _OWN.issuperset(set().union(*found)) else None

    def whole(self, line: bytes, e: Event) -> tuple[int, Event]:
        """The same of a line that was parsed. Raises ValueError for a ``tensor`` or ``param`` event that is none."""
        number = self.number(TensorSite.of_line(e, self._layouts))
        head, _, tail = _PARTED(line)
        with contextlib.suppress(ValueError):  # a head is an object of its own, and says all but what may follow it
            same = self.tails([tail]) is not None and orjson.loads(head + b"}").keys() == e.keys() - _OWN
            if same and len(self.heads) < MOST_HEADS:
                self.heads[head] = number
        return number, e


_WORDS = ("min", "max", "mean", "l2")
_COUNTS = ("count", "nan", "inf")
Columns = dict[str, np.ndarray]
"""site, rank: int32; step (-1: a parameter), call, seq, seg (-1: no payload), off, count (-1: no statistics), nan, inf:
int64; min, max, mean, l2: float64, NaN for none; hash: str or None; lost: bool."""
_EMPTY: Columns = {
    **dict.fromkeys(("site", "rank"), np.zeros(0, np.int32)),
    **dict.fromkeys(("step", "call", "seq", "seg", "off", *_COUNTS), np.zeros(0, np.int64)),
    **dict.fromkeys(_WORDS, np.zeros(0)), "hash": np.zeros(0, object), "lost": np.zeros(0, bool),
}  # fmt: skip


class _PlaceNames(dict[tuple[int, int], str]):
    """By the number of a site and a call."""

    def __init__(self, sites: TensorSites):
        super().__init__()
        self.sites = sites

    def __missing__(self, place: tuple[int, int]) -> str:
        site = self.sites.all[place[0]]
        found = self[place] = sys.intern(f"{site.tap}/{which(site.role, place[1], site.rows)}")
        return found


class RecordTable(Sequence[Record]):
    """Records in the order of the journals. columns: see `Columns`."""

    def __init__(self, sites: TensorSites, columns: Columns):
        self.sites, self.columns = sites, columns

    @staticmethod
    def joined(sites: TensorSites, parts: Sequence[RecordTable]) -> RecordTable:
        return RecordTable(
            sites, {name: np.concatenate([none, *(p.columns[name] for p in parts)]) for name, none in _EMPTY.items()}
        )

    @staticmethod
    def of_lines(
        sites: TensorSites, rank: int, numbers: Sequence[int], events: Sequence[Event]
    ) -> tuple[RecordTable, list[tuple[int, str]]]:
        """The tensors of one rank, as `TensorSites` reads their lines, and (which, why) of those that are none."""
        try:
            return RecordTable(sites, _columns(sites, rank, numbers, events)), []
        except (ValueError, RecursionError) as error:
            if len(events) == 1:
                why = "nested too deep" if isinstance(error, RecursionError) else str(error)
                return RecordTable(sites, _EMPTY), [(0, why)]
        half = len(events) // 2
        first, bad = RecordTable.of_lines(sites, rank, numbers[:half], events[:half])
        second, more = RecordTable.of_lines(sites, rank, numbers[half:], events[half:])
        return RecordTable.joined(sites, [first, second]), [*bad, *((half + i, why) for i, why in more)]

    def __len__(self) -> int:
        return len(self.columns["site"])

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), BATCH):
            yield from self.made(slice(start, start + BATCH))

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.made(at)
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        return self.made(slice(at, at + 1))[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def only(self, which: np.ndarray) -> RecordTable:
        """Those at a mask, or at indices."""
        return RecordTable(self.sites, {name: column[which] for name, column in self.columns.items()})

    def of_sites(self, fits: Callable[[TensorSite], bool]) -> np.ndarray:
        """bool [n]: which records are of a site that ``fits``."""
        return self.by_site(fits, bool)

    def by_site(self, value: Callable[[TensorSite], Any], dtype: Any) -> np.ndarray:
        """For each record what ``value`` says of its site."""
        return np.fromiter(map(value, self.sites.all), dtype, len(self.sites.all))[self.columns["site"]]

    def change(self, which: np.ndarray, **fields: Any) -> None:
        """Replaces fields of the sites of some records."""
        own = self.columns["site"][which]
        for number in np.unique(own).tolist():
            self.columns["site"][which[own == number]] = self.sites.number(self.sites.all[number]._replace(**fields))

    @cached_property
    def places(self) -> tuple[list[Record], np.ndarray]:
        """(the first record of each site and call, in order; int64 [n]: which of them each record is like). Only when
        no site changes any more."""
        calls, call = np.unique(self.columns["call"], return_inverse=True)
        code = self.columns["site"].astype(np.int64) * len(calls) + call
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return self.made(first[order]), rank[which]

    def names(self, at: np.ndarray) -> list[str]:
        """`Record.name` of some records; one string for all that have the same."""
        places = zip(self.columns["site"][at].tolist(), self.columns["call"][at].tolist(), strict=True)
        return list(map(self._names.__getitem__, places))

    @cached_property
    def _names(self) -> _PlaceNames:
        return _PlaceNames(self.sites)

    @property
    def ran(self) -> np.ndarray:
        """bool [n]: which records belong to a step."""
        return ~self.of_sites(lambda site: site.parameter)

    @cached_property
    def payload_sizes(self) -> np.ndarray:
        """int64 [n]: bytes of each payload, 0 for none."""
        return np.where(self.columns["seg"] >= 0, self.by_site(lambda site: site.nbytes, np.int64), 0)

    @property
    def stored(self) -> int:
        """Bytes of all payloads, each once."""
        c, nbytes = self.columns, self.by_site(lambda site: site.nbytes, np.int64)
        order = np.lexsort((c["off"], c["seg"], c["rank"]))
        order = order[c["seg"][order] >= 0]
        places = np.stack([c[name][order] for name in ("rank", "seg", "off")])
        last = np.append((places[:, 1:] != places[:, :-1]).any(axis=0), True)[: len(order)]
        return int(nbytes[order[last]].sum())

    def made(self, at: slice | np.ndarray) -> list[Record]:
        c = {name: column[at].tolist() for name, column in self.columns.items()}
        sites = [self.sites.all[i] for i in c["site"]]
        if not sites:
            return []
        fields: dict[str, Iterable[Any]] = dict(zip(TensorSite._fields, zip(*sites, strict=True), strict=True))
        steps = zip(c["step"], fields.pop("parameter"), strict=True)
        places = zip(c["seg"], c["off"], fields.pop("nbytes"), strict=True)
        fields |= {name: c[name] for name in ("rank", "call", "seq", "hash", "lost")}
        fields["step"] = [None if parameter else step for step, parameter in steps]
        fields["payload"] = [None if place[0] < 0 else Payload(*place) for place in places]
        stats: dict[str, Iterable[Any]] = {name: c[name] for name in _COUNTS}
        stats |= {name: [None if v != v else v for v in c[name]] for name in _WORDS}  # NaN
        some = by_column(Stats, len(sites), stats)
        fields["stats"] = [None if n < 0 else one for n, one in zip(c["count"], some, strict=True)]
        return by_column(Record, len(sites), fields)


class ListedRecords(RecordTable):
    """Records that are objects already, as other tools' dumps have them, by the same columns."""

    def __init__(self, records: Sequence[Record]):
        self.records, sites, stats = list(records), TensorSites(), [r.stats for r in records]
        columns: dict[str, Any] = {
            "site": [sites.number(_site_of(r)) for r in records],
            "step": [-1 if r.step is None else r.step for r in records],
            "seg": [-1 if r.payload is None else max(r.payload.seg, 0) for r in records],
            "off": [0 if r.payload is None else r.payload.off for r in records],
            **{name: [getattr(r, name) for r in records] for name in ("rank", "call", "seq", "hash", "lost")},
            **{name: [-1 if s is None else getattr(s, name) for s in stats] for name in _COUNTS},
            **{name: [None if s is None else getattr(s, name) for s in stats] for name in _WORDS},
        }
        super().__init__(sites, {name: np.array(columns[name], none.dtype) for name, none in _EMPTY.items()})

    def made(self, at: slice | np.ndarray) -> list[Record]:
        return self.records[at] if isinstance(at, slice) else [self.records[i] for i in at.tolist()]

    def only(self, which: np.ndarray) -> RecordTable:
        return ListedRecords(self.made(np.arange(len(self))[which]))

    def names(self, at: np.ndarray) -> list[str]:
        records, usual = self.made(at), super().names(at)
        return [name if type(r) is Record else r.name for r, name in zip(records, usual, strict=True)]


def table_of(records: Sequence[Record]) -> RecordTable:
    return records if isinstance(records, RecordTable) else ListedRecords(records)


def _site_of(r: Record) -> TensorSite:
    nbytes = 0 if r.payload is None else r.payload.nbytes
    return TensorSite(r.tap, r.cls, r.role, r.dtype, r.shape, r.rows, r.row_dim, r.layout, r.sample, r.mutated,
                      r.stride, r.offset, r.step is None, nbytes, r.rounded)  # fmt: skip


def _columns(sites: TensorSites, rank: int, numbers: Sequence[int], events: Sequence[Event]) -> Columns:
    """Raises ValueError with the first value that is none, of whichever line."""
    n = len(events)
    out = dict(_EMPTY) | {"site": np.array(numbers, np.int32), "rank": np.full(n, rank, np.int32)}
    own, at = np.unique(out["site"], return_inverse=True)
    nbytes, parameter = (np.array([getattr(sites.all[i], name) for i in own.tolist()], np.int64)[at]
                         for name in ("nbytes", "parameter"))  # fmt: skip
    keys = {"call": 0, "seq": 0, "hash": None, "stats": None, **dict.fromkeys(("step", "seg", "off", "nbytes"))}
    calls, seqs, hashed, stats, steps, *places = _columns_of(events, keys)
    stored = [i for i, seg in enumerate(places[0]) if seg is not None]
    out["seg"], out["off"] = np.full(n, -1), np.zeros(n, np.int64)
    if stored:
        seg, off, sizes = (_whole(name, c if len(stored) == n else [c[i] for i in stored])
                           for name, c in zip(("seg", "off", "nbytes"), places, strict=True))  # fmt: skip
        there = _places(stored, n)
        out["seg"][there], out["off"][there] = seg, off
        for wrong in np.flatnonzero(nbytes[there] != sizes)[:1].tolist():
            site = sites.all[numbers[stored[wrong]]]
            raise ValueError(f"{sizes[wrong]} bytes are not a {site.dtype} tensor of shape {list(site.shape)}")
    ran = np.flatnonzero(parameter == 0).tolist()
    out["step"] = np.full(n, -1)
    out["step"][_places(ran, n)] = _whole("step", steps if len(ran) == n else [steps[i] for i in ran])
    out["call"], out["seq"] = _whole("call", calls), _whole("seq", seqs)
    if not set(map(type, hashed)) <= {str, type(None)}:
        hashed = [optional_string({"hash": h}, "hash") for h in hashed]
    out["hash"] = np.empty(n, object)
    out["hash"][:] = hashed
    out["lost"] = np.zeros(n, bool)
    return out | _of_stats(stats)


def _places(at: list[int], n: int) -> Any:
    """To index columns of n with: a list would be made an array each time."""
    return slice(None) if len(at) == n else np.array(at, np.int64)


def _columns_of(events: Sequence[Event], keys: Mapping[str, Any]) -> list[Sequence[Any]]:
    """The values of each key, which has a default."""
    first = tuple(events[0]) if events else ()
    if len(first) > 1 and set(map(len, events)) == {len(first)}:
        with contextlib.suppress(KeyError):  # all have the keys of the first, and no others
            found = dict(zip(first, zip(*map(itemgetter(*first), events), strict=True), strict=True))
            return [found[key] if key in found else (default,) * len(events) for key, default in keys.items()]
    return [[e.get(key, default) for e in events] for key, default in keys.items()]


def _of_stats(found: Sequence[Any]) -> Columns:
    known = [i for i, s in enumerate(found) if s is not None]
    some, there = found if len(known) == len(found) else [found[i] for i in known], _places(known, len(found))
    if not set(map(type, some)) <= {dict}:
        raise ValueError(f"stats is {short(next(s for s in some if type(s) is not dict))}")
    out: Columns = {name: np.full(len(found), -1) for name in _COUNTS} | {
        name: np.full(len(found), np.nan) for name in _WORDS
    }
    (count, nan, inf), words = (columns := _columns_of(some, _STATS))[:3], columns[3:]
    out["count"][there] = _whole("count", count)
    out["nan"][there], out["inf"][there] = _whole("nan", nan), _whole("inf", inf)
    for name, values in zip(_WORDS, words, strict=True):
        out[name][there] = numbers_with_fractions(values)
    return out


def numbers_with_fractions(values: Sequence[Any]) -> np.ndarray:
    """float64 [n]; NaN for all that is no number."""
    if not set(map(type, values)) <= {float, type(None)}:
        values = [float(v) if type(v) is int and abs(v) <= MAX_INT else v if type(v) is float else None for v in values]
    column = np.array(values, np.float64)
    column[~np.isfinite(column)] = np.nan  # infinity and NaN, which JSON cannot say, are as good as missing
    return column


_STATS: Mapping[str, Any] = {"count": None, "nan": 0, "inf": 0, **dict.fromkeys(_WORDS)}


def _whole(key: str, values: Sequence[Any]) -> np.ndarray:
    """int64 [n]: `integer` of each. Raises ValueError."""
    if set(map(type, values)) <= {int}:
        try:
            column = np.array(values, np.int64)
        except OverflowError:
            column = np.full(1, -1)
        if not len(column) or (column.min() >= 0 and column.max() <= MAX_INT):
            return column
    return np.array([integer({key: v}, key) for v in values], np.int64)  # says which is none


def places_of(records: Sequence[Record]) -> tuple[Sequence[Record], np.ndarray]:
    """`RecordTable.places`; each record of a list is a place of its own."""
    return records.places if isinstance(records, RecordTable) else (records, np.arange(len(records)))


def first_of_each_site(records: Sequence[Record]) -> Sequence[Record]:
    """A record of each tap, role, call and form, the first, in order; of a list all."""
    return places_of(records)[0]


def numbers_of(records: Sequence[Record], name: str) -> np.ndarray:
    """int64 [n]: rank, or step, -1 for a parameter's."""
    if isinstance(records, RecordTable):
        return records.columns[name]
    found = (getattr(r, name) for r in records)
    return np.fromiter((-1 if v is None else v for v in found), np.int64, len(records))


def joined(first: Sequence[Record], second: Sequence[Record]) -> Sequence[Record]:
    if not len(second):
        return first
    if isinstance(first, RecordTable) and isinstance(second, RecordTable):
        return RecordTable.joined(first.sites, [first, second])
    return [*first, *second]


class ChosenRecords(Sequence[tuple[int, Record]]):
    """Some records with their indices. at: int64, ascending."""

    def __init__(self, records: Sequence[Record], at: np.ndarray):
        self.records, self.at = records, at

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return list(zip(self.at[i].tolist(), self._only(self.at[i]), strict=True))
        return int(self.at[i]), self.records[int(self.at[i])]

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        return zip(self.at.tolist(), self._only(self.at), strict=True)

    def _only(self, at: np.ndarray) -> Sequence[Record]:
        table = self.records
        return table.only(at) if isinstance(table, RecordTable) else [table[i] for i in at.tolist()]

    def but(self, taps: Collection[str]) -> ChosenRecords:
        """Those of other taps."""
        firsts, which = places_of(self.records)
        others = np.fromiter((r.tap not in taps for r in firsts), bool, len(firsts))
        return ChosenRecords(self.records, self.at[others[which[self.at]]]) if taps else self

    @property
    def ran(self) -> int:
        """How many are of a step."""
        return int((numbers_of(self.records, "step")[self.at] >= 0).sum())


def stored_bytes(records: Sequence[Record]) -> int:
    """Of all payloads, each place counted once."""
    if isinstance(records, RecordTable):
        return records.stored
    return sum({(r.rank, r.payload.seg, r.payload.off): r.payload.nbytes for r in records if r.payload}.values())


def of_sites(records: Sequence[Record], fits: Callable[[Any], bool]) -> Sequence[Record]:
    """The records whose tap, cls, role, dtype, shape, rows, layout and parameter, of a site or a record, fit."""
    if isinstance(records, RecordTable):
        return records.only(records.of_sites(fits))
    return [r for r in records if fits(r)]


def of_moment(records: Sequence[Record], rank: int, step: int | None) -> Sequence[Record]:
    """The records of one rank and step, or its parameters."""
    at = (numbers_of(records, "rank") == rank) & (numbers_of(records, "step") == (-1 if step is None else step))
    return records.only(at) if isinstance(records, RecordTable) else [records[i] for i in np.flatnonzero(at).tolist()]


def of_new_places(records: Sequence[Record]) -> Sequence[Record]:
    """The records of all steps of a rank in which a (tap, role, call) comes that no step before had; of a list all."""
    if not isinstance(records, RecordTable):
        return records
    ran = records.only(records.ran)
    known: dict[tuple[str, str], int] = {}
    places = ran.by_site(lambda site: known.setdefault((site.tap, site.role), len(known)), np.int64)
    calls, call = np.unique(ran.columns["call"], return_inverse=True)
    step = np.unique(ran.columns["step"], return_inverse=True)[1]
    moments = ran.columns["rank"] + step * (int(ran.columns["rank"].max(initial=0)) + 1)
    order = np.argsort(moments, kind="stable")
    first = np.unique((places * len(calls) + call)[order], return_index=True)[1]
    return ran.only(np.isin(moments, moments[order[first]]))
