"""``accprobe compare DUMP`` of a dump with labels: the pairs that a program named with set_label, or run it first.

Not here: how a command is run (run.py), measuring (comparison/labelled_pairs.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.output import answer, progress, say_notes, say_written

ALL_LABELS = "ACCPROBE_LABELS"
"""Environment variable for the command: 1 counts labels that no set_task_id precedes, too (vllm_accprobe/labels.py)."""
ENVS = ("ATB_OUTPUT_DIR", "ACLTRANSFORMER_HOME_PATH", "ASDOPS_LOG_TO_FILE_DIR")
"""Directories of the caller's own environment are searched, too, as the library does."""


def compare_labelled(dump: Path | None, opened: Any, how: Any, out: Path, verbose: bool) -> None:
    """opened: the dump where it is open already; how: compare.LabelOptions; out: for labels.csv and labels.json. Raises
    typer.Exit; with --exec the code is the command's own where the pairs pass and it failed."""
    from vllm_accprobe.comparison.labelled_pairs import compare_labels, count_pairs
    from vllm_accprobe.dump.label_files import LABEL_TAP
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report import label_lines as report

    limit = how.tolerance
    if limit is not None and not 0 <= limit < 1:
        raise CommandError(f"--tolerance: {limit} is no relative error; write for example 0.01")
    for directory in how.acl:
        places.require_directory(directory, "--acl")
    ours = {"labels.csv": places.csv_with(*report.COLUMNS), "labels.json": places.SCHEMA_AND_VERDICT}
    if (dump is None) == (how.exec is None):
        raise CommandError("name a DUMP, or with --exec a command that labels tensors while it runs; one of the two")
    if how.exec is None and (how.dir is not None or how.types is not None):
        raise CommandError("--dir and --type are for --exec: they say what the command writes, and where")
    places.check(out, ours, dumps=[] if dump is None else [dump])
    code = 0
    if how.exec is not None:
        code, dump = _run(how.exec, how.dir, how.types)
    opened = opened or open_dump(dump)  # type: ignore[arg-type]
    roots = [*how.acl, *(Path(d) for name in ENVS if (d := os.environ.get(name)) and Path(d).is_dir())]
    with progress("comparing", count_pairs(opened)) as done:
        found = compare_labels(opened, roots, limit, done)
    say_notes(opened.problems)
    if not found.pairs and not found.unpaired:
        why = "; ".join(f"{n} x {reason}" for reason, n in found.skipped.items()) or "set_label was never called in it"
        raise NothingThere(f"{dump} holds no labels: {why}")
    out.mkdir(parents=True, exist_ok=True)
    written = report.write(found, out)
    for line in report.lines(found, None if verbose else 10):
        typer.echo(line)
    say_written(*written)
    answer(**report.to_json(found))
    verdict = report.verdict(found)
    if verdict is None:
        typer.echo(f"accprobe: {dump}: no pair of {LABEL_TAP}* could be compared", err=True)
    raise typer.Exit({"pass": code, "fail": 1, None: 3}[verdict])


def _run(line: str, place: str | None, types: str | None) -> tuple[int, Path]:
    """(the command's exit code, the dump with its labels). ATB writes, too, where ``types`` or the environment of its
    ancestor asks for it. Raises CommandError."""
    from vllm_accprobe.cli.run import launched, say
    from vllm_accprobe.run.atb import ANCESTOR, options_of

    atb = None
    if types is not None or os.environ.get(ANCESTOR, "0") not in ("", "0"):
        atb, notes = options_of({"types": types}, os.environ)
        for note in notes:
            say(note)
    ran = launched([line], {"dir": place}, atb, False, {ALL_LABELS: "1"})
    dumps = ran.watcher.dumps()
    if ran.code:
        say(f"the command ended with exit code {ran.code}")
    if not dumps:
        raise NothingThere("no label was captured: the command called no set_label of vllm_accprobe, or failed before")
    if len(dumps) > 1:
        named = ", ".join(map(str, dumps))
        raise CommandError(f"the command left {len(dumps)} dumps ({named}): compare each with `accprobe compare DUMP`")
    say(f"dump: {dumps[0]}")
    return ran.code, Path(dumps[0])
