"""``accprobe labels DUMP``: the pairs that a program labelled with set_label, compared; or run that program first.

Not here: how a command is run (cli/common/running.py), measuring (comparison/labelled_pairs.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import typer

from vllm_accprobe.cli.common.declared import DIR
from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress, require_directory, say_notes


def labels(
    dump: Path = typer.Argument(None, metavar="[DUMP]", help="Directory of a dump; not with --exec."),
    exec: str = typer.Option(
        None,
        "--exec",
        metavar="LINE",
        help="A command as one line: run first, with labels on, e.g. 'bash run.sh model.py'.",
    ),
    dir: str = DIR,
    types: str = typer.Option(
        None, "--type", metavar="TYPES", help="With --exec: what Ascend's ATB writes meanwhile, see accprobe run."
    ),
    out: Path = typer.Option(
        Path("accprobe-labels"),
        "--out",
        "--output",
        "-o",
        metavar="DIR",
        help="Where the results go: labels.csv, .json.",
    ),
    acl: list[Path] = typer.Option(
        [],
        "--acl",
        metavar="DIR",
        help="Where the accelerator's library wrote the files that labels name. Can be repeated.",
    ),
    limit: float = typer.Option(
        None, "--tolerance", metavar="REL", help="Allowed relative L2 error of a row; by default by the coarser dtype."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: all pairs that fail."),
) -> None:
    """Compare the pta/acl pairs of one dump (set_label): the reference against the accelerator's own.

    Writes labels.csv (a row per pair, the columns of ait's aclcmp) and labels.json.
    Exit code 0: pass, 1: a pair differs beyond the limit, 2: unreadable input, 3: nothing could be compared; with
    --exec the command's own where the pairs pass and it failed.
    """
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.comparison.labelled_pairs import compare_labels, count_pairs
    from vllm_accprobe.dump.label_files import LABEL_TAP
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report import label_lines as report

    if limit is not None and not 0 <= limit < 1:
        raise CommandError(f"--tolerance: {limit} is no relative error; write for example 0.01")
    for directory in acl:
        require_directory(directory, "--acl")
    ours = {"labels.csv": outputs.csv_with(*report.COLUMNS), "labels.json": outputs.SCHEMA_AND_VERDICT}
    if (dump is None) == (exec is None):
        raise CommandError("name a DUMP, or with --exec a command that labels tensors while it runs; one of the two")
    if exec is None and (dir is not None or types is not None):
        raise CommandError("--dir and --type are for --exec: they say what the command writes, and where")
    outputs.check(out, ours, dumps=[] if dump is None else [dump])
    code = 0
    if exec is not None:
        code, dump = _run(exec, dir, types)
    opened = open_dump(dump)
    roots = [*acl, *(Path(d) for name in ENVS if (d := os.environ.get(name)) and Path(d).is_dir())]
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
    from vllm_accprobe.cli.common.running import launched, say
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
        raise CommandError(f"the command left {len(dumps)} dumps ({named}): compare each with `accprobe labels DUMP`")
    say(f"dump: {dumps[0]}")
    return ran.code, Path(dumps[0])


ALL_LABELS = "ACCPROBE_LABELS"
"""Environment variable for the command: 1 counts labels that no set_task_id precedes, too (vllm_accprobe/labels.py)."""
ENVS = ("ATB_OUTPUT_DIR", "ACLTRANSFORMER_HOME_PATH", "ASDOPS_LOG_TO_FILE_DIR")
"""The caller's own environment may name further directories, as it did for the library."""
