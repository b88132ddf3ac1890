"""Origins and flipped tokens as they stand in the result.

The problem: what judge/ finds is keys and arrays; a reader wants a request, a position and one entry per module. The
idea: `Places` answers where and when a row was computed; the rest turns each finding into its entry, and makes the
pairs agree with it. Not here: the finding itself (judge/), what was recorded of a flip (measure/sampler_rows.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from vllm_accprobe.align.data_flow import OUTPUT, PARAM
from vllm_accprobe.align.tokens import Flip, RowSet, position, subject
from vllm_accprobe.comparison import messages
from vllm_accprobe.comparison.measure.measured import ComparisonContext
from vllm_accprobe.comparison.measure.padding import stood_in_padding
from vllm_accprobe.comparison.pair import Pairs, counted
from vllm_accprobe.comparison.plan.unit import MASKED_LOGITS, SAMPLER, TOKEN
from vllm_accprobe.comparison.result import FAIL, PASS, SKIP, Pair
from vllm_accprobe.comparison.runner_inputs import chunk_words
from vllm_accprobe.comparison.verdict import pair_status
from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.judge import error_pattern, near_ties
from vllm_accprobe.judge.origins import Origin, OriginEntry
from vllm_accprobe.judge.sampling_rules import OTHER_PAST, WRONG, Way, commonest
from vllm_accprobe.judge.siblings import TensorStats
from vllm_accprobe.judge.tensor_errors import TensorErrors

Chosen = dict[str, "list[tuple[np.ndarray, np.ndarray]]"]
"""Tap that gets which experts to use → (keys [n], experts [n, k]) of its tensors."""


class Places:
    def __init__(self, setting: ComparisonContext):
        self.known, self.steps, self.decode = setting.places
        self.names = setting.names

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into the sorted places, whether it is there) of each key."""
        at = np.minimum(np.searchsorted(self.known, keys), max(len(self.known) - 1, 0))
        return at, (self.known[at] == keys if len(self.known) else np.zeros(len(keys), bool))

    def steps_of(self, keys: np.ndarray) -> np.ndarray:
        """int64: the first step that computed each key, -1 where it is not known."""
        at, there = self.find(keys)
        return np.where(there, self.steps[at], -1) if len(self.known) else np.full(len(keys), -1)

    def earliest(self, keys: np.ndarray) -> int:
        """The index of the key that was computed first: in the earliest step, at the lowest position."""
        at, there = self.find(keys)
        step = np.where(there, self.steps[at], 0) if len(self.known) else np.zeros(len(keys))
        return int(np.lexsort((position(keys), step))[0])

    def chunk(self, request: str, at: int) -> str:
        """Which chunk of its prompt a row was computed with, in words; "" where that is not known."""
        subjects = [who for who, (name, image) in self.names.items() if name == request and image is None]
        of = np.isin(subject(self.known), subjects)
        mine = np.flatnonzero(of & (position(self.known) == at))
        if len(subjects) != 1 or not len(mine) or self.decode[mine[0]]:
            return ""
        steps = np.unique(self.steps[of & ~self.decode])
        return chunk_words(int(np.searchsorted(steps, self.steps[mine[0]])), len(steps))

    def phase(self, key: int) -> str | None:
        at, there = self.find(np.array([key]))
        if not there[0]:
            return None
        return "decode" if self.decode[at[0]] else "prefill"


def origin_entry(
    c: Origin, setting: ComparisonContext, places: Places, pairs: Pairs, chosen: Chosen | None = None
) -> OriginEntry:
    trace = c.trace
    request = where = phase = None
    at = 0
    if len(c.keys):
        at = places.earliest(c.keys)
        key = int(c.keys[at])
        request, where = setting.name(key)
        phase = places.phase(key)
        if not request:  # a tensor that is compared as a whole
            request = where = phase = None
    value, limit, worst = size_of(c, at)
    if trace.kind == PARAM:
        found = next((p for p in pairs if (p.tap, p.role) == (trace.tap, trace.role)), None)
        value = found.rel_l2 if found is not None and found.rel_l2 is not None else value
    text = "" if len(c.keys) and request is None else shape_of(c, setting, places, chosen or {})
    graph = _graph_of(c, setting, places)
    return cast("OriginEntry", {
        "module": c.tap,
        "class": setting.classes.get(c.tap, ""),
        "role": trace.role if trace.tap == c.tap else f"{trace.tap}/{trace.role}",
        "request": request,
        "position": where,
        "phase": phase,
        "created": value,
        "propagated": float(c.explained[at]),
        "floor": limit,
        "evidence": c.evidence,
        "tier": c.tier,
        "times": worst / limit if limit and math.isfinite(worst) else None,
        "chance": c.chance,
        "layers": None,
        "rows": len(c.keys),
        "worst": worst,
        "nonfinite": 0,
        "shape": text,
        "setting": "",
        "cause": None,
    } | ({"graph": graph} if graph else {}))  # fmt: skip


def steps_of(created: Sequence[Origin]) -> dict[str, int]:
    rows: dict[str, list[np.ndarray]] = {}
    for c in created:
        if len(c.steps):
            rows.setdefault(c.tap, []).append(c.steps)
    return {tap: len(np.unique(np.concatenate(found))) for tap, found in rows.items()}


def size_of(c: Origin, at: int = 0) -> tuple[float, float, float]:
    """(error of the first row, what it was compared with, error of the worst row), as relative L2 errors.

    A row that a lone element or its norm condemned, while its relative L2 error is within the limit, is given in
    tensor_errors.py's common unit. A hidden error is that of the rows or columns that show it, against what it took.
    """
    if c.hidden is not None:
        return c.hidden.size, c.hidden.size / c.hidden.strength, c.hidden.size
    err = _sizes(c)
    return float(err[at]), c.trace.limit, float(err.max())


def _sizes(c: Origin) -> np.ndarray:
    """The error of each of its rows, as `size_of` gives the first and the worst."""
    trace = c.trace
    if not (len(trace.rel) == len(trace.keys) and len(trace.keys) and len(c.keys)):
        return c.err
    rel = trace.rel[np.minimum(np.searchsorted(trace.keys, c.keys), len(trace.keys) - 1)]
    return np.where(rel > trace.limit, rel, c.err)


def shape_of(c: Origin, setting: ComparisonContext, places: Places, chosen: Chosen) -> str:
    if c.trace.kind == PARAM:
        return ""
    attrs = setting.attrs.get(c.trace.tap) or setting.attrs.get(c.tap) or {}
    logits = "logits" in c.trace.tap or "lm_head" in c.trace.tap
    rows = None
    if c.stats is not None and len(c.stats.keys):
        rows = _shape_rows(c, c.stats, setting, places, chosen)
    return error_pattern.sentence(rows, c.trace.columns, attrs, tail="the vocabulary's tail" if logits else "")


def _made(c: Origin, stats: TensorStats) -> np.ndarray:
    made = np.sqrt(np.maximum(stats.err**2 - np.where(np.isfinite(stats.before), stats.before, 0.0) ** 2, 0.0))
    made[~np.isfinite(stats.err)] = np.inf
    if len(c.keys):  # the measure that condemned a row may be another one than its relative error
        blamed = np.isin(stats.keys, c.keys)
        made[blamed & (made == 0)] = stats.err[blamed & (made == 0)]
    return made


def _shape_rows(
    c: Origin, stats: TensorStats, setting: ComparisonContext, places: Places, chosen: Chosen
) -> error_pattern.RowFacts:  # fmt: skip
    at, there = places.find(stats.keys)
    step = places.steps_of(stats.keys)
    counts = [setting.batches.get(s, (-1, -1)) for s in step.tolist()]
    made = _made(c, stats)
    who, where = subject(stats.keys), position(stats.keys)
    decode = places.decode[at] & there if len(places.known) else np.zeros(len(stats.keys), bool)
    return error_pattern.RowFacts(
        made=made,
        gain=stats.gain,
        position=where,
        request=who,
        decode=decode,
        batch=np.array([n for n, _ in counts]),
        tokens=np.array([n for _, n in counts]),
        chunk=np.where(decode, 0, _chunks(who, step)),
        names={int(s): setting.names[int(s)][0] for s in np.unique(who)},
        experts=_experts(c.tap, stats.keys, chosen),
    )


def _graph_of(c: Origin, setting: ComparisonContext, places: Places) -> dict[str, Any] | None:
    graphs = object_at(setting.mine_run, "engine", "graphs")
    if graphs is None or c.trace.kind == PARAM:
        return None
    place = error_pattern.piece_of(c.trace.tap, graphs) or error_pattern.piece_of(c.tap, graphs)
    found, stood = None, ""
    if setting.graphs and c.stats is not None and len(c.stats.keys):
        rows = _graph_rows(c, c.stats, setting, places)
        found = error_pattern.of_steps(rows, c.stats.mixing)
        stood = stood_in_padding(setting.padding, c.trace.tap)
    return error_pattern.entry(found, place, stood)


def _graph_rows(c: Origin, stats: TensorStats, setting: ComparisonContext, places: Places) -> error_pattern.GraphRows:
    steps = places.steps_of(stats.keys)
    known = [setting.graphs.get(s, (-1, 0)) for s in steps.tolist()]
    bad = error_pattern.bad_rows(_made(c, stats)) | np.isin(stats.keys, c.keys)
    sizes, padding = (np.array([k[i] for k in known], np.int64) for i in (0, 1))
    return error_pattern.GraphRows(steps, sizes, padding, subject(stats.keys), position(stats.keys), bad)


def _experts(tap: str, keys: np.ndarray, chosen: Chosen) -> np.ndarray | None:
    """int64 [len(keys), k]: the experts of each row, -1 where not known; None for a tap outside of experts."""
    for report, found in chosen.items():
        root = report.partition(".experts")
        if not (tap == report or (root[1] and tap.startswith(root[0] + root[1]))):
            continue
        known, experts = np.concatenate([k for k, _ in found]), np.concatenate([e for _, e in found])
        order = np.argsort(known, kind="stable")
        known, experts = known[order], experts[order]
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where((known[at] == keys)[:, None], experts[at], -1)
    return None


def _chunks(who: np.ndarray, step: np.ndarray) -> np.ndarray:
    """For each row the number of its step among those that computed its request, from 1."""
    out = np.zeros(len(who), np.int64)
    for one in np.unique(who):
        mine = who == one
        out[mine] = np.searchsorted(np.unique(step[mine]), step[mine]) + 1
    return out


def unproved(c: Origin) -> Origin:
    """An origin to which a router that was not captured may have sent other rows: how likely that is, it is not
    known."""
    return c if c.evidence == "values" else replace(c, unproved=True, chance=None)


def condemn(
    created: Sequence[Origin], pairs: Pairs, rows: Sequence[RowSet], after: Sequence[str] = ()
) -> Pairs:  # fmt: skip
    """The pairs in which an error was created fail by what was created there, also where so much may have piled up by
    then: one fault is so many times one limit, its origin's, wherever it is reported. rows: of each pair. after:
    of each of ``created`` the beginning of the gap in which it was created, "" where there is none."""
    blamed: dict[tuple[str, str, int], list[tuple[Origin, str]]] = {}
    for c, since in zip(created, after or [""] * len(created), strict=True):
        blamed.setdefault(c.trace.key, []).append((c, since))
    out: dict[int, Pair] = {}
    names = zip(*map(pairs.column, ("tap", "role", "call")), strict=True) if blamed else ()
    for i in [i for i, name in enumerate(names) if name in blamed]:
        pair = pairs[i]
        for c, since in blamed[pair.tap, pair.role, pair.call]:
            mask = np.isin(c.keys, rows[i].keys)
            most, limit = (float(_sizes(c)[mask].max()), c.trace.limit) if mask.any() else (math.inf, 0.0)
            # NaN, and what must be equal, is beyond all limits already; of two, whoever came first has spoken.
            skip = pair.status not in (PASS, FAIL) or pair.measure == "created" or pair.identical
            if mask.any() and not skip and (pair.status == PASS or (math.isfinite(most) and limit > 0)):
                gap = c.trace.gap
                where = counted(gap, "unseen layer") if gap else "one operator"
                does = f"shows an error that was created since {since}," if since else "introduces an error"
                what = f"{does} of {most:.3g} (limit {limit:.2g} for {where})"
                if c.hidden is not None:  # within fixed limits, but not what this operator does elsewhere
                    most, limit, _ = size_of(c)
                    what = f"{does} of {most:.3g}, where {limit:.2g} would be usual ({c.hidden.how})"
                by_statistics = pair.status == FAIL and pair.max_abs_err is None  # which its words are about
                words = pair.message if by_statistics else messages.join(what, pair.message)
                pair = replace(pair, status=FAIL, message=words, limit=limit)
                pair = replace(pair, measure="created", measured=most, allowed=limit)
        out[i] = pair
    return pairs.changed(out)


def judge_flips(
    setting: ComparisonContext, traces: Sequence[TensorErrors], places: Places, pairs: Pairs,
    rows: Sequence[RowSet], unrouted: Collection[int] = (),
) -> tuple[list[dict[str, Any]], list[OriginEntry], Pairs]:  # fmt: skip
    """(entries of ``tokens.flipped``, the sampler's origins, the pairs with verdicts). unrouted: keys of rows whose
    logits are not judged, because their experts were not compared."""
    entries: list[dict[str, Any]] = []
    failed: list[_Failed] = []
    verdicts: dict[int, str] = {}
    for found in setting.flips:
        flip = Flip(**found["flip"])
        golden, mine = (_as_best(b) for b in found["best"])
        sides = [near_ties.Masking(None if by is None else tuple(by), grammar, _as_best(left))
                 for by, grammar, left in found.get("masks") or [(None, None, None)] * 2]  # fmt: skip
        masks = sides[0], sides[1]
        requested = near_ties.RequestedRow.of(found.get("asked"))
        why = near_ties.judge_flip(golden, mine, flip, _logits_agree(traces, flip.key), masks, requested)
        if why == near_ties.NEAR_TIE and flip.key in unrouted:
            why = near_ties.UNROUTED
        text = requested.sentence(why) if why in near_ties.FAILED else ("", "")
        words = ": ".join(filter(None, text))
        entries.append(near_ties.flip_entry(flip, setting.name(flip.key)[0], golden, mine, why, masks, words))
        verdicts[flip.key] = why
        if why in near_ties.FAILED:
            side = requested.side(why)
            failed.append(_Failed(flip.key, why, text, requested.ways[side], requested.left[side]))
    for found in setting.processed:
        requested = near_ties.RequestedRow.of(found)
        by_request = requested.verdict(flipped=False)
        if by_request in near_ties.FAILED:
            why = str(by_request)
            side = requested.side(why)
            ways, left = requested.ways[side], requested.left[side]
            failed.append(_Failed(int(found["key"]), why, requested.sentence(why), ways, left))
    tokens = pairs.having("tap", SAMPLER) & pairs.having("role", TOKEN) & ~pairs.having("status", SKIP)
    out = {i: pair_status.judged_tokens(pairs[i], [why for key, why in verdicts.items() if key in rows[i].keys])
           for i in np.flatnonzero(tokens).tolist()}  # fmt: skip
    return entries, _sampler_origins(failed, setting, places), pairs.changed(out)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A row whose sampler or processor failed: its verdict, what judge.near_ties says of it, and the ways that give
    it."""

    key: int
    why: str
    words: tuple[str, str]
    ways: tuple[Way, ...]
    left: str = ""

    @property
    def weak(self) -> bool:
        return bool(self.ways) and all(how == OTHER_PAST for _, how in self.ways)


_OF_SAMPLER = {near_ties.PROCESSED: near_ties.SAMPLED, near_ties.GOLDEN_PROCESSED: near_ties.GOLDEN_SAMPLED}


def _sampler_origins(
    failed: Sequence[_Failed], setting: ComparisonContext, places: Places
) -> list[OriginEntry]:  # fmt: skip
    """One origin for the processors and one for the sampler. Where some rows follow from no processor, those that only
    an unknown past explains do neither."""
    if any(row.left == WRONG and not row.words[0] for row in failed):
        failed = [replace(row, why=_OF_SAMPLER.get(row.why, row.why), words=("", row.words[1])) if row.weak else row
                  for row in failed]  # fmt: skip
    out: list[OriginEntry] = []
    for verdicts, role in (((near_ties.PROCESSED, near_ties.GOLDEN_PROCESSED), MASKED_LOGITS),
                           ((near_ties.SAMPLED, near_ties.GOLDEN_SAMPLED), TOKEN)):  # fmt: skip
        rows = [row for row in failed if row.why in verdicts]
        if not rows:
            continue
        first = rows[places.earliest(np.array([row.key for row in rows]))]
        request, where = setting.name(first.key)
        processor, text = first.words
        words, how = commonest(row.ways for row in rows)
        if role == MASKED_LOGITS and words:
            processor = f"logits processor: {' and '.join(words)}"
            text = messages.join(text, how) if (words, how) in first.ways else text
        cls = processor or setting.classes.get(SAMPLER, "")
        out.append({
            "module": SAMPLER, "class": cls, "role": role, "request": request, "position": where,
            "phase": places.phase(first.key), "created": 1.0, "propagated": 0.0, "floor": 0.0, "evidence": "values",
            "rows": len(rows), "worst": 1.0, "shape": text,
        })  # fmt: skip
    return out


def _as_best(lists: Any) -> near_ties.Best | None:
    return None if lists is None else near_ties.Best(*map(np.array, lists))


def _logits_agree(traces: Sequence[TensorErrors], key: int) -> bool | None:
    """Whether a row of the logits is within limits, by all that shows it; None where nothing does, and where earlier
    rows that were not compared may have changed it."""
    known: bool | None = None
    for t in traces:
        if t.kind == OUTPUT and (t.tap == SAMPLER or "logits" in t.tap or "lm_head" in t.tap) and key in t.seen.keys:
            if key in t.doubted:
                continue
            at = np.flatnonzero(t.keys == key)
            known = (known is not False) and not (len(at) and t.err[at[0]] > t.allowed)
    return known
