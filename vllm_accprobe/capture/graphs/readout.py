"""From the buffers of a compiled graph to the dump: once per step, with that step's rows.

The problem: a graph's taps know neither steps nor requests, their buffers have few rows, the next step overwrites them,
and a line of statistics may be an old one. The idea: before the forward the wanted rows are chosen; after it the
buffers go through the session like tensors of a hook, with the same roles, row maps and lines. Statistics carry the
number of their choice, and a line with another number is a skip. Rows that do not fit are counted, and a buffer that
nobody has written is a skip. Everything is copied before the next forward can overwrite it: in host memory into the
writer's block, on a device on the stream in which the next forward comes. Without room for that the forward waits, or
all taps of the step are counted skips (VLLM_ACCPROBE_GRAPH_FULL=drop).

Not here: the operators (graph_ops.py), which taps there are (placement.py), when a forward begins (vllm/compiled.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import DTYPE_NAMES, LANGUAGE, Part, Session, Sites, StepState
from vllm_accprobe.capture.graphs.graph_ops import choose, choose_stats, read_line
from vllm_accprobe.capture.graphs.placement import STATS_BYTES, Placed, Sighting, unwritten
from vllm_accprobe.dump.journal import TensorHead
from vllm_accprobe.dump.journal_writer import TensorTemplate, template_of
from vllm_accprobe.dump.schema import PADDING, TOKENS

DROPPED = "dropped, the disk was slower than the model (VLLM_ACCPROBE_GRAPH_FULL=drop)"
NOT_MEASURED = "the compiled graph did not run its tap, or with a tensor of another form"


_Line = tuple[TensorTemplate, int, int, int]
"""Template, step, call and seq of a tensor that was measured."""


class StatsReadout:
    """The taps of one placed plan that measure: ``aim`` before the forward, ``take`` of each tap after it,
    ``flush`` when all are taken, ``rest`` when no step runs. select: what they share, see graph_ops.stats_selection."""

    def __init__(self, session: Session, select: torch.Tensor):
        self._session = session
        self._select = select
        self._serial = 0
        self._space: Space | None = None
        self._templates: dict[tuple[str, str, int], tuple[TensorHead, TensorTemplate]] = {}
        self._waiting: list[tuple[_Line, Sighting, torch.Tensor]] = []

    def aim(self, space: Space) -> None:
        """The rows of ``space`` are measured in the forward that comes."""
        self._space = space
        self._serial += 1
        choose_stats(self._select, self._serial, space.ranges)

    def take(self, state: StepState, one: Sighting, buffer: torch.Tensor) -> None:
        """The forward has returned, and ``buffer`` is the line of the tap at ``one``."""
        space = self._space
        if space is None or not space.n:
            return
        self._session.announce(state, space)
        line = self._template(one, space), state.number, one.call, state.seq
        state.seq += 1
        if self._session.sink.direct:
            self._read(line, one, buffer, self._serial, space.n)
        else:
            self._waiting.append((line, one, buffer))

    def _template(self, one: Sighting, space: Space) -> TensorTemplate:
        shape, key = (space.n, *one.shape), (one.path, one.role, one.call)
        known = self._templates.get(key)
        if known is not None and known[1].shape == shape and known[0].rows == space.name:
            return known[1]
        layout = self._session.layout_event(one.path, one.role, torch.Size(shape))
        head = TensorHead(one.path, one.cls, one.role, space.name, layout=layout)
        template = template_of(head, DTYPE_NAMES[one.dtype], shape, 0)
        self._templates[key] = head, template
        return template

    def flush(self, drops: bool = False) -> None:
        """All taps of the step are taken: the lines of a device are on their way to the host. drops: where that would
        have to wait, they are counted skips."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._space is None:
            return
        sink, serial, rows = self._session.sink, self._serial, self._space.n
        if drops and not sink.room([sum(buffer.nbytes for _, _, buffer in waiting)]):
            for _, one, _ in waiting:
                sink.skip(one.path, DROPPED, one.role)
            return

        def arrived(hosts: Sequence[torch.Tensor]) -> None:
            for (line, one, _), numbers in zip(waiting, hosts[0], strict=True):
                self._read(line, one, numbers, serial, rows)

        sink.arrived((torch.stack([buffer for _, _, buffer in waiting]),), arrived)

    def rest(self) -> None:
        """Nothing is measured any more."""
        if self._space is not None:
            self._space = None
            self._waiting.clear()
            choose_stats(self._select, 0, ())

    def _read(self, line: _Line, one: Sighting, numbers: torch.Tensor, serial: int, rows: int) -> None:
        found = read_line(numbers, serial, one.dtype, one.shape)
        if found is None or found.rows != rows:
            self._session.sink.skip(one.path, NOT_MEASURED, one.role)
        else:
            self._session.sink.measured(*line, found.sums, found.hash)


FIRST_ROWS = f"{TOKENS}/held"
"""The row space of a graph's taps in a step with more rows than their buffers have: the first ones."""
MORE_PADDING = "rows of padding beyond those that VLLM_ACCPROBE_GRAPH_MB holds in one step"
MORE_ROWS = "rows beyond those that VLLM_ACCPROBE_GRAPH_MB holds in one step"
NOT_RUN = "the compiled graph did not run its tap"
UNSEEN = "this runner calls the compiled model in a way that is not watched: no rows were chosen in that step"


class GraphReadout:
    """The taps of one placed plan, step by step: ``aim`` before the forward, ``take`` after it, ``rest`` at its end."""

    def __init__(self, session: Session, placed: Placed):
        self._session = session
        self._placed = placed
        self._drops = session.config.graph_full == "drop"
        self._aimed: StepState | None = None
        self._begun: StepState | None = None
        """The last step whose forward was seen to begin, or is counted as one that was not."""
        self._space: Space | None = None
        self._padding: Space | None = None
        self._on = False
        self._stats = StatsReadout(session, placed.stats_select) if placed.plan.measured else None
        self._live: set[tuple[str, str, int]] = set()
        self._sites: dict[tuple[Any, ...], Sites] = {}

    def aim(self, padded: int = 0) -> None:
        """The session's step is about to be computed, and its rows are known. padded: rows of the model's tensors."""
        session, state = self._session, self._session.state
        if state is None or state is self._aimed or not self._placed.chosen:
            return
        self._begun = state
        session.whole_step(state)  # makes the step's rows known
        space = state.spaces.get(TOKENS)
        if space is None:
            session.skip(self._placed.chosen[0][0].path, "its rows cannot be distinguished in a compiled graph")
            return
        if padded > space.padded:
            space.padded = padded
            if space.announced:
                session.know(state, space)
        self._aimed, self._on = state, True
        self._placed.begin()
        if self._stats is not None:
            self._stats.aim(space)
        most = self._placed.plan.rows
        self._space, self._padding = first_rows(space, most) if most else space, None
        if most:
            self._aim_copies(self._space, most)

    def _aim_copies(self, space: Space, most: int) -> None:
        """The same for the taps that copy ``most`` rows at most."""
        # Rows of padding may hold what an earlier step left there of anybody: stored where everybody's are.
        if self._session.everybodys and space.padded > space.src:
            self._padding = padding_of(space, most - space.n)
        ranges = [*space.ranges, *(self._padding.ranges if self._padding is not None else ())]
        choose(self._placed.select, [row for start, stop in ranges for row in range(start, stop)])

    def take(self) -> None:
        """The forward has returned: what the taps have copied goes into the dump."""
        state, space, session = self._aimed, self._space, self._session
        self._aimed = self._space = None
        self._count_unseen()
        if state is None or space is None or session.state is not state or not space.n:
            return
        fits = not self._drops or session.sink.room([self._copied(one, space) for one, _ in self._placed.chosen])
        if not fits and not session.sink.idle():
            for one, _ in self._placed.chosen:
                session.fired.add(one.path)
                session.sink.skip(one.path, DROPPED, one.role)
            return
        left = (state.spaces[TOKENS].n - space.n) if space.name == FIRST_ROWS else 0
        for sighting, buffer in self._placed.chosen:
            if self._stats is not None and self._placed.plan.measures(sighting):
                if not state.calls.get(sighting.path):
                    session.fired.add(sighting.path)
                    self._stats.take(state, sighting, buffer)
                continue
            key = (sighting.path, sighting.role, sighting.call)
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
            if not fits and not session.sink.room([self._copied(sighting, space)]) and not session.sink.idle():
                session.sink.skip(sighting.path, DROPPED, sighting.role)
                continue
            if left:
                session.sink.skip(sighting.path, MORE_ROWS, sighting.role, left)
            self._record(state, sighting, rows, LANGUAGE if space.whole and space.name == TOKENS else space)
            if self._padding is not None:
                self._take_padding(state, sighting, buffer[space.n :], self._padding)
        if self._stats is not None:
            self._stats.flush(drops=not fits)

    def _count_unseen(self) -> None:
        """A step has computed, and no call has shown its forward: a vendor's runner that replays it whole."""
        session, state = self._session, self._session.state
        if state is None or state is self._begun:
            return
        self._begun = state
        for one, _ in self._placed.chosen:
            if not state.calls.get(one.path):  # not seen by a tap in Python, either
                session.fired.add(one.path)
                session.sink.skip(one.path, UNSEEN, one.role)

    def _copied(self, one: Sighting, space: Space) -> int:
        """Bytes that the tap at ``one`` hands over in a step with the rows of ``space``."""
        if self._placed.plan.measures(one):
            return STATS_BYTES
        return one.row_bytes * (space.n + (0 if self._padding is None else self._padding.n))

    def _take_padding(self, state: StepState, one: Sighting, rows: torch.Tensor, space: Space) -> None:
        """What stands in the rows behind the tokens', as many as were copied."""
        if space.n:
            self._record(state, one, rows[: space.n], space)
        left = space.padded - space.ranges[0][0] - space.n
        if left:
            self._session.sink.skip(one.path, MORE_PADDING, one.role, left)

    def rest(self) -> None:
        """No step runs: what is computed now (dummy batches, drafts) is none of anybody's."""
        self._aimed = self._space = None
        if self._on:
            self._on = False
            choose(self._placed.select, ())
            if self._stats is not None:
                self._stats.rest()

    def _record(self, state: StepState, one: Sighting, rows: torch.Tensor, part: Part) -> None:
        """A tensor that has the kept rows of a space and no others."""
        sites = self._sites.setdefault((one.path, one.role, one.call, isinstance(part, Space) and part.name), {})
        self._session.take(state, sites, one.path, one.cls, one.role, one.call, rows, part)


def padding_of(space: Space, most: int) -> Space:
    """The first ``most`` of the rows that tensors have behind those of ``space``."""
    stop = min(space.padded, space.src + max(most, 0))
    return Space(PADDING, space.padded, space.padded, [(space.src, stop)], [])


def first_rows(space: Space, most: int) -> Space:
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
        FIRST_ROWS, space.src, space.padded, ranges, segments,
        ids=space.ids, positions=space.positions, floors=space.floors,
    )  # fmt: skip
