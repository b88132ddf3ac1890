"""The operators' part of ``accprobe summary``: which were called, how often, on what, from the journals alone.

The problem: a step has hundreds of operator calls, most of them alike. The idea: a row per operator: its calls, how
many kept their tensors, from how many modules, in how many forms (shapes and dtypes of what went in), the commonest of
them, and the range of what came out. Not here: tensors (summary.py), what an argument may be (dump/opcalls.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.schema import OpCall
    from vllm_accprobe.dump.select import Selection

COLUMNS = ("operator", "calls", "stored", "modules", "forms", "commonest input", "output min", "max", "NaN", "Inf")


def chosen(dump: Dump, selection: Selection) -> list[OpCall]:
    """The calls that a selection of tensors means: by names (operator or tap), steps, ranks and ordinals; none where
    requests are chosen, whose rows operators do not know."""
    from vllm_accprobe.dump.select import matches, within

    if selection.requests or (selection.roles and not selection.names):
        return []
    known: dict[str, bool] = {}
    found = []
    for call in dump.ops:
        wanted = known.get(call.tap)
        if wanted is None:
            wanted = known[call.tap] = matches(selection.names, (call.tap, call.op, call.op.rpartition(".")[0]))
        steps = not selection.steps or (call.step is not None and within(selection.steps, call.step))
        if wanted and steps and within(selection.ranks, call.rank) and within(selection.calls, call.call):
            found.append(call)
    return found


def table(dump: Dump, calls: Sequence[OpCall]) -> list[list[Any]]:
    """The rows of the table, most calls first."""
    from vllm_accprobe.dump.opcalls import inputs, tensors

    kept = {(r.rank, r.step, r.tap, r.call) for r in dump.records if r.payload is not None and "::" in r.tap}
    by_op: dict[str, list[OpCall]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    rows = []
    for op, mine in sorted(by_op.items(), key=lambda item: (-len(item[1]), item[0])):
        forms = Counter(", ".join(_form(t) for t in inputs(call)) for call in mine)
        out = [t for call in mine for t in tensors(call.outputs)]
        out += [t["after"] for call in mine for t in inputs(call) if t["role"] in call.mutates and t.get("after")]
        lows = [t["min"] for t in out if t.get("min") is not None]
        highs = [t["max"] for t in out if t.get("max") is not None]
        stored = sum((c.rank, c.step, c.tap, c.call) in kept for c in mine)
        rows.append(
            [op, len(mine), stored, len({(c.rank, c.module) for c in mine if c.module}), len(forms),
             forms.most_common(1)[0][0], min(lows, default=None), max(highs, default=None),
             sum(_number(t.get("nan")) for t in out), sum(_number(t.get("inf")) for t in out)]
        )  # fmt: skip
    return rows


def _cells(row: Sequence[Any]) -> list[str]:
    from vllm_accprobe.report.text import num, safe

    op, *counts, form, low, high, nan, inf = row
    return [safe(op), *(f"{n:,}" for n in counts), safe(form, 60), num(low, 4), num(high, 4), str(nan), str(inf)]


def _form(tensor: dict[str, Any]) -> str:
    return f"{tensor['dtype']}[{'x'.join(map(str, tensor['shape']))}]"


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def show(dump: Dump, calls: Sequence[OpCall], limit: int) -> None:
    """Prints the table and a line about it."""
    from vllm_accprobe.cli.common.json_answer import answer
    from vllm_accprobe.cli.common.options import print_table
    from vllm_accprobe.report.text import count

    rows = table(dump, calls)
    texts = ("operator", "commonest input")
    shown = rows[:limit] if limit else rows
    answer(operators=[dict(zip(COLUMNS, row, strict=True)) for row in shown])
    print_table(COLUMNS, [_cells(row) for row in shown], texts, folded=texts)
    if limit and len(rows) > limit:
        typer.echo(f"... {len(rows) - limit:,} more operators: --limit 0 shows all")
    typer.echo(f"{count(len(calls), 'call')} of {count(len(rows), 'operator')}, of {len(dump.ops):,} captured")
