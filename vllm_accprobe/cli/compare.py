"""``accprobe compare GOLDEN MINE``: which operator made the difference, and how large it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import typer


def compare(
    golden: Path = typer.Argument(..., help="The dump to trust."),
    mine: Path = typer.Argument(..., help="The dump to judge."),
    out: Path = typer.Option(Path("accprobe-report"), "--out", "-o", help="Where compare.csv, .json and .html go."),
    taps: str = typer.Option(None, "--taps", help="Only taps that match one of these globs, comma separated."),
    standard: str = typer.Option("accprobe", "--standard", help="The limits: accprobe or strict."),
    plan: bool = typer.Option(False, "--plan", help="Only say what would be compared with what, and write nothing."),
    verbose: int = typer.Option(0, "--verbose", "-v", count=True, help="Say more; twice for everything."),
) -> None:
    """Compare two dumps row by row and name the operator that created the error.

    Prints the verdict and the culprit first and writes compare.csv (a row per pair), compare.html and compare.json.
    Exit code 0: pass, 1: differences beyond the limits, 2: unreadable input, 3: nothing could be compared.
    """
    from vllm_accprobe.compare import engine
    from vllm_accprobe.compare.result import PASS

    if plan:
        from vllm_accprobe.compare.plan import make_plan

        for line in make_plan(*engine.open_both(golden, mine), taps=taps).lines():
            typer.echo(line)
        return
    with _progress() as advance:
        result = engine.compare(golden, mine, standard=standard, taps=taps, progress=advance)
    import json

    from rich.console import Console

    from vllm_accprobe.report import html, table, terminal

    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(result, out / "compare.csv")
    (out / "compare.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    html.write_html(result, out / "compare.html")
    terminal.render(result, Console(highlight=False), verbosity=1 + verbose)
    for name in ("compare.csv", "compare.json", "compare.html"):
        typer.echo(f"wrote {out / name}")
    raise typer.Exit(0 if result.verdict == PASS else 1)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal's stderr, nothing in a pipe."""
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
