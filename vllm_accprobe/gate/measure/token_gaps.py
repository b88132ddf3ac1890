"""Two replies to one prompt, token by token, for as long as both have read the same.

The problem: after the first token that is not the same, two servers answer different texts, and comparing these says
nothing about numbers. The idea: positions are compared up to and including the first token that is not the same: its
context is still. Where a side was forced along the other's tokens, that never happens: a flip is then a token that is
not the server's own best, and ends nothing. A `scored` reply has a token for each position of prompt and answer.
Not here: what is expected (floor.py), who forces (sending/along.py), what condition a token has (features.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from vllm_accprobe.gate.sending.replies import Reply

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
    scored = SCORED in (forced(golden), forced(mine))
    if scored and (forced(golden) != forced(mine) or ours != theirs):
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
        a, b = _known(golden.top[k]), _known(mine.top[k])
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


def forced(reply: Reply) -> str | None:
    """How the tokens of a reply were forced, None where the server chose them."""
    return reply.forced


def _known(top: tuple[list[int] | None, list[float]]) -> dict[int, float]:
    ids, values = top
    return {i: v for i, v in zip(ids or (), values, strict=False) if v > CLIPPED}


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
    if forced(reply) is None or not ids or (token in ids and values[ids.index(token)] >= values[0]):
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
