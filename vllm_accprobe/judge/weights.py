"""What the fingerprints of weights show: within one run, between two runs, and from which event on.

The problem: one wrong parameter explains everything behind it, and kernels pack weights in forms of their own. The
idea: journal lines become one `State` per parameter and event. Within one run (`faults_within`), what loading wrote a
whole reload must write again, row by row, and what loading packed it must pack again; a parameter that stays the same
is no fault. Between two runs (`weights_between`), the k-th event of a kind is compared with the k-th, as loaded or
unpacked, else without order; the first event at which a parameter differs is named. Other cuts and dtypes are counted.
Not here: how fingerprints are taken (capture/weights/), the journal's lines (dump/journal.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from vllm_accprobe.dump import journal
from vllm_accprobe.judge.constants import FEW_LISTED, WEIGHTS_WHOLE

NOT_WRITTEN, NEVER_WRITTEN, UNFILLED, ZERO, NAN = "not written", "never written", "never filled", "zero", "NaN"
EXCHANGED, VALUE, NOT_PACKED, SLEEP, OLD_ADAPTER, DIFFERS = (
    "exchanged", "value", "not packed again", "sleep", "old adapter", "differs",
)  # fmt: skip
BOTH = "both"
"""The side of a fault that golden and mine have alike: it is no difference between them."""


@dataclass(frozen=True)
class WeightFault:
    """what: one of the words above. side: ``golden``, ``mine`` or BOTH, "" for what is between them. event: in words;
    number: of the event in its own dump. rows: in words, "" for all. says: the whole sentence."""

    what: str
    side: str
    rank: int
    tap: str
    name: str
    event: str
    number: int
    rows: str
    says: str

    def to_dict(self) -> dict[str, Any]:
        """As in compare.json; ``module`` and ``parameter`` as everywhere there."""
        found = asdict(self)
        return {"module": found.pop("tap"), "parameter": found.pop("name")} | found


def wrong_weights(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [f for f in found.get("findings") or [] if f["side"] != BOTH]


_COMPUTED = ("cos_sin_cache", "inv_freq", "cos_cached", "sin_cached", "position_ids")
Place = tuple[int, str, str]
"""Rank, tap, name."""


@dataclass
class State:
    event: journal.WeightEvent
    forms: dict[str, journal.WeightPrint] = field(default_factory=dict)

    @property
    def given(self) -> journal.WeightPrint | None:
        return self.forms.get(journal.LOADED)

    @property
    def lies(self) -> journal.WeightPrint | None:
        """As it lies after the event: what was not packed lies as it was given."""
        return self.forms.get(journal.PACKED) or self.forms.get(journal.LOADED)

    @property
    def any(self) -> journal.WeightPrint:
        return next(iter(self.forms.values()))

    def written(self) -> np.ndarray | None:
        """How often each row was written, int64 [rows]; None where it was not checked."""
        p = self.given or self.lies
        return None if p is None else times(p)


@dataclass
class WeightHistory:
    """One dump's lives. events: in order, by rank; states: by place, in the order of events."""

    events: dict[int, list[journal.WeightEvent]] = field(default_factory=dict)
    states: dict[Place, list[State]] = field(default_factory=dict)

    @cached_property
    def at(self) -> dict[tuple[int, int], dict[Place, State]]:
        found: dict[tuple[int, int], dict[Place, State]] = {}
        for place, states in self.states.items():
            for state in states:
                found.setdefault((state.event.rank, state.event.number), {})[place] = state
        return found


def side_of(lives: journal.Lives) -> WeightHistory:
    """Both put in order. Prints without an event (the run was killed before its line) are left out."""
    side = WeightHistory()
    events = {(e.rank, e.number): e for e in lives.events}
    for e in sorted(events.values(), key=lambda e: e.number):
        side.events.setdefault(e.rank, []).append(e)
    rows: dict[tuple[int, str, str, str, str], str] = {}
    for p in lives.prints:
        event = events.get((p.rank, p.life))
        if event is None:
            continue
        key = (p.rank, p.tap, p.name, p.form, p.order)
        if p.rows is not None:
            rows[key] = p.rows
        elif key in rows:
            p = replace(p, rows=rows[key])
        states = side.states.setdefault((p.rank, p.tap, p.name), [])
        if not states or states[-1].event.number != p.life:
            states.append(State(event))
        states[-1].forms[p.form] = p
    return side


def is_computed(name: str) -> bool:
    """Tables and numbers that an engine computes for itself: those with a private name, too."""
    return name.startswith("_") or any(word in name for word in _COMPUTED)


def times(p: journal.WeightPrint) -> np.ndarray | None:
    if p.written is None:
        return None
    found = np.zeros(
        p.count if p.count <= journal.MAX_WEIGHT_ROWS else 1, np.int64
    )  # of one with more rows: whether any was
    for first, end, n in p.written:
        found[first:end] = n
    return found


def differing(a: journal.WeightPrint, b: journal.WeightPrint) -> np.ndarray | None:
    """Rows in which two prints of one shape differ; None where they cannot be determined."""
    if a.shape != b.shape:
        return None
    x, y = a.sums(), b.sums()
    return None if x is None or y is None else np.flatnonzero(x != y)


def exchanged(a: journal.WeightPrint, b: journal.WeightPrint) -> tuple[int, int] | None:
    """The two rows of which each holds the other's elements, where these are the only ones that differ."""
    rows, x, y = differing(a, b), a.sums(), b.sums()
    if rows is None or x is None or y is None or len(rows) != 2:
        return None
    i, j = map(int, rows)
    return (i, j) if x[i] == y[j] and x[j] == y[i] else None


def named(p: journal.WeightPrint, rows: np.ndarray) -> str:
    """Rows in words: ``k``, ``up of expert 3``, ``rows 4, 17``, ``rows 0-63``. "" for all of them."""
    if not len(rows) or len(rows) == p.count:
        return ""
    block = p.block or p.count
    blocks = sorted({int(r) // block for r in rows})
    within = {int(r) % block for r in rows}
    per_block = len(rows) == len(blocks) * len(within)
    part = next((name for name, first, end in p.parts if within == set(range(first, end))), "")
    of = f"expert{'s' * (len(blocks) > 1)} {_listed(blocks)}" if p.block else ""
    if p.block and per_block and len(within) == block:
        return of
    if part and per_block:
        return f"{part} of {of}" if of else part
    what = "row" if len(p.shape) > 1 else "element"
    if p.block and len(blocks) == 1:
        return f"{what}{'s' * (len(within) > 1)} {_listed(sorted(within))} of {of}"
    return f"{what}{'s' * (len(rows) > 1)} {_listed([int(r) for r in rows])}"


def named_pair(p: journal.WeightPrint, pair: tuple[int, int]) -> str:
    """Two rows in words: ``rows 3 and 17``, of one expert counted within it."""
    i, j = pair
    if p.block and i // p.block == j // p.block:
        i, j = i % p.block, j % p.block
    return f"{'rows' if len(p.shape) > 1 else 'elements'} {i} and {j}"


def _listed(numbers: list[int]) -> str:
    """``3``, ``4, 17``, ``0-63``, ``1, 5, 9, 12 and 20 more``."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:FEW_LISTED]))
    return shown if len(numbers) <= FEW_LISTED else f"{shown} and {len(numbers) - FEW_LISTED} more"


def event_words(event: journal.WeightEvent, events: list[journal.WeightEvent]) -> str:
    """An event in words: ``loading``, ``reload 2``, ``putting adapter 'a' into slot 0``."""
    if event.kind == journal.LOAD:
        return "loading"
    if event.kind == journal.LORA:
        return f"putting adapter {event.name!r} into slot {event.slot}"
    nth = sum(e.kind == event.kind and e.number <= event.number for e in events)
    return f"{event.kind} {nth}"


Make = Callable[[str, Place, str, str], WeightFault]
_FLOATS = ("bfloat16", "float16", "float32")


def faults_within(side: WeightHistory, which: str) -> list[WeightFault]:
    """All findings, the earliest event first, each parameter once for each kind of fault."""
    found: list[WeightFault] = []
    for rank, events in sorted(side.events.items()):
        for event in events:
            found += _of_event(side, rank, events, event, which)
    seen: set[tuple[str, int, str, str]] = set()
    first = []
    for f in found:
        key = (f.what, f.rank, f.tap, f.name)
        if key not in seen:
            seen.add(key)
            first.append(f)
    return first


def _of_event(
    side: WeightHistory, rank: int, events: list[journal.WeightEvent], event: journal.WeightEvent, which: str
) -> Iterator[WeightFault]:
    states = side.at.get((rank, event.number), {})
    when = event_words(event, events)

    def fault(what: str, place: Place, rows: str, says: str) -> WeightFault:
        tap, name = place[1:]
        of = f" ({rows})" if rows else ""
        return WeightFault(what, which, rank, tap, name, when, event.number, rows, f"{tap}.{name}{of} {says}")

    if event.kind == journal.LORA:
        for place, state in states.items():
            yield from _slot(side, place, state, fault)
        return
    if event.kind == journal.LOAD:
        for place, made, rows, why in _never_written(states, times):
            if "scale" not in place[2]:  # of scales more is known (_scale)
                yield fault(NEVER_WRITTEN, place, named(made, rows), f"was never written by {when}: {why}")
    unwritten = _unwritten(side, rank, event, states) if event.kind in (journal.RELOAD, journal.SYNC) else {}
    for place, state in states.items():
        if is_computed(place[2]):
            continue
        history = [s for s in side.states[place] if s.event.number < event.number and s.event.kind != journal.LORA]
        if place in unwritten:
            rows = unwritten[place]
            p = state.given or state.lies
            assert p is not None
            stays = " and contains its earlier values" if _stays(history, p, rows) else ""
            says = f"was not written by {when}, as loading had written it{stays}"
            yield fault(NOT_WRITTEN, place, named(p, rows), says)
            continue
        yield from _scale(place, state, when, fault)
        yield from _packing(place, state, history, event, when, fault)
        a, b = history[-1].lies if history else None, state.lies
        if event.kind == journal.WAKE and a is not None and b is not None and a.shape == b.shape and a.order != b.order:
            yield fault(SLEEP, place, named(b, _rows(a, b)), f"is not after {when} what it was before sleep")


def _rows(a: journal.WeightPrint, b: journal.WeightPrint) -> np.ndarray:
    rows = differing(a, b)
    return np.zeros(0, np.int64) if rows is None else rows


def _stays(history: list[State], p: journal.WeightPrint, rows: np.ndarray) -> bool:
    before = next((q for s in reversed(history) for q in (s.forms.get(p.form),) if q is not None), None)
    changed = None if before is None else differing(before, p)
    return changed is not None and not np.isin(rows, changed).any()


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def any_layers(tap: str, name: str) -> str:
    """The name of the same parameter in any layer."""
    return f"{_NUMBER.sub('*', tap)}.{name}"


def _never_written(
    states: Mapping[Place, State], times: Callable[[Any], Any]
) -> Iterator[tuple[Place, journal.WeightPrint, np.ndarray, str]]:  # fmt: skip
    """(place, print, the rows that nothing wrote, why that is wrong) after loading: memory that was made empty is wrong
    whatever it holds; memory that the module filled, where the same parameter of another layer was written. times: of a
    print, how often each row was written, None where it was not observed."""
    written: Counter[str] = Counter()
    found: list[tuple[Place, journal.WeightPrint, np.ndarray]] = []
    for place, state in states.items():
        p = state.given or state.lies
        seen = None if p is None or is_computed(place[-1]) or not p.count else times(p)
        if p is None or seen is None:
            continue
        written[any_layers(*place[1:])] += bool(seen.any())
        if not seen.all():
            found.append((place, p, np.flatnonzero(seen == 0)))
    if not any(written.values()):  # loading by other means than torch's calls: nothing was seen of any
        return
    for place, p, rows in found:
        if p.raw:
            yield place, p, rows, "it contains earlier values of the memory"
        elif len(rows) == p.count and written[any_layers(*place[1:])]:
            yield place, p, rows, "as initialised, while loading wrote that of other layers"


def _unwritten(
    side: WeightHistory, rank: int, event: journal.WeightEvent, states: dict[Place, State]
) -> dict[Place, np.ndarray]:
    """Rows that loading wrote and this event did not, of an event that means to write all; of another one those of
    tensors and modules that it began to write."""
    first = {p: s for (r, n), at in side.at.items() if r == rank and n == 0 for p, s in at.items()}
    written, missing = 0, {}
    touched: Counter[str] = Counter()
    for place, state in states.items():
        if is_computed(place[2]) or place not in first:
            continue
        before, now = first[place].written(), state.written()
        if before is None or not before.any():
            continue
        if now is None:  # it lies in a form that could not be examined
            continue
        if len(now) != len(before):
            now = np.full(len(before), int(now.any()))
        if now.any():
            written += 1
            touched[place[1]] += 1
        rows = np.flatnonzero((before > 0) & (now == 0))
        if len(rows):
            missing[place] = rows
    total = written + sum(len(rows) == states[p].any.count for p, rows in missing.items())
    if not written:
        return {}
    if written >= WEIGHTS_WHOLE * total:
        return missing
    return {p: rows for p, rows in missing.items() if touched[p[1]] or len(rows) < states[p].any.count}


def _scale(place: Place, state: State, when: str, make: Make) -> Iterator[WeightFault]:
    p = state.given or state.lies
    if p is None or "scale" not in place[2] or not p.count:
        return
    if p.zeros and p.zeros == math.prod(p.shape):
        yield make(ZERO, place, "", f"is zero after {when}: whatever it scales is lost")
    elif p.nan:
        yield make(NAN, place, "", f"holds {p.nan} NaN after {when}")
    elif p.raw and p.written is not None and state.event.kind == journal.LOAD:
        now = state.written()
        rows = np.flatnonzero(now == 0) if now is not None else np.zeros(0, np.int64)
        if len(rows) and now is not None and now.any():
            yield make(
                UNFILLED, place, named(p, rows), f"was never filled by {when}: it contains earlier values of the memory"
            )


def _packing(
    place: Place, state: State, history: list[State], event: journal.WeightEvent, when: str, make: Make
) -> Iterator[WeightFault]:
    loaded, lies = state.given, state.lies
    packed = lies if lies is not None and lies is not loaded else None
    if loaded is not None and packed is not None and loaded.dtype == packed.dtype and loaded.dtype in _FLOATS:
        pair = exchanged(loaded, packed)
        if loaded.order == packed.order and loaded.shape == packed.shape:
            pass
        elif loaded.bag != packed.bag:
            if "scale" not in place[2]:
                rows = named(packed, _rows(loaded, packed))
                says = f"was changed by packing at {when}: not only the order of its elements"
                yield make(VALUE, place, rows, says)
        elif pair is not None or packed.undone not in ("", "unknown"):
            what = f"{named_pair(packed, pair)} were exchanged" if pair else "elements changed places"
            rows = named(packed, _rows(loaded, packed))
            yield make(EXCHANGED, place, rows, f"was packed wrong at {when}: {what}")
    yield from _again(place, state, history, when, make)


def _again(place: Place, state: State, history: list[State], when: str, make: Make) -> Iterator[WeightFault]:
    """What was packed into another order at loading, and lies in the checkpoint's now."""
    first = next((s for s in history if s.event.kind == journal.LOAD), None)
    if first is None or first.given is None or first.lies is None or first.lies is first.given:
        return
    was, now = first.lies, state.lies
    # it lies exactly as it was given: nothing packed it
    if was.undone and now is not None and now is state.given and (now.shape, now.dtype) == (was.shape, was.dtype):
        order = "" if was.undone == "unknown" else f" ({was.undone})"
        packer = f"loading had packed it{order}, and nothing did again"
        says = f"lies in the checkpoint's order after {when}: {packer}"
        yield make(NOT_PACKED, place, "", says)


def _slot(side: WeightHistory, place: Place, state: State, make: Make) -> Iterator[WeightFault]:
    loaded, slot = state.forms.get(journal.GIVEN), state.forms.get(journal.SLOT)
    if loaded is None or slot is None or loaded.bag == slot.bag:
        return
    rank, event = place[0], state.event
    before = [s for s in side.states[place] if s.event.slot == event.slot and s.event.number < event.number]
    same = next((s for s in reversed(before) if (p := s.forms.get(journal.SLOT)) and p.order == slot.order), None)
    of = f"adapter {event.name!r} in slot {event.slot} of rank {rank}"
    if same is not None:
        whose = f"adapter {same.event.name!r}" if same.event.name != event.name else "an earlier version"
        says = f"was left as {whose} had it: {of} was not written there"
    else:
        says = f"is not what {of} was to put there"
    yield make(OLD_ADAPTER, place, "", says)


OTHER_FORM, OTHER_CUT, ONE_SIDE = "packed by other kernels", "cut otherwise, or of another dtype", "in one dump only"
Prints = tuple[journal.WeightPrint, journal.WeightPrint]
Key = tuple[int, str, str, int]
"""Rank, kind, an adapter's name, and which of these events."""


def weights_between(golden: journal.Lives, mine: journal.Lives) -> dict[str, Any]:
    """What compare.json says of weights; {} where neither dump tells of them. ``findings``: first what is between the
    two, each with what mine's own life says of it, then what else one of them shows alone. Where only one dump tells
    of its weights (the other is another tool's, or older), what it shows alone is all that there is; ``told`` counts
    the weights of such a mine."""
    if not golden.prints or not mine.prints:
        return _one_side(golden, mine)
    sides = side_of(golden), side_of(mine)
    alone = [faults_within(side, which) for side, which in zip(sides, ("golden", "mine"), strict=True)]
    skipped: Counter[str] = Counter()
    between, compared = _between(*sides, skipped)
    own = {(f.rank, f.tap, f.name): f for f in reversed(alone[1])}
    known = {(f.rank, f.tap, f.name) for f in alone[0]}
    between = [f for f in between if not _follows(f, own.values(), sides[1])]
    # What mine's own life explains is reported by that; a fault that both have cannot be what is between them.
    explained = [own.get((f.rank, f.tap, f.name), f) for f in between]
    rest = [f for f in alone[1] if f not in explained and (f.rank, f.tap, f.name) not in known]
    both = [f for f in alone[1] if (f.rank, f.tap, f.name) in known and f not in explained]
    theirs = [f for f in alone[0] if (f.rank, f.tap, f.name) not in {(g.rank, g.tap, g.name) for g in both}]
    faults = sorted(dict.fromkeys([*explained, *rest]), key=lambda f: (f.number, f.what == DIFFERS)) + theirs
    faults += [replace(f, side=BOTH) for f in both]
    return {
        "events": {which: _events(side) for which, side in zip(("golden", "mine"), sides, strict=True)},
        "compared": compared,
        "not_compared": dict(skipped),
        "findings": [f.to_dict() for f in faults],
    }


def _one_side(golden: journal.Lives, mine: journal.Lives) -> dict[str, Any]:
    if not golden.prints and not mine.prints:
        return {}
    which, lives = ("mine", mine) if mine.prints else ("golden", golden)
    side = side_of(lives)
    return {
        "events": {which: _events(side)},
        "compared": 0,
        "told": len(side.states) if which == "mine" else 0,
        "not_compared": {ONE_SIDE: len(side.states)},
        "findings": [f.to_dict() for f in faults_within(side, which)],
    }


def _follows(fault: WeightFault, own: Iterable[WeightFault], mine: WeightHistory) -> bool:
    """Whether the tensor is none of the checkpoint's, and made of another one of its module, which is wrong since the
    same event: packing computes column sums of scale times weight, for example."""
    if not any((f.rank, f.tap, f.number) == (fault.rank, fault.tap, fault.number) for f in own):
        return False
    # At loading: a reload copies into the tensors that there are.
    written = mine.states[fault.rank, fault.tap, fault.name][0].written()
    return written is not None and not written.any()


def _events(side: WeightHistory) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "number": e.number, "event": event_words(e, events), "step": e.step, "seconds": e.seconds}
        for rank, events in sorted(side.events.items())
        for e in events
    ]


def _keys(side: WeightHistory) -> dict[Key, journal.WeightEvent]:
    found: dict[Key, journal.WeightEvent] = {}
    for rank, events in side.events.items():
        nth: Counter[tuple[str, str]] = Counter()
        for e in events:
            name = e.name if e.kind == journal.LORA else ""
            found[rank, e.kind, name, nth[e.kind, name]] = e
            nth[e.kind, name] += 1
    return found


def _between(golden: WeightHistory, mine: WeightHistory, skipped: Counter[str]) -> tuple[list[WeightFault], int]:
    events = _keys(golden), _keys(mine)
    found: dict[Place, WeightFault] = {}
    compared: set[Place] = set()
    before: dict[Place, tuple[State, State, str]] = {}
    why: dict[Place, str] = defaultdict(str)
    for key, event in sorted(events[1].items(), key=lambda x: x[1].number):
        theirs = events[0].get(key)
        if theirs is None:
            continue
        when = event_words(event, mine.events[event.rank])
        states = golden.at.get((theirs.rank, theirs.number), {}), mine.at.get((event.rank, event.number), {})
        for place in states[0].keys() & states[1].keys():
            if place in found or is_computed(place[2]):
                continue
            g, m = states[0][place], states[1][place]
            pair, reason = _comparable(g, m)
            if pair is None:
                why[place] = reason
                continue
            compared.add(place)
            if not _same(*pair):
                found[place] = _fault(place, pair, when, event.number, before.get(place))
            else:
                before[place] = g, m, when
        if event.number == 0:
            skipped[ONE_SIDE] += len(states[0].keys() ^ states[1].keys())
    for place, reason in why.items():
        if place not in compared:
            skipped[reason] += 1
    return list(found.values()), len(compared)


def _comparable(g: State, m: State) -> tuple[Prints | None, str]:
    a, b = g.given, m.given
    if a is None or b is None:
        a, b = g.lies or g.forms.get(journal.SLOT), m.lies or m.forms.get(journal.SLOT)
    if a is None or b is None:
        return None, ONE_SIDE
    if a.shape != b.shape or a.dtype != b.dtype:
        return None, OTHER_CUT
    if a.undone != b.undone and "unknown" in (a.undone, b.undone) and a.bag != b.bag:
        return None, OTHER_FORM
    return (a, b), ""


def _same(a: journal.WeightPrint, b: journal.WeightPrint) -> bool:
    if "unknown" in (a.undone, b.undone):
        return a.bag == b.bag
    return a.order == b.order


def _fault(place: Place, pair: Prints, when: str, number: int, before: tuple[State, State, str] | None) -> WeightFault:
    rank, tap, name = place
    rows = differing(*pair)
    where = named(pair[1], np.zeros(0, np.int64) if rows is None else rows)
    if (swapped := exchanged(*pair)) is not None:
        how = f": {named_pair(pair[1], swapped)} are exchanged"
    elif pair[0].bag == pair[1].bag:
        how = ": the same elements in another order"
    else:
        how = ""
    if before is None:
        says = f"differs from golden's at {when}{how}"
    else:
        says = f"is golden's after {before[2]} and differs after {when}{how}"
        last = (before[0].given or before[0].lies, before[1].given or before[1].lies)
        changed = [a is not None and a.form == b.form and a.order != b.order for a, b in zip(last, pair, strict=True)]
        if changed == [True, False]:
            says += ": golden's changed there and mine's did not"
    of = f" ({where})" if where else ""
    return WeightFault(DIFFERS, "", rank, tap, name, when, number, where, f"{tap}.{name}{of} {says}")
