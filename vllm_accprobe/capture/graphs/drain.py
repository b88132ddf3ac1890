"""From the buffers of a compiled graph to the dump: once per step, with that step's rows.

The problem: a graph's taps know neither steps nor requests, their buffers are few rows high, and the next step writes
over them. The idea: before the forward the rows that are wanted are chosen (tap_op.choose), after it the buffers go
through the session like tensors of a hook: the same roles, the same row maps, the same lines. Rows that do not fit are
left out of the step's map for these taps and counted; a buffer that nobody has written to is a skip and no tensor. Not
here: which taps there are (placement.py), when a forward begins (vllm/compiled.py).
"""

from __future__ import annotations

import dataclasses

import torch

from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import LANGUAGE, Session
from vllm_accprobe.capture.core.step_state import StepState
from vllm_accprobe.capture.graphs.placement import Placed, unwritten
from vllm_accprobe.capture.graphs.sightings import Sighting
from vllm_accprobe.capture.graphs.tap_op import choose
from vllm_accprobe.capture.taps.fast_path import Sites
from vllm_accprobe.dump.journal.tensor_lines import TensorHead
from vllm_accprobe.dump.schema import TOKENS

HELD = f"{TOKENS}/held"
"""The row space of a graph's taps in a step with more rows than their buffers have: the first ones."""
MORE_ROWS = "rows beyond those that VLLM_ACCPROBE_GRAPH_MB holds in one step"
NOT_RUN = "the compiled graph did not run its tap"


class GraphDrain:
    """The taps of one placed plan, step by step: ``aim`` before the forward, ``take`` after it, ``rest`` at its end."""

    def __init__(self, session: Session, placed: Placed):
        self._session = session
        self._placed = placed
        self._aimed: StepState | None = None
        self._space: Space | None = None
        self._on = False
        self._live: set[tuple[str, int]] = set()
        self._sites: dict[tuple[str, int], Sites] = {}

    def aim(self, padded: int = 0) -> None:
        """The session's step is about to be computed, and its rows are known. padded: rows of the model's tensors."""
        session, state = self._session, self._session.state
        if state is None or not self._placed.chosen:
            return
        session.whole_step(state)  # makes the step's rows known
        space = state.spaces.get(TOKENS)
        if space is None:
            session.skip(self._placed.chosen[0][0].path, "its rows cannot be told apart in a compiled graph")
            return
        space.padded = max(space.padded, padded)
        self._space = held(space, self._placed.plan.rows)
        self._aimed, self._on = state, True
        choose(self._placed.select, [row for start, stop in self._space.ranges for row in range(start, stop)])

    def take(self) -> None:
        """The forward has returned: what the taps have copied goes into the dump."""
        state, space, session = self._aimed, self._space, self._session
        self._aimed = self._space = None
        if state is None or space is None or session.state is not state or not space.n:
            return
        left = (state.spaces[TOKENS].n - space.n) if space.name == HELD else 0
        for sighting, buffer in self._placed.chosen:
            key = (sighting.path, sighting.index)
            rows = buffer[: space.n]
            if key not in self._live:
                if unwritten(rows):
                    session.sink.skip(sighting.path, NOT_RUN, sighting.role)
                    session.fired.add(sighting.path)
                    continue
                self._live.add(key)
            if state.calls.get(sighting.path):  # this step ran as Python, whose taps have seen it
                continue
            session.fired.add(sighting.path)
            if left:
                session.sink.skip(sighting.path, MORE_ROWS, sighting.role, left)
            if space.whole and space.name == TOKENS:
                sites = self._sites.setdefault(key, {})
                session.record(state, sighting.path, sighting.cls, sighting.role, 0, rows, LANGUAGE, None, sites)
            else:
                self._record(state, sighting, rows, space)

    def rest(self) -> None:
        """No step runs: what is computed now (dummy batches, drafts) is none of anybody's."""
        self._aimed = self._space = None
        if self._on:
            self._on = False
            choose(self._placed.select, ())

    def _record(self, state: StepState, one: Sighting, rows: torch.Tensor, space: Space) -> None:
        """A tensor that has the kept rows of ``space`` and no others."""
        session = self._session
        if not space.announced:
            space.announced = True
            session.sink.rows(state.number, space)
        seq = state.seq
        state.seq = seq + 1
        layout = session.layout_event(one.path, one.role, rows.shape)
        head = TensorHead(state.number, one.path, one.cls, one.role, 0, seq, space.name, layout=layout)
        session.sink.tensor(head, rows, None)


def held(space: Space, most: int) -> Space:
    """``space`` itself where its kept rows fit into ``most``, else one of its first ``most`` kept rows."""
    if space.n <= most:
        return space
    ranges, segments, room = [], [], most
    for start, stop in space.ranges:
        if room:
            ranges.append((start, min(stop, start + room)))
            room -= ranges[-1][1] - start
    last = ranges[-1][1] if ranges else 0
    for segment in space.segments:
        n = min(segment.n, last - segment.row)
        if n > 0:
            segments.append(dataclasses.replace(segment, n=n))
    return Space(
        HELD, space.src, space.padded, ranges, segments, ids=space.ids, positions=space.positions, floors=space.floors
    )
