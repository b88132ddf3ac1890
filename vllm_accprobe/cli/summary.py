"""``accprobe summary DUMP``: the table of tensors, from the journals alone.

The problem: a dump holds thousands of tensors, and the first question is which, how large, and is there a NaN. The
idea: one row per record, made once and either aligned for the eye or written as csv; what the table leaves out and what
the dump itself lacks is said below it. Not here: one tensor in detail (show.py), two dumps (compare.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli.common.declared import DUMP, LEVEL, NAMES, RANK, REQUEST, ROLE, STEP
from vllm_accprobe.cli.common.json_answer import answer, say_written, wanted
from vllm_accprobe.cli.common.options import CommandError, NothingThere, print_table, selection, size, writable
from vllm_accprobe.cli.common.values import shape_text

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.schema import Record

COLUMNS = ("index", "step", "rank", "tap", "role", "shape", "dtype", "min", "max", "mean", "std", "NaN", "Inf")
MORE = ("class", "call", "rows", "requests", "mutated", "hash", "layout", "bytes", "stored")
"""Further columns of the csv."""
_ROWS = 200


def summary(
    dump: Path = DUMP,
    names: list[str] = NAMES,
    step: str = STEP,
    rank: str = RANK,
    role: list[str] = ROLE,
    request: list[str] = REQUEST,
    csv: Path = typer.Option(
        None, "--csv", metavar="FILE", help="Write a csv there: all chosen tensors, in full precision."
    ),
    limit: int = typer.Option(
        None, "--limit", min=0, metavar="N", help="At most so many, rows of a table: 200, in json all; 0 for all."
    ),
    ops: bool = typer.Option(False, "--ops", help="Operators only: calls, shapes, ranges."),
    tree: bool = typer.Option(False, "--tree", help="The model's modules as a tree, with shapes; also ATB's topology."),
    level: int = LEVEL,
) -> None:
    """List a dump's tensors with their statistics, and the operators that were called.

    Of our own dumps no payload is read, so this is quick on any. Of another tool's, what is listed and has no
    statistics is read to compute them. Tensors of operators are listed where a GLOB has '::'. A name that ends with
    .txt or .csv is a file to write to: the table, all of it, or the same as --csv."""
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.formats.common import held

    if tree:
        from vllm_accprobe.cli.common import drawing

        if names or role or request or ops or csv is not None:
            raise CommandError("--tree shows one step of one rank: it takes --steps, --ranks and --level")
        lines = drawing.tree(dump, level, step, rank)
        answer(dump=dump, tree=lines)
        for line in lines:
            typer.echo(line)
        return
    if level is not None:
        raise CommandError("--level: how deep --tree shows the model; a table of tensors has no levels")
    limit = limit if limit is not None else 0 if wanted() else _ROWS
    opened = open_dump(dump)
    held.look(opened)
    names, text, named_csv = _files(opened, names or [])
    if csv is not None and named_csv is not None:
        raise CommandError(f"--csv {csv} and {named_csv}: name one file")
    csv = csv or named_csv  # type: ignore[assignment]
    if csv is not None:
        _check_csv(csv, dump)
        writable(csv.parent, "--csv")
    if text is not None:
        _check_text(text, dump)
        writable(text.parent, str(text))
    what = selection(names, step, rank, request, role)
    calls: list[Any] = []
    if getattr(opened, "ops", None):
        from vllm_accprobe.cli.common import operators

        calls = operators.chosen(opened, what)
    chosen = [] if ops else what.apply(opened, padding=True)
    if chosen and csv is not None:
        chosen = _with_statistics(opened, chosen)
        _write_csv(opened, chosen, csv)
    if chosen and (csv is None or text is not None):
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
    if calls and csv is None and text is None:
        operators.show(opened, calls, limit)
    said = about(opened, [r for _, r in chosen])
    skipped: Counter[str] = Counter()
    for s in opened.skips:
        skipped[s.reason] += s.count
    answer(dump=dump, about=said, skipped=skipped)
    for line in said:
        typer.echo(line)
    say_written(*(path for path in (csv, text) if path is not None and chosen))
    if not chosen and not calls and not getattr(opened, "state_totals", None):
        raise NothingThere(f"{dump}: {_why_none(opened, names, ops)}")


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
    from vllm_accprobe.cli.common.options import progress
    from vllm_accprobe.formats.common import computed_stats
    from vllm_accprobe.formats.common.foreign import ForeignDump

    lacking = sum(computed_stats.missing(r) for _, r in chosen)
    if not lacking or not isinstance(dump, ForeignDump):  # of our own, what the journal does not say is not there
        return chosen
    with progress("statistics", lacking) as done:
        records, failed = computed_stats.computed(dump, [r for _, r in chosen], done)
    dump.problems += failed
    return [(i, r) for (i, _), r in zip(chosen, records, strict=True)]


def _why_none(dump: Dump, names: list[str], ops: bool) -> str:
    if not dump.records:
        return "it holds no tensors"
    if ops and not getattr(dump, "ops", None):
        return "it holds no operator calls: capture them with VLLM_ACCPROBE_OPS=1, or `accprobe run --ops`"
    asked = f" {', '.join(names)}" if names else " what was asked for"
    return f"no {'operator' if ops else 'tensor'} matches{asked}; without a GLOB all are listed"


def about(dump: Dump, chosen: list[Record]) -> list[str]:
    """What the dump holds, what it lacks and why, as lines."""
    from vllm_accprobe.cli.common import lives
    from vllm_accprobe.report.text import count, safe

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
    lines += states(dump)
    lines += lives.told(getattr(dump, "lives", None))
    lines += [f"note: {safe(p, 400)}" for p in dump.problems]
    if dump.errors:
        first = dump.errors[0]
        what = safe(f"{first.get('where', '')}: {first.get('message', '')}", 300)
        lines.append(f"note: {count(len(dump.errors), 'error')} inside the probe; the first at {what}")
    return lines


def states(dump: Dump, n: int = 20) -> list[str]:
    """What the run's own ledger of states has found, and looked at."""
    from vllm_accprobe.dump.journal.state_lines import sentence
    from vllm_accprobe.report.text import count, safe

    found, totals = getattr(dump, "states", []), getattr(dump, "state_totals", {})
    out = [f"the cache, not the kernel: {safe(sentence(one), 1000)}, rank {rank}" for rank, one in found[:n]]
    total = max(sum(one.findings for one in totals.values()), len(found))
    if total > n:
        out.append(f'... {total - n:,} more findings of the ledger of states: the journals\' lines "state"')
    for rank, one in sorted(totals.items()):
        what = count(one.findings, "finding") if one.findings else "nothing wrong"
        out.append(
            f"states, rank {rank}: {what}; {safe(one.mode)}: {one.layers:,} layers, {one.steps:,} steps, "
            f"{one.checked:,} blocks looked at, {one.hashed:,} hashed, {one.held:,} numbers of metadata"
        )
        if one.events:
            out.append("  events: " + ", ".join(f"{v:,} x {safe(k)}" for k, v in sorted(one.events.items())))
        out += [f"  not watched: {v:,} x {safe(k)}" for k, v in one.skipped.items()]
    return out


def _cells(index: int, r: Record) -> list[str]:
    from vllm_accprobe.report.text import num, safe

    s = r.stats
    values = [num(v, 6) for v in (s.min, s.max, s.mean, s.std)] if s else [num(None)] * 4
    bad = [str(s.nan), str(s.inf)] if s else [num(None)] * 2
    role = safe(r.which)
    step = "param" if r.step is None else str(r.step)
    return [str(index), step, str(r.rank), safe(r.tap), role, shape_text(r.shape), r.dtype, *values, *bad]


def _check_csv(path: Path, dump: Path) -> None:
    from vllm_accprobe.cli.common import outputs

    if path.is_dir():
        raise CommandError(f"--csv: {path} is a directory; name a file")
    outputs.check_place(path, [dump], "--csv")
    if path.is_symlink() or (path.exists() and not outputs.is_ours(path, outputs.csv_with(*COLUMNS[:-2], "nan"))):
        raise CommandError(f"--csv: {path} is not of this command: nothing is overwritten; name another file")


def _check_text(path: Path, dump: Path) -> None:
    from vllm_accprobe.cli.common import outputs

    outputs.check_place(path, [dump], "FILE")
    begins = r"\A\s*" + r"\s+".join(COLUMNS[:4])
    if path.is_symlink() or path.is_dir() or (path.exists() and not outputs.is_ours(path, outputs.matching(begins))):
        raise CommandError(f"{path} is not of this command: nothing is overwritten; name another file")


def _write_csv(dump: Dump, chosen: list[tuple[int, Record]], path: Path) -> None:
    import csv as csv_module

    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv_module.writer(f)
        writer.writerow([*COLUMNS[:-2], "nan", "inf", *MORE])
        writer.writerows(_rows(dump, chosen))


def _rows(dump: Dump, chosen: list[tuple[int, Record]]) -> Iterator[list[Any]]:
    """A row of the csv for each record."""
    from vllm_accprobe.dump.select import row_space

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
