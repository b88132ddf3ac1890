"""How ``compare`` says its result on stdout: for a person, a program, a pull request, GitHub Actions.

The idea: every format is a function of report/; stdout holds that format and nothing else, so that it can be piped, and
what else there is to say (which files were written) goes to stderr then. Not here: the texts (report/).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.json_answer import say_written

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison


class Format(str, enum.Enum):
    """What stdout gets."""

    terminal = "terminal"
    json = "json"
    markdown = "markdown"
    github = "github"


FORMAT = typer.Option(
    Format.terminal,
    "--format",
    help="What stdout gets: terminal, markdown, github (annotations for GitHub Actions, and the markdown as the step's "
    "summary), or json, as --json.",
)


def say(comparison: Comparison, form: Format, verbosity: int, written: Iterable[Path]) -> None:
    """Prints ``comparison`` as ``form``; ``verbosity`` is report.terminal's and concerns the terminal only."""
    if form is Format.terminal:
        from rich.console import Console

        from vllm_accprobe.report import terminal

        terminal.render(comparison, Console(highlight=False), verbosity=verbosity)
    elif form is Format.json:
        import json

        typer.echo(json.dumps(comparison.to_json(), indent=1))
    else:
        from vllm_accprobe.report import github, markdown

        lines = markdown.lines if form is Format.markdown else github.lines
        for line in lines(comparison):
            typer.echo(line)
        if form is Format.github:
            github.write_summary(comparison)
    if verbosity > 0:
        say_written(*written, err=form is not Format.terminal)


def say_before(comparison: Comparison) -> None:
    """Prints the verdict by comparison to stderr, while a replay that may change it goes on."""
    from vllm_accprobe.report import facts

    typer.echo(f"before replay: {facts.headline(comparison)}", err=True)


def say_plan(lines: Iterable[str], form: Format) -> None:
    """Prints what would be compared with what."""
    import json

    if form is Format.json:
        typer.echo(json.dumps({"schema": 1, "plan": list(lines)}, indent=1))
        return
    for line in lines:
        typer.echo(line)
