"""Which token each request took at each position, and which rows were computed on the way there.

The problem: with speculation and preemption a step computes rows that never came to be. The idea: what the sampler gave
is what was taken (the last word counts); a row is valid if it holds that token and so does every row before it in its
run: a draft behind a rejected draft was computed in a context that never existed, even if its own token came true.
Not here: naming rows (tokens.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Numbered = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of one row space: keys, token ids (or none), decode flags, index of the first row of each row's run."""
Accepted = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""Text subject → sorted positions and the tokens taken there."""
POSITION_BITS = 32
POSITION_MASK = (1 << POSITION_BITS) - 1


def subject(keys: np.ndarray) -> np.ndarray:
    """Subjects of row keys: int64 of any shape to the same."""
    return keys >> POSITION_BITS


def position(keys: np.ndarray) -> np.ndarray:
    """Positions of row keys: int64 of any shape to the same."""
    return keys & POSITION_MASK


def accepted_tokens(
    spaces: Mapping[tuple[int, int, str], Numbered],
    sampled: Callable[[int, int], np.ndarray | None],
    prompt_len: Mapping[int, int],
) -> Accepted:
    """What each request took: what was sampled where that is recorded, else the last id seen there.

    spaces: by (cell, step, name), in order of steps; sampled: (cell, step) → token of each logits row, -1 for none;
    prompt_len: text subject → length of its prompt, whose tokens no sampling changes.
    """
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for (_, _, name), (keys, ids, _, _) in spaces.items():
        if len(ids) and not name.startswith("vision"):
            seen.append((keys[keys >= 0], ids[keys >= 0]))
    for (cell, step, name), (keys, _, _, _) in spaces.items():
        tokens = sampled(cell, step) if name == "logits" else None
        if tokens is not None and len(tokens) == len(keys):
            lengths = np.array([prompt_len.get(int(k), 0) for k in subject(keys)], np.int64)
            real = (tokens >= 0) & (keys >= 0) & (position(keys) + 1 >= lengths)
            seen.append((keys[real] + 1, tokens[real].astype(np.int64)))
    if not seen:
        return {}
    keys, tokens = last_of_each(np.concatenate([k for k, _ in seen]), np.concatenate([t for _, t in seen]))
    if not len(keys):
        return {}
    accepted = {}
    edges = np.flatnonzero(np.diff(subject(keys), prepend=-1))
    for start, stop in zip(edges, [*edges[1:], len(keys)], strict=True):
        accepted[int(subject(keys[start : start + 1])[0])] = (position(keys[start:stop]), tokens[start:stop])
    return accepted


def last_of_each(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct keys, each with its last value."""
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    last = np.append(keys[1:] != keys[:-1], True) if len(keys) else np.zeros(0, bool)
    return keys[last], values[last]


def valid_rows(keys: np.ndarray, ids: np.ndarray, starts: np.ndarray, accepted: Accepted) -> np.ndarray:
    """bool [n]: the row holds the accepted token, and so does every row before it in its run."""
    valid = keys >= 0
    if not len(ids):
        return valid
    right = valid.copy()
    for who in np.unique(subject(keys[valid])):
        if int(who) in accepted:
            mask = valid & (subject(keys) == who)
            at, tokens = accepted[int(who)]
            where = np.searchsorted(at, position(keys[mask]))
            known = (where < len(at)) & (at[np.minimum(where, len(at) - 1)] == position(keys[mask]))
            right[mask] = ~known | (tokens[np.minimum(where, len(at) - 1)] == ids[mask])
    wrong_before = np.cumsum(~right)
    base = wrong_before[starts] - ~right[starts]
    return valid & (wrong_before - base == 0)


def last_rows(keys: Sequence[np.ndarray], valid: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For row spaces in order of time: of several valid rows with one key only the last is kept. bool, as ``keys``."""
    if not keys:
        return []
    every = np.concatenate(keys)
    index = np.flatnonzero(np.concatenate(valid))
    _, last = last_of_each(every[index], index)
    keep = np.zeros(len(every), bool)
    keep[last] = True
    return np.split(keep, np.cumsum([len(k) for k in keys])[:-1])
