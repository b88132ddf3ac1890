"""``accprobe opcheck DUMP``: every captured call run again against a reference, on the CPU in float64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.options import CommandError, progress

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.replay import Checked


def opcheck(
    dump: Path = typer.Argument(..., metavar="DUMP", help="Directory of a dump."),
    ops: list[str] = typer.Option([], "--ops", metavar="GLOB", help="Module classes or paths. Can be repeated."),
    model: Path = typer.Option(
        None, "--weights", metavar="DIR", help="The model's directory; by default the path in the dump's run.json."
    ),
    out: Path = typer.Option(Path("accprobe-opcheck"), "--out", "-o", help="Where opcheck.csv goes."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show all modules that fail."),
) -> None:
    """Run captured module calls again against references: which operator is wrong for its own inputs?

    Prints the wrong modules first, in the order of execution, then every class and all that was not checked, and writes
    opcheck.csv (a row per output). Needs torch.
    Exit code 0: pass, 1: an operator is wrong, 2: unreadable input, 3: nothing could be checked.
    """
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise CommandError("opcheck needs torch: install it beside accprobe (the CPU build will do)")
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck import replay, table
    from vllm_accprobe.opcheck.calls import Calls
    from vllm_accprobe.opcheck.reference import default_references
    from vllm_accprobe.opcheck.totals import totals as count

    if model is not None and not model.is_dir():
        raise CommandError(f"--weights: {model} is no directory")
    opened = open_dump(dump)
    calls = Calls(opened, model or _model_of(opened.run))
    references = default_references()
    with progress("opcheck", replay.count_taps(calls)) as done:
        rows = [*replay.check_stored(calls, ops), *replay.check(calls, references, ops=ops, done=done)]
    for problem in [*opened.problems, *calls.problems, *references.problems]:
        typer.echo(f"note: {problem}", err=True)
    totals = count(rows)
    if not totals.checked:
        why = next(iter(totals.skipped), "no call matches --ops" if ops else "the dump holds no module call")
        typer.echo(f"accprobe: nothing could be checked: {why}", err=True)
        raise typer.Exit(3)
    out.mkdir(parents=True, exist_ok=True)
    table.write_csv(rows, out / "opcheck.csv")
    table.write_result(rows, out / "result.csv")
    for line in table.lines(rows, totals, most=None if verbose else 10):
        typer.echo(line)
    typer.echo(f"written: {out / 'opcheck.csv'}")
    raise typer.Exit(1 if totals.statuses.get(replay.FAIL) else 0)


def replayed(dump: Path) -> list[Checked]:
    """All checks of a dump, for `compare --replay`. Raises CommandError without torch."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise CommandError("--replay needs torch: install it beside accprobe (the CPU build will do)")
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck import replay
    from vllm_accprobe.opcheck.calls import Calls
    from vllm_accprobe.opcheck.reference import default_references

    opened = open_dump(dump)
    calls = Calls(opened, _model_of(opened.run))
    with progress("replaying", replay.count_taps(calls)) as done:
        return list(replay.check(calls, default_references(), done=done))


def _model_of(run: object) -> Path | None:
    """The model's directory by run.json, where it is on this machine."""
    described = run.get("model") if isinstance(run, dict) else None
    path = described.get("path") if isinstance(described, dict) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    return Path(path) if Path(path).is_dir() else None
