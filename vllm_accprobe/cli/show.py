"""``accprobe show DUMP TAP``: one tensor in detail.

The problem: after a report has named a tap, a person wants to see the numbers. The idea: all records of the tap as a
small table, then the first of them (or the only one that the options leave) with its statistics, a histogram and the
rows asked for, each named by request, position and token. Not here: how values become lines (cli/common/values.py).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.declared import CALL, DUMP, RANK, ROLE, STEP
from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere, ranges, selection, writable

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.schema import Record

_LISTED = 20
STATES, WEIGHTS = "states", "weights"
"""What TAP says for all findings of the ledger of states, where the run kept one; for the weights over their life."""


def show(
    dump: Path = DUMP,
    tap: str = typer.Argument("", metavar="TAP", help="A module path, or tap/role#call as in compare.csv."),
    role: list[str] = ROLE,
    step: str = STEP,
    call: str = CALL,
    rank: str = RANK,
    rows: str = typer.Option("", "--rows", metavar="RANGES", help="Rows to print or save, e.g. 0,5-9."),
    request: list[str] = typer.Option(
        [], "--requests", metavar="GLOBS", help="Requests: globs over ids; with --positions. Their rows."
    ),
    position: str = typer.Option("", "--positions", metavar="RANGES", help="Positions within the request, e.g. 0-3."),
    save: Path = typer.Option(None, "--save", metavar="FILE", help="Save the tensor, or its rows: .npy, .safetensors."),
    prompt: bool = typer.Option(False, "--prompt", help="No tensor, but the prompt of --requests: its token ids."),
    tokenizer: Path = typer.Option(
        None, "--tokenizer", metavar="PATH", help="A model's folder or its tokenizer.json; with --prompt: text, too."
    ),
) -> None:
    """Show one tensor: statistics, histogram, chosen rows; or save it. Or, with --prompt, what a request asked."""
    from vllm_accprobe.cli import summary
    from vllm_accprobe.cli.asked import prompts
    from vllm_accprobe.cli.common import lives, outputs, values
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report.text import count, safe

    if prompt or tokenizer is not None:
        if tap or role or step or call or rank or rows or position or save is not None or not prompt:
            raise CommandError("--prompt takes --requests and --tokenizer alone: show DUMP --requests ID --prompt")
        said = prompts.told(open_dump(dump), request, tokenizer)
        answer(dump=dump, lines=said)
        for line in said:
            typer.echo(line)
        return
    if not tap:
        raise CommandError("give a TAP (`accprobe summary DUMP` lists them), or --requests ID --prompt")
    if rows and (request or position):
        raise CommandError(
            "--rows counts rows of the tensor, --requests and --positions name them: use one or the other"
        )
    if save is not None and save.suffix not in (".npy", ".safetensors"):
        raise CommandError(f"--save: {save} must end in .npy or .safetensors")
    if save is not None and save.exists():
        raise CommandError(f"--save: {save} exists: nothing is overwritten; choose another name")
    if save is not None:
        outputs.check_place(save, [dump], "--save")
        writable(save.parent, "--save")
    wanted_rows, positions = ranges(rows, "--rows"), ranges(position, "--positions")
    opened, said = open_dump(dump), []
    if tap == STATES and getattr(opened, "state_totals", None):
        said = summary.states(opened, len(opened.states))
    elif tap == WEIGHTS:
        said = lives.told(getattr(opened, "lives", None), whole=True)
    if said:
        answer(dump=dump, lines=said)
        for line in said:
            typer.echo(line)
        return
    name = _resolve(opened, tap)
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in name)
    found = [r for _, r in selection([escaped], step, rank, request, role, call).apply(opened, padding=True)]
    if positions:  # the steps that computed one of them
        from vllm_accprobe.dump.select import rows_of

        found = [r for r in found if rows_of(opened, r, request, positions).size]
    if not found:
        raise NothingThere(f"{safe(name)} is in {dump}, but {_what_there_is(opened, name)}")
    if save is not None and len(found) > 1:
        raise CommandError(f"--save: {count(len(found), 'tensor')} match, e.g. {', '.join(map(_brief, found[:4]))}: "
                           "narrow down with --roles, --steps, --calls or --ranks")  # fmt: skip
    if len(found) > 1:
        for r in found[:_LISTED]:
            typer.echo(_brief(r) + "  " + values.stats_line(r))
        if len(found) > _LISTED:
            typer.echo(f"... {len(found) - _LISTED:,} more: narrow down with --roles, --steps, --calls or --ranks")
        typer.echo("")
        typer.echo("the first of them:")
    record = found[0]
    answer(dump=dump, matches=found, tensor=record, values=None)
    for line in values.header(opened, record):
        typer.echo(line)
    if record.payload is None:
        typer.echo("only its statistics were stored, no values")
        if save is not None:
            raise CommandError(f"--save: {safe(record.name)} has no values in this dump")
        return
    array = opened.read(record)
    indices = values.choose(opened, record, wanted_rows, request, positions)
    answer(values=values.as_json(record, array, indices))
    for line in values.histogram(array, record.dtype):
        typer.echo(line)
    for line in values.rows(opened, record, array, indices):
        typer.echo(line)
    if save is not None:
        values.save(save, record, array if indices is None else array.take(indices, axis=record.row_dim))
        say_written(save)


def _resolve(dump: Dump, tap: str) -> str:
    """``tap`` as given where it names a tap or a record; raises CommandError with the nearest names."""
    from vllm_accprobe.report.text import safe

    taps = sorted({r.tap for r in dump.records} | {m.tap for ms in dump.modules.values() for m in ms})
    if tap in {r.tap for r in dump.records} or any(
        tap in (r.name, f"{r.tap}/{r.role}") for r in (*dump.records, *dump.padding)
    ):
        return tap
    if tap in taps:
        reasons = sorted({s.reason for s in dump.skips if s.tap == tap})
        why = f" ({', '.join(map(safe, reasons))})" if reasons else ""
        raise CommandError(f"{safe(tap)} is a module of the model, but nothing of it was captured{why}")
    near = difflib.get_close_matches(tap, taps, n=3, cutoff=0.5)
    near += [t for t in taps if tap in t and t not in near][: 5 - len(near)]
    hint = f"; nearest: {', '.join(map(safe, near))}" if near else f"; `accprobe summary {dump.path}` lists all"
    raise CommandError(f"no tap {safe(tap)} in {dump.path}{hint}")


def _what_there_is(dump: Dump, name: str) -> str:
    from vllm_accprobe.report.text import safe

    records = [r for r in (*dump.records, *dump.padding) if name in (r.tap, f"{r.tap}/{r.role}", r.name)]
    roles = sorted({r.role for r in records})
    steps = sorted({r.step for r in records if r.step is not None})
    at = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    ranks = ", ".join(map(str, sorted({r.rank for r in records})))
    return f"nothing matches the options: it has {safe(', '.join(roles), 300)} at {at}, rank {ranks}"


def _brief(r: Record) -> str:
    from vllm_accprobe.report.text import safe

    step = "parameter" if r.step is None else f"step {r.step}"
    return f"{safe(r.which)} ({step}, rank {r.rank})"
