"""Errors by row, samples and histograms, kept for heat map, worst rows and charts.

The problem: a pair says how bad its worst row is; which rows, and how the numbers are spread, it does not say. The
idea: `RowLog` keeps one float32 per row of outputs while pairs are made; `RowTable` is the same in columns. For the
worst failed pairs the worst row and some others are read again (`take_samples`); for origins and the worst pairs both
sides' histograms, column errors and errors by position (`take_spreads`), until a tenth of the compared bytes is read
again. What is left out is counted by reason. Not here: measuring and judging (engine.py), drawing (report/).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.align.tokens import NO_ROWS, POSITION_MASK, RowSet, SideRows, subject
from vllm_accprobe.comparison.measure.measured import SpillBuffer
from vllm_accprobe.comparison.measure.measurer import unit_bytes
from vllm_accprobe.comparison.measure.read import Loader, Stretch, Unread, find_cut
from vllm_accprobe.comparison.pair import FAIL, PASS, Pair, Pairs
from vllm_accprobe.comparison.plan.make_plan import Plan
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES

Names = dict[int, "tuple[str, int | None]"]
"""Subject of a row key → (request label, image index or None)."""
BOUND = 32 << 20
"""Bytes of errors by row that stay in memory."""
OFTEN = 1 << 18
"""Rows."""


@dataclass(frozen=True)
class RowTable:
    """One entry per compared row of a tensor, all columns of one length.

    pair: int32, ascending, index into ``Comparison.pairs``. request: int32, index into ``requests``, the labels (``a``,
    or ``a, image 0`` for rows of a vision tower). position: int64, of the token in its request, or of the row in its
    image. decode: bool. error: float32, in units of a relative L2 error, 0 where the numbers agree,
    infinite where NaNs differ. ratio: float32, error over the pair's limit; NaN where the pair has none. There are no
    entries at all where every row of every pair agrees.
    """

    requests: tuple[str, ...]
    pair: np.ndarray
    request: np.ndarray
    position: np.ndarray
    decode: np.ndarray
    error: np.ndarray
    ratio: np.ndarray
    shelf: SpillBuffer | None = field(default=None, compare=False, repr=False)
    """Where the columns lie, None where they are in memory."""

    def __len__(self) -> int:
        return len(self.pair)

    def rest(self) -> None:
        """For whoever walks over all rows, now and then: they need not fit into memory."""
        if self.shelf is not None:
            self.shelf.rest()


@dataclass(frozen=True)
class ValueSample:
    """Values of one pair. pair: index into ``Comparison.pairs``. golden, mine: float32 [n], the same places of both
    sides; the first ``worst`` of them lie in the worst row (``request``, ``position``), evenly spread, the others in
    other rows."""

    pair: int
    golden: np.ndarray
    mine: np.ndarray
    worst: int
    request: str | None = None
    position: int | None = None


@dataclass(frozen=True)
class ValueSpread:
    """One pair's values and errors in bins (comparison/row_table.py). pair: index into ``Comparison.pairs``.
    golden, mine: int64 [bins + 3], how many values lie in equal bins from low to high, and NaN, +Inf, -Inf. columns:
    float64, the largest error of the columns in each bin, of ``width`` columns. positions: float64, the largest row
    error in each stretch from first to last; -1 without rows. read, rows: rows whose values were read, of how
    many; of an input only those beyond the limit."""

    pair: int
    low: float
    high: float
    golden: np.ndarray
    mine: np.ndarray
    columns: np.ndarray
    width: int
    first: int
    last: int
    positions: np.ndarray
    read: int
    rows: int


def numbered_sets(rows: Sequence[RowSet]) -> tuple[list[RowSet], np.ndarray]:
    """(the different sets, int64 [n], which of them each is)."""
    known = {own: i for i, own in enumerate(dict.fromkeys(rows))}
    return list(known), np.fromiter(map(known.__getitem__, rows), np.int64, len(rows))


KeptRows = tuple[RowSet, "np.ndarray | float"]
"""A pair's rows, and the float32 error of each, or the one that all have."""
NOT_KEPT: KeptRows = (NO_ROWS, 0.0)


@dataclass
class RowLog:
    """Filled with each pair's rows in turn while pairs are made; 4 bytes per row, and 25 of the table, on a shelf."""

    shelf: SpillBuffer = field(default_factory=lambda: SpillBuffer(None, BOUND))
    _rows: list[RowSet] = field(default_factory=list)
    _errors: list[np.ndarray | float] = field(default_factory=list)
    _differs: bool = False
    """Whether any row has an error."""

    def add(self, kept: KeptRows) -> None:
        self._rows.append(kept[0])
        self._errors.append(kept[1])

    def add_alike(
        self, rows: Sequence[RowSet], errors: np.ndarray, roles: Sequence[str], limits: Sequence[float], of: np.ndarray
    ) -> None:
        """Pairs of some units, with their rows, and the one error that all rows of a pair have: float [pairs]. roles,
        limits: of each unit; of: int64 [pairs], the unit of each."""
        self._differs |= bool(errors.any())
        errors = _float32(errors)
        given = np.array([_all_kept(role) for role in roles], bool)[of]
        kept = given | (errors > np.array(limits, np.float32)[of])
        usable = {own: len(own.decode) == len(own.keys) for own in dict.fromkeys(rows)}
        if kept.all() and all(usable.values()):
            self._rows += rows
        else:
            self._rows += [own if k and usable[own] else NO_ROWS for own, k in zip(rows, kept.tolist(), strict=True)]
        self._errors += errors.tolist()

    def kept(self, pair: Pair, rows: RowSet, error: np.ndarray) -> KeptRows:
        """error: float [n] of the n ``rows``, or [1] for all alike."""
        if not len(rows) or len(rows.decode) != len(rows) or pair.role.startswith("param."):
            return NOT_KEPT
        error = _float32(error)
        over = np.flatnonzero(error > (pair.limit or 0.0))
        if len(error) == 1:
            self._differs |= bool(error.any())
            return (rows, float(error[0])) if _all_kept(pair.role) or len(over) else NOT_KEPT
        if len(error) != len(rows) or not (_all_kept(pair.role) or len(over)):
            return NOT_KEPT
        if not _all_kept(pair.role):
            rows, error = RowSet(rows.keys[over], rows.decode[over]), error[over]
        self._differs |= bool(error.any())
        return rows, self.shelf.keep(error)

    def reorder(self, order: np.ndarray) -> None:
        """The pairs at ``order`` instead of those there are."""
        self._rows, self._errors = ([own[i] for i in order.tolist()] for own in (self._rows, self._errors))

    def errors(self, i: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(keys, float32 errors) of the rows of one pair."""
        rows = self._rows[i]
        return (rows.keys, np.broadcast_to(np.float32(self._errors[i]), len(rows))) if len(rows) else None

    def table(self, limits: np.ndarray, names: Names) -> RowTable:
        """limits: float64 [pairs], NaN for none."""
        each = {i: e for i, e in enumerate(self._errors) if isinstance(e, np.ndarray)}
        alike = np.array([0.0 if i in each else e for i, e in enumerate(self._errors)], np.float32)
        sets, of = numbered_sets(self._rows)
        lengths = np.array([len(rows) for rows in sets], np.int64)[of]
        differs = self._differs and (((alike != 0) & (lengths > 0)).any() or any(map(np.any, each.values())))
        found = np.flatnonzero(lengths) if differs else np.zeros(0, np.int64)  # else there is nothing to tell
        keys = np.concatenate([NO_ROWS.keys, *(rows.keys for rows in sets if len(found))])
        decode = np.concatenate([NO_ROWS.decode, *(rows.decode for rows in sets if len(found))])
        begins = np.cumsum([0, *(len(rows) for rows in sets)])[of]
        owners, request = np.unique(subject(keys), return_inverse=True)
        labels = tuple(_label(*names.get(int(s), (str(int(s)), None))) for s in owners)
        n = int(lengths[found].sum())
        # Filled stretch by stretch: of millions of rows, joined arrays would be most of the memory.
        empty = self.shelf.empty
        out = RowTable(
            labels, empty(n, np.int32), empty(n, np.int32), empty(n, np.int64), empty(n, bool),
            empty(n, np.float32), empty(n, np.float32), self.shelf,
        )  # fmt: skip
        start = 0
        for pairs in np.split(found, np.flatnonzero(np.diff(np.cumsum(lengths[found]) // OFTEN)) + 1):
            some = lengths[pairs]
            ends = np.cumsum(some)
            here = slice(start, start := start + int(some.sum()))
            at = np.repeat(begins[pairs] - (ends - some), some) + np.arange(here.stop - here.start)
            out.pair[here] = np.repeat(pairs, some)
            out.request[here] = request[at]
            out.position[here] = keys[at] & POSITION_MASK
            out.decode[here] = decode[at]
            error = np.repeat(alike[pairs], some)
            for i, end in zip(pairs.tolist(), ends.tolist(), strict=True) if each else ():
                if i in each:
                    error[end - len(each[i]) : end] = each[i]
            with np.errstate(divide="ignore", invalid="ignore"):
                allowed = np.repeat(limits[pairs].astype(np.float32), some)
                out.ratio[here] = np.where(error == 0, np.float32(0), error / allowed)
            out.error[here] = error
            out.rest()
        return out


def _float32(errors: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinite, then
        return errors.astype(np.float32)


def _all_kept(role: str) -> bool:
    """Whether rows of tensors with this role are kept where they are within limits, too."""
    return role.startswith(("output", "inplace"))


def _label(request: str, image: int | None) -> str:
    return request if image is None else f"{request}, image {image}"


def row_labels(names: Names, keys: np.ndarray) -> dict[str, list[tuple[int, int]]]:
    """Rows by the label of their request, as in `RowTable`: half-open ranges of positions. keys: int64, ascending."""
    out: dict[str, list[tuple[int, int]]] = {}
    for part in np.split(keys, np.flatnonzero(np.diff(keys) != 1) + 1) if len(keys) else ():
        who, first = int(subject(part[:1])[0]), int(part[0]) & POSITION_MASK
        found = out.setdefault(_label(*names.get(who, (str(who), None))), [])
        found.append((first, first + len(part)))
    return {label: sorted(found) for label, found in out.items()}


VALUES = 256
OTHER_ROWS = 15
MAX_SAMPLED_PAIRS = 64


def take_samples(
    plan: Plan, loaders: tuple[Loader, Loader], pairs: Pairs, log: RowLog, limit: int = MAX_SAMPLED_PAIRS
) -> tuple[ValueSample, ...]:
    units = {u.key: u for u in plan.units}
    out = []
    for i in _chosen(pairs, limit):
        unit = units.get((pairs[i].tap, pairs[i].role, pairs[i].call))
        try:
            sample = None if unit is None else _sample(i, pairs[i], unit, plan, loaders, log)
        except Unread:
            sample = None
        if sample is not None:
            out.append(sample)
    for loader in loaders:
        loader.forget()
    return tuple(out)


def _chosen(pairs: Pairs, limit: int) -> list[int]:
    best: dict[tuple[str, str, int], int] = {}
    failed = np.flatnonzero(pairs.failed & pairs.those("rows", bool)).tolist()
    for i in failed:
        p = pairs[i]
        key = (p.tap, p.role, p.call)
        if key not in best or (p.worst_row_rel_l2 or 0.0) > (pairs[best[key]].worst_row_rel_l2 or 0.0):
            best[key] = i
    first = set(best.values())
    return sorted(sorted(failed, key=lambda i: (i not in first, pairs[i].order))[:limit])


def _sample(
    index: int, pair: Pair, unit: Unit, plan: Plan, loaders: tuple[Loader, Loader], log: RowLog
) -> ValueSample | None:
    found = log.errors(index)
    group = next((g for g in unit.mine if g.merge and (g.first.step, g.first.name) == (pair.step, pair.mine)), None)
    if found is None or group is None or not group.readable:
        return None
    keys, errors = found
    worst = int(keys[int(errors.argmax())])
    others = keys[keys != worst]
    others = others[np.unique(np.linspace(0, len(others) - 1, OTHER_ROWS).astype(int))] if len(others) else others
    goldens = [g for g in unit.golden if g.readable]
    known, *sides = _rows_of_both(plan, loaders, goldens, group, np.unique([*others, worst]))
    at = {int(key): i for i, key in enumerate(known)}
    if worst not in at:
        return None
    share = max(1, VALUES // max(len(others), 1))
    rows = [(at[k], VALUES if k == worst else share) for k in (worst, *others.tolist()) if k in at]
    width = sides[0].shape[1]
    places = [(i, np.arange(width) if width <= n else np.linspace(0, width - 1, n).astype(int)) for i, n in rows]
    golden, mine = (np.concatenate([side[i][c] for i, c in places]).astype(np.float32) for side in sides)
    return ValueSample(index, golden, mine, len(places[0][1]), *plan.tokens.name(worst))


def _rows_of_both(
    plan: Plan, loaders: tuple[Loader, Loader], goldens: Sequence[Group], group: Group, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(those of ``keys`` that both sides have, golden's rows, mine's), float64 [n, width]; of golden's tensors the last
    that has a row counts. Nothing where row maps and tensors do not fit. keys: ascending. Raises Unread."""
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for golden in reversed(goldens):
        rows = _rows_at(plan.tokens.golden, golden, keys), _rows_at(plan.tokens.mine, group, keys)
        both = (rows[0] >= 0) & (rows[1] >= 0)
        if not both.any():
            continue
        cuts = find_cut(golden, group)
        loaded = [ld.load(g, cut) for ld, g, cut in zip(loaders, (golden, group), cuts, strict=True)]
        at = [r[both] for r in rows]
        beyond = any(r.max() >= len(b.data) for r, b in zip(at, loaded, strict=True))
        if beyond or loaded[0].data.shape[1] != loaded[1].data.shape[1]:
            found.clear()
            break
        found.append((keys[both], *Stretch(loaded[0], at[0], loaded[1], at[1]).numbers))
        keys = keys[~both]
        if not len(keys):
            break
    if not found:
        return keys[:0], np.zeros((0, 0)), np.zeros((0, 0))
    known, *sides = (np.concatenate(column) for column in zip(*found, strict=True))
    return known, sides[0].astype(np.float64), sides[1].astype(np.float64)


MAX_SPREAD_PAIRS = 200
MAX_BYTES = 64 << 20
"""Of one side's tensor; chosen: what the comparison's own loader keeps."""
MAX_VALUES = 1 << 15
"""Of one pair and side; chosen: 48 bins and 256 columns are full long before."""
SHARE, LEAST_BYTES = 10, 64 << 20
"""Read again is one part in SHARE of what was compared, or LEAST_BYTES where that is more; chosen: a tenth of the time
for a look at the worst, and small comparisons have all of it."""
BINS, COLUMNS, POSITIONS = 48, 256, 128


def take_spreads(
    plan: Plan, loaders: tuple[Loader, Loader], pairs: Pairs, log: RowLog, origins: Collection[str] = (),
    *, requested: bool = False,
) -> tuple[tuple[ValueSpread, ...], dict[str, int]]:  # fmt: skip
    """(spreads of up to `MAX_SPREAD_PAIRS` pairs that fail or belong to the taps ``origins``, in the order of
    ``pairs``; how many of such pairs have none, by reason). requested: the user chose these taps, so that outputs
    which pass and are not identical have one, too."""
    units = {u.key: u for u in plan.units}
    chosen, left_out = _pairs_to_spread(pairs, origins, requested)
    left = max(LEAST_BYTES, sum(unit_bytes(u) for u in plan.units) // SHARE)
    out = []
    for i in chosen:
        found = _one(i, pairs[i], units.get((pairs[i].tap, pairs[i].role, pairs[i].call)), plan, loaders, log, left)
        for loader in loaders:
            loader.forget()
        if isinstance(found, str):
            left_out[found] += 1
            continue
        out.append(found[0])
        left -= found[1]
    return tuple(sorted(out, key=lambda spread: spread.pair)), dict(sorted(left_out.items()))


def _pairs_to_spread(pairs: Pairs, origins: Collection[str], requested: bool) -> tuple[list[int], Counter[str]]:
    """The failed pairs, the origins' before the others, then the origins' others, where ``requested``, all others;
    the largest error over its limit first. And what is beyond `MAX_SPREAD_PAIRS`."""

    def place(i: int) -> tuple[bool, bool, float]:
        p = pairs[i]
        error = p.worst_row_rel_l2 if p.worst_row_rel_l2 is not None else np.inf
        return p.status != FAIL, p.tap not in origins, -(error / p.limit if p.limit else error)

    some = pairs.failed | pairs.those("tap", origins.__contains__)
    if requested:  # of an input that passes no row is kept
        others = pairs.those("identical", bool) | pairs.those("role", lambda role: role.startswith("input"))
        some |= pairs.having("status", PASS) & ~others
    wanted = np.flatnonzero(some & pairs.those("rows", bool)).tolist()
    left_out: Counter[str] = Counter()
    if len(wanted) > MAX_SPREAD_PAIRS:
        left_out[f"after the {MAX_SPREAD_PAIRS} worst"] = len(wanted) - MAX_SPREAD_PAIRS
    return sorted(wanted, key=place)[:MAX_SPREAD_PAIRS], left_out


def _one(
    index: int, pair: Pair, unit: Unit | None, plan: Plan, loaders: tuple[Loader, Loader], log: RowLog, left: int
) -> tuple[ValueSpread, int] | str:
    found = log.errors(index)
    named = (g for g in unit.mine if (g.first.step, g.first.name) == (pair.step, pair.mine)) if unit else ()
    group = next((g for g in named if g.merge), None)
    if found is None or unit is None or group is None:
        return "no rows of requests"
    if _bytes(group) > MAX_BYTES:
        return f"above {MAX_BYTES >> 20} MB"
    sides = [g for g in unit.golden if _fits(g)]
    if not _fits(group) or not sides:
        return "values that cannot be read"
    size = _bytes(group) + max(map(_bytes, sides))
    if size > left:
        return f"beyond a {SHARE}th of the bytes that were compared"
    try:
        spread = _spread_of(index, group, sides, *found, plan, loaders)
    except Unread:
        spread = None
    return (spread, size) if spread is not None else "values that cannot be read"


def _spread_of(
    index: int, group: Group, sides: Sequence[Group], keys: np.ndarray, error: np.ndarray, plan: Plan,
    loaders: tuple[Loader, Loader],
) -> ValueSpread | None:  # fmt: skip
    first, last, positions = over_positions(keys & POSITION_MASK, error)
    chosen = _some(keys, error, max(1, MAX_VALUES // max(1, _width(group))))
    known, g, m = _rows_of_both(plan, loaders, sides, group, chosen)
    if not len(known):
        return None
    low, high, counts = histograms(g, m)
    peaks = over_columns(g, m)
    return ValueSpread(index, low, high, *counts, peaks, g.shape[1], first, last, positions, len(g), len(keys))


def histograms(golden: np.ndarray, mine: np.ndarray) -> tuple[float, float, tuple[np.ndarray, np.ndarray]]:
    """(low, high, (golden's, mine's)): int64 [BINS + 3] each, counts in BINS equal bins from low to high, then of NaN,
    +Inf and -Inf. As numpy.histogram with that range counts."""
    finite = [x[np.isfinite(x)] for x in (golden, mine)]
    seen = [x for x in finite if x.size]
    low = min((float(x.min()) for x in seen), default=0.0)
    high = max((float(x.max()) for x in seen), default=0.0)
    out = []
    # Half of the values: the width of a range of float64's own would overflow.
    kinds = {x.dtype for x in finite if x.dtype.kind == "f"} or {np.dtype(np.float64)}
    edges = (np.linspace(low / 2, high / 2, BINS + 1, dtype=kind) for kind in kinds)
    narrow = any((e[1:] <= e[:-1]).any() for e in edges)  # the dtype has fewer numbers between them than bins: one bin
    for x, kept in zip((golden, mine), finite, strict=True):
        if narrow:
            counts = np.where(np.arange(BINS) == BINS // 2, len(kept), 0)
        else:
            counts = np.histogram(kept / 2, BINS, (low / 2, high / 2))[0]
        out.append(np.append(counts, [np.isnan(x).sum(), np.isposinf(x).sum(), np.isneginf(x).sum()]))
    return low, high, (out[0], out[1])


def over_columns(golden: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """float64 [at most COLUMNS]: root mean square of mine - golden of each column of [n, width], over that of all of
    golden; of the columns that share a bin, the largest. Infinite where one side alone is not finite."""
    same = (golden == mine) | (np.isnan(golden) & np.isnan(mine))
    with np.errstate(all="ignore"):
        off = np.where(same, 0.0, mine - golden)
        each = np.sqrt(np.mean(off**2, axis=0))
        scale = np.sqrt(np.mean(golden[np.isfinite(golden)] ** 2)) if np.isfinite(golden).any() else 1.0
        each = np.where(np.isnan(each), np.inf, each) / (scale if scale > 0 else 1.0)
    return np.maximum.reduceat(each, _edges(len(each), COLUMNS)) if len(each) else each


def over_positions(positions: np.ndarray, error: np.ndarray) -> tuple[int, int, np.ndarray]:
    """(first position, last, float64 [at most POSITIONS]): the largest error of the rows in each equal stretch of
    positions; -1 where there are none, infinite for NaN."""
    first, last = int(positions.min()), int(positions.max())
    n = min(POSITIONS, last - first + 1)
    out = np.full(n, -1.0)
    np.maximum.at(out, (positions - first) * n // (last - first + 1), np.where(np.isnan(error), np.inf, error))
    return first, last, out


def _edges(n: int, bins: int) -> np.ndarray:
    return np.unique(np.arange(min(n, bins)) * n // min(n, bins))


def _some(keys: np.ndarray, error: np.ndarray, limit: int) -> np.ndarray:
    """All keys, or the worst quarter of ``limit`` and evenly spread others."""
    if len(keys) <= limit:
        return np.unique(keys)
    worst = np.argsort(-np.nan_to_num(error, nan=np.inf), kind="stable")[: max(1, limit // 4)]
    spread = np.linspace(0, len(keys) - 1, max(0, limit - len(worst))).astype(int)
    return np.unique(keys[np.union1d(worst, spread)])


def _rows_at(side: SideRows, group: Group, keys: np.ndarray) -> np.ndarray:
    """int64 [n]: the row of each of ``keys``, the last where there are several, -1 where there is none."""
    out = np.full(len(keys), -1)
    rows = None if group.where is None else side.rows.get(group.where)
    if rows is not None and len(keys):
        kept = np.flatnonzero(rows.keep)
        at = np.searchsorted(keys, rows.keys[kept])
        hit = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == rows.keys[kept])
        out[at[hit]] = kept[hit]
    return out


def _shape(group: Group) -> tuple[int, ...]:
    return group.merge.shape if group.merge else ()


def _bytes(group: Group) -> int:
    return int(np.prod(_shape(group), dtype=np.float64)) * DTYPES[group.first.dtype].itemsize


def _fits(group: Group) -> bool:
    kind = DTYPES[group.first.dtype].kind
    return bool(group.readable and group.merge and kind != "complex" and _bytes(group) <= MAX_BYTES)


def _width(group: Group) -> int:
    shape = _shape(group)
    rows = shape[group.row_dim] if group.where is not None and len(shape) else 1
    return int(np.prod(shape, dtype=np.float64)) // max(1, rows)
