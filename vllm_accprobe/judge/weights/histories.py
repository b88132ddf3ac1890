"""What a dump says of each parameter, put in order: one state for each event.

The problem: lines come as they were made, rows only where they are new, and a parameter that lies as it was given has
one line for both. The idea: a `State` holds all forms of one parameter after one event, its rows filled in from the
last line with the same sum; a `History` is the states of one rank's parameter. Not here: what is wrong (within.py,
between.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from vllm_accprobe.dump.weights.weight_life import LOAD, LOADED, LORA, MAX_ROWS, PACKED, Lives, WeightEvent, WeightPrint
from vllm_accprobe.judge.constants import FEW_LISTED

_COMPUTED = ("cos_sin_cache", "inv_freq", "cos_cached", "sin_cached", "position_ids")
Place = tuple[int, str, str]
"""Rank, tap, name."""


@dataclass
class State:
    """One parameter after one event: its prints by form."""

    event: WeightEvent
    forms: dict[str, WeightPrint] = field(default_factory=dict)

    @property
    def given(self) -> WeightPrint | None:
        """As it was given by this event, where it was looked at."""
        return self.forms.get(LOADED)

    @property
    def lies(self) -> WeightPrint | None:
        """As it lies after the event: what was not packed lies as it was given."""
        return self.forms.get(PACKED) or self.forms.get(LOADED)

    @property
    def any(self) -> WeightPrint:
        return next(iter(self.forms.values()))

    def written(self) -> np.ndarray | None:
        """How often each row was written, int64 [rows]; None where nobody looked."""
        p = self.given or self.lies
        return None if p is None else times(p)


@dataclass
class LivesInOrder:
    """One dump's lives. events: in order, by rank; states: by place, in the order of events."""

    events: dict[int, list[WeightEvent]] = field(default_factory=dict)
    states: dict[Place, list[State]] = field(default_factory=dict)

    @cached_property
    def at(self) -> dict[tuple[int, int], dict[Place, State]]:
        """(rank, number) → the states after that event."""
        found: dict[tuple[int, int], dict[Place, State]] = {}
        for place, states in self.states.items():
            for state in states:
                found.setdefault((state.event.rank, state.event.number), {})[place] = state
        return found


def side_of(lives: Lives) -> LivesInOrder:
    """Both put in order. Prints without an event (the run was killed before its line) are left out."""
    side = LivesInOrder()
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


def times(p: WeightPrint) -> np.ndarray | None:
    """`State.written` of a print."""
    if p.written is None:
        return None
    found = np.zeros(p.count if p.count <= MAX_ROWS else 1, np.int64)  # of one with more rows: whether any was
    for first, end, n in p.written:
        found[first:end] = n
    return found


def differing(a: WeightPrint, b: WeightPrint) -> np.ndarray | None:
    """Rows in which two prints of one shape differ; None where they cannot be told."""
    if a.shape != b.shape:
        return None
    x, y = a.sums(), b.sums()
    return None if x is None or y is None else np.flatnonzero(x != y)


def exchanged(a: WeightPrint, b: WeightPrint) -> tuple[int, int] | None:
    """The two rows of which each holds the other's elements, where these are the only ones that differ."""
    rows, x, y = differing(a, b), a.sums(), b.sums()
    if rows is None or x is None or y is None or len(rows) != 2:
        return None
    i, j = map(int, rows)
    return (i, j) if x[i] == y[j] and x[j] == y[i] else None


def named(p: WeightPrint, rows: np.ndarray) -> str:
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


def named_pair(p: WeightPrint, pair: tuple[int, int]) -> str:
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


def spoken(event: WeightEvent, events: list[WeightEvent]) -> str:
    """An event in words: ``loading``, ``reload 2``, ``putting adapter 'a' into slot 0``."""
    if event.kind == LOAD:
        return "loading"
    if event.kind == LORA:
        return f"putting adapter {event.name!r} into slot {event.slot}"
    nth = sum(e.kind == event.kind and e.number <= event.number for e in events)
    return f"{event.kind} {nth}"
