"""How a machine computes, decided over all rows of a replay: what every layer does alike is a habit, what one does a
fault.

The problem: a kernel that truncates, or adds up in bfloat16, is honest if that is how its machine computes, and wrong
if it is one layer's alone; one output cannot tell the two apart. The idea: what the outputs' numbers show (evidence,
look.py) is pooled by operator, dtype and output, over calls and layers. A habit is what all layers and calls
that can show it show alike, at two layers at least where it costs anything. Then rows are settled: one that failed and
is right with its machine's habit allowed for passes, and says so; one that passed by a habit that its machine does not
have fails. Only the closed list of judge/profile.py is ever allowed for: a wrong scale, mask, table or constant in
every layer explains no habit's numbers, and stays a fault. Two layers that disagree, and no third: the costlier is
blamed. `strict` allows for nothing. Not here: words and prices (habit_words.py). Needs no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from vllm_accprobe.judge.profile import ACCUMULATOR, FUNCTION, ROUNDING, SUBNORMALS, Habit
from vllm_accprobe.kernels.float_formats import half_step
from vllm_accprobe.opcheck.floors.truncating import truncating
from vllm_accprobe.opcheck.habits import habit_words as words
from vllm_accprobe.opcheck.habits.evidence import AWAY, ZERO, Evidence
from vllm_accprobe.opcheck.habits.layers import Seen, TapPlace, flush_of, functions_of, place_of
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, Checked

TOWARD_ZERO = "toward zero"
_ALIKE = 0.95
"""Chosen: of a habit's outputs, those that show it; a narrow output may show another thing by chance."""
_LEAST_LAYERS = 2
Key = tuple[str, str, str]
"""(class or operator, dtype, role)."""


@dataclass(frozen=True)
class MachineHabits:
    """What a replay's rows say of a machine. habits: in the order in which operators are met; unknown: sentences on
    what cannot be told; units: relative errors of functions, as judge/profile.Profile's."""

    habits: tuple[Habit, ...] = ()
    unknown: tuple[str, ...] = ()
    units: dict[str, float] = field(default_factory=dict)


def settle(rows: Sequence[Checked], strict: bool = False) -> tuple[list[Checked], MachineHabits]:
    """(``rows`` with habits allowed for and departures blamed, the habits). strict: habits are found, nothing is
    allowed for."""
    groups: dict[Key, list[tuple[int, Evidence]]] = {}
    for k, row in enumerate(rows):
        if row.evidence and row.status in (PASS, FAIL):
            groups.setdefault((row.cls, row.dtype, row.role), []).append((k, Evidence.of_text(row.evidence)))
    settled, habits = list(rows), _Habits()
    by_key: dict[Key, list[int]] = {}
    for k, row in enumerate(rows):
        if row.status in (PASS, FAIL):
            by_key.setdefault((row.cls, row.dtype, row.role), []).append(k)
    places = {key: _places(rows, mine) for key, mine in groups.items()}
    for key in sorted(groups, key=lambda key: len(places[key]) < _LEAST_LAYERS):  # who stands alone comes last
        mine = [rows[k] for k in by_key[key]]
        for k, row in _group(key, places[key], mine, by_key[key], habits, strict):
            settled[k] = row
    return settled, _with_truncating(habits.found(list(groups)), settled)


def _with_truncating(found: MachineHabits, rows: Sequence[Checked]) -> MachineHabits:
    """Also the operators whose outputs are seen to be truncated (rounding.py) where nobody knows what they round before
    their results: each output's own verdict allows for it, layer by layer."""
    told = {(h.operator, h.dtype) for h in found.habits if h.kind == ROUNDING}
    dtypes = {r.cls: r.dtype for r in rows if r.rounding}
    said = "rounds toward zero, its results or what they are made of"
    more = [
        Habit(ROUNDING, t.cls, dtypes[t.cls], said, 1.0, t.outputs, t.of, t.modules)
        for t in truncating(rows)
        if (t.cls, dtypes[t.cls]) not in told
    ]
    new = {(h.operator, h.dtype) for h in more}
    unknown = tuple(u for u in found.unknown if not any(u.startswith(f"{o}, {d}:") for o, d in new))
    return replace(found, habits=(*found.habits, *more), unknown=unknown)


def _places(rows: Sequence[Checked], group: Iterable[tuple[int, Evidence]]) -> list[TapPlace]:
    taps: dict[tuple[int, str], list[Seen]] = {}
    for k, e in group:
        taps.setdefault((rows[k].rank, rows[k].tap), []).append(Seen(rows[k], e))
    return [place_of(tap, seen) for tap, seen in taps.items()]


def _group(
    key: Key, places: list[TapPlace], rows: list[Checked], at: list[int], habits: _Habits, strict: bool
) -> Iterable[tuple[int, Checked]]:  # fmt: skip
    """Finds the habits of one output of one operator, and gives the rows that these change."""
    cls, dtype, _ = key
    direction = _common(Counter(p.direction for p in places if p.direction))
    ways = _common_ways(places)
    changes: dict[int, Checked] = {}
    allowed: dict[str, str] = {}
    if direction:
        show = [p for p in places if p.direction == direction]
        alike = _alike(show, places, direction)
        said = words.rounds(direction) if alike else f"{words.rounds(direction)} in part"
        habits.add(ROUNDING, key, said, words.PRICES[direction], show, lambda p: p.outputs_of(direction))
        if direction == AWAY and alike and habits.enough("away", dtype, show):
            allowed["away"] = said
        for p in places:
            if _departs(p.direction, direction, places):
                why = f"{words.rounds(p.direction)}, {_others(places, p, words.rounds(direction))}"
                changes |= _blamed(p, rows, at, why, TOWARD_ZERO if p.direction == ZERO else "")
    if ways:
        way = min(ways, key=lambda w: words.price_of(w, 0))
        show = [p for p in places if p.ways & ways]
        terms = max((s.evidence.terms for p in show for s in p.seen), default=0)
        price, kind = words.price_of(way, terms), words.kind_of(way)
        if price:
            habits.add(kind, key, words.words_of(way, dtype), price, show, lambda p: p.outputs_way(ways))
            if _whole(show, places, ways) and habits.enough(words.allowed_as(way), dtype, show):
                allowed[words.allowed_as(way)] = words.words_of(way, dtype)
        elif terms:
            habits.add(ACCUMULATOR, key, "adds up in float32 or wider", 0.0, show, lambda p: p.outputs_way(ways))
        for p in places:
            if p.ways and not p.ways & ways and _costlier(p.ways, ways, terms):
                theirs = min(p.ways, key=lambda w: words.price_of(w, terms))
                usual = words.words_of(way, dtype) or ("adds up in float32 or wider" if terms else "rounds once")
                why = f"{words.words_of(theirs, dtype)}, {_others(places, p, usual)}"
                changes |= _blamed(p, rows, at, why, None)
    if not direction and not ways and dtype != "float32":
        habits.unknown.append(_unknown(key, places))
    flush = flush_of(places)
    if flush is not None:
        habits.add(SUBNORMALS, key, (words.flushed if flush else words.kept)(dtype), 0.0, places, lambda p: p.subnormal)
        if flush and habits.enough("flush", dtype, [p for p in places if p.pool.flushed]):
            allowed["flush"] = words.flushed(dtype)
    for f in functions_of(places, dtype):
        habits.units[f"{cls} {dtype} {f.name}"] = f.size
        if f.off:
            habits.add(FUNCTION, key, f.words, f.size / half_step(dtype), places, lambda p: len(p.seen))
            if habits.enough(f.name, dtype, places):
                allowed[f.name] = f.words
        else:
            habits.add(ACCUMULATOR if f.name == "sums" else FUNCTION, key, f.words, 0.0, places, lambda p: len(p.seen))
    if not strict:
        departing = set(changes)
        changes |= {k: r for k, r in _excused(rows, at, allowed).items() if k not in departing}
    return changes.items()


def _common(found: Counter[str]) -> str:
    """What most places show; of two that are shown equally often the cheaper; "" where nothing is shown."""
    if not found:
        return ""
    most = max(found.values())
    return min((d for d, n in found.items() if n == most), key=lambda d: words.PRICES[d])


def _common_ways(places: list[TapPlace]) -> frozenset[str]:
    """The ways that most places allow, as far as those agree; one kind of habit alone, else nothing is told."""
    told = [p.ways for p in places if p.ways]
    if not told:
        return frozenset()
    counts = Counter(w for ways in told for w in ways)
    most = max(counts.values())
    best = min((w for w, n in counts.items() if n == most), key=lambda w: words.price_of(w, 0))
    if sum(best in ways for ways in told) * 2 < len(told):
        return frozenset()
    left = frozenset.intersection(*(ways for ways in told if best in ways))
    return left if len({words.kind_of(w) for w in left}) == 1 else frozenset()


def _departs(mine: str, usual: str, places: list[TapPlace]) -> bool:
    others = sum(p.direction == usual for p in places)
    return bool(mine) and mine != usual and words.PRICES[mine] > words.PRICES[usual] and others > 0


def _costlier(mine: frozenset[str], usual: frozenset[str], terms: int) -> bool:
    """Sums in fewer bits, or in parts, where the others are not: the rounding of an intermediate result on the way is
    within every reference's noise, and whether it can be seen depends on the weights."""
    kinds = {words.kind_of(w) for w in mine}
    cost = min(words.price_of(w, terms) for w in mine), min(words.price_of(w, terms) for w in usual)
    return cost[0] > cost[1] and not kinds & {ROUNDING, "twice"}


def _alike(show: list[TapPlace], places: list[TapPlace], direction: str) -> bool:
    outputs, of = sum(p.outputs_of(direction) for p in show), sum(p.told for p in show)
    return outputs >= _ALIKE * of and all(p.direction in ("", direction) for p in places)


def _whole(show: list[TapPlace], places: list[TapPlace], ways: frozenset[str]) -> bool:
    """Whether all layers and calls that can show one of ``ways`` do."""
    outputs, of = sum(p.outputs_way(ways) for p in show), sum(p.told for p in show)
    told = [p for p in places if p.ways]
    return len(show) == len(told) and outputs >= _ALIKE * of


def _others(places: list[TapPlace], mine: TapPlace, usual: str) -> str:
    taps = {p.tap[1] for p in places} - {mine.tap[1]}
    layers = {m[0] for t in taps if (m := re.search(r"\d+", t))}
    called = "layer" if len(layers) == len(taps) else "module"
    number = f"{len(taps)} {called}s" if len(taps) > 1 else called
    return f"where the other {number} {words.plural(usual) if len(taps) > 1 else usual}"


def _blamed(p: TapPlace, rows: list[Checked], at: list[int], why: str, rounding: str | None) -> dict[int, Checked]:
    """The rows of a place that departs. rounding: only those that are seen to be rounded so; None: only the words of
    those that fail."""
    found: dict[int, Checked] = {}
    for k, row in zip(at, rows, strict=True):
        if (row.rank, row.tap) != p.tap:
            continue
        if row.status == FAIL:
            found[k] = replace(row, message=f"{row.message}; {why}")
        elif rounding is not None and row.rounding == rounding:
            found[k] = replace(row, status=FAIL, measure="habit", measured=1.0, allowed=0.5, message=why)
    return found


def _excused(rows: list[Checked], at: list[int], allowed: dict[str, str]) -> dict[int, Checked]:
    """The rows that fail, and are within their limits with one of their machine's habits allowed for; those that pass
    anyway are marked with it."""
    found: dict[int, Checked] = {}
    for k, row in zip(at, rows, strict=True):
        if not allowed:
            continue
        if row.status == PASS:  # it does the same, and a comparison must know
            found[k] = replace(row, habit=next(iter(allowed.values())))
            continue
        if not row.evidence:
            continue
        would = Evidence.of_text(row.evidence).would
        fits = [(would[name], said) for name, said in allowed.items() if would.get(name, 2.0) <= 1.0]
        if fits and row.allowed is not None:
            severity, said = min(fits)
            message = f"{said}: as this machine computes everywhere, and no further off than that explains"
            found[k] = replace(row, status=PASS, measured=severity * row.allowed, message=message, habit=said)
    return found


def _unknown(key: Key, places: list[TapPlace]) -> str:
    of, could = sum(len(p.seen) for p in places), sum(p.told for p in places)
    if not could:
        return f"{key[0]}, {key[1]}: cannot be told: none of {of} outputs has a number that could show it"
    best = max(p.share for p in places)
    return (
        f"{key[0]}, {key[1]}: cannot be told: no known way gives the numbers of its {of} outputs (the best {best:.0%})"
    )


class _Habits:
    """Habits of single outputs, put together for each operator and dtype."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.units: dict[str, float] = {}
        self._enough: set[tuple[str, str]] = set()
        self._all: dict[tuple[str, str, str, str], tuple[float, list[int], set[tuple[int, str]]]] = {}

    def add(self, kind: str, key: Key, said: str, price: float, show: list[TapPlace], outputs: object) -> None:
        assert callable(outputs)
        if not show:
            return
        old = self._all.setdefault((kind, key[0], key[1], said), (price, [0, 0], set()))
        old[1][0] += sum(int(outputs(p)) for p in show)
        old[1][1] += sum(len(p.seen) for p in show)
        old[2].update(p.tap for p in show)

    def enough(self, name: str, dtype: str, show: list[TapPlace]) -> bool:
        """Whether so many layers show a habit that costs something that it is the machine's: two, or one where another
        operator has been seen to have the same."""
        if len(show) >= _LEAST_LAYERS:
            self._enough.add((name, dtype))
        return bool(show) and (name, dtype) in self._enough

    def found(self, order: list[Key]) -> MachineHabits:
        kinds: dict[tuple[str, str, str], list[tuple[str, float, list[int], set[tuple[int, str]]]]] = {}
        for (kind, cls, dtype, said), more in self._all.items():
            kinds.setdefault((kind, cls, dtype), []).append((said, *more))
        habits = []
        for (kind, cls, dtype), parts in kinds.items():  # an operator's outputs may differ: one habit says all
            layers: set[tuple[int, str]] = set().union(*(p[3] for p in parts))
            n, of = (sum(p[2][k] for p in parts) for k in (0, 1))
            said = ", and in another output ".join(p[0] for p in parts)
            habits.append(Habit(kind, cls, dtype, said, max(p[1] for p in parts), n, of, len(layers)))
        told = {(h.operator, h.dtype) for h in habits}
        met = list(dict.fromkeys((cls, dtype) for cls, dtype, _ in order))
        habits.sort(key=lambda h: met.index((h.operator, h.dtype)))
        unknown = [u for u in dict.fromkeys(self.unknown) if not any(u.startswith(f"{o}, {d}:") for o, d in told)]
        return MachineHabits(tuple(habits), tuple(unknown), self.units)
