"""Near ties: rows that a router sends to other experts, and tokens that flip.

The problem: choosing the best of many is a jump: where the k-th and the next are nearly equal, the smallest rounding
changes the choice, and everything behind it differs by far more than any limit. The idea: each side's choice is checked
against that side's own logits. Both right, and logits within their limits: a near tie; the later rows of the request
are counted and not judged. Mine leaves a clearly better one: the choice is wrong, whatever came before. Logits beyond
their limit: an earlier operator is wrong. Groups of experts and a score bias count where a dump has them (`Chooser`);
without logits nothing is excused. Inside a compiled graph, where no choice is seen, logits alone tell which rows may
have gone elsewhere (`undecided`). A token is judged by its request's own parameters first where they are known. Not
here: what a request's parameters make of logits (sampling_rules.py), finding flips (align/tokens.py).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import is_choice, is_weight
from vllm_accprobe.align.tokens import Flip, position, subject
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.constants import FLOOR_MARGIN, LOGIT_ROUNDING, LOGITS_APART, TIE
from vllm_accprobe.judge.sampling_rules import RIGHT, WRONG, Way
from vllm_accprobe.judge.statistic import RATE, tail
from vllm_accprobe.judge.tensor_errors import TensorErrors, spread

ROWS_AFTER = "rows after a router's near tie"
NOT_COMPARED = "rows of best logits whose experts were not compared"
"""Why such rows are skipped, in compare.json's coverage."""
ROWS_BEHIND = "rows that read earlier rows whose experts were not compared"
"""The same of attention and its like behind a router, in a comparison with a pack."""
_BEYOND = 64
"""Numbers of experts without a logit that are distinguished; a dump may claim any."""


def in_front_of(tap: str, choosing: str) -> bool:
    """Whether the logits of ``tap`` are those by which the experts of tap ``choosing`` were chosen: it, or the block
    in which it stands, encloses them."""
    block = tap.rpartition(".")[0]
    return choosing == tap or choosing.startswith((tap + ".", block + ".") if block else tap + ".")


def choices_first(units: Iterable[Any]) -> Iterator[Any]:
    """``units`` (measured.MeasuredUnit, in order of the flow), each tap's chosen experts before their weights: a row
    that was sent elsewhere at a near tie has other weights, which need not be near."""
    waiting: list[Any] = []
    for unit in units:
        if waiting and waiting[0].key[0] != unit.key[0]:
            yield from waiting
            waiting = []
        if is_weight(unit.key[1], unit.cls):
            waiting.append(unit)
            continue
        yield unit
        if is_choice(unit.key[1], unit.cls):
            yield from waiting
            waiting = []
    yield from waiting


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
    if not at.any():
        return out
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
    def of(found: np.ndarray | None, rows: int, rounding: float, leaves: float = 0.0) -> Choices:
        """found: `margins` of these rows, or None. rounding: of the logits' dtype (floor.unit). leaves: see
        `golden_leaves`; where mine leaves no more, it is not wrong, and unruled.

        A router rounds twice: a logit, by ``rounding`` of itself, and the score made from it, which moves as if the
        logit did by ``rounding`` (d ln softmax / d logit is 1 at most); and two experts are compared."""
        if found is None:
            no = np.zeros(rows, bool)
            return Choices(no, no, no, ~no)
        slack = 2.0 * rounding * (1.0 + found[:, 2])
        with np.errstate(invalid="ignore"):
            unknown, unruled = np.isnan(found[:, 0]), found[:, 0] < -slack
            wrong = (found[:, 1] < -np.maximum(slack, leaves)) & ~unruled
            unruled |= (found[:, 1] < -slack) & ~wrong
            tie = (np.abs(found[:, 0]) <= slack) & (np.abs(found[:, 1]) <= slack)
        return Choices(wrong, tie, unruled, unknown)


def golden_leaves(found: Sequence[np.ndarray], rounding: float) -> float:
    """How much better experts a router may leave, by its own logits, that chooses by something else, too (a bias that
    was not captured): FLOOR_MARGIN times what golden leaves at most, as far as `margins` of all its rows show. 0.0
    where golden leaves none, and where mine does in more rows than chance allows [sign test of the rows in which one
    side does: by such a rule, either is as likely]."""
    margin = np.concatenate([np.zeros((0, 3)), *found])
    sides = Choices.of(margin, len(margin), rounding)
    golden, mine = int(sides.unruled.sum()), int(sides.wrong.sum())
    if not golden or tail((mine - golden - 1) / math.sqrt(golden + mine), sides=1) <= RATE:
        return 0.0
    return FLOOR_MARGIN * float(-margin[sides.unruled, 0].min())


Since = tuple[np.ndarray, np.ndarray]
"""Subjects of requests, sorted, and a position of each."""


def _since(first: Mapping[int, int]) -> Since:
    who = np.array(sorted(first), np.int64)
    return who, np.array([first[w] for w in who.tolist()], np.int64)


def _reached(keys: np.ndarray, since: Since) -> np.ndarray:
    """bool [len(keys)]: rows at or after their request's position."""
    who, first = since
    if not len(who):
        return np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(who, subject(keys)), len(who) - 1)
    return (who[at] == subject(keys)) & (position(keys) >= first[at])


@dataclass
class Routing:
    """Rows that other experts may have computed, request by request.

    first: request's subject → first position that was sent elsewhere: from there on nothing can be judged. lost: the
    first one whose experts some router so far did not compare: a pack has few rows, and attention behind a router reads
    all. computed: sorted keys of the rows that were computed; none where all of these are compared. seen: whether any
    choice was compared. left: why → keys of rows that are not judged. unruled, unknown: how many choices (rows of a
    router) had no margin, see `Choices`; wrong: how many were wrong."""

    first: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    computed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    seen: bool = False
    left: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    unruled: int = 0
    unknown: int = 0
    wrong: int = 0
    _read: Since = field(default_factory=lambda: _since({}))

    def judge(
        self, keys: np.ndarray, found: np.ndarray | None, rounding: float, unit: Any, traces: Sequence[TensorErrors],
        leaves: float = 0.0,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """(excused, wrong) of rows ``keys`` that were sent to other experts; bool each. found: their `margins`; leaves:
        see `golden_leaves`."""
        choices = Choices.of(found, len(keys), rounding, leaves)
        near = self.near_ties(keys, unit, traces)
        before = self.after(keys)
        self.unruled += int((choices.unruled & near & ~before).sum())
        self.unknown += int((choices.unknown & ~before).sum())
        self.wrong += int(choices.wrong.sum())
        return (near & ~choices.unknown | choices.tie) & ~choices.wrong, choices.wrong

    def undecided(self, keys: np.ndarray, found: np.ndarray, rounding: float, near: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: rows that rounding alone may have sent to other experts. found: what undecided
        says of them; near: whether their logits differ by no more than the limit."""
        choices = Choices.of(found, len(keys), rounding)
        return ~choices.unknown & (near | choices.tie)

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
        """Rows that were sent elsewhere."""
        for who, at in zip(subject(keys).tolist(), position(keys).tolist(), strict=True):
            self.first[who] = min(at, self.first.get(who, at))

    def after(self, keys: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: rows at or after a rerouted row of their request."""
        mask = _reached(keys, _since(self.first))
        self.left[ROWS_AFTER].update(keys[mask].tolist())
        return mask

    def compared(self, keys: np.ndarray) -> None:
        """keys: rows whose experts the next router compared. A row that was not computed for its request (a shared
        prefix in the cache) is any request's row at that position."""
        missing = self.computed[~np.isin(self.computed, keys)]
        places = np.unique(position(missing))
        for who in np.unique(subject(self.computed)).tolist() if len(missing) else ():
            own = position(self.computed[subject(self.computed) == who])
            lost = position(missing[subject(missing) == who])
            shared = places[(places < own[-1]) & ~np.isin(places, own)]
            for at in (*lost[:1].tolist(), *shared[:1].tolist()):
                self.lost[who] = min(at, self.lost.get(who, at))

    def mixed(self) -> None:
        """A module that mixes rows follows: what the routers so far did to earlier rows reaches later ones."""
        who, first = _since(self.lost)
        self._read = who, first + 1

    def behind(self, keys: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: rows that earlier rows without compared experts may have changed."""
        return _reached(keys, self._read)


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
    """How far each side was from taking other experts: float64 [rows, 3], as `margins`.

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


def experts_of(attrs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Taps of the modules that hold experts, of which rows take some. attrs: by tap."""
    return [tap for tap, has in attrs.items() if has.get("top_k") and has.get("global_num_experts")]


def unknown_routers(attrs: Mapping[str, Mapping[str, Any]], known: Iterable[str]) -> list[str]:
    """Modules that hold experts, whose choices cannot be checked. attrs: by tap; known: taps whose router's logits or
    chosen experts both dumps have."""
    seen = list(known)
    return [tap for tap in experts_of(attrs) if not any(in_front_of(k, tap) or k.startswith(tap + ".") for k in seen)]


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
PROCESSED, GOLDEN_SAMPLED, GOLDEN_PROCESSED, OTHERWISE, UNROUTED = (
    "logits processor",
    "sampler of golden",
    "logits processor of golden",
    "other sampling parameters",
    "experts not compared",
)
UNJUDGED = (UNKNOWN, UNROUTED, RANDOM, OTHERWISE)
"""Flips that show neither a right sampler nor a wrong one."""
FAILED = (SAMPLED, PROCESSED, GOLDEN_SAMPLED, GOLDEN_PROCESSED)
"""A sampler or a logits processor that did not do what its request asks."""


@dataclass(frozen=True, slots=True)
class Best:
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
    """What changed one side's row of logits before sampling. by: in words, empty for nothing; None: it was not
    recorded. grammar: hash of a grammar's bitmask. left: the best logits after it, None where they were not
    recorded."""

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
    whether both have the same bits, None where not known; noise: whether both engines draw the same for the same seed;
    untouched: of each, whether the best logits are left as the model gave them.
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
    untouched: tuple[bool | None, bool | None] = (None, None)

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
            bool(found["greedy"]), bool(found["seeded"]), untouched=tuple(found["untouched"]),
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
            text = found or "equal logits and parameters, and golden's processors left others"
            if not found and self.untouched == (False, True):
                text = "golden's mask or processors change the best logits, and mine's are as the model gave them"
            return f"logits processor{f': {words}' if words else ''}", where + text
        if found:
            return "", where + found
        known = self.same_parameters and self.seeded and self.same_logits
        return "", "equal logits, parameters and seed, and another token than golden's" if known else ""


NOT_REQUESTED = RequestedRow()


def _ways(check: Mapping[str, Any]) -> tuple[Way, ...]:
    return tuple((tuple(words), str(how)) for words, how in check["ways"])


def judge_flip(
    golden: Best | None,
    mine: Best | None,
    flip: Flip,
    logits_agree: bool | None,
    masks: tuple[Masking, Masking] = (NOTHING, NOTHING),
    requested: RequestedRow = NOT_REQUESTED,
) -> str:
    """One of NEAR_TIE, UPSTREAM, SAMPLED, RANDOM, UNKNOWN, MASKED, PROCESSED, GOLDEN_SAMPLED, GOLDEN_PROCESSED,
    OTHERWISE. golden, mine: the best logits as the model gave them. logits_agree: within limits, None where not
    compared."""
    by_request = requested.verdict(masks)
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
    text: str = "",
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
    return entry | ({"masked": masked} if masked else {}) | ({"says": text} if text else {})
