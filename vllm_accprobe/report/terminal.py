"""The comparison as lines of text: verdict and culprit first, then what supports them.

The problem: the reader wants to know what is wrong, where and how much, in the first line, also in a CI log. The idea:
each section is a pure function from a `Comparison` to lines; ``lines`` puts them in order, ``render`` colours and
prints. What is left out is counted, and the line says where to see it. Not
here: the headline and other sentences that the page shows too (facts.py); gate's (servers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_accprobe.report import facts, verdict_parts
from vllm_accprobe.report.text import count, more, num, place, safe

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_accprobe.comparison.result import Comparison, Pair

T = TypeVar("T")
QUIET, NORMAL, FULL = 0, 1, 2
"""Verbosity: verdict and notes only; the usual report; nothing left out (plan, all origins and taps)."""


def lines(comparison: Comparison, verbosity: int = NORMAL) -> list[str]:
    return [line for _, line in _styled(comparison, verbosity)]


def render(comparison: Comparison, console: Console, verbosity: int = NORMAL) -> None:
    """Print ``lines`` to a rich ``console``; long lines are left to the terminal, so that a pipe gets them whole."""
    from rich.text import Text

    for style, line in _styled(comparison, verbosity):
        console.print(Text(line, style=style), soft_wrap=True, highlight=False)


def _styled(comparison: Comparison, verbosity: int) -> list[tuple[str, str]]:
    passed = comparison.verdict == "pass"
    checked = verdict_parts.head(comparison) if passed or verbosity > QUIET else []
    sections: list[tuple[str, list[str]]] = [
        ("yellow", notes(comparison)),
        ("bold green" if passed else "bold red", [facts.headline(comparison), *causes(comparison), *checked]),
    ]
    if verbosity > QUIET:
        full = verbosity >= FULL
        builders: list[Callable[[Comparison, bool], list[str]]] = [
            cache_findings,
            other_origins,
            alarms,
            deciding,
            how_they_compute,
            first_divergence,
            worst_pairs,
            flipped_tokens,
            covered,
            coverage,
        ]
        sections += [("", build(comparison, full)) for build in builders]
        if full:
            sections.append(("", plan(comparison)))
        sections.append(("", next_commands(comparison)))
    out: list[tuple[str, str]] = []
    for style, section in sections:
        if not section:
            continue
        if out:
            out.append(("", ""))
        out += [(style, line) for line in section]
    return out


def _list(items: Sequence[T], n: int | None, where: str, say: Callable[[T], list[str]]) -> list[str]:
    """What is reported of the first ``n``, None for all, and where the others are."""
    shown = items[:n]
    return [x for item in shown for x in say(item)] + [f"  {x}" for x in more(len(items), len(shown), where)]


def notes(comparison: Comparison) -> list[str]:
    """What must be known before the verdict is believed: different weights, prompts, ranks that stopped early."""
    return [f"note: {safe(note, 1000)}" for note in comparison.notes]


def causes(comparison: Comparison) -> list[str]:
    """Why the culprit is wrong, where a replay proves it."""
    text = facts.cause(comparison.origins[0]) if comparison.origins else ""
    return [f"cause: {text}"] if text else []


def cache_findings(comparison: Comparison, full: bool = False, n: int = 5) -> list[str]:
    """What mine's ledger of states has found in addition to the headline's, and who else would have been blamed."""
    wrong = facts.wrong_states(comparison)[1:]
    out = [f"{facts.FURTHER}:"] if wrong else []
    out += _list(wrong, None if full else n, "compare.json, states", lambda line: [f"  {line}"])
    if facts.wrong_states(comparison) and (others := facts.operators(comparison)):
        culprit = facts.origin_title(others[0])
        got = "these inputs" if facts.of_runner(comparison.origins[0]) else "that cache"
        out.append(f"without it, the tensors would blame {culprit}, which computed with {got}:")
    return out


def other_origins(comparison: Comparison, full: bool = False) -> list[str]:
    """The culprit's evidence, and further independent origins in data-flow order."""
    if not facts.operators(comparison):
        return []
    culprit, *others = facts.operators(comparison)
    out = [_evidence(culprit)]
    where = verdict_parts.code(comparison.sources, None if facts.gap_of(culprit) else culprit.get("module"))
    sentence = (("gap: ", facts.inside(comparison, culprit)), ("", facts.sentence(culprit)),
            ("shape: ", facts.shape(culprit)), ("graphs: ", facts.graph(culprit)), ("code: ", where))  # fmt: skip
    out += [f"{label}{text}" for label, text in sentence if text]
    out += verdict_parts.neighbour_lines(comparison)
    if others:
        out.append(f"{count(len(others), 'other independent origin')}, in data-flow order:")

        def say(numbered: tuple[int, Any]) -> list[str]:
            return [_other(comparison, *numbered)]

        numbered = [*enumerate(others, len(comparison.origins) - len(others) + 1)]
        out += _list(numbered, None if full else 5, "compare.json, origins", say)
    return out


def _other(comparison: Comparison, number: int, origin: Any) -> str:
    sentence = f"shape: {shape}" if (shape := facts.shape(origin)) else None
    title = f"  {number}. {facts.origin_title(origin)}: {facts.origin_detail(comparison, origin)}"
    graphs = f"graphs: {text}" if (text := facts.graph(origin)) else None
    gap = f"gap: {text}" if (text := facts.inside(comparison, origin)) else None
    cause = f"cause: {text}" if (text := facts.cause(origin)) else None
    return "; ".join(x for x in (title, facts.short(origin), facts.layers(origin), cause, sentence, graphs, gap) if x)


def _evidence(origin: Any) -> str:
    if origin.get("role") == facts.FILE:
        return "evidence: the values alone; files do not say what went into them"
    why = facts.evidence(origin) or safe(origin.get("evidence") or "unknown")
    passed = origin.get("propagated")
    return f"evidence: {why}" + ("" if passed is None else f" (error passed on from its inputs: {num(passed)})")


def alarms(comparison: Comparison, full: bool = False) -> list[str]:
    line = facts.alarms(comparison)
    return [f"by chance: {line}"] if line else []


def deciding(comparison: Comparison, full: bool = False, n: int = 3) -> list[str]:
    steps = comparison.would_decide
    if not steps:
        return []

    return ["this would decide:", *_list(steps, None if full else n, "compare.json, would_decide", _command)]


def _command(step: Mapping[str, str]) -> list[str]:
    return [f"  {safe(step['why'], 400)}:", *(f"    {safe(line, 1000)}" for line in step["command"].splitlines())]


def next_commands(comparison: Comparison) -> list[str]:
    steps = comparison.next_steps
    return ["next:", *(line for step in steps for line in _command(step))] if steps else []


def how_they_compute(comparison: Comparison, full: bool = False, n: int = 10) -> list[str]:
    found = verdict_parts.machine_lines(comparison.machines)
    where = "compare.html, or compare.json, machines"
    text = _list(found, None if full else n, where, lambda line: [f"  {line}"])
    return [f"{verdict_parts.MACHINES_TITLE}:", *text] if found else []


def first_divergence(comparison: Comparison, full: bool = False) -> list[str]:
    line = facts.divergence(comparison)
    return [f"first divergence: {line}"] if line else []


def worst_pairs(comparison: Comparison, full: bool = False, n: int = 10) -> list[str]:
    if not comparison.counts.failed:
        return []
    head = ("x limit", "measure", "value", "limit", "cosine", "step", "pair")
    found = facts.causes(comparison)
    body = [_pair_cells(cause.worst, cause.like) for cause in found[:n]]
    left = more(len(found), n, "compare.html, or compare.csv where status is fail")
    return [f"{facts.title(comparison, n, found)}:", *_aligned([head, *body]), *(f"  {line}" for line in left)]


def _pair_cells(pair: Pair, like: str = "") -> tuple[str, ...]:
    name = safe(pair.golden or pair.mine)
    if pair.mine and pair.golden and pair.mine != pair.golden:
        name += f" ↔ {safe(pair.mine)}"
    where = place(pair.worst_request, pair.worst_position)
    note = ""
    if pair.nonfinite_mismatch:
        note = f"{count(int(pair.nonfinite_mismatch), 'NaN/Inf mismatch', 'NaN/Inf mismatches')}"
    elif pair.message:
        # The first clause of a measured pair says what the columns say.
        note = safe(pair.message if pair.measure is None else pair.message.partition("; ")[2])
    measure, value, limit = facts.decided(pair)
    last = "; ".join(x for x in (name, where, note, like) if x)
    bound = f"1 ± {num(limit, 2)}" if pair.measure == "row_norm_ratio" else num(limit)
    worst = num(value, 4) if pair.measure == "row_norm_ratio" else num(value)
    return facts.over(pair), measure, worst, bound, num(pair.cosine, 6), facts.step_of(pair), last


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned right but for the last, two blanks apart, indented by two."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    return [
        "  " + "  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in table
    ]


def flipped_tokens(comparison: Comparison, full: bool = False, n: int = 10) -> list[str]:
    """Sampled tokens that differ, with how close the choice was on each side (logit of the first minus the second)."""
    flipped = comparison.tokens.get("flipped") or []
    if not flipped:
        return []
    compared = int(comparison.tokens.get("compared") or 0)
    title = f"{len(flipped):,} of {count(compared, 'sampled token')} flipped (margin: first logit minus second):"
    return [title, *_list(flipped, None if full else n, "compare.json, tokens.flipped", _flip)]


def _flip(t: Mapping[str, Any]) -> list[str]:
    return [
        f"  request '{safe(t.get('request'), 80)}', generated token {safe(t.get('ordinal'), 20)}: "
        f"golden {safe(t.get('golden'), 20)} (margin {num(t.get('golden_margin'))}), "
        f"mine {safe(t.get('mine'), 20)} (margin {num(t.get('mine_margin'))})"
    ]


def coverage(comparison: Comparison, full: bool = False, n: int = 3) -> list[str]:
    """What was compared, what only one side has, and what was skipped and why."""
    out = ["coverage:"]
    out += [f"  {label}: {value}" for label, value in facts.coverage_rows(comparison)]
    cov = comparison.coverage
    for side in ("golden", "mine"):
        taps = cov.get(f"taps_only_{side}") or []
        shown = taps if full else taps[:n]
        out += [f"  only in {side}: {safe(tap)}" for tap in shown]
        if len(shown) < len(taps):
            out.append(f"  … {len(taps) - len(shown):,} more only in {side}: compare.json, coverage.taps_only_{side}")
    out += [f"  {what}: {number:,}" for what, number in facts.skip_rows(comparison)]
    return out


def covered(comparison: Comparison, full: bool = False, n: int = 12) -> list[str]:
    total = verdict_parts.totals(comparison)
    if total is None:
        return []
    short = [] if comparison.verdict == "pass" else [f"covered: {total} (compare.json, coverage.by_class)"]
    if short and not full:
        return short
    body = verdict_parts.table(comparison)
    shown = _aligned([verdict_parts.HEAD, *body])[: None if full else n + 1]
    left = more(len(body), len(shown) - 1, "compare.json, coverage.by_class")
    return [*short, f"{verdict_parts.COVERS_TITLE} ({total}):", *shown, *(f"  {line}" for line in left)]


def plan(comparison: Comparison) -> list[str]:
    return ["plan:", *(f"  {safe(line, 1000)}" for line in comparison.plan)] if comparison.plan else []
