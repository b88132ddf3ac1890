"""``accprobe doctor``: would a capture work here, and if not, why; with --graphs: do taps change what is computed."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.declared import JSON
from vllm_accprobe.cli.common.options import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.doctor import Finding
    from vllm_accprobe.doctor.graphs.proof import TapProof

_COLOUR = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}


_RUN_S = 3600.0
"""chosen: seconds that one run with --graphs may take: a large model is loaded, compiled and captured in it."""


def doctor(
    command: list[str] = typer.Argument(None, metavar="[-- CMD...]", help="With --graphs: vllm serve ..., a script."),
    json: bool = JSON,
    quick: bool = typer.Option(False, "--quick", help="Leave out what needs vLLM imported (about ten seconds)."),
    timeout: float = typer.Option(
        None,
        "--timeout",
        metavar="S",
        min=1.0,
        help="How long to wait; for vLLM's import (180), for each run of --graphs (3600).",
    ),
    graphs: bool = typer.Option(
        False, "--graphs", help="Run CMD with taps in its graphs off, on and selected: are tokens and bits the same?"
    ),
    out: Path = typer.Option(
        "accprobe-doctor-graphs",
        "--out",
        "-o",
        metavar="DIR",
        help="Where the results go, with --graphs: a new directory.",
    ),
    full: bool = typer.Option(False, "--full", help="With --graphs: also with taps at all modules."),
    bisect: bool = typer.Option(
        None, "--bisect/--no-bisect", help="Find the module whose tap changes bits; not for --full by default."
    ),
    prompts: Path = typer.Option(
        None, "--prompts", metavar="FILE", help="What a server is asked; one a line or JSONL."
    ),
    max_tokens: int = typer.Option(16, "--max-tokens", metavar="N", min=1, help="Tokens to generate for a prompt."),
    port: int = typer.Option(None, "--port", min=1, max=65535, metavar="N", help="A server's port: CMD listens there."),
    wheel: list[Path] = typer.Option(
        None,
        "--wheel",
        metavar="FILE",
        help="Read a wheel or sdist, not installed: is all there that capture relies on? A vendor's, and its vLLM's. "
        "Can be repeated.",
    ),
) -> None:
    """Check whether a capture would work in this environment, and say what would go wrong.

    Looks at vLLM and its platform, both entry points, VLLM_PLUGINS, the hook points of this release, the
    VLLM_ACCPROBE_* settings and the disk. Exit code 0: capture would work, 1: something would go wrong.

    accprobe doctor --graphs -- vllm serve MODEL runs the command four times or more and compares tokens, top logits and
    bits. Exit code 0: taps change nothing, 1: they change the result, 2: a run failed, 3: nothing could be proved.

    accprobe doctor --wheel FILE [--wheel VLLM] reads the source in a wheel, and imports nothing. Exit code 0: all is
    there, 1: something is missing, 2: a file cannot be read.
    """
    if wheel:
        if command or graphs or quick:
            raise CommandError("--wheel goes with --json only")
        raise typer.Exit(_wheels(wheel, json))
    if graphs:
        raise typer.Exit(_graphs(command, out, json, full, bisect, prompts, max_tokens, port, timeout or _RUN_S))
    if command:
        raise CommandError("a command is run with --graphs only: accprobe doctor --graphs -- CMD ...")
    for given, option in ((full, "--full"), (bisect, "--bisect"), (prompts, "--prompts"), (port, "--port")):
        if given:
            raise CommandError(f"{option} goes with --graphs")
    from vllm_accprobe.doctor import ERROR, examine

    findings = examine(quick=quick, timeout=timeout or 180.0)
    errors = sum(f.level == ERROR for f in findings)
    if json:
        report = {"schema": 1, "ok": not errors, "findings": [f.to_json() for f in findings]}
        typer.echo(json_.dumps(report, indent=2))
    else:
        for finding in findings:
            for line in lines(finding):
                typer.echo(line)
        typer.echo(summary(findings))
    raise typer.Exit(1 if errors else 0)


def lines(finding: Finding) -> list[str]:
    """The finding's line, its level coloured (typer drops colours outside a terminal), and what to do below it."""
    level = typer.style(f"{finding.level:<9}", fg=_COLOUR[finding.level])
    out = [f"{level}{finding.check:<16} {_one_line(finding.text)}"]
    if finding.todo:
        out.append(f"{'':25} → {_one_line(finding.todo)}")
    return out


def summary(findings: list[Finding]) -> str:
    """The last line: whether a capture would work."""
    errors = sum(f.level == "error" for f in findings)
    warnings = sum(f.level == "warning" for f in findings)
    said = "a capture would work" if not errors else f"a capture would NOT work: {errors} error{'s' * (errors > 1)}"
    return said + (f", {warnings} warning{'s' * (warnings > 1)}" if warnings else "")


def _one_line(text: str) -> str:
    return "".join(ch if ch.isprintable() else " " for ch in text)


def _wheels(paths: list[Path], json: bool) -> int:
    """Reads the wheels, prints what is there and what is not, and gives the exit code."""
    from vllm_accprobe.doctor.wheel import holding, telling
    from vllm_accprobe.doctor.wheel.archive import WheelError, read
    from vllm_accprobe.doctor.wheel.modes_found import modes_found

    try:
        wheels = holding.together([read(path) for path in paths])
        looked = holding.held(wheels)
        modes = modes_found(wheels)
    except WheelError as error:
        raise CommandError(str(error)) from None
    if json:
        typer.echo(json_.dumps(telling.to_json(wheels, looked, modes), indent=2))
    else:
        for finding in telling.findings(wheels, looked, modes):
            for line in lines(finding):
                typer.echo(line)
        typer.echo(telling.summary(looked))
    return 1 if telling.lacks(looked) else 0


def _graphs(
    command: list[str] | None, out: Path, json: bool, full: bool, bisect: bool | None, file: Path | None,
    max_tokens: int, port: int | None, timeout: float,
) -> int:  # fmt: skip
    """Carries out the proof, prints it, and gives the exit code."""
    import os
    import time

    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.doctor.graphs import asking, carrying, telling
    from vllm_accprobe.doctor.graphs.proof import CHANGED, SAME, Prover
    from vllm_accprobe.doctor.graphs.runs import Runs
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.run.launcher import LaunchError, command_line
    from vllm_accprobe.run.server_command import ServerCommandError, understood

    out = Path(os.path.abspath(out))
    try:
        what = understood(command or (), os.environ, port)
        command_line(what.words, os.environ)
        asked = asking.PROMPTS if file is None else asking.read_prompts(file)
    except (ServerCommandError, LaunchError, asking.AskingError) as error:
        raise CommandError(str(error)) from None
    runs = Runs(os.environ, out)
    outputs.check_place(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"--out {out} is not empty: name a new directory")

    def say(line: str) -> None:
        typer.echo(f"accprobe: {safe(line)}", err=True)

    kind = f"a server at {what.url}" if what.url else "a program that ends by itself"
    say(f"{kind}; its runs: off, off again, on, selected{', full' * full}; dumps and logs: {out}")
    try:
        proof: TapProof = Prover(
            runs, lambda run: carrying.carry_out(run, what, asked, max_tokens, timeout), say, time.monotonic
        ).prove(full=full, bisect=bisect)
    except carrying.RunFailed as error:
        for line in error.tail:
            typer.echo(f"    {safe(line, 1000)}", err=True)
        raise CommandError(str(error)) from None
    except LaunchError as error:
        raise CommandError(str(error)) from None
    if json:
        typer.echo(json_.dumps(telling.to_json(proof), indent=2))
    else:
        for line in telling.lines(proof):
            for part in line.split("\n"):
                typer.echo(safe(part, 1000))
    return {SAME: 0, CHANGED: 1}.get(proof.verdict, 3)
