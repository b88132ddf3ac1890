"""``accprobe labels DUMP``: the pairs that a program labelled with set_label, compared."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_accprobe.cli.common.declared import DUMP
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress, require_directory, say_notes


def labels(
    dump: Path = DUMP,
    out: Path = typer.Option(
        Path("accprobe-labels"), "--out", "-o", metavar="DIR", help="Where labels.csv and labels.json go."
    ),
    acl: list[Path] = typer.Option(
        [], "--acl", metavar="DIR", help="Where the accelerator's library wrote the files that labels name. Repeatable."
    ),
    limit: float = typer.Option(
        None, "--limit", metavar="REL", help="Allowed relative L2 error of a row; by default by the coarser dtype."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show all pairs that fail."),
) -> None:
    """Compare the pta/acl pairs of one dump (set_label): the reference against the accelerator's own.

    Writes labels.csv (a row per pair, the columns of ait's aclcmp) and labels.json.
    Exit code 0: pass, 1: a pair differs beyond the limit, 2: unreadable input, 3: nothing could be compared.
    """
    import os

    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.comparison.labelled_pairs import compare_labels, count_pairs
    from vllm_accprobe.dump.label_files import LABEL_TAP
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report import label_lines as report

    if limit is not None and not 0 <= limit < 1:
        raise CommandError(f"--limit: {limit} is no relative error; write for example 0.01")
    for directory in acl:
        require_directory(directory, "--acl")
    ours = {"labels.csv": outputs.csv_with(*report.COLUMNS), "labels.json": outputs.SCHEMA_AND_VERDICT}
    outputs.check(out, ours, dumps=[dump])
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
    typer.echo(f"written: {', '.join(map(str, written))}")
    verdict = report.verdict(found)
    if verdict is None:
        typer.echo(f"accprobe: {dump}: no pair of {LABEL_TAP}* could be compared", err=True)
    raise typer.Exit({"pass": 0, "fail": 1, None: 3}[verdict])


ENVS = ("ATB_OUTPUT_DIR", "ACLTRANSFORMER_HOME_PATH", "ASDOPS_LOG_TO_FILE_DIR")
"""The caller's own environment may name further directories, as it did for the library."""
