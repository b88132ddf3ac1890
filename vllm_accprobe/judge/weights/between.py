"""Golden's weights against mine's, event by event: from which on they differ.

The problem: kernels pack weights in forms of their own, so what lies in memory cannot be compared between machines, and
one wrong parameter explains everything behind it. The idea: the k-th event of a kind meets the k-th of the same kind;
there the parameter is compared as it was given, or where a packing was taken off; else without order, where the shapes
are one. The first event at which it differs is named, and whether mine's was written there at all. Parameters that are
cut otherwise, or have other dtypes, are counted and not compared. Not here: one dump alone (within.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_accprobe.dump.weights.weight_life import LORA, SLOT, Lives, WeightEvent, WeightPrint
from vllm_accprobe.judge.weights.faults import BOTH, DIFFERS, WeightFault
from vllm_accprobe.judge.weights.histories import (
    LivesInOrder,
    Place,
    State,
    differing,
    exchanged,
    is_computed,
    named,
    named_pair,
    side_of,
    spoken,
)
from vllm_accprobe.judge.weights.within import faults_within

OTHER_FORM, OTHER_CUT, ONE_SIDE = "packed by other kernels", "cut otherwise, or of another dtype", "in one dump only"
Key = tuple[int, str, str, int]
"""Rank, kind, an adapter's name, and which of these events."""


def weights_between(golden: Lives, mine: Lives) -> dict[str, Any]:
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
    # What mine's own life explains is said by that; a fault that both have cannot be what is between them.
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


def _one_side(golden: Lives, mine: Lives) -> dict[str, Any]:
    """`weights_between` where at most one of the two tells of its weights."""
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


def _follows(fault: WeightFault, own: Iterable[WeightFault], mine: LivesInOrder) -> bool:
    """Whether the tensor is none of the checkpoint's, and made of another one of its module, which is wrong since the
    same event: packing computes column sums of scale times weight, for example."""
    if not any((f.rank, f.tap, f.number) == (fault.rank, fault.tap, fault.number) for f in own):
        return False
    # At loading: a reload copies into the tensors that there are.
    written = mine.states[fault.rank, fault.tap, fault.name][0].written()
    return written is not None and not written.any()


def _events(side: LivesInOrder) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "number": e.number, "event": spoken(e, events), "step": e.step, "seconds": e.seconds}
        for rank, events in sorted(side.events.items())
        for e in events
    ]


def _keys(side: LivesInOrder) -> dict[Key, WeightEvent]:
    found: dict[Key, WeightEvent] = {}
    for rank, events in side.events.items():
        nth: Counter[tuple[str, str]] = Counter()
        for e in events:
            name = e.name if e.kind == LORA else ""
            found[rank, e.kind, name, nth[e.kind, name]] = e
            nth[e.kind, name] += 1
    return found


def _between(golden: LivesInOrder, mine: LivesInOrder, skipped: Counter[str]) -> tuple[list[WeightFault], int]:
    events = _keys(golden), _keys(mine)
    found: dict[Place, WeightFault] = {}
    compared: set[Place] = set()
    before: dict[Place, tuple[State, State, str]] = {}
    why: dict[Place, str] = defaultdict(str)
    for key, event in sorted(events[1].items(), key=lambda x: x[1].number):
        theirs = events[0].get(key)
        if theirs is None:
            continue
        when = spoken(event, mine.events[event.rank])
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
                found[place] = _fault(place, pair, when, event.number, before.get(place), (g, m))
            else:
                before[place] = g, m, when
        if event.number == 0:
            skipped[ONE_SIDE] += len(states[0].keys() ^ states[1].keys())
    for place, reason in why.items():
        if place not in compared:
            skipped[reason] += 1
    return list(found.values()), len(compared)


def _comparable(g: State, m: State) -> tuple[tuple[WeightPrint, WeightPrint] | None, str]:
    """The two prints to compare, or why there are none."""
    a, b = g.given, m.given
    if a is None or b is None:
        a, b = g.lies or g.forms.get(SLOT), m.lies or m.forms.get(SLOT)
    if a is None or b is None:
        return None, ONE_SIDE
    if a.shape != b.shape or a.dtype != b.dtype:
        return None, OTHER_CUT
    if a.undone != b.undone and "unknown" in (a.undone, b.undone) and a.bag != b.bag:
        return None, OTHER_FORM
    return (a, b), ""


def _same(a: WeightPrint, b: WeightPrint) -> bool:
    if "unknown" in (a.undone, b.undone):
        return a.bag == b.bag
    return a.order == b.order


def _fault(
    place: Place,
    pair: tuple[WeightPrint, WeightPrint],
    when: str,
    number: int,
    before: tuple[State, State, str] | None,
    states: tuple[State, State],
) -> WeightFault:
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
