"""What a comparison says, in sentences and picks that do not depend on where they are shown.

The problem: terminal, page and csv must never tell three stories. The idea: the verdict's sentence, the counts and
how bad a pair is are made once, here, as plain values. Not here: judging (judge/), which pairs are told first
(worst/causes.py), layout (terminal.py, html/). Every string returned is already ``safe``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.over import over_limit as over_limit
from vllm_accprobe.comparison.over import ratio as ratio
from vllm_accprobe.comparison.over import severity as severity
from vllm_accprobe.comparison.over import value_of as value_of
from vllm_accprobe.comparison.states import NOT_THE_KERNEL, findings, is_cache, watched
from vllm_accprobe.judge.weights.faults import wrong_weights
from vllm_accprobe.report import tiers
from vllm_accprobe.report.between import gap_of as gap_of
from vllm_accprobe.report.between import inside as inside
from vllm_accprobe.report.between import tap_of as tap_of
from vllm_accprobe.report.between import where as between
from vllm_accprobe.report.next.outcomes import one_sum, own_pairs
from vllm_accprobe.report.text import MISSING, against, count, num, place, safe, times

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison, Counts, Pair


METRICS = {
    "worst_row_rel_l2": "row relative L2",
    "row_rel_l2": "row relative L2",
    "row_norm_ratio": "row norm ratio",
    "element": "largest element error, in row rms",
    "created": "created error",
    "row_error": "row error",
    "exact": "values differ that must be equal",
    "nonfinite": "NaN or Inf on one side only",
    "rel_l2": "relative L2",
    "statistics": "relative L2 (of statistics, a lower bound)",
    "max_abs_err": "largest absolute error",
    "nonfinite_mismatch": "NaN or Inf on one side only, elements",
}
"""Metrics of compare.json in words."""

ZERO = "golden is 0 there and mine is not"
UNMEASURABLE = "NaN or Inf on one side only, or values that differ and must be equal"
"""What an infinite error means."""

FILE = "value"
"""The role of a tensor that is a file's or was saved alone (common/foreign.py): it has no inputs and no outputs."""

SHORT = {
    "row_rel_l2": "row L2",
    "row_norm_ratio": "norm ratio",
    "element": "element",
    "created": "created",
    "exact": "equality",
    "nonfinite": "NaN/Inf",
}
"""Measures of ``Pair.measure`` in a word or two."""


def decided(pair: Pair) -> tuple[str, float | None, float | None]:
    """(what a pair was judged by, its value, its own limit): a word for a narrow column, and two numbers."""
    if pair.measure in SHORT and pair.measured is not None:
        return SHORT[pair.measure], pair.measured, pair.allowed
    return "row L2" if pair.worst_row_rel_l2 is not None else "rel L2", value_of(pair), pair.limit


EVIDENCE = {
    "replay": "replaying the operator on mine's own inputs does not give mine's output",
    "jump": "its output is further off than its inputs explain",
    "values": "its values differ though nothing before them does",
}
"""What an origin's ``evidence`` means."""


def where(found: Mapping[str, Any]) -> str:
    """The row of an origin or a divergence: ``request 'a', position 17 (decode)``; empty where it has none."""
    return place(found.get("request"), found.get("position"), found.get("phase"))


def step_of(pair: Pair) -> str:
    return MISSING if pair.step is None else str(pair.step)


def over(pair: Pair) -> str:
    """``13x``, ``∞``: how many times its limit a failed pair reaches."""
    found = severity(pair)
    return "∞" if found == math.inf else times(found, 1.0) or MISSING


def accused(origin: Mapping[str, Any]) -> str:
    """Who creates an error, and in how many layers: ``X (cls) creates the error``, of a gap ``the error is created
    between X and Y``."""
    if gap := gap_of(origin):
        return f"the error is created {between(gap)}"
    return f"{origin_title(origin)} {deed(origin)}" + (f" {n}, first here" if (n := tiers.layers(origin)) else "")


def deed(origin: Mapping[str, Any]) -> str:
    """What an origin does. A file's tensor, of which nobody knows what went in, is not said to create anything, and
    a module with another constant, or with other weights, computes what it was built to."""
    if is_cache(origin):
        return "is wrong"
    if constant(origin):
        return "has another constant"
    if str(origin.get("role")).rpartition("/")[2].startswith("param."):
        return "has other weights"
    return "differs" if origin.get("role") == FILE else "creates the error"


def constant(origin: Mapping[str, Any]) -> str:
    """``impl.scale is 0.1275, golden has 0.125``, of an origin that was built otherwise; else empty, also where a
    replay shows that this does not matter."""
    cause = origin.get("cause")
    if not isinstance(cause, Mapping) or cause.get("kind") != "setting" or cause.get("matters") is False:
        return ""
    return safe(cause.get("sentence") or "", 400)


def origin_title(origin: Mapping[str, Any]) -> str:
    """``model.layers.3.mlp.down_proj (RowParallelLinear)``; of a gap ``between X and Y``."""
    if gap := gap_of(origin):
        return between(gap)
    title = safe(origin.get("module", "?"))
    return f"{title} ({safe(origin['class'], 80)})" if origin.get("class") else title


def infinite(comparison: Comparison, origin: Mapping[str, Any]) -> str:
    """What an origin's infinite error means, from its own pairs: a NaN or Inf, numbers that must be equal, or a golden
    of nothing but 0, which no relative error can be measured by."""
    role = str(origin.get("role"))
    if role.startswith("param."):
        return METRICS["exact"]
    own = [p for p in own_pairs(comparison, origin) if p.status == "fail"]
    if any(p.nonfinite_mismatch for p in own):
        return METRICS["nonfinite"]
    if any(p.measure == "exact" for p in own):
        return METRICS["exact"]
    if any(p.measure == "row_rel_l2" and p.measured == math.inf for p in own):
        return ZERO
    return UNMEASURABLE


def place_of(origin: Mapping[str, Any]) -> tuple[Any, Any]:
    """(tap, role) of the tensor that shows an origin's error."""
    gap = gap_of(origin)
    if gap is None:
        return origin.get("module"), origin.get("role")
    return gap["before"], str(origin.get("role")).removeprefix(f"{gap['before']}/")


def evidence(origin: Mapping[str, Any]) -> str:
    """What an origin rests on, in a sentence without its full stop; empty for a word that is none of ours."""
    word = str(origin.get("evidence"))
    if gap_of(origin) and word == "jump":
        return "what comes out of the gap is further off than what goes in explains"
    if constant(origin):
        recorded = "both dumps recorded the constants of this module"
        return recorded if origin.get("created") is None else f"{recorded}; {EVIDENCE.get(word, '')}"
    return EVIDENCE.get(word, "")


def origin_name(origin: Mapping[str, Any]) -> str:
    """An origin's module without its class, or where its gap is."""
    gap = gap_of(origin)
    return between(gap) if gap else str(origin.get("module", "?"))


def origin_detail(comparison: Comparison, origin: Mapping[str, Any]) -> str:
    """Where and how much: ``output.0, request 'a', position 17 (decode), row relative L2 0.21, limit 0.016 (13x)``."""
    if is_cache(origin):
        return where(origin)
    other = constant(origin)
    created = origin.get("created")
    if other and created is None:
        return other
    parts = [other] if other else []
    parts += [safe(origin["role"], 80)] if origin.get("role") and origin["role"] != FILE else []
    parts += [row] if (row := where(origin)) else []
    if created is None:
        parts.append("the values differ")
    elif isinstance(created, float) and not math.isfinite(created):
        parts.append(infinite(comparison, origin))
    else:
        parts.append(f"{created_as(origin)} {_held(created, origin)}")
    return ", ".join(parts)


def _held(created: float, origin: Mapping[str, Any]) -> str:
    """``0.21, limit 0.016 (13x)``; ``up to`` where a later row is worse than the first, whose place is told."""
    limit, factor, size = origin.get("floor"), tiers.origin_times(origin), tiers.origin_size(origin)
    later = "up to " if num(size) != num(created) else ""
    text = f"{later}{num(size)}" + ("" if limit is None else f", limit {num(limit)}")
    return text + (f" ({factor})" if factor else "")


def created_as(origin: Mapping[str, Any]) -> str:
    """What an origin's ``created`` measures, in words."""
    metric = str(origin.get("measure") or origin.get("metric") or "row_rel_l2")
    return METRICS.get(metric) or safe(metric, 60)


def shape(origin: Mapping[str, Any]) -> str | None:
    """The sentence on the shape of an origin's error, such as ``columns 400-511 of 512``, where there is one."""
    return safe(origin["shape"], 300) if origin.get("shape") else None


def graph(origin: Mapping[str, Any]) -> str | None:
    """Where in compiled and captured graphs an origin's error is: the piece, captured sizes, padding; None where it is
    not known, as in an engine that compiles nothing."""
    found = origin.get("graph")
    return safe(found["sentence"], 400) if isinstance(found, Mapping) and found.get("sentence") else None


def divergence(comparison: Comparison) -> str | None:
    """The first divergence as one line without its heading, or None."""
    d = comparison.first_divergence
    if not d:
        return None
    parts = [safe(d.get("module", "?")) + (f"/{safe(d['role'], 80)}" if d.get("role") and d["role"] != FILE else "")]
    parts += [f"{key} {safe(d[key], 20)}" for key in ("rank", "step") if d.get(key) is not None]
    parts += [row] if (row := where(d)) else []
    place = d.get("module"), d.get("role")
    same = [i for i, o in enumerate(comparison.origins, 1) if place_of(o) == place]
    if same and d.get("metric") != "statistics":  # how large it is, is said there; but not what statistics tell of it
        return ", ".join([*parts, f"where origin {same[0]} is"])
    value = d.get("value")
    if d.get("metric") in ("exact", "nonfinite"):
        parts.append(METRICS[d["metric"]])
    elif value is None:  # another tool's standard says its reason, ours had nothing to measure
        parts.append("values differ" if d.get("metric") in METRICS else safe(d.get("metric") or "values differ"))
    elif value == math.inf and d.get("metric") == "row_rel_l2":
        parts.append(ZERO)
    else:
        metric = str(d.get("metric") or "error")
        parts.append(f"{METRICS.get(metric) or safe(metric)} {against(value, d.get('limit'))}")
    return ", ".join(parts)


def headline(comparison: Comparison) -> str:
    """The verdict in one sentence: on failure with the culprit, on a pass with what it rests on."""
    c = comparison.counts
    if comparison.verdict != "pass":
        return f"FAIL: {_failure(comparison, c)}"
    if not c.compared:  # the first note says why
        return "PASS: nothing wrong in what was compared: " + " and ".join(_told_instead(comparison))
    rows = int(comparison.coverage.get("rows_compared") or 0)
    standard = safe((comparison.standard or {}).get("name") or "", 60)
    text = f"PASS: {count(c.passed, 'pair')} and {count(rows, 'row')} agree"
    text += f" within the standard '{standard}'" if standard else " within the standard"
    extra = [f"{n:,} {what}" for n, what in ((c.identical, "identical"), (c.skipped, "more skipped")) if n]
    return text + (f" ({', '.join(extra)})" if extra else "")


def _told_instead(comparison: Comparison) -> list[str]:
    """What a comparison without tensors is about."""
    mine = watched(comparison.states, "mine")
    steps = max((int(one.get("steps") or 0) for one in mine.values()), default=0)
    said = [f"mine's ledger of states in {count(steps, 'step')}"] if mine else []
    weights = int(comparison.weights.get("compared") or 0), int(comparison.weights.get("told") or 0)
    if any(weights):
        said.append(f"{weights[0]:,} weights of both" if weights[0] else f"the life of {weights[1]:,} weights of mine")
    return said or ["no tensors"]


def wrong_states(comparison: Comparison, side: str = "mine") -> list[str]:
    """The findings of a side's own ledger of states, a sentence each."""
    return [safe(one.get("sentence") or "", 1000) for one in findings(comparison.states, side)]


def operators(comparison: Comparison) -> list[dict[str, Any]]:
    """The origins that are operators: all but a cache."""
    return [o for o in comparison.origins if not is_cache(o)]


def _failure(comparison: Comparison, c: Counts) -> str:
    if wrong := wrong_states(comparison):
        n = int(comparison.states["mine"].get("count") or len(wrong)) - 1
        return f"{NOT_THE_KERNEL}: {wrong[0]}" + (f" (and {count(n, 'other finding')})" if n > 0 else "")
    if faults := wrong_weights(comparison.weights):
        where = "in golden, " if faults[0]["side"] == "golden" else ""
        others = f" (and {count(len(faults) - 1, 'more finding')} about weights)" if faults[1:] else ""
        return f"the weights, not the kernel: {where}{safe(faults[0]['says'], 400)}{others}"
    if comparison.origins:
        origin = comparison.origins[0]
        return f"{accused(origin)}: {origin_detail(comparison, origin)}"
    if first := divergence(comparison):
        return f"no single operator stands out as the origin; the error is first seen at {first}"
    if c.failed:
        return f"{count(c.failed, 'pair')} of {c.compared:,} differ beyond the standard"
    if flipped := comparison.tokens.get("flipped"):
        return f"{count(len(flipped), 'sampled token')} flipped without a near tie, and no captured tensor explains it"
    return "the comparison failed; see the notes"


def coverage_rows(comparison: Comparison) -> list[tuple[str, str]]:
    """What was compared and what was not, as (label, value) pairs; reasons follow in ``skip_rows``."""
    cov, c = comparison.coverage, comparison.counts
    return [
        ("pairs", one_sum(comparison)),
        ("pairs compared", f"{c.compared:,} ({c.passed:,} pass, {c.failed:,} fail)"),
        ("pairs identical", f"{c.identical:,} ({c.bit_identical:,} bit-identical)"),
        ("pairs skipped", f"{c.skipped:,}"),
        ("rows compared", num(int(cov.get("rows_compared") or 0))),
        ("rows only in golden", num(int(cov.get("rows_only_golden") or 0))),
        ("rows only in mine", num(int(cov.get("rows_only_mine") or 0))),
        ("taps only in golden", num(len(cov.get("taps_only_golden") or ()))),
        ("taps only in mine", num(len(cov.get("taps_only_mine") or ()))),
        ("tokens compared", num(int(comparison.tokens.get("compared") or 0))),
    ]


def skip_rows(comparison: Comparison) -> list[tuple[str, int]]:
    """(what was skipped and why, count), the largest first: the pairs of compare.csv, which add up to its skipped ones;
    then what never became a pair: rows, tensors of one side, what the captures left out."""
    pairs = comparison.counts.skip_reasons
    everything = comparison.coverage.get("skipped") or {}
    others = {k: n for k, v in everything.items() if (n := int(v) - pairs.get(k, 0)) > 0}
    out = []
    for what, reasons in (("pairs skipped", pairs), ("left out", others)):
        ordered = sorted(reasons.items(), key=lambda kv: (-kv[1], str(kv[0])))
        out += [(f"{what}, {safe(k) or 'no reason given'}", v) for k, v in ordered]
    return out
