"""What a comparison covers: rows and skips, and by operator class what was checked, compared only or unseen.

The problem: comparing half of the rows in silence looks like a pass, and so does a check that would have missed an
error of ten per cent. The idea: rows are counted once each, as sets of keys, and every skip under its reason. Each
module of mine is counted once under its class, with the smallest error that would have been named: by the floors of the
replay where it checked (opcheck/proof/make_proof.py), else by the limits of its pairs. Not here: why a pair was skipped
(measure/measurer.py), how it is shown (report/verdict_parts.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_accprobe.align.tokens import RowSet, SideRows, subject
from vllm_accprobe.comparison.pair import SKIP, Pairs
from vllm_accprobe.comparison.plan.make_plan import Plan
from vllm_accprobe.comparison.plan.unit import TEXT, family
from vllm_accprobe.judge.near_ties import NOT_COMPARED, ROWS_AFTER, ROWS_BEHIND, UNJUDGED, Routing
from vllm_accprobe.standards.limits import ELEMENT

if TYPE_CHECKING:
    from vllm_accprobe.comparison.measure.measured import ComparisonContext
    from vllm_accprobe.comparison.result import Comparison


UNRULED = "choices of experts left out: golden does not take its highest logits, which tell no margin then"
UNKNOWN = "choices of experts that differ without the router's logits in both dumps: no near tie is shown"
ENDED = "rows of golden behind mine's last ones"
"""In `coverage`'s result until `finished`."""
NOBODYS = "tensors of a captured graph's rows of padding, which are nobody's"
_NONE = np.zeros(0, np.int64)


def coverage(
    plan: Plan, dumps: Sequence[Any], compared: Mapping[str, Collection[RowSet]], skipped: Counter[str]
) -> dict[str, Any]:
    """compare.json's coverage, but for what judging adds (see `finished`).

    compared: family → the rows that some pair compared, each set once."""
    sides = [_rows(plan.tokens.golden), _rows(plan.tokens.mine)]
    both, golden, mine = 0, 0, 0
    # A vision space that only one side has is another way to cut the same images; its tensors are skipped by name.
    shared = (sides[0].keys() & sides[1].keys()) | {TEXT}
    for name in sorted(shared):
        g, m = (s.get(name, _NONE) for s in sides)
        both += len(np.unique(np.concatenate([_NONE, *(rows.keys for rows in compared.get(name, ()))])))
        golden += len(np.setdiff1d(g, m, assume_unique=True))
        mine += len(np.setdiff1d(m, g, assume_unique=True))
    own, theirs = (s.get(TEXT, _NONE) for s in (sides[1], sides[0]))
    reasons: Counter[str] = Counter({k: n for k, n in plan.tokens.skipped.items() if n})
    reasons.update(plan.skipped)
    reasons.update(skipped)
    for side, dump in zip(("golden", "mine"), dumps, strict=True):
        for skip in dump.skips:
            reasons[f"{side}: {skip.reason}"] += skip.count
        if dump.padding:
            reasons[f"{side}: {NOBODYS}"] += len(dump.padding)
    return {
        "rows_compared": both,
        "rows_only_golden": golden,
        "rows_only_mine": mine,
        "taps_only_golden": plan.names.only_golden,
        "taps_only_mine": plan.names.only_mine,
        "skipped": dict(reasons),
        ENDED: _behind(theirs, own),
    }


def _behind(golden: np.ndarray, mine: np.ndarray) -> int:
    """How many rows golden has behind the last one of mine's, of requests that both have. golden, mine: sorted keys."""
    if not len(mine):
        return 0
    last = mine[np.append(np.flatnonzero(np.diff(subject(mine))), len(mine) - 1)]
    at = np.searchsorted(mine, golden, side="right") - 1
    before = mine[np.maximum(at, 0)]
    return int(((at >= 0) & (subject(before) == subject(golden)) & (before < golden) & np.isin(before, last)).sum())


def finished(
    measured: Mapping[str, Any], routing: Routing, flipped: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """``coverage`` with what judging adds: rows that other experts may have computed, choices without a margin, and
    ``flipped`` tokens (compare.json's) that are not judged. Pairs of which no row is judged: `Comparison`."""
    left = {why: len(routing.left[why]) for why in (ROWS_AFTER, ROWS_BEHIND, NOT_COMPARED)}
    counts = left | {UNRULED: routing.unruled, UNKNOWN: routing.unknown}
    skipped = dict(measured["skipped"]) | {why: n for why, n in counts.items() if n}
    skipped |= Counter(f"flipped tokens: {f['why']}" for f in flipped if f["why"] in UNJUDGED)
    return {k: v for k, v in measured.items() if k != ENDED} | {"skipped": skipped}


def _rows(side: SideRows) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {}
    for (_, _, name), rows in side.rows.items():
        found.setdefault(family(name), []).append(rows.keys[rows.keep])
    return {name: np.unique(np.concatenate(keys)) for name, keys in found.items()}


BY_CLASS = "by_class"
"""In compare.json's coverage."""
_NEVER_CALLED = frozenset(("ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "PPMissingLayer"))
"""Classes of modules that hold others, or nothing, and are not called."""


class ModuleCover(NamedTuple):
    """What is known of a module. calls, rows: captured, or compared; checked: rows of which all outputs had a
    reference; row, column, one_row: relative errors, of all rows, of one column, of one row, from which on one of its
    outputs would have been named; None where none was checked."""

    cls: str
    calls: int
    rows: int
    checked: int
    row: float | None
    column: float | None
    one_row: float | None


def by_class(
    pairs: Pairs, setting: ComparisonContext | None, element: float,
    covers: Mapping[str, ModuleCover] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """compare.json's ``coverage.by_class``, the classes with most rows first. element: an element's limit over its
    row's (standards/limits.py); covers: of a replay, by tap. ``rows`` = ``checked`` + ``compared`` + those that have
    neither; ``unseen``: modules."""
    compared, covers = _compared(pairs, element), covers or {}
    names = {} if setting is None else dict(setting.modules)
    names |= {tap: one.cls for known in (compared, covers) for tap, one in known.items()}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    by_replay: dict[str, list[ModuleCover]] = defaultdict(list)
    by_limits: dict[str, list[ModuleCover]] = defaultdict(list)
    for tap, cls in names.items():
        one, other = covers.get(tap), compared.get(tap)
        checked = one.checked if one is not None else 0
        unseen = not checked and other is None
        if unseen and (one is None or not one.rows) and (cls in _NEVER_CALLED or not tap or tap == "<root>"):
            continue
        known = [x for x in (one, other) if x is not None]
        calls, rows = max((x.calls for x in known), default=0), max((x.rows for x in known), default=0)
        only = max(0, other.rows - checked) if other is not None else 0
        counts[cls].update(calls=calls, rows=rows, checked=checked, compared=only, unseen=int(unseen))
        if one is not None and checked:
            by_replay[cls].append(one)
        elif other is not None:
            by_limits[cls].append(other)
    entries: list[dict[str, Any]] = []
    for cls, n in counts.items():
        entries.append({"class": cls, **n, "smallest": _largest(by_replay[cls] or by_limits[cls])})
        if by_replay[cls] and by_limits[cls]:
            entries[-1]["smallest_compared"] = _largest(by_limits[cls])
    return sorted(entries, key=lambda e: (-e["rows"], -e["unseen"], e["class"]))


def with_covers(result: Comparison, covers: Mapping[str, ModuleCover]) -> Comparison:
    limits = result.standard.get("origins by", result.standard)
    setting = None if result.measured is None else result.measured.setting
    found = by_class(result.table, setting, float(limits.get("element", ELEMENT)), covers)
    return replace(result, coverage=result.coverage | {BY_CLASS: found})


def _largest(covers: Iterable[ModuleCover]) -> dict[str, float] | None:
    """Of all modules of a class, so that it holds for each of them."""
    sizes = [c[4:] for c in covers if all(x is not None and math.isfinite(x) for x in c[4:])]
    names = ModuleCover._fields[4:]
    return {name: max(float(s[i] or 0.0) for s in sizes) for i, name in enumerate(names)} if sizes else None


def _compared(pairs: Pairs, element: float) -> dict[str, ModuleCover]:
    """Of what modules gave out: files' tensors, too, but no inputs and no parameters. The widest limits count."""
    given = ~pairs.those("role", lambda role: role.startswith(("input", "param."))) & ~pairs.having("status", SKIP)
    at = np.flatnonzero(given)
    taps, tap = pairs.numbered("tap", at)
    call, form = tap, tap
    for name in ("step", "rank", "call"):
        call = _joint(call, pairs.numbered(name, at)[1])
    rows = pairs.numbers("rows")[at]
    most = np.full(int(call.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(most, call, np.where(np.isnan(rows), 1, rows))
    owner = tap[np.unique(call, return_index=True)[1]]
    counts = np.bincount(owner, minlength=len(taps)).tolist()
    sums = np.bincount(owner, most, len(taps)).astype(np.int64).tolist()
    shapes, shape = pairs.numbered("shape", at)
    features = {feature: i for i, feature in enumerate(dict.fromkeys(own[1:] for own in shapes))}
    shape = np.array([features[own[1:]] for own in shapes], np.int64)[shape]
    for column in (pairs.numbered("limit", at)[1], shape):
        form = _joint(form, column)
    limits: dict[int, tuple[str, float, float]] = {}
    columns = [pairs.column(name) for name in ("cls", "limit", "shape")]
    for i in np.sort(np.unique(form, return_index=True)[1]).tolist():
        which, (own, limit, shape_of) = int(tap[i]), (c[at[i]] for c in columns)
        cls, row, column = limits.get(which, (own, 0.0, 0.0))
        limit = limit or 0.0
        width = math.prod(shape_of[1:])
        limits[which] = cls, max(row, limit), max(column, min(limit * element, limit * math.sqrt(width)))
    return {
        taps[which]: ModuleCover(cls, counts[which], sums[which], 0, row, column, row)
        for which, (cls, row, column) in limits.items()
    }


def _joint(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """A number for each pair of equal numbers."""
    return np.unique(one * (int(other.max(initial=0)) + 1) + other, return_inverse=True)[1]


def to_plain(found: Mapping[str, ModuleCover]) -> dict[str, list[Any]]:
    return {tap: [x if not isinstance(x, float) or math.isfinite(x) else None for x in c] for tap, c in found.items()}
