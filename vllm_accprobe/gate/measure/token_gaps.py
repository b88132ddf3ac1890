"""Two replies to one prompt, token by token, for as long as both have read the same.

The problem: after the first token that is not the same, two servers answer different texts, and comparing these says
nothing about numbers. The idea: positions are compared up to and including the first flip: its context is still the
same on both sides. What comes after is counted, not compared.
Not here: what is expected (floor.py), forcing mine along golden's tokens, which would end nothing at a flip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_accprobe.gate.sending.client import Reply

REFUSED = "prompts that a side refused"
NO_IDS = "prompts without token ids on a side"
OTHER_IDS = "prompts whose token ids are not the same on both sides"
CLIPPED = -9999.0
"""What vLLM writes for minus infinity."""


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One generated token. ordinal: from 0, which is computed with the prompt (prefill), the others in decode; length:
    of the prompt, in tokens. gap: how far apart the log-probabilities of the chosen token are, of both tokens in the
    mean where it flipped (so that it does not matter which side is golden), None where a side does not list it;
    kl: of golden's most likely tokens and the rest against mine's, in nats, None where nothing is shared.
    flipped: the tokens are not the same; margins: the best log-probability minus the second."""

    ordinal: int
    length: int
    cached: bool
    gap: float | None
    kl: float | None
    flipped: bool
    golden_margin: float | None
    mine_margin: float | None

    @property
    def phase(self) -> str:
        return "decode" if self.ordinal else "prefill"

    @property
    def position(self) -> int:
        """Of the row whose logits these are."""
        return self.length + self.ordinal - 1


def gaps(golden: Reply, mine: Reply) -> tuple[list[TokenGap], int, str | None]:
    """(tokens, how many after a flip are not compared, why there are none)."""
    if golden.refused is not None or mine.refused is not None:
        return [], 0, REFUSED
    ours, theirs = golden.token_ids, mine.token_ids
    if not (golden.prompt_token_ids and mine.prompt_token_ids and ours and theirs):
        return [], 0, NO_IDS
    if golden.prompt_token_ids != mine.prompt_token_ids:
        return [], 0, OTHER_IDS
    n = min(len(ours), len(theirs), *(len(r.top or ()) for r in (golden, mine)))
    if not n:
        return [], 0, NO_IDS
    found = []
    assert golden.top is not None
    assert mine.top is not None
    length, cached = len(golden.prompt_token_ids), bool(golden.cached) or bool(mine.cached)
    for k in range(n):
        a, b = _known(golden.top[k]), _known(mine.top[k])
        token, flipped = ours[k], ours[k] != theirs[k]
        chosen = {token, theirs[k]}
        gap = sum(abs(b[t] - a[t]) for t in chosen) / len(chosen) if chosen <= a.keys() & b.keys() else None
        margins = ((r.margins or [])[k] if k < len(r.margins or []) else None for r in (golden, mine))
        found.append(TokenGap(k, length, cached, gap, divergence(a, b), flipped, *margins))
        if flipped:
            return found, max(len(ours), len(theirs)) - k - 1, None
    return found, 0, None


def _known(top: tuple[list[int] | None, list[float]]) -> dict[int, float]:
    ids, values = top
    return {i: v for i, v in zip(ids or (), values, strict=False) if v > CLIPPED}


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
