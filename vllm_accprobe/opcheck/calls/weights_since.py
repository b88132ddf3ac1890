"""Weights that a reload or a sync changed: from which step on a dump no longer holds what a call was made with.

The problem: a dump has a parameter's values once, as they were at loading; calls after a trainer's sync would be held
against weights that the engine no longer had, and every product would look like a broken kernel. The idea: the life of
each parameter (dump/weights/weight_life.py) has a fingerprint after each event; between an event that left another one
and one that brings the first back, a call with it cannot be checked, and says so. Not here: whether an event left the
right weights (judge/weights/).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from vllm_accprobe.dump.weights.weight_life import LOADED, PACKED, RELOAD, SYNC, WAKE, Lives

_NAMES = {RELOAD: "a reload", SYNC: "a weight sync", WAKE: "waking up"}


class WeightsSince:
    """lives: of one dump, all ranks."""

    def __init__(self, lives: Lives):
        self._at: dict[tuple[int, str], list[tuple[int, str]]] = {}
        events = {(e.rank, e.number): e for e in lives.events}
        prints: dict[tuple[int, int], dict[tuple[str, str], dict[str, str]]] = {}
        for p in lives.prints:
            if p.form in (LOADED, PACKED):
                prints.setdefault((p.rank, p.life), {}).setdefault((p.tap, p.name), {})[p.form] = p.order
        first: dict[tuple[int, str, str, str], str] = {}
        other: dict[tuple[int, str], set[str]] = {}
        for event in sorted(events.values(), key=lambda e: e.number):
            rank = event.rank
            for (tap, name), forms in prints.get((rank, event.number), {}).items():
                told = {f: first.setdefault((rank, tap, name, f), order) == order for f, order in forms.items()}
                # As it was given, where somebody saw that: packing again may order the same values otherwise.
                same = told[LOADED] if LOADED in told else told[PACKED]
                changed = other.setdefault((rank, tap), set())
                (changed.discard if same else changed.add)(name)
                if event.kind not in _NAMES:
                    continue
                steps = self._at.setdefault((rank, tap), [])
                why = f"{_NAMES[event.kind]} before step {event.step} changed its weights; the dump holds those before"
                if steps and steps[-1][0] == event.step:
                    steps.pop()
                steps.append((event.step, why if changed else ""))

    def why_not(self, rank: int, taps: Iterable[str], step: int | None) -> str:
        """Why the dump's parameters of ``taps`` are not those of a call in ``step``; "" where they are, as far as
        fingerprints were taken."""
        for tap in taps if step is not None and self._at else ():
            steps = self._at.get((rank, tap), [])
            at = bisect_right(steps, step, key=lambda s: s[0]) - 1
            if at >= 0 and steps[at][1]:
                return steps[at][1]
        return ""
