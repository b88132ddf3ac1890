"""``accprobe inspect DUMP TAP``: one tensor in detail; all states, all weights; with --prompt, a request's prompt.

All records of the tap are a small table, then the first of them (or the only one that the options leave) is shown.
Not here: the list of tensors (inspect_list.py), the lines (report/tensors.py, report/prompt.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.options import SelectionOptions, ranges
from vllm_accprobe.cli.output import answer, say_written, show
from vllm_accprobe.dump.reader import Dump, Ranges, row_space, rows_of
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.io import containers
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.report import tensors
from vllm_accprobe.report.tensors import brief
from vllm_accprobe.report.text import count, safe

_LISTED = 20
STATES, WEIGHTS = "states", "weights"
"""What TAP says for all findings of the ledger of states, where the run kept one; for the weights over their life."""


def is_tap(dump: Dump, name: str) -> bool:
    """Whether ``name`` is shown in detail: a tap or a record; or else what is neither a glob, nor a file to write to,
    nor a class or an operator, so that the nearest names are of use."""
    if any(name in (r.tap, r.name, f"{r.tap}/{r.role}") for r in dump.records):
        return True
    if any(c in name for c in "*?[!,") or name.endswith((".txt", ".csv")):
        return False
    operators = (word for c in getattr(dump, "ops", ()) for word in (c.op, c.op.rpartition(".")[0]))
    return not any(name == r.cls for r in dump.records) and name not in operators


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
        places.check_place(save, [dump], "--save")
        places.writable(save.parent, "--save")
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
    hint = f"; nearest: {', '.join(map(safe, near))}" if near else f"; `accprobe inspect {dump.path}` lists all"
    raise CommandError(f"no tap {safe(tap)} in {dump.path}{hint}")


def _what_there_is(dump: Dump, name: str) -> str:
    records = [r for r in (*dump.records, *dump.padding) if name in (r.tap, f"{r.tap}/{r.role}", r.name)]
    roles = sorted({r.role for r in records})
    steps = sorted({r.step for r in records if r.step is not None})
    at = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    ranks = ", ".join(map(str, sorted({r.rank for r in records})))
    return f"nothing matches the options: it has {safe(', '.join(roles), 300)} at {at}, rank {ranks}"


def choose(dump: Dump, r: Record, wanted: Ranges, requests: Sequence[str], positions: Ranges) -> np.ndarray | None:
    """Indices along dimension ``row_dim`` of the chosen rows; None where none were chosen. Raises CommandError."""
    if not wanted and not requests and not positions:
        return None
    if not r.shape:
        raise CommandError(f"{r.name} is a scalar and has no rows")
    n = r.shape[r.row_dim]
    if wanted:
        past = [high for _, high in wanted if high >= n]
        if past:
            raise CommandError(f"--rows: {r.name} has rows 0 to {n - 1}, not {past[0]}")
        return np.concatenate([np.arange(low, high + 1) for low, high in wanted])
    if row_space(dump, r) is None:
        raise CommandError(f"{r.name} has no row map: choose with --rows")
    found = rows_of(dump, r, requests, positions)
    if not found.size:
        raise CommandError(f"{r.name} has no row of that request and position in this step")
    return found
