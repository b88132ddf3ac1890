"""Rows that a router sent to other experts, and whether that is an error.

The problem: choosing the best k of many experts is a jump: where the k-th and the next are nearly equal, the smallest
rounding sends a row elsewhere, and everything after it differs by far more than any limit. The idea: what an operator
chose is in the dump (``topk_ids``), and so are the logits it chose by. Each side's choice is held against its own
logits. If both took their highest logits, and the logits differ within their limits, it was a near tie: the margins of
the two sides add up to what the logits moved by, so that neither can be larger. This row and the later ones of its
request cannot be judged from here on: they are counted, not condemned. If mine left an expert with a clearly higher
logit, the choice is wrong, whatever came before; if the logits are beyond their limit, an operator before is.
Where groups of experts, or a bias that corrects the scores, decide, and both are in the dump (`Chooser`), a margin is
one of corrected scores, or of groups.
Two cases have no margin. Without logits nothing shows a near tie, and nothing is excused. Where golden itself does not
take its best, as far as the dumps say what is best, logits do not tell how near a choice was: rows whose logits differ
within their limits are then left out, because to accuse needs proof as well; they are counted apart, and the verdict
says so.
Not here: chosen experts that nobody saw (flips.py), flipped tokens, which are the same at the end of the model
(flips.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import position, subject
from vllm_accprobe.judge.tensor_errors import TensorErrors, spread

_CHOICE = re.compile(r"(top_?k|expert)_?(ids|indices|index|idx)$")
_WEIGHT = re.compile(r"(top_?k|expert)_?(weights?|scores|vals?|values)$")

_BEYOND = 64
"""Numbers of experts without a logit that are told apart; a dump may claim any."""
_LOGITS = re.compile(r"router_?logits$|gating_?output$")
_GATE = re.compile(r"(^|\.)(gate|router)$")

_ROUTER = re.compile(r"Top[kK]Router$")
"""transformers' routers give logits, weights and experts, in this order and without names."""


def is_choice(role: str, cls: str) -> bool:
    """Whether a tensor of this role, of a module of this class, holds the numbers of chosen experts."""
    return bool(_CHOICE.search(role)) or (role == "output.2" and bool(_ROUTER.search(cls)))


def is_logits(tap: str, role: str, cls: str) -> bool:
    """Whether a tensor holds a router's logits, one per expert."""
    named = role == "output.0" and bool(_GATE.search(tap) or _ROUTER.search(cls))
    return named or bool(_LOGITS.search(role))


def in_front_of(tap: str, choosing: str) -> bool:
    """Whether the logits of ``tap`` are those by which the experts of tap ``choosing`` were chosen: it, or the block
    in which it stands, encloses them."""
    block = tap.rpartition(".")[0]
    return choosing == tap or choosing.startswith((tap + ".", block + ".") if block else tap + ".")


def is_weight(role: str, cls: str) -> bool:
    return bool(_WEIGHT.search(role)) or (role == "output.1" and bool(_ROUTER.search(cls)))


def choices_first(units: Iterable[Any]) -> Iterator[Any]:
    """``units`` (measured.MeasuredUnit, in order of the flow), each tap's chosen experts before their weights: a row
    that was sent elsewhere at a near tie has other weights, which need not be near."""
    held: list[Any] = []
    for unit in units:
        if held and held[0].key[0] != unit.key[0]:
            yield from held
            held = []
        if is_weight(unit.key[1], unit.cls):
            held.append(unit)
            continue
        yield unit
        if is_choice(unit.key[1], unit.cls):
            yield from held
            held = []
    yield from held


@dataclass(frozen=True)
class Chooser:
    """By what experts are chosen where it is not their logits: ``scoring`` makes scores of them (softmax, sigmoid),
    ``bias`` (float [experts]) is added, the ``top_groups`` of ``groups`` stay that are best by their two largest with a
    bias and else by their largest. Formulas: opcheck/references/moe.py."""

    scoring: str
    groups: int = 1
    top_groups: int = 1

    def fits(self, experts: int, bias: np.ndarray | None) -> bool:
        """Whether a dump's numbers can be these."""
        groups = 0 < self.top_groups <= self.groups and experts % self.groups == 0
        return groups and (bias is None or bias.shape == (experts,)) and experts >= 2 * self.groups

    def scores(self, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(what experts are chosen by, by how much each expert's group is worse than the worst group that stays, 0 in
        these, how far a rounding of a logit and of its score moves it, in units): float64 [rows, experts] each."""
        z = logits.astype(np.float64)
        if self.scoring == "sigmoid":
            score = 0.5 * (1.0 + np.tanh(0.5 * z))
            slope = score * (1.0 - score)
        else:
            score = np.exp(z - z.max(axis=1, keepdims=True))
            score /= score.sum(axis=1, keepdims=True)
            slope = score
        choice = score if bias is None else score + bias
        moved = slope * np.abs(z) + score
        if self.groups == 1:
            return choice, np.zeros_like(choice), moved
        sorted_scores = np.sort(choice.reshape(len(z), self.groups, -1), axis=2)
        strength = sorted_scores[:, :, -1] if bias is None else sorted_scores[:, :, -2:].sum(axis=2)
        last = np.sort(strength, axis=1)[:, -self.top_groups]
        behind = np.maximum(last[:, None] - strength, 0.0)
        return choice, np.repeat(behind, choice.shape[1] // self.groups, axis=1), 2.0 * moved


def margins(
    golden: np.ndarray, mine: np.ndarray, golden_logits: np.ndarray, mine_logits: np.ndarray,
    by: Chooser | None = None, bias: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> np.ndarray:  # fmt: skip
    """How far each side was from the other's choice: float64 [rows, 3].

    golden, mine: int [rows, k], the experts; the logits: float [rows, experts]. Column 0: in golden's logits, the
    lowest of the experts that only golden took less the highest of those that only mine took; column 1: the same in
    mine's, the other way round; column 2: the largest |logit| among these. NaN where both took the same, and where an
    expert that only one took has no logit, or a logit is not finite. What both took beyond the logits (experts that all
    rows share) does not matter. by, bias (golden's, mine's): margins are of corrected scores, or of groups where an
    expert's group decides, and column 2 is what makes `Choices` allow for their roundings.
    """
    rows, experts = golden_logits.shape
    out = np.full((rows, 3), np.nan)
    took = np.zeros((2, rows, experts + _BEYOND), bool)
    for ids, mask in zip((golden, mine), took, strict=True):
        inside = (ids >= 0) & (ids < experts)
        np.put_along_axis(mask, np.where(inside, ids, experts + ids % _BEYOND), True, axis=1)
    lost, won = took[0] & ~took[1], took[1] & ~took[0]
    at = lost.any(axis=1) & won.any(axis=1) & ~(lost | won)[:, experts:].any(axis=1)
    at &= np.isfinite(golden_logits).all(axis=1) & np.isfinite(mine_logits).all(axis=1)
    lost, won = lost[at, :experts], won[at, :experts]
    g, m = golden_logits[at].astype(np.float64), mine_logits[at].astype(np.float64)
    if by is None:
        behind, sizes = np.zeros_like(g), (np.abs(g), np.abs(m))
        out[at, 0], out[at, 1] = _ahead(g, behind, lost, won), _ahead(m, behind, won, lost)
    else:
        (g, g_behind, g_moved), (m, m_behind, m_moved) = by.scores(g, bias[0]), by.scores(m, bias[1])
        out[at, 0], out[at, 1] = _ahead(g, g_behind, lost, won), _ahead(m, m_behind, won, lost)
        sizes = g_moved - 1.0, m_moved - 1.0
    out[at, 2] = np.where(lost | won, np.maximum(*sizes), -1.0).max(axis=1)
    return out


def _ahead(choice: np.ndarray, behind: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """float64 [rows]: how much better the worst of the experts ``own`` is than the best of ``other``, by groups where
    one's group is not among those that stay. bool [rows, experts] each, no row empty."""
    stays = behind == 0
    worst = np.where(own, choice, np.inf).min(axis=1)
    inside = worst - np.where(other & stays, choice, -np.inf).max(axis=1)
    outside = np.where(other & ~stays, behind, np.inf).min(axis=1)
    left = np.where(own, behind, 0.0).max(axis=1)
    return np.asarray(np.where(left > 0, -left, np.minimum(inside, outside)), np.float64)


@dataclass(frozen=True)
class Choices:
    """What margins say of rows with other experts, bool [rows] each. wrong: mine left an expert that its own logits
    prefer. tie: both sides' logits prefer neither. unruled: golden does not take its own highest logits. unknown: no
    margin."""

    wrong: np.ndarray
    tie: np.ndarray
    unruled: np.ndarray
    unknown: np.ndarray

    @staticmethod
    def of(found: np.ndarray | None, rows: int, rounding: float) -> Choices:
        """found: `margins` of these rows, or None. rounding: of the logits' dtype (floor.unit).

        A router rounds twice: a logit, by ``rounding`` of itself, and the score made from it, which moves as if the
        logit did by ``rounding`` (d ln softmax / d logit is 1 at most); and two experts are compared."""
        if found is None:
            no = np.zeros(rows, bool)
            return Choices(no, no, no, ~no)
        slack = 2.0 * rounding * (1.0 + found[:, 2])
        with np.errstate(invalid="ignore"):
            unknown, unruled = np.isnan(found[:, 0]), found[:, 0] < -slack
            wrong = (found[:, 1] < -slack) & ~unruled
            tie = (np.abs(found[:, 0]) <= slack) & (np.abs(found[:, 1]) <= slack)
        return Choices(wrong, tie, unruled, unknown)


@dataclass
class Rerouted:
    """first: request's subject → first position that cannot be judged any more. rows: how many rows that concerns.
    unruled, unknown: how many choices (rows of a router) had no margin, see `Choices`; wrong: how many were wrong."""

    first: dict[int, int] = field(default_factory=dict)
    unruled: int = 0
    unknown: int = 0
    wrong: int = 0
    _seen: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return len(self._seen)

    def judge(
        self, keys: np.ndarray, found: np.ndarray | None, rounding: float, unit: Any, traces: Sequence[TensorErrors]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(excused, wrong) of rows ``keys`` that were sent to other experts; bool each. found: their `margins`."""
        said = Choices.of(found, len(keys), rounding)
        near = self.near_ties(keys, unit, traces)
        before = self.after(keys)
        self.unruled += int((said.unruled & near & ~before).sum())
        self.unknown += int((said.unknown & ~before).sum())
        self.wrong += int(said.wrong.sum())
        return (near & ~said.unknown | said.tie) & ~said.wrong, said.wrong

    def undecided(self, keys: np.ndarray, found: np.ndarray, rounding: float, near: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: rows that rounding alone may have sent to other experts. found: what near_ties.undecided
        says of them; near: whether their logits differ by no more than the limit."""
        said = Choices.of(found, len(keys), rounding)
        return ~said.unknown & (near | said.tie)

    def near_ties(self, keys: np.ndarray, unit: Any, traces: Sequence[TensorErrors]) -> np.ndarray:
        """bool [len(keys)]: rows where what the router read differs, but by no more than its limit allows."""
        before = [t for t in traces if t.order < unit.order and not t.role.startswith("param") and not t.vision]
        near = [t for t in before if unit.key[0].startswith(t.tap.rpartition(".")[0] + ".")][-12:]
        worst, limit = np.zeros(len(keys)), 0.0
        for t in near:
            np.maximum(worst, spread(keys, t.keys, t.err), out=worst)
            limit = max(limit, t.allowed)
        return (worst > 0) & (worst <= limit)

    def add(self, keys: np.ndarray) -> None:
        for who, at in zip(subject(keys).tolist(), position(keys).tolist(), strict=True):
            self.first[who] = min(at, self.first.get(who, at))

    def after(self, keys: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: rows at or after a rerouted row of their request."""
        mask = np.zeros(len(keys), bool)
        for who, first in self.first.items():
            mask |= (subject(keys) == who) & (position(keys) >= first)
        self._seen.update(keys[mask].tolist())
        return mask
