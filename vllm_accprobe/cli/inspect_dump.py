"""``accprobe inspect DUMP [TAP]``: the table of tensors and of the operators that were called, or one tap in detail.

The problem: a dump has thousands of tensors, and the first question is which, how large, and is there a NaN; after a
report has named a tap, a person wants to see its numbers. The idea: the table is made from the journals alone, aligned
for the eye or as csv; what it leaves out and what the dump itself lacks follows it. Of a tap all records are a small
table, then the first of them (or the only one that the options leave) is shown; all states, all weights, or a
request's prompt. Not here: rows and lines (report/tensors.py, report/prompt.py), two dumps (compare.py).
"""

from __future__ import annotations

import csv
import difflib
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from vllm_accprobe.cli import output_paths
from vllm_accprobe.cli.options import SelectionOptions, ranges
from vllm_accprobe.cli.output import answer, for_program, print_table, say_written, show
from vllm_accprobe.dump.reader import Dump, Ranges, Selection, matches, row_space, rows_of, within
from vllm_accprobe.dump.record_table import ChosenRecords, first_of_each_site, joined
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.formats import ForeignDump, open_dump
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.formats.io import containers
from vllm_accprobe.progress import progress
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.report import tensors
from vllm_accprobe.report.tensors import COLUMNS, CSV, OPERATORS, about, brief, cells, csv_rows
from vllm_accprobe.report.text import count, safe
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
    limit = limit if limit is not None else 0 if for_program() else _ROWS
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
        output_paths.check_place(table, [dump], "--csv")
        output_paths.check_own(table, output_paths.csv_with(*CSV[:12]), "--csv")
    if text is not None:
        output_paths.check_place(text, [dump], "FILE")
        output_paths.check_own(text, output_paths.matching(r"\A\s*" + r"\s+".join(COLUMNS[:4])))
    what = chosen_by.selection(names)
    calls: list[Any] = chosen_calls(opened, what) if getattr(opened, "ops", None) else []
    chosen = ChosenRecords([], np.zeros(0, np.int64)) if how.ops else what.apply(opened, padding=True)
    if chosen and table is not None:
        listed: Sequence[tuple[int, Record]] = _with_statistics(opened, chosen)
        with whole(table) as part, open(part, "w", newline="", encoding="utf-8") as f:
            csv.writer(f).writerows(itertools.chain([CSV], csv_rows(opened, listed)))
    if chosen and (table is None or text is not None):
        taps = set() if any("::" in name for name in names) else {call.tap for call in calls}
        listed = chosen.but(taps)
        shown = _with_statistics(opened, listed[:limit] if limit and text is None else listed)
        answer(tensors=[dict(zip(CSV, row, strict=True)) for row in csv_rows(opened, shown)] if for_program() else [])
        if shown:
            texts = ("tap", "role", "shape", "dtype")
            print_table(COLUMNS, [cells(i, r) for i, r in shown], texts, folded=("tap",), path=text)
        if len(shown) < len(listed):
            left = len(listed) - len(shown)
            typer.echo(f"... {left:,} more: --limit 0 shows all, --csv FILE writes all, a GLOB or --steps narrows down")
    if calls and table is None and text is None:
        show_operators(opened, calls, limit)
    lines = about(opened, chosen)
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
        if not like_one or any(name in (r.tap, r.cls) for r in first_of_each_site(dump.records)):
            globs.append(name)
        elif suffix in (".txt", ".csv") and suffix not in places:
            places[suffix] = Path(name)
        else:
            why = "here globs over taps are named: one FILE.txt or FILE.csv is written to"
            raise CommandError(f"{name} reads like a file, and {why}")
    return globs, places.get(".txt"), places.get(".csv")


def _with_statistics(dump: Dump, chosen: Sequence[tuple[int, Record]]) -> Sequence[tuple[int, Record]]:
    """The same; what has values and no statistics gets them computed, with a bar on a terminal."""
    if not isinstance(dump, ForeignDump):  # of our own, what the journal does not say is not there
        return chosen
    lacking = sum(foreign.missing(r) for _, r in chosen)
    if not lacking:
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


def chosen_calls(dump: Dump, selection: Selection) -> list[OpCall]:
    """The calls that a selection of tensors means: by names (operator or tap), steps, ranks and ordinals; none where
    requests are chosen, whose rows operators do not know."""
    if selection.requests or (selection.roles and not selection.names):
        return []
    known: dict[str, bool] = {}
    found = []
    for call in dump.ops:
        selected = known.get(call.tap)
        if selected is None:
            selected = known[call.tap] = matches(selection.names, (call.tap, call.op, call.op.rpartition(".")[0]))
        steps = not selection.steps or (call.step is not None and within(selection.steps, call.step))
        if selected and steps and within(selection.ranks, call.rank) and within(selection.calls, call.call):
            found.append(call)
    return found


def show_operators(dump: Dump, calls: Sequence[OpCall], limit: int) -> None:
    """Prints the table and a line about it."""
    rows = tensors.operator_table(dump, calls)
    texts = ("operator", "commonest input")
    shown = rows[:limit] if limit else rows
    answer(operators=[dict(zip(OPERATORS, row, strict=True)) for row in shown])
    print_table(OPERATORS, [tensors.operator_cells(row) for row in shown], texts, folded=texts)
    if limit and len(rows) > limit:
        typer.echo(f"... {len(rows) - limit:,} more operators: --limit 0 shows all")
    typer.echo(f"{count(len(calls), 'call')} of {count(len(rows), 'operator')}, of {len(dump.ops):,} captured")


_LISTED = 20
STATES, WEIGHTS = "states", "weights"
"""What TAP says for all findings of the ledger of states, where the run kept one; for the weights over their life."""


def is_tap(dump: Dump, name: str) -> bool:
    """Whether ``name`` is shown in detail: a tap or a record; or else what is neither a glob, nor a file to write to,
    nor a class or an operator, so that the nearest names are of use."""
    if any(name in (r.tap, r.name, f"{r.tap}/{r.role}") for r in first_of_each_site(dump.records)):
        return True
    if any(c in name for c in "*?[!,") or name.endswith((".txt", ".csv")):
        return False
    operators = (word for c in getattr(dump, "ops", ()) for word in (c.op, c.op.rpartition(".")[0]))
    return not any(name == r.cls for r in first_of_each_site(dump.records)) and name not in operators


def show_tap(dump: Path, opened: Dump | None, tap: str, chosen: SelectionOptions, how: Any) -> None:
    """opened: the dump where it is open already; how: inspect.TensorOptions. Raises CommandError, NothingThere."""
    save, request = how.save, chosen.requests
    if how.prompt or how.tokenizer is not None:
        others = tap or chosen.roles or chosen.steps or how.calls or chosen.ranks or how.rows or how.positions
        if others or save is not None or not how.prompt:
            raise CommandError("--prompt takes --requests and --tokenizer alone: inspect DUMP --requests ID --prompt")
        from vllm_accprobe.report.prompt import prompt_lines

        lines = prompt_lines(open_dump(dump), request, how.tokenizer)
        answer(dump=dump, lines=lines)
        show(lines)
        return
    if not tap:
        raise CommandError("name a TAP (`accprobe inspect DUMP` lists them), or --requests ID --prompt")
    if how.rows and (request or how.positions):
        others = "--requests and --positions name them: use one or the other"
        raise CommandError(f"--rows counts rows of the tensor, {others}")
    if save is not None and save.suffix not in (".npy", ".safetensors"):
        raise CommandError(f"--save: {save} must end in .npy or .safetensors")
    if save is not None and save.exists():
        raise CommandError(f"--save: {save} exists: nothing is overwritten; choose another name")
    if save is not None:
        output_paths.check_place(save, [dump], "--save")
    wanted_rows, positions = ranges(how.rows, "--rows"), ranges(how.positions, "--positions")
    opened = open_dump(dump) if opened is None else opened
    lines = []
    if tap == STATES and getattr(opened, "state_totals", None):
        lines = tensors.state_lines(opened, len(opened.states))
    elif tap == WEIGHTS:
        lines = tensors.weight_lines(getattr(opened, "lives", None), whole=True)
    if lines:
        answer(dump=dump, lines=lines)
        show(lines)
        return
    name = _resolve(opened, tap)
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in name)
    found = [r for _, r in chosen.selection([escaped], how.calls).apply(opened, padding=True)]
    if positions:  # the steps that computed one of them
        found = [r for r in found if rows_of(opened, r, request, positions).size]
    if not found:
        raise NothingThere(f"{safe(name)} is in {dump}, but {_what_there_is(opened, name)}")
    if save is not None and len(found) > 1:
        raise CommandError(f"--save: {count(len(found), 'tensor')} match, e.g. {', '.join(map(brief, found[:4]))}: "
                           "narrow down with --roles, --steps, --calls or --ranks")  # fmt: skip
    if len(found) > 1:
        show(brief(r) + "  " + tensors.stats_line(r) for r in found[:_LISTED])
        if len(found) > _LISTED:
            typer.echo(f"... {len(found) - _LISTED:,} more: narrow down with --roles, --steps, --calls or --ranks")
        show(["", "the first of them:"])
    record = found[0]
    answer(dump=dump, matches=found, tensor=record, values=None)
    show(tensors.header(opened, record))
    if record.payload is None:
        typer.echo("only its statistics were stored, no values")
        if save is not None:
            raise CommandError(f"--save: {safe(record.name)} has no values in this dump")
        return
    array = opened.read(record)
    indices = choose(opened, record, wanted_rows, request, positions)
    answer(values=tensors.rows_json(record, array, indices))
    show([*tensors.histogram(array, record.dtype), *tensors.row_lines(opened, record, array, indices)])
    if save is not None:
        array = array if indices is None else array.take(indices, axis=record.row_dim)
        if save.suffix == ".npy":
            containers.save_npy(save, array, record.dtype)
        else:
            containers.save_safetensors(save, record.name, array, record.dtype)
        say_written(save)


def _resolve(dump: Dump, tap: str) -> str:
    """``tap`` as it was typed where it names a tap or a record; raises CommandError with the nearest names."""
    firsts = first_of_each_site(joined(dump.records, dump.padding))
    captured = {r.tap for r in first_of_each_site(dump.records)}
    taps = sorted(captured | {m.tap for ms in dump.modules.values() for m in ms})
    if tap in captured or any(tap in (r.name, f"{r.tap}/{r.role}") for r in firsts):
        return tap
    if tap in taps:
        reasons = sorted({s.reason for s in dump.skips if s.tap == tap})
        why = f" ({', '.join(map(safe, reasons))})" if reasons else ""
        raise CommandError(f"{safe(tap)} is a module of the model, but nothing of it was captured{why}")
    near = difflib.get_close_matches(tap, taps, n=3, cutoff=0.5)
    near += [t for t in taps if tap in t and t not in near][: 5 - len(near)]
    hint = f"; nearest: {', '.join(map(safe, near))}" if near else f"; `accprobe inspect {dump.path}` lists all"
    raise CommandError(f"no tap {safe(tap)} in {dump.path}{hint}")


def _what_there_is(dump: Dump, name: str) -> str:
    records = [r for r in (*dump.records, *dump.padding) if name in (r.tap, f"{r.tap}/{r.role}", r.name)]
    roles = sorted({r.role for r in records})
    steps = sorted({r.step for r in records if r.step is not None})
    at = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    ranks = ", ".join(map(str, sorted({r.rank for r in records})))
    return f"nothing matches the options: it has {safe(', '.join(roles), 300)} at {at}, rank {ranks}"


def choose(dump: Dump, r: Record, numbers: Ranges, requests: Sequence[str], positions: Ranges) -> np.ndarray | None:
    """Indices along dimension ``row_dim`` of the chosen rows; None where none were chosen. Raises CommandError."""
    if not numbers and not requests and not positions:
        return None
    if not r.shape:
        raise CommandError(f"{r.name} is a scalar and has no rows")
    n = r.shape[r.row_dim]
    if numbers:
        past = [high for _, high in numbers if high >= n]
        if past:
            raise CommandError(f"--rows: {r.name} has rows 0 to {n - 1}, not {past[0]}")
        return np.concatenate([np.arange(low, high + 1) for low, high in numbers])
    if row_space(dump, r) is None:
        raise CommandError(f"{r.name} has no row map: choose with --rows")
    found = rows_of(dump, r, requests, positions)
    if not found.size:
        raise CommandError(f"{r.name} has no row of that request and position in this step")
    return found
