"""Results of gate, localize, self-check, eval-diff and bisect as lines and JSON.

The problem: two accuracies side by side are easily read as a drop, and a gap without its floor as a fault. The idea:
pure functions from results to lines and plain values; one sentence for each metric says both counts, whether the
difference exceeds chance, and what would have been seen. Not here: measures and conclusions (gate/).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.gate.evaluations import LEVEL, NO_NUMBER, POWER, Documents, digest, label, response
from vllm_accprobe.gate.localize import Localized, LocalizePlan
from vllm_accprobe.gate.sending.rendering import to_json
from vllm_accprobe.report import facts
from vllm_accprobe.report.table import cell
from vllm_accprobe.report.text import count, more, num, safe
from vllm_accprobe.whole_file import write_csv_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_accprobe.gate.bisect.edits import ServerSetting
    from vllm_accprobe.gate.bisect.search import Cause, Found
    from vllm_accprobe.gate.bisect.trials import TrialRow
    from vllm_accprobe.gate.evaluations import Contrast, Evaluation, Side
    from vllm_accprobe.gate.measure.gating import Gate
    from vllm_accprobe.gate.self_check import PathFinding, SelfGate
    from vllm_accprobe.gate.sending.rendering import Rendering
    from vllm_accprobe.gate.trainer import Ratios, Span


MAX_FLIPS = 10
_HEADER = (
    "", "tokens", "flips", "median", "99%", "worst", "KL", "mean", "golden itself", "mine itself", "distance", "floor"
)  # fmt: skip
NO_FLOOR = (
    "the limit is golden's own batching alone: a correct card that rounds in another way fails, too; --floor (golden's "
    "model in another dtype, or on another card that is known to be right) makes it a limit for rounding"
)


def gap_lines(gate: Gate, floors: Sequence[str] = ()) -> list[str]:
    """The verdict, its condition, the floors, the table of conditions, the flips, and what was not compared. floors:
    their names."""
    chats = gate.rendering
    out = rendered_lines(chats) if chats is not None else []
    out.append(f"{ALONG if out else ''}{headline(gate)}")
    if text := shown(gate):
        out.append(text)
    if gate.condition is not None and gate.condition.also:
        out.append("or, explaining it as well: " + "; ".join(c.sentence for c in gate.condition.also))
    if gate.numbers is not None and not gate.floors and (gate.numbers == "fail" or gate.cells[0].worst):
        out.append(NO_FLOOR)
    if gate.differs is not None:
        every = "; or ".join(c.sentence for c in (gate.differs, *gate.differs.also))
        out.append(f"what differs at all, though rounding may explain how far: {every}")
    out += _floors(gate, floors)
    if gate.forced:
        out.append(f"mine's tokens were golden's ({safe(gate.forced)}): a flip is a token that is not mine's own best")
    out += [
        "",
        "how far the log-probabilities of the chosen tokens are apart, in nats (distance and floor: root mean square",
        "over all listed tokens, of mine from the nearest right server, and of the right ones from one another):",
    ]
    return [*out, *_aligned([_HEADER, *map(_row, gate.cells)]), *_flips(gate), *_left_out(gate)]


ALONG = "with golden's token ids for both: "
"""What is in front of the numbers' verdict where mine renders other ones."""


def rendered_lines(chats: Rendering) -> list[str]:
    """The first finding, and which other prompts have one."""
    if not chats.different:
        return []
    first, *others = chats.different
    out = [f"FAIL: {safe(first.sentence, 600)}"]
    if others:
        named = [safe(gap.name) for gap in others[:MAX_WORST]] + ["more"] * (len(others) > MAX_WORST)
        out.append(f"{len(chats.different):,} of {count(chats.compared, 'chat')} differ: also {', '.join(named)}")
    return out


def _aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table whose first ``left`` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([v.ljust(w) if i < left else v.rjust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True))]
             for row in rows)  # fmt: skip
    return ["  " + "  ".join(row).rstrip() for row in cells]


def headline(gate: Gate) -> str:
    """Of the numbers: ``FAIL: further away than ..., only decode (24 prompts, p = 0.0001, 6.1 times the floor)``."""
    if gate.numbers is None and gate.p is not None:
        return f"UNDECIDED: no difference is seen (p = {num(gate.p, 2)}), but {gate.why}"
    if gate.numbers is None:
        return f"no verdict: {gate.why}"
    if gate.numbers == "pass" and gate.cells[0].worst == 0:
        return f"PASS: the same numbers in every compared token ({count(gate.prompts, 'prompt')})"
    size = "" if gate.times is None else f", {num(gate.times)} times the floor"
    against = "servers known to be right are from one another" if gate.floors else "golden is from itself in batches"
    if gate.numbers == "fail":
        text = f"FAIL: further away than {against}"
        text += f", {gate.condition.sentence}" if gate.condition else ""
    else:
        text = f"PASS: no further away than {against}"
        if gate.floors and gate.p_batching is not None and gate.p_batching <= gate.rate:
            text += f", though further than golden's own batches (p = {num(gate.p_batching, 2)})"
    return f"{text} ({count(gate.prompts, 'prompt')}, p = {num(gate.p, 2)}{size})"


def shown(gate: Gate) -> str | None:
    """``these 24 prompts would have shown 1.7 times the floor in all tokens, 2.2 in prefill``: what a pass excludes."""
    if gate.numbers != "pass" or gate.power is None:
        return None
    sizes = [f"{num(one.times, 2)} times the floor in {one.condition}" if one.times else
             f"any difference in {one.condition}" for one in gate.power.shown]  # fmt: skip
    return f"these {count(gate.prompts, 'prompt')} would have shown {', '.join(sizes)}"


def _floors(gate: Gate, names: Sequence[str]) -> list[str]:
    near = "golden" if gate.nearest == 0 else f"floor {gate.nearest - 1}"
    text = []
    for i, size in enumerate(gate.floors):
        name = f" ({safe(names[i])})" if i < len(names) else ""
        text.append(f"floor {i}{name}: {num(size)} nats from golden")
    return [*text, f"mine is nearest to {near}"] if text else []


def _row(c: Any) -> list[str]:
    sizes = (c.median, c.p99, c.worst, c.kl, c.mean, c.golden_self, c.mine_self, c.away, c.floor)
    return [c.condition, f"{c.n:,}", f"{c.flips:,}", *map(num, sizes)]


def _flips(gate: Gate) -> list[str]:
    each = [(name, t) for name, tokens in gate.across.by_prompt.items() for t in tokens if t.flipped]
    flips = list({(name, t.position): (name, t) for name, t in each}.values())  # several passes may have it
    flips.sort(key=lambda f: -min(f[1].golden_margin or 0.0, f[1].mine_margin or 0.0))
    text = [
        f"  {safe(name)}, {'position' if t.scored else 'token'} {t.position if t.scored else t.ordinal}: "
        f"margins {num(t.golden_margin)} and {num(t.mine_margin)}"
        for name, t in flips[:MAX_FLIPS]
    ]
    if not flips:
        return []
    head = f"{count(len(flips), 'token')} flipped, those with the largest margins first; a small margin is a coin toss:"
    return [head, *text]


def _left_out(gate: Gate) -> list[str]:
    out = [f"not compared: {count(gate.across.after, 'token')} after a flip"] if gate.across.after else []
    out += [f"not compared: {n:,} {what}" for what, n in gate.across.skipped.items()]
    return out + [f"note: {note}" for note in gate.notes]


def gap_json(gate: Gate, floors: Sequence[str] = ()) -> dict[str, Any]:
    """For programs. verdict is null without a floor, and with too few prompts; p and times are null where there is
    none."""
    flips = Counter(name for name, tokens in gate.across.by_prompt.items() for t in tokens if t.flipped)
    names = [*floors, *[""] * len(gate.floors)]
    return {
        "schema": 1, "verdict": gate.verdict, "why": gate.why,
        "condition": None if gate.condition is None else asdict(gate.condition),
        "differs": None if gate.differs is None else asdict(gate.differs), "p": gate.p,
        "p_batching": gate.p_batching, "times": gate.times,
        "power": None if gate.power is None else asdict(gate.power), "false_alarm_rate": gate.rate,
        "prompts": gate.prompts, "forced": gate.forced, "nearest": gate.nearest,
        "floors": [{"name": names[i], "distance": _finite(size)} for i, size in enumerate(gate.floors)],
        "cells": [{k: _finite(v) for k, v in asdict(c).items()} for c in gate.cells],
        "worst": [{k: _finite(v) for k, v in asdict(w).items()} for w in gate.worst],
        "flipped": dict(flips), "after_flips": gate.across.after, "left_out": dict(gate.across.skipped),
        "notes": list(gate.notes), "numbers": gate.numbers,
        "rendering": None if gate.rendering is None else to_json(gate.rendering),
    }  # fmt: skip


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_SHOWN = 4
"""Modules of a gap that a line names."""


def planned(plan: LocalizePlan) -> list[str]:
    t = plan.target
    word = plan.words[-1]
    found = [
        f"dig: token {t.ordinal} of {safe(t.name)} (position {t.position:,}, pass {t.pass_index}, {safe(word)}), "
        f"{num(t.gap)} nats apart"
    ]
    for window in plan.windows:
        tokens = f"{window.first}-{window.last}" if window.last > window.first else str(window.first)
        names = ", ".join(safe(name) for name in window.requests)
        found.append(f"  captured: {names}; tokens {tokens}, at most {count(window.rows, 'row')}, every module")
    return [*found, *(f"  not captured: {what}" for what in plan.left)]


def localize_lines(dug: Localized) -> list[str]:
    target = dug.plan.target
    found = []
    if dug.gap is not None:
        found.append(f"  the token's gap: {num(target.gap)} nats in the gate, {num(dug.gap)} while captured")
    if dug.shows is False:
        found.append(f"  THE DIFFERENCE DID NOT SHOW while captured{why(dug)}")
    if dug.origin is None and dug.verdict == "pass":
        found.append("no culprit: in the captured rows every module is the same within rounding")
    elif dug.origin is None:
        found.append(
            "no culprit: the captured rows differ, and no module is beyond its floor by itself (compare's report says "
            "where)"
        )
    else:
        found += culprit(dug)
    return [*found, "look further:", *(f"  {line}" for line in dug.look)]


def why(dug: Localized) -> str:
    if dug.eager:
        return (": the engine was made eager for it; where the fault is one of compiled code or captured graphs, put "
                "VLLM_ACCPROBE_GRAPHS=1 in front of both commands")  # fmt: skip
    return ": it needs a batch or a moment that did not come again"


def culprit(dug: Localized) -> list[str]:
    """The module, its layer, the token, and how much it is above rounding."""
    assert dug.origin is not None
    origin = dug.origin
    module = facts.tap_of(origin)
    layer = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", module)
    at = [f"layer {layer[1]}"] if layer else []
    if dug.token is not None:
        name, index, ordinal = dug.token
        at.append(f"token {ordinal} of {safe(name)} (position {origin['position']}, pass {index})")
    elif origin.get("position") is not None:
        at.append(f"position {origin['position']}")
    found = [f"culprit: {facts.origin_title(origin)}{''.join(f', {x}' for x in at)}"]
    if str(origin.get("role")).startswith("param."):  # no call is wrong: another weight
        found[0] += f": its {safe(origin['role'])} {facts.cause(origin) or 'differs'}"
    above = facts.sentence(origin)
    sizes = f"created error {num(facts.origin_size(origin))}, rounding alone {num(origin.get('floor'))}"
    found.append("  " + "; ".join(x for x in (above, sizes, facts.layers(origin), facts.shape(origin)) if x))
    if gap := facts.gap_of(origin):
        found.append(f"  not seen there: {', '.join(safe(m) for m in gap['contains'][:_SHOWN])}")
    if dug.others:
        found.append(f"  {count(dug.others, 'other independent origin')}, in the comparison's report")
    return found


MAX_WORST = 5
_RATIO_HEADER = ("", "tokens", "mean |dlogp|", "max", "k1", "k3", "ESS", "outside 1/2..2", "outside 0.8..1.2")


def ratio_lines(found: Ratios) -> list[str]:
    """The verdict, the table by position, ratios of tokens and sequences, the worst tokens, what was left out."""
    from vllm_accprobe.gate.trainer import LIMIT

    tokens = sum(s.n for s in found.spans[:1])
    beyond = "above" if found.mult > LIMIT else "within"
    text = f"{found.verdict.upper()}: mean exp|dlogp| {num(found.mult, 4)}, {beyond} {LIMIT}"
    if found.nonfinite:
        text = f"FAIL: {count(found.nonfinite, 'token')} without a finite log-probability; {text.partition(': ')[2]}"
    out = [f"{text} ({count(tokens, 'token')} of {count(found.sequences, 'sequence')}; server: {found.how})", ""]
    out += _aligned([_RATIO_HEADER, *(_ratio_row(s) for s in found.spans)])
    if found.quantiles:
        out += ["", f"ratio of a token, trainer / server, at 0.1, 1, 50, 99 and 99.9%: {_listed(found.quantiles)}"]
        out += [
            f"of a sequence: geometric mean {_listed(found.geometric)}; log of the product {_listed(found.product)}"
        ]
        whole = found.sequence_ess * found.sequences
        out += [f"effective sample size of the sequences: {num(whole)} of {found.sequences:,}"]
        out += [f"probabilities |p - q|: mean {num(found.prob_mean)}, max {num(found.prob_worst)}"]
        apart = [one for one in found.worst if one[2] != one[3]]
        out += ["furthest apart:"] if apart else []
        for name, ordinal, p, q in apart[:MAX_WORST]:
            out.append(f"  {safe(name)}, answer's token {ordinal}: trainer {num(p, 4)}, server {num(q, 4)}")
    return out + [f"not compared: {n:,} {why}" for why, n in found.left_out.items()]


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(num(v) for v in values)


def _ratio_row(s: Span) -> tuple[str, ...]:
    shares = [f"{v:.2%}" for v in (s.beyond, s.clipped)]
    return (s.where, f"{s.n:,}", num(s.mean), num(s.worst), num(s.k1), num(s.k3), num(s.ess, 4), *shares)


def ratio_json(found: Ratios) -> dict[str, Any]:
    from vllm_accprobe.gate.trainer import LIMIT, QUANTILES

    value = asdict(found)
    worst = [dict(zip(("name", "token", "trainer", "server"), w, strict=True)) for w in value.pop("worst")]
    head = {"schema": 1, "verdict": found.verdict, "limit": LIMIT, "quantiles_at": list(QUANTILES)}
    return head | value | {"worst": worst}


MAX_OUTLIERS = 5
_SELF_HEADER = ("", "must be", "prompts", "tokens", "flips", "unequal", "mean", "worst", "allowed", "p")


def self_check_lines(gate: SelfGate) -> list[str]:
    """The verdict with the outlier's name, a row for each way, the prompts, and what was not compared."""
    out = [_headline(gate), "", "the same answers in another way, how far the log-probabilities are apart, in nats:"]
    findings = [f for f in gate.findings if f.ok is not None]
    table = _aligned([_SELF_HEADER, *(_self_row(f) for f in findings)], 2)
    verdicts = ["", *(("PASS: " if f.ok else "FAIL: ") + f.why for f in findings)]
    out += [f"{line}  {verdict}".rstrip() for line, verdict in zip(table, verdicts, strict=True)]
    for f in gate.findings:
        if f.outliers:
            named = ", ".join(safe(name) for name in f.outliers[:MAX_OUTLIERS])
            more = f" and {len(f.outliers) - MAX_OUTLIERS:,} more" if len(f.outliers) > MAX_OUTLIERS else ""
            out.append(f"{f.way.name} ({f.way.says}): {named}{more}")
    for f in gate.findings:
        if f.ok is None:
            out.append(f"not compared: {f.way.name}: {f.why}")
        out += [f"not compared: {f.way.name}: {n:,} {why}" for why, n in f.left_out.items()]
    return out + [f"note: {note}" for note in gate.notes]


def _headline(gate: SelfGate) -> str:
    known = [f for f in gate.findings if f.ok is not None]
    if not known:
        return "no verdict: nothing could be compared"
    if gate.verdict == "pass":
        equal = all(f.unequal == 0 for f in known if f.way.rule == "the same bits")
        text = "what must be the same to the bit is" if equal else "nothing differs by more than rounding"
        and_ = ", and nothing else differs by more than rounding" if equal else ""
        return f"PASS: {text}{and_} ({count(len(known), 'way')} of asking one server)"
    outliers = [f for f in known if f.way.name in gate.outliers]
    if len(outliers) == 1:
        only = outliers[0]
        return f"FAIL: only {only.way.name} differs: {only.way.says}: {only.why} (p = {num(only.p, 2)})"
    named = f"{', '.join(gate.outliers[:-1])} and {gate.outliers[-1]}"
    rounding = [f for f in known if f.way.rule != "the same bits"]
    if gate.agree and len(outliers) == len(rounding):
        return f"FAIL: {named} all differ from alone and agree with one another: one request at a time is the outlier"
    return f"FAIL: {named} differ" + (" from alone in the same way" if gate.agree else "")


def _self_row(f: PathFinding) -> tuple[str, ...]:
    sizes = [num(v) for v in (f.mean, f.worst, f.allowance)]
    counts = [f"{n:,}" for n in (f.prompts, f.tokens, f.flips, f.unequal)]
    return (f.way.name, f.way.rule, *counts, *sizes, num(f.p, 2))


def self_check_json(gate: SelfGate) -> dict[str, Any]:
    """For programs. verdict is null where nothing was compared."""
    return {
        "schema": 1, "verdict": gate.verdict, "odd": list(gate.outliers), "agree": gate.agree,
        "false_alarm_rate": gate.rate, "ways": [_finding(f) for f in gate.findings], "notes": list(gate.notes),
    }  # fmt: skip


def _finding(f: PathFinding) -> dict[str, Any]:
    value = asdict(f)
    way = value.pop("way")
    return {"name": way["name"], "says": way["says"], "must_be": way["rule"], "against": way["against"], **value}


MAX_CONTRASTS = 20

COLUMNS = (
    "task", "filter", "metric", "kind", "pairs", "golden", "mine", "difference", "low", "high", "p", "beyond_chance",
    "lost", "won", "questions_needed", "smallest_seen", "left_out",
)  # fmt: skip


def evaluation_lines(e: Evaluation, shown: int = MAX_CONTRASTS) -> list[str]:
    """The verdict, what it rests on, each metric, what flipped, and what was not compared."""
    beyond = sum(c.beyond for c in e.contrasts)
    if e.texts:
        return _texts(e) + _not_compared(e)
    n, total = len(e.matched.pairs), count(len(e.contrasts), "comparison")
    head = "no difference beyond chance" if not beyond else f"{beyond} beyond chance"
    word = "FAIL" if beyond else "PASS"
    out = [f"{word}: {head} in {total}, {count(n, 'pair')} (rate of false alarms {num(e.rate)} in all)"]
    ordered = sorted(e.contrasts, key=lambda c: (not c.beyond, not c.together, c.p))
    out += [f"  {sentence(c, len(e.contrasts), e.rate)}" for c in ordered[:shown]]
    out += [f"  {line}" for line in more(len(ordered), shown, "--verbose, --csv")]
    return out + _flipped(e) + _not_compared(e)


def _texts(e: Evaluation) -> list[str]:
    """Of answers without scores: how many are not the same text, and where the first ones part."""
    n, documents = count(len(e.matched.pairs), "answer"), Documents()
    if not e.flips:
        return [f"PASS: {n}, each the same text on both sides (no scores on both sides)"]
    out = [f"UNDECIDED: {len(e.flips):,} of {n} are not the same text; without scores on both sides, whether mine is "
           "worse is not tested"]  # fmt: skip
    for f in e.flips[:MAX_FLIPS]:
        golden, mine = (response(a.place, documents) for a in (f.golden, f.mine))
        alike = takewhile(lambda both: both[0] == both[1], zip(golden, mine, strict=False))
        same = sum(1 for _ in alike)
        a, b = (safe(repr(text[same : same + 24])) for text in (golden, mine))
        where = safe(" ".join(filter(None, (f.golden.task, f.golden.name))))
        out.append(f"  {where}: equal up to character {same:,}, then golden {a}, mine {b}")
    out += [f"  {line}" for line in more(len(e.flips), MAX_FLIPS, "--json; --prompts-out writes their prompts")]
    empty = [sum(pair[side].response == digest("") for pair in e.matched.pairs) for side in (0, 1)]
    if any(empty):
        out.append(f"empty answers: golden {empty[0]:,}, mine {empty[1]:,}")
    return [*out, "to test right and wrong, name the scored files: results/ of OpenCompass or AISBench "
            "(--dump-eval-details), evalscope's reviews/"]  # fmt: skip


def sentence(c: Contrast, among: int, rate: float) -> str:
    """``gsm8k exact_match: golden 26 of 50, mine 24: nothing to be seen (p = 0.69; ...); 587 questions would ...``"""
    name = safe(label(c.task, c.way, c.metric))
    if c.binary:
        sides = f"golden {round(c.golden * c.n):,} of {c.n:,}, mine {round(c.mine * c.n):,}"
    else:
        sides = f"golden {num(c.golden, 4)}, mine {num(c.mine, 4)} ({count(c.n, 'question')})"
    what = "a drop" if c.difference < 0 else "a rise"
    text = f"{what} beyond chance" if c.beyond else "nothing to be seen"
    if not c.beyond and c.p <= rate:
        text += f", among {among:,} comparisons"
    spread = (
        f"mine - golden {_signed(c, c.difference)}, {LEVEL:.0%} between {_signed(c, c.low)} and {_signed(c, c.high)}"
    )
    return f"{name}: {sides}: {text} (p = {num(c.p, 2)}; {spread}){_questions(c, what)}"


def _signed(c: Contrast, value: float) -> str:
    if not math.isfinite(value):
        return "any number"
    return f"{100 * value:+.1f} points" if c.binary else f"{value:+.3g}"


def _questions(c: Contrast, what: str) -> str:
    if c.beyond:
        return ""
    if c.needed is not None:
        # By the formula fewer may do than there are: the exact test, and Holm's rule, require a little more.
        enough = max(c.needed, c.n + 1)
        return f"; {enough:,} questions would be needed to see {what} of this size ({POWER:.0%} of the time)"
    if c.smallest is not None:
        return f"; with {c.n:,} questions less than {100 * c.smallest:.1f} points would not be seen"
    return ""


def _flipped(e: Evaluation) -> list[str]:
    out = []
    if e.flips:
        lost, won = (sum(bool(getattr(f, way)) for f in e.flips) for way in ("lost", "won"))
        out.append(f"{count(len(e.flips), 'question')} flipped: {lost:,} lost, {won:,} won")
        for f in e.flips[:MAX_FLIPS]:
            ways = [f"{word} {', '.join(names)}" for word, names in (("lost", f.lost), ("won", f.won)) if names]
            out.append(f"  {safe(' '.join(filter(None, (f.golden.task, f.golden.name))))}: {safe('; '.join(ways))}")
        out += [f"  {line}" for line in more(len(e.flips), MAX_FLIPS, "--json; --prompts-out writes their prompts")]
    if n := e.matched.other_responses:
        out.append(f"the text of {count(n, 'response')} is not the same on both sides")
    return out


def _not_compared(e: Evaluation) -> list[str]:
    m, out = e.matched, []
    if m.other_prompts:
        out.append(f"note: {count(m.other_prompts, 'question')} had another prompt in mine (template, examples before "
                   "it): the evaluations differ before any server does")  # fmt: skip
    for side, only in (("golden", m.only_golden), ("mine", m.only_mine)):
        out += [f"only in {side}: {line}" for line in _by_task(only)]
    out += [f"left out: {n:,} {safe(what)}" for what, n in m.left_out.items()]
    out += [
        f"left out: {n:,} {NO_NUMBER}, {safe(name)} (a metric of all questions together)" for name, n in e.no_numbers
    ]
    out += [
        f"left out: {c.left_out:,} {NO_NUMBER}, {safe(label(c.task, c.way, c.metric))}"
        for c in e.contrasts
        if c.left_out
    ]
    return out + [f"note: {safe(note, 400)}" for note in m.notes]


def _by_task(only: Counter[tuple[str, str]]) -> list[str]:
    named = [
        f"{count(n, 'answer')} of {safe(label(task, way, '')) or 'the file'}" for (task, way), n in only.most_common()
    ]
    return [*named[:MAX_FLIPS], *more(len(named), MAX_FLIPS, "--json")]


def write_csv(e: Evaluation, path: Path) -> None:
    write_csv_lines(path, COLUMNS, map(_evaluation_row, e.contrasts))


def _evaluation_row(c: Contrast) -> tuple[object, ...]:
    kind = "right or wrong" if c.binary else "score"
    names, sides = (cell(c.task), cell(c.way), cell(c.metric), kind), (c.n, c.golden, c.mine)
    return (*names, *sides, c.difference, c.low, c.high, c.p, c.beyond, c.lost, c.won, c.needed, c.smallest, c.left_out)


def side_lines(side: Side) -> list[str]:
    """One run: its tasks and metrics, and what reads two."""
    scores: dict[tuple[str, str, str], list[float | None]] = defaultdict(list)
    for a in side.answers:
        for metric, value in (a.scores or {"": None}).items():
            scores[a.task, a.way, metric].append(value)
    out = [f"{side.tool}: {count(len(side.answers), 'answer')}"]
    for where, values in scores.items():
        known = [v for v in values if v is not None]
        mean = f"mean {num(sum(known) / len(known), 4)} of" if known else "no score of"
        out.append(f"  {safe(label(*where)) or '?'}: {mean} {len(known or values):,}")
    out += [f"left out: {n:,} {what}" for what, n in side.left_out.items()] + [f"note: {safe(n)}" for n in side.notes]
    return [*out, "two runs are compared by `accprobe eval-diff A B`"]


def read_json(golden: Side, mine: Side) -> dict[str, object]:
    """Of each side: the path, the tool, and what is no answer."""
    sides = (("golden", golden), ("mine", mine))
    return {name: {"path": str(s.path), "tool": s.tool, "left_out": dict(s.left_out)} for name, s in sides}


def nothing_compared(e: Evaluation, golden: Side, mine: Side) -> str:
    """Why nothing could be paired, in one line."""
    m = e.matched
    if not golden.answers or not mine.answers:
        return "nothing is left of one side: --tasks, --filters and --metrics choose nothing there"
    if e.no_numbers:
        return f"no metric has a number for each question ({', '.join(name for name, _ in e.no_numbers)})"
    if m.pairs:
        return "the two sides have no metric in common"
    if m.left_out:
        return "; ".join(f"{n:,} {what}" for what, n in m.left_out.items())
    tasks = [", ".join(sorted({a.task or "?" for a in s.answers})[:5]) for s in (golden, mine)]
    had = [f"{s.path} has {len(s.answers):,} answers ({t})" for s, t in zip((golden, mine), tasks, strict=True)]
    return f"no question is on both sides: {'; '.join(had)}; another task, version or order of choices?"


def plan_lines(axes: Sequence[ServerSetting], usual: int, most: int, kept: int) -> list[str]:
    if not axes:
        return ["nothing to vary: every setting of the command is plain already"]
    rows = [("setting", "the command", "plain"), *((a.name, a.value, a.plain) for a in axes)]
    widths = [min(max(len(r[i]) for r in rows), 48) for i in range(3)]
    out = [f"{count(len(axes), 'setting')} of the command can be made plain:"]
    for axis, row in zip([None, *axes], rows, strict=True):
        cells = "  ".join(safe(v).ljust(w) for v, w in zip(row, widths, strict=True)).rstrip()
        parts = f"  ({count(len(axis.parts), 'part')})" if axis and axis.parts else ""
        out.append(f"  {cells}{parts}")
    out.append(
        f"about {usual} runs for one culprit, {most} at the most"
        + f"{', and those of its parts' * any(a.parts for a in axes)}; {2 ** len(axes):,} combinations"
        + (f"; {count(kept, 'run')} of a bisection before {'is' if kept == 1 else 'are'} kept" if kept else "")
    )
    return out


def plan_json(axes: Sequence[ServerSetting], usual: int, most: int, kept: int) -> dict[str, Any]:
    return {
        "schema": 1, "verdict": None, "axes": [_axis(a) for a in axes], "runs_expected": usual, "runs_most": most,
        "kept": kept, "combinations": 2 ** len(axes),
    }  # fmt: skip


def _axis(a: ServerSetting) -> dict[str, Any]:
    return {"name": a.name, "value": a.value, "plain": a.plain, "parts": len(a.parts)}


def bisect_lines(found: Found, rows: Sequence[TrialRow], seconds: float, line: Callable[..., str]) -> list[str]:
    """The verdict, each set with its commands, and what could not be tried. line: the command for (names as in the
    command, axes that are apart), None for those of the command itself."""
    out = [_bisect_lines_headline(found)]
    for cause in found.causes:
        out += ["", *_cause(cause, found, line)]
    ran = sum(not row.tried.kept for row in rows)
    before = f", {len(rows) - ran} of them kept from before" if ran < len(rows) else ""
    out += ["", f"{count(len(rows), 'run')}{before}, of {2 ** len(found.axes):,} combinations; {_time(seconds)}"]
    if found.equal:
        out.append(f"left out, because both engines' logs tell the same: {', '.join(found.equal)}")
    if found.held:
        out.append(f"left as in the command, because plain does not start without: {', '.join(found.held)}")
    unresolved = [row for row in rows if row.outcome.kind == "unresolved"]
    if unresolved:
        out.append(f"{count(len(unresolved), 'configuration')} could not be tried:")
        out += [f"  {', '.join(row.bad) or 'everything plain'}: {safe(row.outcome.why, 400)}" for row in unresolved]
    if any(row.outcome.smaller for row in rows):
        out.append("runs that differ, but by much less than the command, count as pass (--share)")
    return out


def _bisect_lines_headline(found: Found) -> str:
    if found.verdict is None:
        return f"nothing could be tried: {safe(found.why, 400)}"
    bad = found.bad
    far = f" ({num(bad.size)} nats from golden)" if bad is not None and bad.size else ""
    if found.verdict == "same":
        if far:
            return f"no cause is searched: batching and rounding explain what the command differs by{far}"
        return "nothing differs: the command gives what golden gives, so nothing among these settings makes it"
    if found.verdict == "elsewhere":
        plain = "" if found.plain is None else f" ({num(found.plain.size)} nats)"
        return f"none of these settings: the plain configuration fails, too{plain}, as the command does{far}"
    sets = " | ".join(" + ".join(cause.names) for cause in found.causes)
    text = f"found: {safe(sets, 400)}{far}"
    return f"inconsistent: {text}; an outcome changed when it was repeated" if found.verdict == "inconsistent" else text


def _cause(cause: Cause, found: Found, line: Callable[..., str]) -> list[str]:
    out = []
    for axis in cause.settings:
        out.append(f"  {safe(axis.name)}: {safe(axis.value)} (plain: {safe(axis.plain)})")
    without = cause.without
    out.append(f"  this set alone, everything else plain: {cause.alone.kind} ({num(cause.alone.size)} nats)")
    it = "it and the sets before" if cause.before else "it"
    out.append(f"  the command without {it}: {without.kind} ({num(without.size)} nats)")
    for name, outcome in cause.each.items():
        out.append(f"  the command without {safe(name)} alone: {outcome.kind}")
    for name, (low, high) in cause.limits.items():
        out.append(f"  {safe(name)}: {low:,} fails, {high:,} passes")
    out += [f"  not the same twice: {text}" for text in cause.flaky]
    bad, plain, passes = line(cause, "fails"), line(cause, "plain"), line(cause, "passes")
    out += ["  fails:", f"    {bad}", "  passes, with everything plain:", f"    {plain}"]
    if without.kind == "pass":
        out += [f"  passes, your command without {it}:", f"    {passes}"]
    return [*out, "  to the operator:", f"    {dig(plain, bad)}"]


def dig(golden: str, mine: str) -> str:
    import shlex

    return f"accprobe gate {shlex.quote(golden)} {shlex.quote(mine)} --localize"


def _time(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def bisect_json(found: Found, rows: Sequence[TrialRow], seconds: float, line: Callable[..., str]) -> dict[str, Any]:
    """For programs. verdict: found, same, elsewhere, inconsistent, or null."""

    def outcome(o: Any) -> dict[str, Any] | None:
        if o is None:
            return None
        return {"outcome": o.kind, "size": o.size, "p": o.p, "smaller": o.smaller, "why": o.why or None}

    causes = []
    for cause in found.causes:
        commands = {what: line(cause, what) for what in ("fails", "plain", "passes")}
        causes.append({
            "settings": [{"name": a.name, "value": a.value, "plain": a.plain} for a in cause.settings],
            "alone": outcome(cause.alone), "without": outcome(cause.without),
            "each": {n: outcome(o) for n, o in cause.each.items()}, "limits": cause.limits, "flaky": cause.flaky,
            "commands": commands | {"dig": dig(commands["plain"], commands["fails"])},
        })  # fmt: skip
    return {
        "schema": 1, "verdict": found.verdict, "why": found.why or None,
        "axes": [_axis(a) for a in found.axes],
        "equal": list(found.equal), "held": list(found.held), "command": outcome(found.bad),
        "plain": outcome(found.plain), "causes": causes, "runs": len(rows),
        "ran": sum(not row.tried.kept for row in rows), "combinations": 2 ** len(found.axes),
        "seconds": round(seconds, 1),
        "trials": [
            {"as_in_the_command": list(row.bad), "values": dict(row.values), "folder": row.tried.key,
             "seconds": row.tried.seconds, "kept": row.tried.kept, "command": row.command,
             "log": str(row.tried.log) if row.tried.log else None} | (outcome(row.outcome) or {})
            for row in rows
        ],
    }  # fmt: skip
