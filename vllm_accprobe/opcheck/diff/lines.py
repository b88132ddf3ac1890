"""What opdiff writes: details.csv, result.csv, opdiff.md, and the lines for a terminal, the worst first.

The problem: of a hundred thousand outputs a person wants the operator that mine has wrong, and a script wants every
row. The idea: one table for each; the details are written while they are judged. Columns follow msprobe's
api_precision_compare files in content (ratio and status of every measure, final status, algorithm, message) and
torch_xray's summary in what stands beside (both sides' largest error and counts above 1e-n).
Not here: the judging (verdicts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vllm_accprobe.opcheck import plain_csv
from vllm_accprobe.opcheck.diff.csv_rows import OURS
from vllm_accprobe.opcheck.diff.verdicts import CALL, SHAPES, CallStatuses, Compared, Diff, DiffTotals, is_msprobe
from vllm_accprobe.standards.finding import ERROR, PASS, SKIP, WARNING
from vllm_accprobe.standards.measures import DECADES
from vllm_accprobe.standards.msprobe_ratios import LABELS

JUDGED = (
    *LABELS.values(), "inf_nan_err_ratio", "rel_err_ratio", "abs_err_ratio", "binary_err_ratio", "ulp_mean",
    "ulp_share", "ulp_share_ratio", "dual_1000", "error_balance",
)  # fmt: skip
"""Columns that details.csv has under every standard, some of which have more (MachineRule.columns)."""
BESIDE = ("max_abs_err", "cosine", "rel_l2", *DECADES)
STEP = 1000
"""Rows between two signs of progress."""


def identity(diff: Diff) -> tuple[str, ...]:
    """The columns in front: what identifies an output, then dtype and shape."""
    return (*(("api_name",) if is_msprobe(diff) else diff.keys), "dtype", "shape")


def write_details(
    diff: Diff, path: Path, totals: DiffTotals, done: Callable[[], object] = lambda: None,
    also: Callable[[Compared], object] = lambda compared: None,
) -> None:  # fmt: skip
    """A row for each output of either file; adds all to ``totals``. Whole or not at all. done: called every STEP rows;
    also: told of each. Raises OSError, SheetError."""
    numbers = tuple(dict.fromkeys((*JUDGED, *diff.rule.columns)))
    header = (
        *identity(diff), "api", "algorithm", "level", "status", "message",
        *(c for name in numbers for c in (name, f"{name}_status")),
        *(f"{side}_{name}" for name in BESIDE for side in ("golden", "mine")),
    )  # fmt: skip

    def cells() -> Iterator[list[object]]:
        for number, c in enumerate(diff.rows(), 1):
            totals.add(c)
            also(c)
            if not number % STEP:
                done()
            yield _details(c, numbers)

    plain_csv.write_rows(path, header, cells())


def _details(c: Compared, names: Sequence[str]) -> list[object]:
    judged = {j.name: j for j in c.finding.judged}
    numbers: list[object] = []
    for name in names:
        found = judged.get(name)
        numbers += [found.value, found.status] if found else [None, None]
    sides = (c.golden, c.mine)
    beside = [None if side is None else side.value(name) for name in BESIDE for side in sides]
    row = c.row
    said = c.api, c.finding.algorithm, c.level, c.finding.status, c.finding.message
    return [_cell(v) for v in (*row.key, row.dtype, row.shape, *said, *numbers, *beside)]


def write_result(diff: Diff, path: Path, totals: DiffTotals) -> None:
    """A row for each call: its outputs' worst status, forward and backward. Raises OSError."""
    names = ("api_name",) if is_msprobe(diff) else tuple(k for k in diff.keys if k != "role")
    header = (*names, "api", "forward", "backward", "outputs", "algorithm", "message")
    plain_csv.write_rows(path, header, (_result(key, call) for key, call in totals.calls.items()))


def _result(key: Sequence[str], call: CallStatuses) -> list[object]:
    outputs = len(call.forward) + len(call.backward)
    values = *key, call.api, *call.statuses, outputs, ", ".join(sorted(call.algorithms)), call.message
    return [_cell(v) for v in values]


def _cell(value: object) -> object:
    return plain_csv.inert(value) if isinstance(value, str) else value


def lines(diff: Diff, totals: DiffTotals, most: int | None = 10) -> list[str]:
    """For a terminal. most: how many outputs are shown; None: all that were kept."""
    out = [sentence(diff, totals)]
    shown = totals.worst_first()[:most]
    out += [f"  {c.finding.status:<7}  {_where(c, diff)}: {safe(c.finding.message)}" for c in shown]
    hidden = totals.statuses[ERROR] + totals.statuses[WARNING] - len(shown)
    if hidden > 0:
        out.append(f"  ... {hidden:,} more: details.csv has all" + ("" if most is None else ", --verbose shows more"))
    out += ["", f"{'operator':<36} {'outputs':>8} {'pass':>7} {'warning':>7} {'error':>7} {'skip':>7}"]
    for name, counts in operators(totals):
        numbers = [counts[s] for s in (PASS, WARNING, ERROR, SKIP)]
        out.append(f"{safe(name, 36):<36} {sum(numbers):>8} " + " ".join(f"{n:>7}" for n in numbers))
    if totals.algorithms:
        out += ["", "judged by: " + ", ".join(f"{name} {n:,}" for name, n in totals.algorithms.most_common())]
    return out + left_out(diff, totals)


def sentence(diff: Diff, totals: DiffTotals) -> str:
    """The first line."""
    paired = sum(totals.statuses.values())
    share = f"{totals.judged:,} of {paired:,} outputs judged by {diff.standard}"
    alone = sum(totals.alone.values())
    if alone:
        share += f" ({alone:,} more are in one file only)"
    errors, warnings = totals.statuses[ERROR], totals.statuses[WARNING]
    more = f", {warnings:,} {'warning' if warnings == 1 else 'warnings'}" if warnings else ""
    if not errors:
        return f"PASS: {share}, none is wrong beside golden{more}"
    first = totals.worst_first()[0]
    wrong = sum(1 for counts in totals.operators.values() if counts[ERROR])
    where = f"{wrong} {'operator' if wrong == 1 else 'operators'}"
    return f"FAIL: {share}, {errors:,} wrong in {where}{more}, worst {_where(first, diff)}"


def operators(totals: DiffTotals) -> list[tuple[str, dict[str, int]]]:
    """Those with the most errors first, then warnings, then the most outputs."""

    def weight(item: tuple[str, dict[str, int]]) -> tuple[int, int, int, str]:
        name, counts = item
        return -counts[ERROR], -counts[WARNING], -sum(counts.values()), name

    return sorted(((name, dict.fromkeys((PASS, WARNING, ERROR, SKIP), 0) | dict(c)) for name, c in
                   totals.operators.items()), key=weight)  # fmt: skip


def left_out(diff: Diff, totals: DiffTotals) -> list[str]:
    """Everything that was not judged, counted."""
    out = [f"  {n:>7}  outputs: {safe(why)}" for why, n in totals.skipped.most_common()]
    for side, sheet in (("golden", diff.golden), ("mine", diff.mine)):
        if totals.alone[side]:
            out.append(f"  {totals.alone[side]:>7}  outputs: only in {safe(str(sheet.path))} ({side})")
    apart = totals.skipped[SHAPES] + sum(totals.alone.values())
    if diff.by == CALL and diff.golden.kind == OURS and apart > totals.judged:
        out.append("  few calls meet; did the runs batch differently? --by tap judges a module's calls together")
    return ["", "not judged:", *out] if out else []


def markdown(diff: Diff, totals: DiffTotals) -> str:
    """opdiff.md: what is wrong, by output and by operator, and what was not judged."""
    out = [f"# {sentence(diff, totals)}", "", f"Golden: `{diff.golden.path}`; mine: `{diff.mine.path}`.", ""]
    shown = totals.worst_first()
    if shown:
        out += [
            "| status | output | dtype | shape | algorithm | beyond | why |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for c in shown:
            beyond = f"{c.finding.severity:.3g}x" if math.isfinite(c.finding.severity) else "must be 0"
            cells = (
                c.finding.status,
                _where(c, diff),
                c.row.dtype,
                c.row.shape,
                c.finding.algorithm,
                beyond,
                c.finding.message,
            )
            out.append("| " + " | ".join(_md(x) for x in cells) + " |")
        hidden = totals.statuses[ERROR] + totals.statuses[WARNING] - len(shown)
        out += (["", f"{hidden:,} more are in details.csv."] if hidden > 0 else []) + [""]
    out += ["| operator | outputs | pass | warning | error | skip |", "| --- | --- | --- | --- | --- | --- |"]
    for name, counts in operators(totals):
        numbers = [counts[s] for s in (PASS, WARNING, ERROR, SKIP)]
        out.append(f"| {_md(name)} | {sum(numbers)} | " + " | ".join(map(str, numbers)) + " |")
    rest = left_out(diff, totals)
    if rest:
        out += ["", "Not judged:", "", *(f"- {_md(' '.join(line.split()))}" for line in rest[2:])]
    return "\n".join(out) + "\n"


def _where(c: Compared, diff: Diff) -> str:
    row = c.row
    if row.api:
        return safe(row.key[0])
    named = dict(zip(diff.keys, row.key, strict=True))
    front = [row.op or row.cls, *(named[k] for k in ("tap", "role") if named.get(k) and named[k] != row.op)]
    behind = [f"{k} {named[k]}" for k in ("rank", "step", "call") if named.get(k)]
    return safe(" ".join(front) + (f" ({', '.join(behind)})" if behind else ""))


def _md(text: str) -> str:
    return safe(text).replace("|", "\\|").replace("<", "&lt;")


def safe(text: str, most: int = 240) -> str:
    """Printable, in one line, not endless: names come from files."""
    return plain_csv.safe(" ".join(text.split()), most)
