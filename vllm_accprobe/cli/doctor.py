"""``accprobe doctor``: would a capture work here, and if not, why."""

from __future__ import annotations

import json as json_
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from vllm_accprobe.doctor import Finding

_COLOUR = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}


def doctor(
    json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
    quick: bool = typer.Option(False, "--quick", help="Leave out what needs vLLM imported (about ten seconds)."),
    timeout: float = typer.Option(180.0, "--timeout", min=1.0, help="Seconds to wait for vLLM's import."),
) -> None:
    """Check whether a capture would work in this environment, and say what would go wrong.

    Looks at vLLM and its platform, both entry points, VLLM_PLUGINS, the hook points of this release, the
    VLLM_ACCPROBE_* settings and the disk. Exit code 0: capture would work, 1: something would go wrong.
    """
    from vllm_accprobe.doctor import ERROR, examine

    findings = examine(quick=quick, timeout=timeout)
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
