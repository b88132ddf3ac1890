"""What a comparison says, in sentences and picks that do not depend on where they are shown.

The problem: terminal, page and csv must never tell three stories. The idea: the verdict's sentence, counts, how bad a
pair is, which limit an origin breaks and how likely that is by chance, and the worst pair of each cause are made once,
here, as plain values. A failed pair is an origin's own or propagated. Every string returned is `safe`. Not here:
judging (judge/), which commands are worth typing (follow_ups.py), layout (terminal.py, html/, markdown.py).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_accprobe.comparison.pair import ratio, severity as severity, value_of
from vllm_accprobe.comparison.plan.unit import TOKEN
from vllm_accprobe.comparison.runner_inputs import NOT_THE_MODEL, RUNNER, findings, is_cache, watched, whose
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, BEYOND_CHANCE, PROVED, SIBLING_OUTLIER
from vllm_accprobe.judge.weights import wrong_weights
from vllm_accprobe.report.text import MISSING, against, count, factor, num, place, safe, times
from vllm_accprobe.report.verdict_parts import gap_of as gap_of, inside as inside, tap_of as tap_of, where as between

if TYPE_CHECKING:
    from vllm_accprobe.comparison.pair import Counts, Pair
    from vllm_accprobe.comparison.result import Comparison


def own_pairs(comparison: Comparison, found: Mapping[str, Any]) -> list[Pair]:
    """The compared pairs of the tensor that an origin or a divergence names; of its module where that has none."""
    pairs = [p for p in comparison.pairs if p.status != "skip"]
    module, role = found.get("module"), str(found.get("role") or "")
    # A module may be blamed for the input of another one: its role then begins with that one's name.
    exact = [p for p in pairs if (p.tap == module and p.role == role) or f"{p.tap}/{p.role}" == role]
    return exact or [p for p in pairs if p.tap == module]


def of_origins(comparison: Comparison) -> Callable[[Pair], bool]:
    modules = {str(o.get("module")) for o in comparison.origins if not o.get("gap")}
    others = {role for o in comparison.origins if "/" in (role := str(o.get("role")))}
    return lambda p: p.tap in modules or f"{p.tap}/{p.role}" in others


def outcomes(comparison: Comparison) -> list[tuple[str, int]]:
    """(outcome, pairs), which add up to all pairs: where an origin is, a failed pair is one of its own or is what the
    error became further on."""
    c = comparison.counts
    if comparison.origins:
        is_own = of_origins(comparison)
        own = sum(is_own(p) for p in comparison.pairs if p.status == "fail")
        fails = [(f"fail at {count(len(comparison.origins), 'origin')}", own), ("propagated", c.failed - own)]
    else:
        fails = [("fail", c.failed)]
    return [("pass", c.passed), *fails, ("skipped", c.skipped)]


def one_sum(comparison: Comparison) -> str:
    """``2,763 = 2,100 pass + 24 fail at 2 origins + 636 propagated + 3 skipped``."""
    return f"{comparison.counts.total:,} = " + " + ".join(f"{n:,} {what}" for what, n in outcomes(comparison))


LONGEST = 900
"""chosen: characters of a line that is still shown whole everywhere (the reports cut texts of 1,000)."""
_SPECIAL = "*?[],!"
"""What lists of globs are built from: see dump/reader.py's `matches`, and ``--taps``, which splits at commas."""


def line_of(words: Sequence[str]) -> str | None:
    """The words as one line that a shell takes apart as they are; None where it could not be shown as it is."""
    line = " ".join(shlex.quote(word) for word in words)
    return line if line.isprintable() and len(line) <= LONGEST else None


def path_word(path: str) -> str:
    """A path as an argument: one that begins with a dash would be read as an option."""
    return f"./{path}" if path.startswith("-") else path


def glob_of(name: str) -> str:
    """A glob that matches ``name``, wherever globs are taken."""
    spelled = "".join("?" if c in _SPECIAL or c.isspace() or not c.isprintable() else c for c in name)
    return f"?{spelled[1:]}" if spelled.startswith("-") else spelled


_RAREST = 1e-12
"""chosen: below, a probability is a figure of speech; the sentence says that it is smaller."""


def sentence(origin: OriginEntry) -> str | None:
    """``proved: 3.1 times the error bound of its own inputs``; None where an origin does not say its tier."""
    tier, by = origin.get("tier"), f"{n} times" if (n := _number(origin.get("times"))) else ""
    seldom = odds(origin.get("chance"))
    if tier == PROVED and not origin.get("floor"):
        return f"{PROVED}: its values must be equal, and are not"
    if tier == PROVED:
        return f"{PROVED}: {by or 'beyond'} the error bound of its own inputs"
    if tier == BEYOND_CHANCE:
        text = f"{BEYOND_CHANCE}: {by or 'above'} its floor"
        return text + (f"; rounding alone shows such a thing in {seldom} comparisons" if seldom else "")
    if tier == SIBLING_OUTLIER:
        elsewhere = "in its other calls" if origin.get("evidence") == "replay" else "in other layers"
        text = f"{SIBLING_OUTLIER}: {by or 'more than'} what the same operator does {elsewhere}"
        return text + (f" ({seldom})" if seldom else "")
    if tier == BEHIND_A_ROUTER:
        return f"{tier}: {by or 'above'} its floor, as rows are that a near tie sends to other experts"
    return safe(tier, 60) if tier else None


def optional_columns(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """(heading, a text of each origin) of the columns that a table of origins has only where an origin fills one."""
    origins = comparison.origins
    found = {
        "constant": [constant(o) for o in origins], "cause": [cause(o) for o in origins],
        "shape": [shape(o) or "" for o in origins],
        "in graphs": [graph(o) or "" for o in origins], "in the gap": [inside(comparison, o) or "" for o in origins],
        "floor that it breaks": [whole(o) for o in origins],
    }  # fmt: skip
    return [(name, texts) for name, texts in found.items() if any(texts)]


def whole(origin: OriginEntry) -> str:
    """The tier's sentence and the layers, for a table; empty where neither is known."""
    return ", ".join(x for x in (sentence(origin), layers(origin)) if x)


def short(origin: OriginEntry) -> str | None:
    """The tier and by how much, for a line that says other things, too: ``beyond chance, 5.2x``."""
    tier = origin.get("tier")
    if not tier:
        return None
    by = _number(origin.get("times"))
    return safe(tier, 60) + (f", {by}x" if by else "")


def layers(origin: OriginEntry) -> str | None:
    """``in all 4 layers`` or ``in 3 of 4 layers``, of a fault that is in more than one; else None."""
    found = origin.get("layers")
    if not isinstance(found, Mapping):
        return None
    many, of = found.get("in"), found.get("of")
    if not isinstance(many, int) or not isinstance(of, int) or many < 2:
        return None
    return f"in all {of:,} layers" if many >= of else f"in {many:,} of {of:,} layers"


def odds(chance: object) -> str | None:
    """A probability as ``1 of 2,000``, two digits of it; ``30 of 100`` where it is large, None where not known."""
    if isinstance(chance, bool) or not isinstance(chance, (int, float)) or math.isnan(chance):
        return None
    if chance < _RAREST:
        return f"fewer than 1 of {round(1 / _RAREST):,}"
    if chance > 0.1:
        return f"{min(round(100 * chance), 100)} of 100"
    turns = 1 / chance
    digits = max(len(str(int(turns))) - 2, 0)
    return f"1 of {round(turns, -digits):,.0f}"


def alarms(comparison: Comparison) -> str | None:
    """How seldom the limits name an origin where there is none; None where the judge did not work it out. What an
    origin that was named says of its own chance is about its size, and mostly far less."""
    expected = comparison.by_chance
    if expected is None:
        return None
    return f"the limits name an origin, of whatever size, in {odds(expected)} comparisons with rounding alone"


def origin_factor(origin: OriginEntry) -> float | None:
    """How many times its own limit an origin's worst row reaches, the one factor that is reported of it; infinite for
    NaN and for what must be equal, None where it was not measured."""
    created, known = origin.get("created"), origin.get("times")
    if isinstance(created, float) and not math.isfinite(created):
        return math.inf
    if isinstance(known, (int, float)) and not isinstance(known, bool) and math.isfinite(known):
        return float(known)
    return ratio(created, origin.get("floor"))


def origin_size(origin: OriginEntry) -> float | None:
    """The error of an origin's worst row, in the unit of its limit: so many times that is its factor. None where it was
    not measured."""
    created, limit, found = origin.get("created"), origin.get("floor"), origin_factor(origin)
    if limit and found is not None and math.isfinite(found):
        return float(limit * found)
    return None if created is None else float(created)


def origin_times(origin: OriginEntry) -> str:
    """``13x``; empty where that is no number."""
    found = origin_factor(origin)
    return "" if found is None else times(found, 1.0)


def _number(found: object) -> str | None:
    """``3.14``, ``130``, ``5e+07``, as everywhere; None for what is no finite number."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return factor(found)


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


def introduced_by(origin: OriginEntry) -> str:
    """Who introduces an error, and in how many layers: ``X (cls) introduces the error``, of a gap ``the error is
    created between X and Y``."""
    if gap := gap_of(origin):
        return f"the error is introduced {between(gap)}"
    return f"{origin_title(origin)} {deed(origin)}" + (f" {n}, first here" if (n := layers(origin)) else "")


def deed(origin: OriginEntry) -> str:
    """What an origin does. A file's tensor, of which it is not known what went in, is not reported to create anything,
    and a module with another constant, or with other weights, computes what it was built to."""
    if is_cache(origin):
        return "is wrong"
    if of_runner(origin):
        return "was handed other inputs by the runner"
    if constant(origin):
        return "has another constant"
    if str(origin.get("role")).rpartition("/")[2].startswith("param."):
        return "has other weights"
    return "differs" if origin.get("role") == FILE else "introduces the error"


def constant(origin: OriginEntry) -> str:
    """``impl.scale is 0.1275, golden has 0.125``, of an origin that was built otherwise; else empty, also where a
    replay shows that this does not matter."""
    cause = origin.get("cause")
    if not isinstance(cause, Mapping) or cause.get("kind") != "setting" or cause.get("matters") is False:
        return ""
    return safe(cause.get("sentence") or "", 400)


def of_runner(origin: OriginEntry) -> str:
    """What the runner did, of an origin that is the model's input and not golden's; else empty."""
    cause = origin.get("cause")
    if origin.get("class") != RUNNER or not isinstance(cause, Mapping):
        return ""
    return safe(str(cause.get("text") or "").removeprefix("the runner: "), 1000)


def cause(origin: OriginEntry) -> str:
    """``mine's output is what this Attention gives without its soft cap of 5``, where a replay proves it, with what is
    left and how likely that is by chance; else empty."""
    found = origin.get("cause")
    if not isinstance(found, Mapping) or not found.get("text") or found.get("family") == "unknown":
        return ""
    if of_runner(origin):  # the verdict says it
        return ""
    left, seldom = found.get("residual"), odds(found.get("chance"))
    proof = []
    if isinstance(left, (int, float)) and found.get("chance") is not None:  # else it was read, not computed again
        proof.append(f"what is left is {num(left, 2)} of what rounding allows")
    proof += [f"an error of any other kind fits as well in {seldom} cases"] if seldom else []
    return safe(found["text"], 600) + (f" ({'; '.join(proof)})" if proof else "")


def origin_title(origin: OriginEntry) -> str:
    """``model.layers.3.mlp.down_proj (RowParallelLinear)``; of a gap ``between X and Y``."""
    if gap := gap_of(origin):
        return between(gap)
    title = safe(origin.get("module", "?"))
    return f"{title} ({safe(origin['class'], 80)})" if origin.get("class") else title


def infinite(comparison: Comparison, origin: OriginEntry) -> str:
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


def place_of(origin: OriginEntry) -> tuple[Any, Any]:
    gap = gap_of(origin)
    if gap is None:
        return origin.get("module"), origin.get("role")
    return gap["before"], str(origin.get("role")).removeprefix(f"{gap['before']}/")


def evidence(origin: OriginEntry) -> str:
    """What an origin rests on, in a sentence without its full stop; empty for a word that is none of ours."""
    word = str(origin.get("evidence"))
    if gap_of(origin) and word == "jump":
        return "what comes out of the gap is further off than what goes in explains"
    if constant(origin):
        recorded = "both dumps recorded the constants of this module"
        return recorded if origin.get("created") is None else f"{recorded}; {EVIDENCE.get(word, '')}"
    return EVIDENCE.get(word, "")


def origin_name(origin: OriginEntry) -> str:
    gap = gap_of(origin)
    return between(gap) if gap else str(origin.get("module", "?"))


def origin_detail(comparison: Comparison, origin: OriginEntry) -> str:
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
    elif origin.get("role") == TOKEN:
        parts.append(METRICS["exact"])
    else:
        parts.append(f"{created_as(origin)} {_held(created, origin)}")
    return ", ".join(parts)


def _held(created: float, origin: OriginEntry) -> str:
    """``0.21, limit 0.016 (13x)``; ``up to`` where a later row is worse than the first, whose place is named; ``(13x,
    by its gain)`` where another measure than the row's error decided, by which both numbers are so far apart."""
    limit, factor, size = origin.get("floor"), origin_times(origin), origin_size(origin)
    later = "up to " if num(size) != num(created) else ""
    text = f"{later}{num(size)}" + ("" if limit is None else f", limit {num(limit)}")
    by = _DECIDED.get(str(origin.get("decided_by")), "")
    return text + (f" ({factor}{by})" if factor else "")


_DECIDED = {"gain": ", by its gain", "column": ", by a column", "element": ", by an element"}
"""Measures of a replay (docs/opcheck.md) that are not the row's error."""


def created_as(origin: OriginEntry) -> str:
    """What an origin's ``created`` measures, in words."""
    metric = str(origin.get("measure") or origin.get("metric") or "row_rel_l2")
    return METRICS.get(metric) or safe(metric, 60)


def shape(origin: OriginEntry) -> str | None:
    """The sentence on the shape of an origin's error, such as ``columns 400-511 of 512``, where there is one."""
    return safe(origin["shape"], 300) if origin.get("shape") else None


def graph(origin: OriginEntry) -> str | None:
    """Where in compiled and captured graphs an origin's error is: the piece, captured sizes, padding; None where it is
    not known, as in an engine that compiles nothing."""
    found = origin.get("graph")
    return safe(found["sentence"], 400) if isinstance(found, Mapping) and found.get("sentence") else None


def divergence(comparison: Comparison) -> str | None:
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
        return "PASS: nothing wrong in what was compared: " + " and ".join(_without_tensors(comparison))
    rows = int(comparison.coverage.get("rows_compared") or 0)
    standard = safe((comparison.standard or {}).get("name") or "", 60)
    text = f"PASS: {count(c.passed, 'pair')} and {count(rows, 'row')} agree"
    text += f" within the standard '{standard}'" if standard else " within the standard"
    extra = [f"{n:,} {what}" for n, what in ((c.identical, "identical"), (c.skipped, "more skipped")) if n]
    return text + (f" ({', '.join(extra)})" if extra else "")


def _without_tensors(comparison: Comparison) -> list[str]:
    """What a comparison without tensors is about."""
    mine = watched(comparison.states, "mine")
    steps = max((int(one.get("steps") or 0) for one in mine.values()), default=0)
    text = [f"mine's ledger of states in {count(steps, 'step')}"] if mine else []
    weights = int(comparison.weights.get("compared") or 0), int(comparison.weights.get("told") or 0)
    if any(weights):
        text.append(f"{weights[0]:,} weights of both" if weights[0] else f"the life of {weights[1]:,} weights of mine")
    return text or ["no tensors"]


def wrong_states(comparison: Comparison, side: str = "mine") -> list[str]:
    return [safe(one.get("sentence") or "", 1000) for one in findings(comparison.states, side)]


FURTHER = "further findings of the ledger of states and of the runner's inputs"


def operators(comparison: Comparison) -> list[OriginEntry]:
    return [o for o in comparison.origins if not is_cache(o)]


def _failure(comparison: Comparison, c: Counts) -> str:
    if wrong := wrong_states(comparison):
        n = int(comparison.states["mine"].get("count") or len(wrong)) - 1
        own = f"{whose(findings(comparison.states, 'mine')[0])}: {wrong[0]}"
        return own + (f" (and {count(n, 'other finding')})" if n > 0 else "")
    if faults := wrong_weights(comparison.weights):
        where = "in golden, " if faults[0]["side"] == "golden" else ""
        others = f" (and {count(len(faults) - 1, 'more finding')} about weights)" if faults[1:] else ""
        return f"the weights, not the kernel: {where}{safe(faults[0]['says'], 400)}{others}"
    if comparison.origins:
        origin = comparison.origins[0]
        if words := of_runner(origin):
            return f"{NOT_THE_MODEL}: {words}"
        return f"{introduced_by(origin)}: {origin_detail(comparison, origin)}"
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
        out += [(f"{what}, {safe(k) or 'without a reason'}", v) for k, v in ordered]
    return out


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A layer's number: a whole part of a module's path."""


@dataclass(frozen=True)
class FailedCause:
    """worst: its worst pair; more: how many other pairs failed for the same reason; own: it is an origin's."""

    worst: Pair
    more: int
    own: bool = False

    @property
    def like(self) -> str:
        """``and 39 more like it``; empty where it is alone."""
        return f"and {self.more:,} more like it" if self.more else ""


def causes(comparison: Comparison) -> list[FailedCause]:
    """All of them, origins first, and then the worst first; equals in data-flow order."""
    is_own, own = of_origins(comparison), set()
    spread = {_form(o["module"]) for o in comparison.origins if layers(o) and isinstance(o.get("module"), str)}
    found: dict[str, tuple[tuple[float, int, int], Pair]] = {}
    pairs: dict[str, int] = {}
    for i in np.flatnonzero(comparison.table.failed).tolist():
        p = comparison.pairs[i]
        form = _form(p.tap) if spread else ""
        key = form if form in spread else p.tap
        rank = (-float(comparison.table.severities[i]), p.order, p.step if p.step is not None else -1)
        pairs[key] = pairs.get(key, 0) + 1
        if is_own(p):
            own.add(key)
        if key not in found or rank < found[key][0]:
            found[key] = rank, p
    ordered = sorted(found, key=lambda key: (key not in own, found[key][0]))
    return [FailedCause(found[key][1], pairs[key] - 1, key in own) for key in ordered]


def title(comparison: Comparison, shown: int, found: Sequence[FailedCause]) -> str:
    """``2 causes and 51 places that they reach, of 1,234 failed pairs, the 10 worst``: what stands above a list of so
    many. Where no origin is known, a cause and what it reaches cannot be distinguished."""
    own, failed = sum(cause.own for cause in found), comparison.counts.failed
    if not own and len(found) == failed:
        return f"the {shown} worst of {failed:,} failed pairs" if failed > shown else "failed pairs, worst first"
    behind = len(found) - own
    reached = count(behind, "place") + (f" that {'it reaches' if own == 1 else 'they reach'}" if own else "")
    what = " and ".join(words for n, words in ((own, count(own, "cause")), (behind, reached)) if n)
    some = f"the {shown} worst" if len(found) > shown else "worst first"
    return f"{what}, of {count(failed, 'failed pair')}, {some}"


def _form(tap: str) -> str:
    """``model.layers.*.mlp``: the same place in any layer."""
    return _NUMBER.sub("*", tap)
