"""What a token's numbers depend on, in one server: chunks, batches, prefix hits.

The problem: a kernel is wrong in the second chunk of a prompt, and every later token reads the wrong keys and values
that it left behind; told by the step that computed the token itself, it would be wrong nearly everywhere. The idea:
features take in the context: the last chunk that computed a row of it, the largest and the smallest batch that did,
whether its request began with a prefix hit. The engine's steps say this exactly (sending/steps.py); without them hits
are what the server says of its cache, batches are counted from requests that overlap in time, and chunks are unknown.
Not here: which feature explains a difference (condition.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.gate.measure.token_gaps import TokenGap
from vllm_accprobe.gate.sending.replies import Reply

Row = tuple[int, int, int, int]
"""(step, computed before, scheduled, requests in the step), of one request, in the order of steps."""
Steps = Callable[[int, str], list[Row]]
"""Of a pass's index and a prompt's name: its rows, empty where the server was not ours."""


@dataclass(frozen=True, slots=True)
class Features:
    """Of a token and its context. chunk: of its rows the last chunk's number, from 1; batch, least: requests in the
    largest and in the smallest step that computed a row of it; None where nobody knows. start: where that chunk begins.
    hit: whether its request began with rows from the prefix cache."""

    chunk: int | None
    batch: int | None
    least: int | None
    hit: bool | None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """How one request was computed. rows: of the engine's steps; overlap: requests at its time, an estimate that is
    used where there are no rows; cached: prompt tokens from the prefix cache, as the server says."""

    length: int
    rows: tuple[Row, ...]
    overlap: int | None
    cached: int | None

    def at(self, token: TokenGap) -> Features:
        if not self.rows:
            hit = None if self.cached is None else self.cached > 0
            return Features(None, self.overlap, self.overlap, hit)
        read = [row for row in self.rows if row[1] <= token.position]
        chunks = [row for row in read if token.scored or row[1] < self.length] or list(self.rows[:1])
        batches = [row[3] for row in read or self.rows]
        return Features(len(chunks), max(batches), min(batches), self.rows[0][1] > 0, chunks[-1][1])


def courses(replies: dict[str, Reply], index: int, steps: Steps | None) -> dict[str, Course]:
    """By prompt, of the pass with this index."""
    together = _overlaps(replies)
    found = {}
    for name, reply in replies.items():
        rows = tuple(steps(index, name)) if steps else ()
        found[name] = Course(len(reply.prompt_token_ids or ()), rows, together.get(name), reply.cached)
    return found


def _overlaps(replies: dict[str, Reply]) -> dict[str, int]:
    """How many requests were under way at once while this one was, at most: at each beginning within its time."""
    names = [name for name, r in replies.items() if r.refused is None]
    begins = np.array([replies[name].began for name in names])
    ends = begins + np.array([replies[name].seconds for name in names])
    counts = np.array([int(np.count_nonzero((begins <= moment) & (moment < ends))) for moment in begins])
    inside = ((begins[None, :] >= begin) & (begins[None, :] < end) for begin, end in zip(begins, ends, strict=True))
    return {name: max(int(counts[now[0]].max(initial=1)), 1) for name, now in zip(names, inside, strict=True)}
