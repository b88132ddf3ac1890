"""What is wrong with weights by one dump alone.

The problem: most faults of a sync show without a golden: a shard that loading wrote and a reload did not, an adapter's
slot that holds the one before, a scale that is zero. A parameter that merely stays the same is none: trainers freeze
some, and small steps round to nothing. The idea: what loading wrote is what a whole reload writes, row by row and time
by time; what packing changed at loading it changes again. Each rule names the first event at which it holds, and
nothing is said of what was not looked at. Not here: order of the lines (histories.py), two dumps (between.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from vllm_accprobe.dump.weights.weight_life import (
    GIVEN,
    LOAD,
    LORA,
    RELOAD,
    SLOT,
    SYNC,
    WAKE,
    WeightEvent,
    WeightPrint,
)
from vllm_accprobe.judge.constants import WEIGHTS_WHOLE
from vllm_accprobe.judge.weights.faults import (
    EXCHANGED,
    NAN,
    NOT_PACKED,
    NOT_WRITTEN,
    OLD_ADAPTER,
    SLEEP,
    UNFILLED,
    VALUE,
    ZERO,
    WeightFault,
)
from vllm_accprobe.judge.weights.histories import (
    LivesInOrder,
    Place,
    State,
    differing,
    exchanged,
    is_computed,
    named,
    named_pair,
    spoken,
)

Make = Callable[[str, Place, str, str], WeightFault]
_FLOATS = ("bfloat16", "float16", "float32")


def faults_within(side: LivesInOrder, which: str) -> list[WeightFault]:
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
    side: LivesInOrder, rank: int, events: list[WeightEvent], event: WeightEvent, which: str
) -> Iterator[WeightFault]:
    states = side.at.get((rank, event.number), {})
    when = spoken(event, events)

    def fault(what: str, place: Place, rows: str, says: str) -> WeightFault:
        tap, name = place[1:]
        of = f" ({rows})" if rows else ""
        return WeightFault(what, which, rank, tap, name, when, event.number, rows, f"{tap}.{name}{of} {says}")

    if event.kind == LORA:
        for place, state in states.items():
            yield from _slot(side, place, state, fault)
        return
    unwritten = _unwritten(side, rank, event, states) if event.kind in (RELOAD, SYNC) else {}
    for place, state in states.items():
        if is_computed(place[2]):
            continue
        history = [s for s in side.states[place] if s.event.number < event.number and s.event.kind != LORA]
        if place in unwritten:
            rows = unwritten[place]
            p = state.given or state.lies
            assert p is not None
            stays = " and holds what it held before" if _stays(history, p, rows) else ""
            says = f"was not written by {when}, as loading had written it{stays}"
            yield fault(NOT_WRITTEN, place, named(p, rows), says)
            continue
        yield from _scale(place, state, when, fault)
        yield from _packing(place, state, history, event, when, fault)
        a, b = history[-1].lies if history else None, state.lies
        if event.kind == WAKE and a is not None and b is not None and a.shape == b.shape and a.order != b.order:
            yield fault(SLEEP, place, named(b, _rows(a, b)), f"is not after {when} what it was before sleep")


def _rows(a: WeightPrint, b: WeightPrint) -> np.ndarray:
    rows = differing(a, b)
    return np.zeros(0, np.int64) if rows is None else rows


def _stays(history: list[State], p: WeightPrint, rows: np.ndarray) -> bool:
    before = next((q for s in reversed(history) for q in (s.forms.get(p.form),) if q is not None), None)
    changed = None if before is None else differing(before, p)
    return changed is not None and not np.isin(rows, changed).any()


def _unwritten(
    side: LivesInOrder, rank: int, event: WeightEvent, states: dict[Place, State]
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
        if now is None:  # it lies in a form that nobody could look at
            continue
        if len(now) != len(before):
            now = np.full(len(before), int(now.any()))
        if now.any():
            written += 1
            touched[place[1]] += 1
        rows = np.flatnonzero((before > 0) & (now == 0))
        if len(rows):
            missing[place] = rows
    total = written + sum(len(rows) == _count(states[p]) for p, rows in missing.items())
    if not written:
        return {}
    if written >= WEIGHTS_WHOLE * total:
        return missing
    return {p: rows for p, rows in missing.items() if touched[p[1]] or len(rows) < _count(states[p])}


def _count(state: State) -> int:
    return state.any.count


def _scale(place: Place, state: State, when: str, make: Make) -> Iterator[WeightFault]:
    p = state.given or state.lies
    if p is None or "scale" not in place[2] or not p.count:
        return
    if p.zeros and p.zeros == _elements(p):
        yield make(ZERO, place, "", f"is zero after {when}: whatever it scales is lost")
    elif p.nan:
        yield make(NAN, place, "", f"holds {p.nan} NaN after {when}")
    elif p.raw and p.written is not None and state.event.kind == LOAD:
        now = state.written()
        rows = np.flatnonzero(now == 0) if now is not None else np.zeros(0, np.int64)
        if len(rows) and now is not None and now.any():
            yield make(
                UNFILLED, place, named(p, rows), f"was never filled by {when}: it holds what the memory held before"
            )


def _elements(p: WeightPrint) -> int:
    found = 1
    for n in p.shape:
        found *= n
    return found


def _packing(
    place: Place, state: State, history: list[State], event: WeightEvent, when: str, make: Make
) -> Iterator[WeightFault]:
    given, lies = state.given, state.lies
    packed = lies if lies is not None and lies is not given else None
    if given is not None and packed is not None and given.dtype == packed.dtype and given.dtype in _FLOATS:
        pair = exchanged(given, packed)
        if given.order == packed.order and given.shape == packed.shape:
            pass
        elif given.bag != packed.bag:
            if "scale" not in place[2]:
                rows = named(packed, _rows(given, packed))
                says = f"was changed by packing at {when}: not only the order of its elements"
                yield make(VALUE, place, rows, says)
        elif pair is not None or packed.undone not in ("", "unknown"):
            what = f"{named_pair(packed, pair)} were exchanged" if pair else "elements changed places"
            rows = named(packed, _rows(given, packed))
            yield make(EXCHANGED, place, rows, f"was packed wrong at {when}: {what}")
    yield from _again(place, state, history, when, make)


def _again(place: Place, state: State, history: list[State], when: str, make: Make) -> Iterator[WeightFault]:
    """What was packed into another order at loading, and lies in the checkpoint's now."""
    first = next((s for s in history if s.event.kind == LOAD), None)
    if first is None or first.given is None or first.lies is None or first.lies is first.given:
        return
    was, now = first.lies, state.lies
    # it lies exactly as it was given: nothing packed it
    if was.undone and now is not None and now is state.given and (now.shape, now.dtype) == (was.shape, was.dtype):
        order = "" if was.undone == "unknown" else f" ({was.undone})"
        packer = f"loading had packed it{order}, and nothing did again"
        says = f"lies in the checkpoint's order after {when}: {packer}"
        yield make(NOT_PACKED, place, "", says)


def _slot(side: LivesInOrder, place: Place, state: State, make: Make) -> Iterator[WeightFault]:
    given, slot = state.forms.get(GIVEN), state.forms.get(SLOT)
    if given is None or slot is None or given.bag == slot.bag:
        return
    rank, event = place[0], state.event
    before = [s for s in side.states[place] if s.event.slot == event.slot and s.event.number < event.number]
    same = next((s for s in reversed(before) if (p := s.forms.get(SLOT)) and p.order == slot.order), None)
    of = f"adapter {event.name!r} in slot {event.slot} of rank {rank}"
    if same is not None:
        whose = f"adapter {same.event.name!r}" if same.event.name != event.name else "an earlier version"
        says = f"was left as {whose} had it: {of} was not written there"
    else:
        says = f"is not what {of} was to put there"
    yield make(OLD_ADAPTER, place, "", says)
