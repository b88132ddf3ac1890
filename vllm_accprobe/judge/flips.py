"""Flipped tokens: near ties, and which side's sampler or logits explain them.

Rows that may have gone to other experts, told by the router's logits alone.

The problem: inside a compiled graph nobody sees which experts were taken, only the logits that they were taken by; and
a row at a near tie differs behind it by far more than any limit. The idea: where experts are taken by their highest
logits (of softmax or sigmoid, no groups, no bias), logits say which: rows whose k highest are others on the two sides,
or whose k-th and next are equal, may have gone elsewhere. If the logits themselves are within their limit, that is
rounding, as in routing.py, and these rows are left out from there on. A wrong choice by right logits stays an error of
the experts; a wrong router one of its logits. Where not even logits are in both dumps, nothing is excused: the origins
behind such a router are said to be no proof.

Whether a flipped token is an error, and whose.

The problem: greedy sampling turns the smallest difference into another token where two logits are nearly equal, and
from there on the texts have nothing in common; but a sampler can also be wrong. The idea: each side's token is held
against that side's own logits. If both took their own best logit, the sampler did its work, and the logits speak:
within their limits it was a near tie, beyond them an operator before is to blame. If the golden took its best logit
and mine did not, while the logits agree, mine's sampler is the origin. If the golden did not, it was sampled at random.
Where something masked the logits (a grammar, bad words), the best that were left stand in for them: a sampler that
took the best of these did its work, and what was masked on one side only, or otherwise, explains another token.
All this holds where the requests' parameters are not known. Where they are, each side is judged by its own request
first (sampling_rules.py), and equal logits and parameters with other processed logits, or another token, are a failed
logits processor or sampler, whatever made them.

Not here: chosen experts that both dumps have (routing.py), what is done with such rows (comparison/verdict), finding
flips (align/tokens.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import Flip
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.constants import LOGIT_ROUNDING, LOGITS_APART, TIE
from vllm_accprobe.judge.routing import in_front_of, margins
from vllm_accprobe.judge.sampling_rules import RIGHT, WRONG, Way

_MONOTONE = ("softmax", "sigmoid")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def taken(attrs: Mapping[str, Any]) -> int:
    """How many experts a row takes, by its highest logits: ``top_k`` of a module that holds experts; 0 where that is
    not known, or where groups or another score decide. attrs: `Module.attrs`."""
    k, experts = attrs.get("top_k"), attrs.get("global_num_experts")
    if not isinstance(k, int) or not isinstance(experts, int) or not 0 < k < experts:
        return 0
    plain = (attrs.get("num_expert_group") or 1) == 1 and attrs.get("scoring_func", "softmax") in _MONOTONE
    return k if plain else 0


def undecided(golden: np.ndarray, mine: np.ndarray, k: int) -> np.ndarray:
    """How far each side was from taking other experts: float64 [rows, 3], as `routing.margins`.

    golden, mine: float [rows, experts], the logits. NaN where both take the same k highest and neither side's k-th
    equals the next, where the two sides' logits are equal, and where one is not finite.
    """
    rows, experts = golden.shape
    out = np.full((rows, 3), np.nan)
    if not 0 < k < experts or golden.shape != mine.shape:
        return out
    at = np.flatnonzero((golden != mine).any(axis=1) & np.isfinite(golden).all(axis=1) & np.isfinite(mine).all(axis=1))
    g, m = golden[at].astype(np.float64), mine[at].astype(np.float64)
    # Of equals each side takes what the other one prefers.
    orders = np.lexsort((-m, -g), axis=1), np.lexsort((-g, -m), axis=1)
    out[at] = margins(orders[0][:, :k], orders[1][:, :k], g, m)
    gaps, largest = [], np.zeros(len(at))
    for logits, order in zip((g, m), orders, strict=True):
        last, following = (np.take_along_axis(logits, order[:, i : i + 1], axis=1)[:, 0] for i in (k - 1, k))
        gaps.append(last - following)
        np.maximum(largest, np.abs(last), out=largest)
    same = np.isnan(out[at, 0]) & ((gaps[0] == 0) | (gaps[1] == 0))
    out[at[same]] = np.stack([*gaps, largest], axis=1)[same]
    return out


def unknown_routers(attrs: Mapping[str, Mapping[str, Any]], known: Iterable[str]) -> list[str]:
    """Modules that hold experts, whose choices nobody can check. attrs: by tap; known: taps whose router's logits or
    chosen experts both dumps have."""
    seen = list(known)
    holders = [tap for tap, has in attrs.items() if has.get("top_k") and has.get("global_num_experts")]
    return [tap for tap in holders if not any(in_front_of(k, tap) or k.startswith(tap + ".") for k in seen)]


def behind(tap: str, routers: Iterable[str]) -> bool:
    """Whether rows may have gone elsewhere before ``tap``, or inside it, by one of ``routers``."""
    found, own = [_NUMBER.search(router) for router in routers], _NUMBER.search(tap)
    if own is None or tap == ROOT_TAP:
        return bool(found) and "embed" not in tap
    inside = any(router.startswith(tap + ".") for router in routers)
    return inside or any(r is not None and int(r[1]) < int(own[1]) for r in found)


NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN, MASKED = (
    "near tie",
    "logits differ beyond the limit",
    "sampler",
    "sampled at random",
    "no logits recorded",
    "logits were masked",
)
PROCESSED, GOLDEN_SAMPLED, GOLDEN_PROCESSED, OTHERWISE = (
    "logits processor",
    "sampler of golden",
    "logits processor of golden",
    "other sampling parameters",
)
FAILED = (SAMPLED, PROCESSED, GOLDEN_SAMPLED, GOLDEN_PROCESSED)
"""A sampler or a logits processor that did not do what its request asks."""


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


@dataclass(frozen=True, slots=True)
class RequestedRow:
    """What is known of a row by the parameters of its request, golden's and mine's
    (comparison/measure/sampler_rows.py).

    left, token: sampling_rules' RIGHT, WRONG or UNKNOWN of golden and mine; why: what is wrong, of each; processors:
    words of those that left wrong logits; ways: sampling_rules.RowCheck's. greedy, seeded: both requests are. same_*:
    whether both have the same bits, None where not known; noise: whether both engines draw the same for the same seed.
    """

    left: tuple[str, str] = ("", "")
    token: tuple[str, str] = ("", "")
    why: tuple[str, str] = ("", "")
    processors: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    ways: tuple[tuple[Way, ...], tuple[Way, ...]] = ((), ())
    greedy: bool = False
    seeded: bool = False
    same_parameters: bool | None = None
    same_logits: bool | None = None
    same_best: bool | None = None
    same_left: bool | None = None
    same_noise: bool = False

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> RequestedRow:
        """Of what `RequestedRows.of` gives."""
        if found is None:
            return cls()
        golden, mine = found["checks"]
        whys = [c["why_left"] if c["left"] == WRONG else c["why_token"] for c in (golden, mine)]
        return cls(
            (golden["left"], mine["left"]), (golden["token"], mine["token"]), (whys[0], whys[1]),
            (tuple(golden["processors"]), tuple(mine["processors"])),
            (_ways(golden), _ways(mine)),
            bool(found["greedy"]), bool(found["seeded"]),
            **{k: found[k] for k in ("same_parameters", "same_logits", "same_best", "same_left", "same_noise")},
        )  # fmt: skip

    def verdict(self, masks: tuple[Masking, Masking] = (NOTHING, NOTHING), flipped: bool = True) -> str | None:
        """One of FAILED, OTHERWISE, NEAR_TIE or RANDOM; None where the parameters do not tell."""
        wrong = [WRONG in both for both in zip(self.left, self.token, strict=True)]
        if wrong[1] and not wrong[0]:
            return PROCESSED if self.left[1] == WRONG and self.processors[1] else SAMPLED
        if wrong[0] and not wrong[1]:
            return GOLDEN_PROCESSED if self.left[0] == WRONG and self.processors[0] else GOLDEN_SAMPLED
        by = [set(side.by or ()) for side in masks]
        if self.same_parameters is False and by[0] == by[1]:
            return OTHERWISE
        if not self.same_parameters:
            return None
        explained = self.left == (RIGHT, RIGHT)
        known = not any(by) or (by[0] == by[1] and masks[0].grammar == masks[1].grammar)
        if self.same_left is False and known and self.same_best and self.same_logits is not False and not explained:
            return PROCESSED
        if not flipped or self.token != (RIGHT, RIGHT) or (self.same_left is False and not explained):
            return None
        if self.greedy:
            return NEAR_TIE
        if self.seeded and self.same_noise and self.same_logits:
            return SAMPLED
        return RANDOM

    def side(self, why: str) -> int:
        """Whose fault a verdict of FAILED is: 0 golden's, 1 mine's."""
        return 0 if why in (GOLDEN_SAMPLED, GOLDEN_PROCESSED) else 1

    def sentence(self, why: str) -> tuple[str, str]:
        """(which logits processors, "" for the sampler; what is wrong), for a verdict of FAILED."""
        side = self.side(why)
        found = self.why[side] if WRONG in (self.left[side], self.token[side]) else ""
        where = "in golden: " if side == 0 and found else ""
        if why in (PROCESSED, GOLDEN_PROCESSED):
            words = " and ".join(self.processors[side])
            told = found or "equal logits and parameters, and golden's processors left others"
            return f"logits processor{f': {words}' if words else ''}", where + told
        if found:
            return "", where + found
        known = self.same_parameters and self.seeded and self.same_logits
        return "", "equal logits, parameters and seed, and another token than golden's" if known else ""


NOT_ASKED = RequestedRow()


def _ways(check: Mapping[str, Any]) -> tuple[Way, ...]:
    return tuple((tuple(words), str(how)) for words, how in check["ways"])


def judge_flip(
    golden: Best | None,
    mine: Best | None,
    flip: Flip,
    logits_agree: bool | None,
    masks: tuple[Masking, Masking] = (NOTHING, NOTHING),
    asked: RequestedRow = NOT_ASKED,
) -> str:
    """One of NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN, MASKED, PROCESSED, GOLDEN_SAMPLED, GOLDEN_PROCESSED,
    OTHERWISE. golden, mine: the best logits as the model gave them. logits_agree: within limits, None where not
    compared."""
    by_request = asked.verdict(masks)
    if by_request in FAILED or (by_request is not None and logits_agree is not False):
        return by_request
    if golden is None or mine is None:
        return UPSTREAM if logits_agree is False else UNKNOWN
    if logits_agree is False or np.isnan(golden.logits).any() != np.isnan(mine.logits).any():
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
    said: str = "",
) -> dict[str, Any]:
    """An entry of compare.json's ``tokens.flipped``; with ``masked``, both sides' words, where something was masked,
    and ``says``, what a sampler or a processor did wrong."""
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
    return entry | ({"masked": masked} if masked else {}) | ({"says": said} if said else {})
