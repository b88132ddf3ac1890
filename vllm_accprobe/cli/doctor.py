"""``accprobe doctor``: would a capture work here, and if not, why; with --graphs: do taps change what is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import report
from vllm_accprobe.cli.output_paths import check_place
from vllm_accprobe.refusals import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.doctor.checks import Finding

_COLOUR = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}
_ERROR = "error"
_RUN_S = 3600.0
"""chosen: seconds that one run with --graphs may take: a large model is loaded, compiled and captured in it."""


@dataclass(frozen=True)
class GraphProofOptions:
    """Do taps in captured graphs change what is computed?"""

    command: list[str] = argument("[-- CMD...]", "With --graphs: vllm serve ..., a script.", [])
    graphs: bool = option("--graphs", False, "Run CMD with taps in its graphs off, on and selected: are tokens and "
                          "bits the same?")  # fmt: skip
    out: Path = options.out("with --graphs, in a new directory", Path("accprobe-doctor-graphs"))
    full: bool = option("--full", False, "With --graphs: also with taps at all modules.")
    bisect: bool | None = option("--bisect/--no-bisect", None, "Find the module whose tap changes bits; not for "
                                 "--full by default.")  # fmt: skip
    prompts: str | None = options.prompts()
    max_tokens: int = option("--max-tokens", 16, "Tokens to generate for a prompt.", metavar="N", min=1)
    port: int | None = option("--port", None, "A server's port: CMD listens there.", min=1, max=65535, metavar="N")


def doctor(
    *,
    as_json: bool = options.as_json(),
    quick: bool = option("--quick", False, "Leave out what needs vLLM imported (about ten seconds)."),
    timeout: float | None = option("--timeout", None, "How long to wait; for vLLM's import (180), for each run of "
                                   "--graphs (3600).", metavar="S", min=1.0),
    wheel: list[Path] = option("--wheel", [], "Read a wheel or sdist, not installed: is all there that capture relies "
                               "on? A vendor's, and its vLLM's. Can be repeated.", metavar="FILE"),
    dump: Path | None = option("--dump", None, "Was the model of this capture built as its config.json asks, and were "
                               "its inputs and weights right? Needs torch.", metavar="DUMP"),
    of_graphs: GraphProofOptions,
) -> None:  # fmt: skip
    """Check whether a capture would work in this environment, and print what would go wrong.

    Examines vLLM and its platform, both entry points, VLLM_PLUGINS, the hook points of this release, the
    VLLM_ACCPROBE_* settings and the disk. Exit code 0: capture would work, 1: something would go wrong.

    accprobe doctor --graphs -- vllm serve MODEL runs the command four times or more and compares tokens, top logits and
    bits. Exit code 0: taps change nothing, 1: they change the result, 2: a run failed, 3: nothing could be proved.

    accprobe doctor --wheel FILE [--wheel VLLM] reads the source in a wheel, and imports nothing. Exit code 0: all is
    there, 1: something is missing, 2: a file cannot be read.

    accprobe doctor --dump DUMP reads a capture: constants of its modules against config.json, positions and token ids
    against the row map, loaded weights against the checkpoint. Exit code 0: nothing is wrong, 1: something is, 2: it
    cannot be read, 3: nothing in it could be checked.
    """
    alone = "--wheel" if wheel else "--dump" if dump is not None else ""
    if alone and (of_graphs.command or of_graphs.graphs or quick):
        raise CommandError(f"{alone} goes with --json only")
    if wheel:
        raise typer.Exit(_wheels(wheel, as_json))
    if dump is not None:
        raise typer.Exit(_dump(dump, as_json))
    if of_graphs.graphs:
        raise typer.Exit(_graphs(of_graphs, as_json, timeout or _RUN_S))
    if of_graphs.command:
        raise CommandError("a command is run with --graphs only: accprobe doctor --graphs -- CMD ...")
    if wrong := [name for name in options.used(of_graphs) if name not in ("--out", "--max-tokens")]:
        raise CommandError(f"{wrong[0]} goes with --graphs")
    from vllm_accprobe.doctor.checks import ERROR, examine

    findings = examine(quick=quick, timeout=timeout or 180.0)
    errors = sum(f.level == ERROR for f in findings)
    fields = {"schema": 1, "ok": not errors, "findings": [f.to_json() for f in findings]}
    report(as_json, fields, [*lines(findings), summary(findings)], indent=2)
    raise typer.Exit(int(bool(errors)))


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """A finding's line, its level coloured (typer drops colours outside a terminal), and what to do below it."""
    for finding in findings:
        level = typer.style(f"{finding.level:<9}", fg=_COLOUR[finding.level])
        yield f"{level}{finding.check:<16} {_one_line(finding.text)}"
        if finding.todo:
            yield f"{'':25} → {_one_line(finding.todo)}"


def summary(findings: list[Finding]) -> str:
    """The last line: whether a capture would work."""
    errors = sum(f.level == "error" for f in findings)
    warnings = sum(f.level == "warning" for f in findings)
    verdict = "a capture would work" if not errors else f"a capture would NOT work: {errors} error{'s' * (errors > 1)}"
    return verdict + (f", {warnings} warning{'s' * (warnings > 1)}" if warnings else "")


def _one_line(text: str) -> str:
    return "".join(ch if ch.isprintable() else " " for ch in text)


def _wheels(paths: list[Path], json: bool) -> int:
    """Reads the wheels, prints what is there and what is not, and gives the exit code."""
    from vllm_accprobe.doctor import wheel

    wheels = wheel.wheel_pair([wheel.read(path) for path in paths])
    found, modes = wheel.checked_places(wheels), wheel.modes_found(wheels)
    text = [*lines(wheel.findings(wheels, found, modes)), wheel.summary(found)]
    report(json, wheel.to_json(wheels, found, modes), text, indent=2)
    return 1 if wheel.lacks(found) else 0


def _dump(path: Path, json: bool) -> int:
    """Checks one capture, prints what is wrong and what was checked, and gives the exit code."""
    from vllm_accprobe.cli.opcheck import require_torch
    from vllm_accprobe.dump.reader import model_of
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report.text import count, safe

    require_torch("doctor --dump")
    from vllm_accprobe.opcheck.run.own_findings import own_findings

    dump = open_dump(path)
    found = own_findings(dump, model_of(dump.run))
    wrong, checked = [row.message for row in found.rows()], found.lines()
    some = bool(wrong or found.held or any(found.runner.checked.values()) or found.built.checked)
    fields = {"schema": 1, "ok": some and not wrong, "findings": wrong, "checked": checked,
              "unchecked": dict(found.built.unchecked)}  # fmt: skip
    error = typer.style(f"{_ERROR:<9}", fg=_COLOUR[_ERROR])
    text = [*(f"{error}{safe(line, 1000)}" for line in wrong), *(f"{'':9}{safe(line, 1000)}" for line in checked),
            count(len(wrong), "finding") if wrong else "nothing is wrong in what was checked"]  # fmt: skip
    if not some:
        text[-1] = f"{path}: nothing could be checked: a capture by accprobe has the row map, modules and weights"
    report(json, fields, text, indent=2)
    return int(bool(wrong)) if some else 3


def _graphs(how: GraphProofOptions, json: bool, timeout: float) -> int:
    """Carries out the proof, prints it, and gives the exit code."""
    import os
    import time

    from vllm_accprobe.doctor import graph_proof
    from vllm_accprobe.doctor.graph_proof import CHANGED, SAME, Prover, Runs
    from vllm_accprobe.gate import preflight
    from vllm_accprobe.gate.bisect.edits import ServeCommand
    from vllm_accprobe.gate.served_run import server_command, serves
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.run.launcher import command_line

    out = Path(os.path.abspath(how.out))
    words, note = tuple(how.command), ""
    if serves(words):
        served = ServeCommand(words, base=os.environ)
        preflight.check(served, captured=True)
        words, note = preflight.prepared(served)
    what = server_command(words, os.environ, how.port)
    command_line(what.words, os.environ)
    prompts = graph_proof.read_prompts(how.prompts)
    runs = Runs(os.environ, out)
    check_place(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"--out {out} is not empty: name a new directory")

    def say(line: str) -> None:
        typer.echo(f"accprobe: {safe(line)}", err=True)

    kind = f"a server at {what.url}" if what.url else "a program that ends by itself"
    if note:
        say(note)
    say(f"{kind}; its runs: off, off again, on, selected{', full' * how.full}; dumps and logs: {out}")
    proof = Prover(
        runs, lambda run: graph_proof.carry_out(run, what, prompts, how.max_tokens, timeout), say, time.monotonic
    ).prove(full=how.full, bisect=how.bisect)
    text = [safe(part, 1000) for line in graph_proof.lines(proof) for part in line.split("\n")]
    report(json, graph_proof.to_json(proof), text, indent=2)
    return {SAME: 0, CHANGED: 1}.get(proof.verdict, 3)
