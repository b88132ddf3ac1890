"""Two replies to one prompt, token by token, and what each token's numbers depend on.

The problem: after the first token that differs two servers answer different texts, and a token may show an error that
an earlier chunk left in its keys and values. The idea: positions are compared up to and including the first token that
differs; where a side was forced nothing ends. Features cover the context: the last chunk that computed a row of it, the
largest and smallest batch that did, whether the request began with a prefix hit: from the engine's steps, else
estimated from the server's answers. `Table` has a row for each token, with every distance that is known: golden to
mine, golden to itself, and floors.

Not here: what is expected, and which feature explains a difference (conditions.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.replies import Sent

REFUSED = "prompts that a side refused"
NO_IDS = "prompts without token ids on a side"
OTHER_IDS = "prompts whose token ids are not the same on both sides"
CLIPPED = -9999.0
"""What vLLM writes for minus infinity."""
SCORED = "scored"


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One token. ordinal: of the answer's, from 0, which is computed with the prompt (prefill), the others in decode;
    scored ones are all prefill. position: of the row whose logits these are. length: of the prompt, in tokens, of a
    scored one with its answer.

    gap: how far apart the log-probabilities of the chosen token are, of both tokens in the mean where two free servers
    chose two (so that it does not matter which side is golden), None where a side does not list it. distance: root mean
    square over all listed tokens, infinite where a side has no number. kl: of golden's most likely tokens and the rest
    against mine's, in nats, None where nothing is shared. flipped: the sides' best tokens are not the same; margins:
    the best log-probability minus the second."""

    ordinal: int
    position: int
    length: int
    cached: bool
    gap: float | None
    distance: float
    kl: float | None
    flipped: bool
    golden_margin: float | None
    mine_margin: float | None
    scored: bool = False

    @property
    def phase(self) -> str:
        return "decode" if self.ordinal and not self.scored else "prefill"


def gaps(golden: Reply, mine: Reply) -> tuple[list[TokenGap], int, str | None]:
    """(tokens, how many after the end of the common text are not compared, why there are none)."""
    if golden.refused is not None or mine.refused is not None:
        return [], 0, REFUSED
    ours, theirs = golden.token_ids, mine.token_ids
    if not (golden.prompt_token_ids and mine.prompt_token_ids and ours and theirs):
        return [], 0, NO_IDS
    if golden.prompt_token_ids != mine.prompt_token_ids:
        return [], 0, OTHER_IDS
    scored = SCORED in (golden.forced, mine.forced)
    if scored and (golden.forced != mine.forced or ours != theirs):
        return [], 0, OTHER_IDS
    n = min(len(ours), len(theirs), *(len(r.top or ()) for r in (golden, mine)))
    if not n:
        return [], 0, NO_IDS
    found = []
    assert golden.top is not None
    assert mine.top is not None
    first, cached = len(golden.prompt_token_ids), bool(golden.cached) or bool(mine.cached)
    length = first + len(ours) if scored else first
    for k in range(n):
        a, b = known(golden, k), known(mine, k)
        apart = ours[k] != theirs[k]
        flipped = apart or _best(golden, k) != _best(mine, k)
        chosen = {ours[k], theirs[k]}
        values = [(_value(golden, k, t), _value(mine, k, t)) for t in chosen]
        sizes = [abs(y - x) for x, y in values if x is not None and y is not None]
        gap = sum(sizes) / len(sizes) if len(sizes) == len(chosen) else None
        margins = [(r.margins or [])[k] if k < len(r.margins or []) else None for r in (golden, mine)]
        far = distance(a, b, chosen) if a or b else math.inf if gap is None else gap
        kl = divergence(a, b)
        found.append(TokenGap(k, first + k - 1, length, cached, gap, far, kl, flipped, margins[0], margins[1], scored))
        if apart:
            return found, max(len(ours), len(theirs)) - k - 1, None
    return found, 0, None


def known(reply: Reply, k: int) -> dict[int, float]:
    """What a reply lists for its token ``k``, without what is minus infinity."""
    assert reply.top is not None
    ids, values = reply.top[k]
    return {i: v for i, v in zip(ids or (), values, strict=False) if v > CLIPPED}


_LISTED = 5
"""Chosen: numbers that a server lists for a token, from which on they have a spread: two or three may be ties."""


def spread(reply: Reply, k: int) -> float | None:
    """How far what is listed for token ``k`` lies above the last of it, root mean square; None where too few are."""
    listed = [*known(reply, k).values()]
    last = min(listed, default=0.0)
    return math.sqrt(sum((v - last) ** 2 for v in listed) / len(listed)) if len(listed) >= _LISTED else None


def _value(reply: Reply, k: int, token: int) -> float | None:
    """The log-probability of a token; of the one that the reply has, even where it is none of the most likely."""
    assert reply.top is not None
    assert reply.token_ids is not None
    ids, values = reply.top[k]
    value = None
    if ids and token in ids:
        value = values[ids.index(token)]
    elif reply.logprobs and k < len(reply.logprobs) and reply.token_ids[k] == token:
        value = reply.logprobs[k]
    return None if value is None or value <= CLIPPED else value


def _best(reply: Reply, k: int) -> int:
    """The server's own choice: of equally good ones the token of the text, which then is no flip."""
    assert reply.top is not None
    assert reply.token_ids is not None
    ids, values = reply.top[k]
    token = reply.token_ids[k]
    if reply.forced is None or not ids or (token in ids and values[ids.index(token)] >= values[0]):
        return token
    return ids[0]


def distance(golden: dict[int, float], mine: dict[int, float], chosen: Collection[int] = ()) -> float:
    """Root mean square of the differences of log-probabilities, in nats, over the tokens that a side lists: a mean of
    20 numbers, which says more of the size of rounding than the chosen token's alone. What only one side lists is less
    likely on the other than all that it lists for being likely, and not for being ``chosen``: the difference is at
    least that to the last of these. Infinite where a side lists nothing that is a number."""
    if not golden or not mine:
        return math.inf
    lasts = [min((v for t, v in side.items() if t not in chosen), default=math.inf) for side in (golden, mine)]
    total, n = 0.0, 0
    for ours, theirs, last in ((golden, mine, lasts[1]), (mine, golden, lasts[0])):
        for token, x in ours.items():
            if token not in theirs:
                total += max(x - last, 0.0) ** 2
                n += 1
            elif ours is golden:
                total += (x - theirs[token]) ** 2
                n += 1
    return math.sqrt(total / n)


def divergence(golden: dict[int, float], mine: dict[int, float]) -> float | None:
    """Kullback-Leibler divergence, sum p (log p - log q), over the tokens that both list and one class for all others:
    at most that of the whole distributions [data processing: T. Cover, J. Thomas, Elements of Information Theory, 2006,
    2.8]. Log-probabilities by token; None where no token is shared."""
    shared = golden.keys() & mine.keys()
    if not shared:
        return None
    total = sum(math.exp(golden[t]) * (golden[t] - mine[t]) for t in shared)
    p, q = (max(1.0 - sum(math.exp(side[t]) for t in shared), 0.0) for side in (golden, mine))
    if p > 1e-12 and q > 1e-12:  # less is the rounding of what was summed
        total += p * math.log(p / q)
    return max(total, 0.0)


Row = tuple[int, int, int, int]
"""(step, computed before, scheduled, requests in the step), of one request, in the order of steps."""
Steps = Callable[[int, str], list[Row]]
"""Of a pass's index and a prompt's name: its rows, empty where the server was not ours."""


@dataclass(frozen=True, slots=True)
class Features:
    """Of a token and its context. chunk: of its rows the last chunk's number, from 1; batch, least: requests in the
    largest and in the smallest step that computed a row of it; None where it is not known. start: where that chunk
    begins. hit: whether its request began with rows from the prefix cache."""

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
    floor to golden and to mine; NaN where it is not known. estimated: batches are from times, and chunks unknown."""

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
        scored = any(r.forced == SCORED for r in mine.passes[j].values())
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
