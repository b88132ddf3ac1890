"""Sentences of a result that both terminal and page show; what is reported, and the headline: report/facts.py.

The problem: the same facts are read in a table, a terminal and a page. The idea: pure functions from what was measured
to sentences; each names the thing, the number and the limit, once. Not here: whether a pair passes
(verdict/pair_status.py), what both dumps say by themselves (notes.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_accprobe.comparison.coverage import ENDED
from vllm_accprobe.comparison.measure.measured import ComparisonContext, MeasuredUnit
from vllm_accprobe.comparison.pair import FAIL, PASS, SKIP, Pairs
from vllm_accprobe.comparison.row_table import RowTable
from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.judge import near_ties
from vllm_accprobe.judge.tensor_errors import METRICS


def masked(flipped: Sequence[dict[str, Any]]) -> list[str]:
    """What is reported of flips that are no errors because something masked the logits: one sentence for each way."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for f in flipped:
        if f["why"] == near_ties.MASKED:
            sides = [f.get("masked", {}).get(side, []) for side in ("golden", "mine")]
            ways.setdefault(_mask_text(*sides), []).append(f)
    out = []
    for way, found in ways.items():
        more = f" and {len(found) - 1} more requests" if len(found) > 1 else ""
        first = f"request {found[0]['request']!r}, generated token {found[0]['ordinal']}{more}"
        out.append(f"{way} ({first}): each sampler took the best of what it was left, and what follows is not compared")
    return out


def _mask_text(golden: Sequence[str], mine: Sequence[str]) -> str:
    only = {"mine": [w for w in mine if w not in golden], "golden": [w for w in golden if w not in mine]}
    parts = [f"by {' and '.join(words)} in {side} only" for side, words in only.items() if words]
    if not parts:
        return f"logits were masked by {' and '.join(mine)} on both sides, otherwise in mine than in golden"
    return "logits were masked " + ", ".join(parts)


def images(setting: ComparisonContext, units: Sequence[MeasuredUnit], pairs: Pairs) -> list[str]:
    """What is reported of images with other hashes: where everything that was computed of them agrees, only their
    hashes differ."""
    if not setting.other_images:
        return []
    vision = {u.key for u in units if u.vision}
    found = {p.status for p in pairs if (p.tap, p.role, p.call) in vision} - {SKIP}
    if not setting.rehashed or found != {PASS}:
        return [f"request {request!r} has different images" for request in setting.other_images]
    versions = [object_at(run, "versions") or {} for run in (setting.golden_run, setting.mine_run)]
    releases = [str(v.get("vllm", ""))[:40] for v in versions]
    by = f" (vLLM {releases[0]} and {releases[1]})" if all(releases) and releases[0] != releases[1] else ""
    return [f"image hashes differ in all requests that have images ({len(setting.other_images)}), and all that was "
            f"computed of the images agrees: another way of hashing{by}"]  # fmt: skip


NOBODY = (
    "no operator adds more than it does elsewhere: either each layer is a little off, or this model enlarges "
    "rounding errors; a second run of golden's side (--floor) or a replay of the operators (--replay) tells which"
)


def join(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def first_divergence(pairs: Pairs, rows: RowTable | None = None) -> dict[str, Any] | None:
    """The first failing pair in the order of the data flow, earliest step first; and in it, where ``rows`` tells, the
    first row beyond the limit. metric ``row_error`` is a row's number in tensor_errors.py's unit, a relative L2
    error."""
    if not pairs.failed.any():
        return None
    failing = np.flatnonzero(pairs.failed).tolist()
    i = min(failing, key=lambda i: (pairs[i].order, -1 if pairs[i].step is None else pairs[i].step))
    p = pairs[i]
    value = p.worst_row_rel_l2 if p.worst_row_rel_l2 is not None else p.rel_l2
    out = {
        "module": p.tap,
        "role": p.role,
        "rank": p.rank,
        "step": p.step,
        "request": p.worst_request,
        "position": p.worst_position,
        "phase": p.phase,
        "metric": METRICS[0] if not p.role.startswith("param.") else "rel_l2",
        "value": value if not p.role.startswith("param.") else p.rel_l2,
        "limit": p.limit,
    }
    if p.max_abs_err is None and value is not None and "statistics" in p.message:
        return out | {"metric": "statistics", "value": value, "golden": p.golden, "mine": p.mine}
    own = f"{p.tap}/{p.role}" + (f"#{p.call}" if p.call else "")
    if not {p.golden, p.mine} <= {own}:  # a name of another tool or engine: where to look
        out |= {"golden": p.golden, "mine": p.mine}
    if p.measure is not None and not p.role.startswith("param."):
        out |= {"metric": p.measure, "value": p.measured, "limit": p.allowed}
    beyond = np.zeros(0, np.int64) if rows is None else np.flatnonzero((rows.pair == i) & (rows.ratio > 1))
    if rows is not None and len(beyond):
        first = beyond[np.lexsort((rows.position[beyond], rows.request[beyond] != rows.request[beyond[0]]))[0]]
        place = {"request": rows.requests[rows.request[first]].partition(", image ")[0]}
        place |= {"position": int(rows.position[first]), "phase": "decode" if rows.decode[first] else "prefill"}
        if (place["request"], place["position"]) != (p.worst_request, p.worst_position):
            out |= place | {"metric": "row_error", "value": float(rows.error[first]), "limit": p.limit}
    return out


def weights(found: dict[str, Any], most: int = 3) -> list[str]:
    faults = found.get("findings") or []
    out = [f"the weights, not the kernel: {_whose(f)}{f['says']}" for f in faults[:most]]
    events = [one["event"] for one in found.get("events", {}).get("mine") or []]
    if found.get("told") and len(events) > 1:
        alone = f"mine's {found['told']:,} were checked by themselves after {', '.join(events[:6])}"
        out.append(f"golden recorded nothing of its weights: {alone}" + ("" if faults else ": nothing wrong"))
    return [*out, f"{len(faults) - most} more findings about weights: compare.json, weights"] if faults[most:] else out


def _whose(fault: dict[str, Any]) -> str:
    return {"golden": "in golden, ", "both": "in both dumps, "}.get(fault["side"], "")


NO_PARTNER = "no partner and"
_LAYER = re.compile(r"\.\d+$")


def one_sided(coverage: Mapping[str, Any], notes: Sequence[str], flipped: Sequence[Any]) -> list[str]:
    """What golden has and mine has not, where neither ``notes`` nor flipped tokens give the reason."""
    out = []
    layers = [tap for tap in coverage.get("taps_only_golden", ()) if _LAYER.search(tap)]
    if layers:
        more = f" and {len(layers) - 1} more layers are" if layers[1:] else " is"
        out.append(f"{layers[0]}{more} in golden only: not compared")
    n = coverage.get(ENDED) or 0
    if n and not flipped and not any(NO_PARTNER in note for note in notes):
        out.append(
            f"{n:,} rows behind mine's last ones are in golden only, and no token differs: mine's run ended early, or "
            "other steps were captured"
        )
    return out


def notes(
    static: Sequence[str],
    pairs: Pairs,
    flipped: Sequence[dict[str, Any]],
    replicas: int,
    origins: Sequence[Any] = (),
) -> list[str]:
    """What must be said before any number: different weights first, then ``static`` (notes.plan_notes)."""
    out: list[str] = []
    weights = pairs.those("role", lambda role: role.startswith("param.")) & ~pairs.having("status", SKIP)
    params = [pairs[i] for i in np.flatnonzero(weights).tolist()]
    wrong = [p for p in params if p.status == FAIL]
    if wrong:
        first = min(wrong, key=lambda p: p.order)
        far = f" (relative L2 {first.rel_l2:.3g})" if first.rel_l2 is not None else ""
        many = f"{len(wrong)} of {len(params)} parameters differ"
        out.append(f"different weights: {many}, first {first.tap} {first.role}{far}")
    out += static
    if replicas:
        out.append(f"{replicas} tensors that all ranks should hold alike differ between the ranks of mine")
    grown = pairs.failed & pairs.those("role", lambda role: role.startswith("output"))
    if (grown & pairs.those("measure", METRICS[:3].__contains__)).any() and not origins:
        out.append(NOBODY)
    whys = Counter(f["why"] for f in flipped)
    if whys[near_ties.RANDOM]:
        out.append(f"{whys[near_ties.RANDOM]} requests were not sampled greedily: their flipped tokens are not judged")
    out += masked(flipped)
    if whys[near_ties.UNROUTED]:
        out.append(f"{whys[near_ties.UNROUTED]} flipped tokens cannot be judged: their experts were not compared")
    if whys[near_ties.UNKNOWN]:
        out.append(f"{whys[near_ties.UNKNOWN]} flipped tokens cannot be judged: no logits were recorded")
    return out
