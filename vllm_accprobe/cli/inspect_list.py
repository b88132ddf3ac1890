"""``accprobe inspect DUMP``: the table of tensors, and of the operators that were called, from the journals alone.

The problem: a dump has thousands of tensors, and the first question is which, how large, and is there a NaN. The idea:
one row per record, either aligned for the eye or written as csv; what the table leaves out and what the dump itself
lacks follows it. Not here: rows and lines (report/tensors.py), one tensor in detail (inspect_tensor.py).
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.options import SelectionOptions
from vllm_accprobe.cli.output import answer, print_table, say_written, show, wanted
from vllm_accprobe.dump.reader import Dump, Selection, matches, within
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.formats import ForeignDump, open_dump
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.report.tensors import COLUMNS, CSV, OPERATORS, about, cells, csv_rows, operator_cells, operator_table
from vllm_accprobe.report.text import count
from vllm_accprobe.waiting import progress
from vllm_accprobe.whole_file import whole

_ROWS = 200


def summary(
    dump: Path, opened: Dump | None, names: list[str], chosen_by: SelectionOptions, how: Any, named: bool
) -> None:
    """opened: the dump where it is open already; how: inspect.ListOptions; named: another tool's format is printed
    first. Raises CommandError, NothingThere."""
    table, limit = how.csv, how.limit
    if how.tree:
        if names or chosen_by.roles or chosen_by.requests or how.ops or table is not None:
            raise CommandError("--tree shows one step of one rank: it takes --steps, --ranks and --level")
        from vllm_accprobe.cli.convert import tree

        lines = tree(dump, how.level, chosen_by.steps, chosen_by.ranks or "")
        answer(dump=dump, tree=lines)
        show(lines)
        return
    if how.level is not None:
        raise CommandError("--level: how deep --tree shows the model; a table of tensors has no levels")
    limit = limit if limit is not None else 0 if wanted() else _ROWS
    opened = open_dump(dump) if opened is None else opened
    foreign.note_values(opened)
    if named and (kind := getattr(opened, "kind", "")):
        typer.echo(f"format: {kind}")
        answer(format=kind)
    names, text, named_table = _files(opened, names)
    if table is not None and named_table is not None:
        raise CommandError(f"--csv {table} and {named_table}: name one file")
    table = table or named_table
    if table is not None:
        places.check_place(table, [dump], "--csv")
        places.check_own(table, places.csv_with(*CSV[:12]), "--csv")
        places.writable(table.parent, "--csv")
    if text is not None:
        places.check_place(text, [dump], "FILE")
        places.check_own(text, places.matching(r"\A\s*" + r"\s+".join(COLUMNS[:4])))
        places.writable(text.parent, str(text))
    what = chosen_by.selection(names)
    calls: list[Any] = chosen_calls(opened, what) if getattr(opened, "ops", None) else []
    chosen = [] if how.ops else what.apply(opened, padding=True)
    if chosen and table is not None:
        chosen = _with_statistics(opened, chosen)
        _write_csv(opened, chosen, table)
    if chosen and (table is None or text is not None):
        taps = set() if any("::" in name for name in names) else {call.tap for call in calls}
        listed = [(i, r) for i, r in chosen if r.tap not in taps]
        shown = _with_statistics(opened, listed[:limit] if limit and text is None else listed)
        answer(tensors=[dict(zip(CSV, row, strict=True)) for row in csv_rows(opened, shown)] if wanted() else [])
        if shown:
            texts = ("tap", "role", "shape", "dtype")
            print_table(COLUMNS, [cells(i, r) for i, r in shown], texts, folded=("tap",), path=text)
        if len(shown) < len(listed):
            left = len(listed) - len(shown)
            typer.echo(f"... {left:,} more: --limit 0 shows all, --csv FILE writes all, a GLOB or --steps narrows down")
    if calls and table is None and text is None:
        show_operators(opened, calls, limit)
    lines = about(opened, [r for _, r in chosen])
    skipped: Counter[str] = Counter()
    for s in opened.skips:
        skipped[s.reason] += s.count
    answer(dump=dump, about=lines, skipped=skipped)
    show(lines)
    say_written(*(path for path in (table, text) if path is not None and chosen))
    if not chosen and not calls and not getattr(opened, "state_totals", None):
        raise NothingThere(f"{dump}: {_why_none(opened, names, how.ops)}")


def _files(dump: Dump, names: list[str]) -> tuple[list[str], Path | None, Path | None]:
    """(the globs, the .txt file, the .csv file): torch_xray's ``summary x.h5 sum.txt`` names the place to write to.
    Raises CommandError for a file of another kind."""
    globs: list[str] = []
    places: dict[str, Path] = {}
    for name in names:
        suffix = Path(name).suffix
        like_one = suffix in (".txt", ".csv", ".json", ".tsv", ".md", ".xlsx") or Path(name).is_file()
        if not like_one or any(name in (r.tap, r.cls) for r in dump.records):
            globs.append(name)
        elif suffix in (".txt", ".csv") and suffix not in places:
            places[suffix] = Path(name)
        else:
            why = "here globs over taps are named: one FILE.txt or FILE.csv is written to"
            raise CommandError(f"{name} reads like a file, and {why}")
    return globs, places.get(".txt"), places.get(".csv")


def _with_statistics(dump: Dump, chosen: list[tuple[int, Record]]) -> list[tuple[int, Record]]:
    """The same; what has values and no statistics gets them computed, with a bar on a terminal."""
    lacking = sum(foreign.missing(r) for _, r in chosen)
    if not lacking or not isinstance(dump, ForeignDump):  # of our own, what the journal does not say is not there
        return chosen
    with progress("statistics", lacking) as done:
        records, failed = foreign.computed(dump, [r for _, r in chosen], done)
    dump.problems += failed
    return [(i, r) for (i, _), r in zip(chosen, records, strict=True)]


def _why_none(dump: Dump, names: list[str], ops: bool) -> str:
    if not dump.records:
        return "it holds no tensors"
    if ops and not getattr(dump, "ops", None):
        return "it holds no operator calls: capture them with VLLM_ACCPROBE_OPS=1, or `accprobe run --ops`"
    wanted_names = f" {', '.join(names)}" if names else " what was chosen"
    return f"no {'operator' if ops else 'tensor'} matches{wanted_names}; without a GLOB all are listed"


def _write_csv(dump: Dump, chosen: list[tuple[int, Record]], path: Path) -> None:
    with whole(path) as part, open(part, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([CSV, *csv_rows(dump, chosen)])


def chosen_calls(dump: Dump, selection: Selection) -> list[OpCall]:
    """The calls that a selection of tensors means: by names (operator or tap), steps, ranks and ordinals; none where
    requests are chosen, whose rows operators do not know."""
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


def show_operators(dump: Dump, calls: Sequence[OpCall], limit: int) -> None:
    """Prints the table and a line about it."""
    rows = operator_table(dump, calls)
    texts = ("operator", "commonest input")
    shown = rows[:limit] if limit else rows
    answer(operators=[dict(zip(OPERATORS, row, strict=True)) for row in shown])
    print_table(OPERATORS, [operator_cells(row) for row in shown], texts, folded=texts)
    if limit and len(rows) > limit:
        typer.echo(f"... {len(rows) - limit:,} more operators: --limit 0 shows all")
    typer.echo(f"{count(len(calls), 'call')} of {count(len(rows), 'operator')}, of {len(dump.ops):,} captured")
