"""Whether a flipped token is an error, and whose.

The problem: greedy sampling turns the smallest difference into another token where two logits are nearly equal, and
from there on the texts have nothing in common; but a sampler can also be wrong. The idea: each side's token is held
against that side's own logits. If both took their own best logit, the sampler did its work, and the logits speak:
within their limits it was a near tie, beyond them an operator before is to blame. If the golden took its best logit
and mine did not, while the logits agree, mine's sampler is the origin. If the golden did not, it was sampled at random.
Not here: finding flips (align/tokens.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Flip

NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN = (
    "near tie",
    "logits differ beyond the limit",
    "sampler",
    "sampled at random",
    "no logits recorded",
)
_TIE = 1e-6
"""Logits this near to the best (relative) count as best: a lower precision makes exact ties, broken by any order."""


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
        found = np.flatnonzero(self.ids == token)
        if not len(found):
            return False
        gap = float(self.logits[0] - self.logits[found[0]])
        return gap <= _TIE * max(abs(float(self.logits[0])), 1.0)


def judge_flip(golden: Best | None, mine: Best | None, flip: Flip, logits_agree: bool | None) -> str:
    """One of NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN. logits_agree: within limits, None where not compared."""
    if golden is None or mine is None:
        return UPSTREAM if logits_agree is False else UNKNOWN
    if logits_agree is False:
        return UPSTREAM
    if not golden.chose(flip.golden):
        return RANDOM
    return NEAR_TIE if mine.chose(flip.mine) else SAMPLED


def flip_entry(flip: Flip, request: str, golden: Best | None, mine: Best | None, why: str) -> dict[str, Any]:
    """An entry of compare.json's ``tokens.flipped``."""
    return {
        "request": request,
        "ordinal": flip.ordinal,
        "golden": flip.golden,
        "mine": flip.mine,
        "golden_margin": golden.margin if golden else None,
        "mine_margin": mine.margin if mine else None,
        "why": why,
    }
