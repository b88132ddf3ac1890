"""All compared tokens of two servers, and of those known to be right, as columns.

The problem: what a distance between golden and mine is worth shows beside two others of the same token: how far golden
is from itself in another batch, and how far two servers that are known to be right are from one another. The idea: a
row for each token of golden's and mine's passes of the same arrival, so that batches differ as little as they can, and
in each row every distance that is known; a row is there only where all sides have read the same text so far.
Not here: distances (token_gaps.py), what they say (floor.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.gate.measure.features import Features, Steps, courses
from vllm_accprobe.gate.measure.token_gaps import SCORED, TokenGap, forced, gaps
from vllm_accprobe.gate.sending.replies import Reply, Sent

ONLY = "prompts that only {} has"
SCORE = "score"
"""The arrival word of the pass in which prompt and answer are read at once."""
Replies = dict[str, Reply]


@dataclass
class Gaps:
    """All compared tokens of one kind of pairs. after: tokens after the end of the common text; skipped: prompts, by
    reason."""

    by_prompt: dict[str, list[TokenGap]] = field(default_factory=dict)
    after: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> list[TokenGap]:
        return [t for tokens in self.by_prompt.values() for t in tokens]

    def add(self, golden: Replies, mine: Replies) -> dict[tuple[str, int], TokenGap]:
        """Compares two passes; gives the new tokens by prompt and ordinal."""
        new: dict[tuple[str, int], TokenGap] = {}
        for name, reply in golden.items():
            other = mine.get(name)
            if other is None:
                self.skipped[ONLY.format("golden")] += 1
                continue
            found, after, why = gaps(reply, other)
            self.after += after
            if why is not None:
                self.skipped[why] += 1
                continue
            self.by_prompt.setdefault(name, []).extend(found)
            new |= {(name, t.ordinal): t for t in found}
        if alone := len(mine.keys() - golden.keys()):
            self.skipped[ONLY.format("mine")] += alone
        return new


@dataclass(frozen=True)
class Table:
    """n tokens of golden against mine. names: prompts; prompt, pass_index: int [n]. tokens, features: of mine.
    across: float64 [n], golden to mine; itself: golden to itself in the other pass; floors, others: [floors, n], each
    floor to golden and to mine; NaN where nobody knows. estimated: batches are from times, and chunks unknown."""

    names: tuple[str, ...]
    prompt: np.ndarray
    pass_index: np.ndarray
    tokens: tuple[TokenGap, ...]
    features: tuple[Features, ...]
    across: np.ndarray
    itself: np.ndarray
    floors: np.ndarray
    others: np.ndarray
    estimated: bool


def pairs(golden: Sent, mine: Sent) -> list[tuple[int, int]]:
    """Indices of passes of the same arrival; where there are none, the n-th with the n-th, but no scored one."""
    left, right = (_words(side) for side in (golden, mine))
    free, found = list(range(len(right))), []
    for i, word in enumerate(left):
        j = next((j for j in free if right[j] == word), None)
        if j is not None:
            free.remove(j)
            found.append((i, j))
    if any(left[i] != SCORE for i, _ in found):
        return found
    plain = [[i for i, word in enumerate(words) if word != SCORE] for words in (left, right)]
    return [*zip(*plain, strict=False), *found]


def selves(side: Sent) -> tuple[Replies, Replies] | None:
    """Two passes of one server that differ in arrival alone."""
    plain = [p for p, word in zip(side.passes, _words(side), strict=True) if word != SCORE]
    return (plain[0], plain[1]) if len(plain) > 1 else None


def _words(side: Sent) -> list[str]:
    return [str(p.get("arrive")) for p in side.about["passes"]]


def build(golden: Sent, mine: Sent, right: Sequence[Sent], steps: Steps | None) -> tuple[Table, Gaps, Gaps, Gaps]:
    """(the table, across, golden itself, mine itself). right: servers known to be right; steps: of mine's engine."""
    across, golden_self, mine_self = Gaps(), Gaps(), Gaps()
    themselves: dict[tuple[str, int], TokenGap] = {}
    for to, side in ((golden_self, golden), (mine_self, mine)):
        both = selves(side)
        new = to.add(*both) if both else {}
        themselves = new if side is golden else themselves
    columns: list[tuple[str, int, TokenGap, Features, float, list[float], list[float]]] = []
    estimated = True
    floors = [dict(pairs(golden, one)) for one in right]
    for i, j in pairs(golden, mine):
        way = courses(mine.passes[j], j, steps)
        estimated = estimated and not any(course.rows for course in way.values())
        near: list[dict[tuple[str, int], TokenGap]] = []
        far: list[dict[tuple[str, int], TokenGap]] = []
        for one, passes in zip(right, floors, strict=True):
            theirs = one.passes[passes[i]] if i in passes else {}
            near.append(Gaps().add(golden.passes[i], theirs))
            far.append(Gaps().add(theirs, mine.passes[j]))
        scored = any(forced(r) == SCORED for r in mine.passes[j].values())
        for (name, k), token in across.add(golden.passes[i], mine.passes[j]).items():
            own = None if scored else themselves.get((name, k))
            sizes = [[_size(d.get((name, k))) for d in of] for of in (near, far)]
            columns.append((name, j, token, way[name].at(token), _size(own), sizes[0], sizes[1]))
    names = tuple(dict.fromkeys(c[0] for c in columns))
    at = {name: i for i, name in enumerate(names)}
    table = Table(
        names,
        np.array([at[c[0]] for c in columns], np.int64),
        np.array([c[1] for c in columns], np.int64),
        tuple(c[2] for c in columns),
        tuple(c[3] for c in columns),
        np.array([c[2].distance for c in columns], np.float64),
        np.array([c[4] for c in columns], np.float64),
        np.array([c[5] for c in columns], np.float64).reshape(len(columns), len(right)).T,
        np.array([c[6] for c in columns], np.float64).reshape(len(columns), len(right)).T,
        estimated,
    )
    return table, across, golden_self, mine_self


def _size(token: TokenGap | None) -> float:
    return np.nan if token is None else token.distance
