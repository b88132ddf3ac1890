"""Whether a flipped token is an error, and whose.

The problem: greedy sampling turns the smallest difference into another token where two logits are nearly equal, and
from there on the texts have nothing in common; but a sampler can also be wrong. The idea: each side's token is held
against that side's own logits. If both took their own best logit, the sampler did its work, and the logits speak:
within their limits it was a near tie, beyond them an operator before is to blame. If the golden took its best logit
and mine did not, while the logits agree, mine's sampler is the origin. If the golden did not, it was sampled at random.
Where something masked the logits (a grammar, bad words), the best that were left stand in for them: a sampler that
took the best of these did its work, and what was masked on one side only, or otherwise, explains another token.
Not here: finding flips (align/tokens.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Flip
from vllm_accprobe.judge.constants import LOGIT_ROUNDING, LOGITS_APART, TIE

NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN, MASKED = (
    "near tie",
    "logits differ beyond the limit",
    "sampler",
    "sampled at random",
    "no logits recorded",
    "logits were masked",
)


@dataclass(frozen=True, slots=True)
class Best:
    """The best logits of one row, descending, and their ids."""

    logits: np.ndarray
    ids: np.ndarray

    @property
    def margin(self) -> float | None:
        return float(self.logits[0] - self.logits[1]) if len(self.logits) > 1 else None

    def chose(self, token: int) -> bool:
        """Whether ``token`` is the best, or as good as the best."""
        gap = self.behind(token)
        return gap is not None and gap <= TIE * max(abs(float(self.logits[0])), 1.0)

    def behind(self, token: int) -> float | None:
        """How far the token's logit is behind the best; None where it is not among the best, or not allowed."""
        found = np.flatnonzero(self.ids == token)
        if not len(found) or not np.isfinite(self.logits[found[0]]):
            return None
        return float(self.logits[0] - self.logits[found[0]])


@dataclass(frozen=True, slots=True)
class Masking:
    """What changed one side's row of logits before sampling. by: in words, empty for nothing; None: nobody wrote it
    down. grammar: hash of a grammar's bitmask. left: the best logits after it, None where they were not recorded."""

    by: tuple[str, ...] | None = None
    grammar: str | None = None
    left: Best | None = None


NOTHING = Masking()


def judge_flip(
    golden: Best | None,
    mine: Best | None,
    flip: Flip,
    logits_agree: bool | None,
    masks: tuple[Masking, Masking] = (NOTHING, NOTHING),
) -> str:
    """One of NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN, MASKED. golden, mine: the best logits as the model gave
    them. logits_agree: within limits, None where not compared."""
    if golden is None or mine is None:
        return UPSTREAM if logits_agree is False else UNKNOWN
    if logits_agree is False:
        return UPSTREAM
    seen = [side.left if side.by else best for side, best in zip(masks, (golden, mine), strict=True)]
    if seen[0] is not None and not seen[0].chose(flip.golden):
        return RANDOM
    if seen[1] is not None and not seen[1].chose(flip.mine):
        return SAMPLED
    by = [set(side.by or ()) for side in masks]
    if by[0] != by[1]:
        return MASKED
    if seen[0] is None or seen[1] is None:
        return UNKNOWN
    if not any(by) or _tie(seen[0], seen[1], flip, (golden, mine)):
        return NEAR_TIE
    same = masks[0].grammar is not None and masks[0].grammar == masks[1].grammar and len(by[0]) == 1
    return SAMPLED if same else MASKED


def _tie(golden: Best, mine: Best, flip: Flip, raw: tuple[Best, Best]) -> bool:
    """Whether both samplers were left both tokens, with logits that differ by no more than those of the model do."""
    noise = max((abs(a - b) for a, b in _common(*raw)), default=0.0)
    noise = max(noise, LOGIT_ROUNDING * float(np.abs(raw[0].logits).max()))
    gaps = [best.behind(token) for best, token in ((golden, flip.mine), (mine, flip.golden))]
    return all(gap is not None and gap <= LOGITS_APART * noise for gap in gaps)


def _common(a: Best, b: Best) -> Iterator[tuple[float, float]]:
    for i, token in enumerate(a.ids):
        for j in np.flatnonzero(b.ids == token)[:1]:
            yield float(a.logits[i]), float(b.logits[j])


def flip_entry(
    flip: Flip,
    request: str,
    golden: Best | None,
    mine: Best | None,
    why: str,
    masks: tuple[Masking, Masking] = (NOTHING, NOTHING),
) -> dict[str, Any]:
    """An entry of compare.json's ``tokens.flipped``; with ``masked``, both sides' words, where something was masked."""
    masked = {side: list(m.by) for side, m in zip(("golden", "mine"), masks, strict=True) if m.by}
    entry = {
        "request": request,
        "ordinal": flip.ordinal,
        "golden": flip.golden,
        "mine": flip.mine,
        "golden_margin": golden.margin if golden else None,
        "mine_margin": mine.margin if mine else None,
        "why": why,
    }
    return entry | ({"masked": masked} if masked else {})
