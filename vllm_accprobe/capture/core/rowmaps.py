"""Row maps as journal lines: which row is which token, as the device has it.

The problem: token ids, and positions where speculation corrects them after the scheduler has guessed, stand in the
runner's buffers only; a space of other rows (logits) speaks of the same tokens. And a buffer may hold nothing: what is
read there is believed only as far as it can be true. The idea: a line is planned when its space is known, with the
scheduler's positions, and finished when copies of these buffers have reached host memory, in the order of the steps;
what the tokens space brought serves the step's other spaces. A position may go back to where the request's own tokens
began, and only where drafts are in play; whatever else differs is not believed, and is counted.
Not here: which rows a space has (rows.py), where the runner keeps positions (vllm_compat.py), the copy
(device_staging.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.dump.schema import PADDING, RowSpace, Segment

Finish = Callable[[Sequence[torch.Tensor]], RowSpace]


class RowMaps:
    """The row maps of one rank. What ``of`` returns is finished on one thread, in the order in which it was asked."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self.disbelieved = 0
        """Segments whose positions the runner gave otherwise than can be."""

    def new_step(self) -> None:
        """Forgets the last step's tokens; in its place among the finished ones."""
        self._ids = []
        self._positions = []

    def of(self, step: int, space: Space) -> tuple[list[torch.Tensor], Finish]:
        """The tensors whose values the line needs (ids and positions: integers, [token rows]), and what makes the
        row map of their copies in host memory."""
        name, src_rows = space.name, space.src
        segments, ranges, token_rows = list(space.segments), list(space.ranges), list(space.token_rows)
        floors = dict(space.floors)
        nobodys = space.n if name == PADDING else None
        found = [(name, tensor) for name in ("ids", "positions") if (tensor := getattr(space, name)) is not None]

        def finish(hosts: Sequence[torch.Tensor]) -> RowSpace:
            named = dict(zip((name for name, _ in found), hosts, strict=True))
            ids: list[int] = []
            if "ids" in named:
                self._ids = named["ids"].tolist()
                ids = [i for start, stop in ranges for i in self._ids[start:stop]]
            # Asynchronous speculation corrects positions on the device after the scheduler has guessed them.
            if "positions" in named:
                self._positions = named["positions"].tolist()
                rows = [s.row for s in segments]
            else:
                rows = _firsts(segments, token_rows)
            if token_rows and self._ids:
                ids = [self._ids[row] for row in token_rows]
            true = segments
            if rows and self._positions:
                true = [self._corrected(s, r, floors.get(s.req)) for s, r in zip(segments, rows, strict=True)]
            return RowSpace(step, name, src_rows, tuple(true), tuple(ids), nobodys)

        return [tensor for _, tensor in found], finish

    def _corrected(self, segment: Segment, row: int, floor: int | None) -> Segment:
        """The segment where the runner's positions, from token row ``row`` on, say that it is.

        floor: the lowest position to which it may be corrected; None where the scheduler's is exact.
        """
        said = self._positions[row : row + segment.n]
        first = said[0] if said else -1
        if said == list(range(first, first + segment.n)):
            if first == segment.pos:
                return segment
            if floor is not None and floor <= first < segment.pos:
                return dataclasses.replace(segment, pos=first)
        if not self.disbelieved:
            say(
                f"the runner's positions are not the scheduler's ({first} and {segment.pos}, the first time): the "
                "scheduler's are taken; if rows seem to be others' in this dump, report this vLLM's version"
            )
        self.disbelieved += 1
        return segment


def _firsts(segments: Sequence[Segment], token_rows: Sequence[int]) -> list[int]:
    """The token row of each segment's first row; empty where the space's rows are no tokens."""
    if not token_rows:
        return []
    firsts, at = [], 0
    for segment in segments:
        firsts.append(token_rows[at])
        at += segment.n
    return firsts
