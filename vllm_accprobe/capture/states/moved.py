"""Whether a step must have changed a request's recurrent state.

The problem: a kernel that leaves out a state's write is seen only by bytes that stay as they were, and they may
rightly stay: a convolution's state holds its last inputs, which are the same after a step in text that repeats itself.
The idea: a first layer's inputs follow from token ids alone. If the last ids before the step and the last ids behind
it differ, over as many as the convolution's state holds, that state holds other inputs, and the recurrence has added
other terms. Where they are the same, or not known, nothing is concluded. Not here: bytes (looks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_accprobe.capture.states.schedule import Held

MOST_TOKENS = 8
"""Ids that are kept of a request: convolutions hold three (Mamba's kernel of 4), seldom more."""


def kept_tails(parts: Sequence[tuple[Held, int, int]], ids: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By request's number, (the last ids before the step, the last behind it), and keeps the latter.

    parts: (request, its first position in the step, how many rows), in the order of ``ids``, the step's token ids.
    """
    found = {}
    at = 0
    for one, start, n in parts:
        tail, own = one.tail, ids[at : at + n].astype(np.int64)
        at += n
        if one.tail_end != start or tail is None:
            prompt = one.prompt if one.prompt is not None and start <= len(one.prompt) else None
            tail = None if prompt is None else np.asarray(prompt[max(start - MOST_TOKENS, 0) : start], np.int64)
        one.tail = None
        if tail is not None and len(own) == n:
            one.tail, one.tail_end = np.concatenate([tail, own])[-MOST_TOKENS:], start + n
            found[one.number] = tail, one.tail
    return found


def must_change(tails: Mapping[int, tuple[np.ndarray, np.ndarray]], number: int, tokens: int) -> bool:
    """Whether a state that remembers ``tokens`` tokens cannot be as it was."""
    before, behind = tails.get(number, (None, None))
    if before is None or behind is None or min(len(before), len(behind)) < tokens or tokens < 1:
        return False
    return bool((before[-tokens:] != behind[-tokens:]).any())
