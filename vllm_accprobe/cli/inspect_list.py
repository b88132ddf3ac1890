"""``accprobe inspect DUMP``: the table of tensors, and of the operators that were called, from the journals alone.

The problem: a dump has thousands of tensors, and the first question is which, how large, and is there a NaN. The idea:
one row per record, either aligned for the eye or written as csv; what the table leaves out and what the dump itself
lacks follows it. Hundreds of operator calls of a step are alike: they have a row per operator, with its calls, how many
kept their tensors, from how many modules, in how many forms (shapes and dtypes of what went in), the commonest of them,
and the range of what came out. Not here: one tensor in detail (inspect_tensor.py), two dumps (compare.py).
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import inspect_tensor, places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.inspect_tensor import print_lines, shape_text
from vllm_accprobe.cli.options import SelectionOptions
from vllm_accprobe.cli.output import answer, print_table, say_written, size, wanted
from vllm_accprobe.dump.journal import inputs, tensors
from vllm_accprobe.dump.reader import Dump, Selection, matches, row_space, within
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.formats import ForeignDump, open_dump
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.report.text import count, num, safe
from vllm_accprobe.waiting import progress
from vllm_accprobe.whole_file import whole

COLUMNS = ("index", "step", "rank", "tap", "role", "shape", "dtype", "min", "max", "mean", "std", "NaN", "Inf")
MORE = ("class", "call", "rows", "requests", "mutated", "hash", "layout", "bytes", "stored")
"""Further columns of the csv."""
OPERATORS = (
    "operator", "calls", "stored", "modules", "forms", "commonest input", "output min", "max", "NaN", "Inf"
)  # fmt: skip
_ROWS = 200


def summary(
    dump: Path, opened: Dump | None, names: list[str], chosen_by: SelectionOptions, how: Any, named: bool
) -> None:  # fmt: skip
    """opened: the dump where it is open already; how: inspect.ListOptions; named: another tool's format is printed
    first. Raises CommandError, NothingThere."""
    table, limit = how.csv, how.limit
    if how.tree:
        if names or chosen_by.roles or chosen_by.requests or how.ops or table is not None:
            raise CommandError("--tree shows one step of one rank: it takes --steps, --ranks and --level")
        from vllm_accprobe.cli.convert import tree

        lines = tree(dump, how.level, chosen_by.steps, chosen_by.ranks or "")
        answer(dump=dump, tree=lines)
        print_lines(lines)
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
        places.check_own(table, places.csv_with(*COLUMNS[:-2], "nan"), "--csv")
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
        names_of = (*COLUMNS[:-2], "nan", "inf", *MORE)
        answer(tensors=[dict(zip(names_of, row, strict=True)) for row in _rows(opened, shown)] if wanted() else [])
        if shown:
            texts = ("tap", "role", "shape", "dtype")
            print_table(COLUMNS, [_cells(i, r) for i, r in shown], texts, folded=("tap",), path=text)
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
    print_lines(lines)
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
            raise CommandError(
                f"{name} reads like a file, and here globs over taps are named: one FILE.txt or FILE.csv is written to"
            )
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


def about(dump: Dump, chosen: list[Record]) -> list[str]:
    """What the dump holds, what it lacks and why, as lines."""
    records = [*dump.records, *dump.padding]
    stored = {(r.rank, r.payload.seg, r.payload.off): r.payload.nbytes for r in records if r.payload}
    tensors = sum(r.step is not None for r in records)
    steps = len({step for _, step in dump.steps})
    requests = len({(q.id, q.prompt, q.ordinal) for q in dump.requests.values()})
    listed = sum(r.step is not None for r in chosen)
    lines = [
        f"{listed:,} of {count(tensors, 'captured tensor')} and {len(chosen) - listed:,} of "
        f"{count(len(records) - tensors, 'parameter')}; {count(len(dump.ranks), 'rank')}, {count(steps, 'step')}, "
        f"{count(requests, 'request')}, {size(sum(stored.values()))} stored"
    ]
    reasons: Counter[str] = Counter()
    example: dict[str, str] = {}
    for s in dump.skips:
        reasons[s.reason] += s.count
        example.setdefault(s.reason, s.tap)
    for reason, n in reasons.most_common():
        at = f", e.g. at {safe(example[reason])}" if example[reason] else ""
        lines.append(f"skipped: {n:,} x {safe(reason)}{at}")
    lines += inspect_tensor.state_lines(dump)
    lines += inspect_tensor.weight_lines(getattr(dump, "lives", None))
    lines += [f"note: {safe(p, 400)}" for p in dump.problems]
    if dump.errors:
        first = dump.errors[0]
        what = safe(f"{first.get('where', '')}: {first.get('message', '')}", 300)
        lines.append(f"note: {count(len(dump.errors), 'error')} inside the probe; the first at {what}")
    return lines


def _cells(index: int, r: Record) -> list[str]:
    s = r.stats
    values = [num(v, 6) for v in (s.min, s.max, s.mean, s.std)] if s else [num(None)] * 4
    bad = [str(s.nan), str(s.inf)] if s else [num(None)] * 2
    role = safe(r.which)
    step = "param" if r.step is None else str(r.step)
    return [str(index), step, str(r.rank), safe(r.tap), role, shape_text(r.shape), r.dtype, *values, *bad]


def _write_csv(dump: Dump, chosen: list[tuple[int, Record]], path: Path) -> None:
    with whole(path) as part, open(part, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow([*COLUMNS[:-2], "nan", "inf", *MORE])
        writer.writerows(_rows(dump, chosen))


def _rows(dump: Dump, chosen: list[tuple[int, Record]]) -> Iterator[list[Any]]:
    """A row of the csv for each record."""
    for index, r in chosen:
        s = r.stats
        stats: list[Any] = [s.min, s.max, s.mean, s.std, s.nan, s.inf] if s else [None] * 6
        space = row_space(dump, r)
        requests = {dump.requests[key].id for q in (space.segments if space else ())
                    if (key := (r.rank, q.req)) in dump.requests}  # fmt: skip
        shape = shape_text(r.shape)
        yield [index, r.step, r.rank, r.tap, r.role, shape, r.dtype, *stats, r.cls, r.call, r.rows,
               " ".join(sorted(requests)), int(r.mutated), r.hash, r.layout.kind,
               r.payload.nbytes if r.payload else None, int(r.payload is not None)]  # fmt: skip


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


def operator_table(dump: Dump, calls: Sequence[OpCall]) -> list[list[Any]]:
    """The rows of the table, most calls first."""
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


def _operator_cells(row: Sequence[Any]) -> list[str]:
    op, *counts, form, low, high, nan, inf = row
    return [safe(op), *(f"{n:,}" for n in counts), safe(form, 60), num(low, 4), num(high, 4), str(nan), str(inf)]


def _form(tensor: dict[str, Any]) -> str:
    return f"{tensor['dtype']}[{'x'.join(map(str, tensor['shape']))}]"


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def show_operators(dump: Dump, calls: Sequence[OpCall], limit: int) -> None:
    """Prints the table and a line about it."""
    rows = operator_table(dump, calls)
    texts = ("operator", "commonest input")
    shown = rows[:limit] if limit else rows
    answer(operators=[dict(zip(OPERATORS, row, strict=True)) for row in shown])
    print_table(OPERATORS, [_operator_cells(row) for row in shown], texts, folded=texts)
    if limit and len(rows) > limit:
        typer.echo(f"... {len(rows) - limit:,} more operators: --limit 0 shows all")
    typer.echo(f"{count(len(calls), 'call')} of {count(len(rows), 'operator')}, of {len(dump.ops):,} captured")
