"""Options of opcheck that run this machine's own kernels: `--repeat`, `--rows`, and operators named by hand.

Not here: running them (opcheck/repeat), opcheck's other options (cli/opcheck.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.run.result_row import Checked
    from vllm_accprobe.opcheck.run.worker import Job

REPEAT = typer.Option(
    0, "--repeat", min=0, metavar="N", help="Run each so many times: calls, here, for races and unwritten memory."
)
ROWS = typer.Option("", "--rows", metavar="SIZES", help="Rows in batches of these sizes, e.g. 1,N or all, here.")
OP = typer.Option("", "--op", metavar="NAME", help="No dump: this operator, or FILE.py:FUNCTION, on drawn inputs.")
SHAPE = typer.Option(
    [], "--shape", metavar="SHAPES", help="Its tensors, e.g. 7x64,64x32. Can be repeated: further calls."
)
DTYPE = typer.Option("float32", "--dtype", metavar="DTYPES", help="Theirs: one, or one for each; int64:32 is below 32.")
WITH = typer.Option([], "--with", metavar="NAME=JSON", help="An argument of it by name. Can be repeated.")
LOAD = typer.Option([], "--load", metavar="MODULE", help="Import this first: it registers operators. Can be repeated.")
_MOST_RUNS = 100_000


def runs_of(repeat: int, rows: str, op: str) -> tuple[int, tuple[str, ...]]:
    """(runs, sizes) as they were asked for. Raises CommandError."""
    sizes = tuple(s.strip() for s in rows.split(",") if s.strip())
    if rows and not sizes:
        raise CommandError("--rows: name batch sizes, e.g. 1,N, or all")
    for size in sizes:
        if size not in ("N", "all") and not re.fullmatch(r"[1-9]\d{0,8}", size):
            raise CommandError(f"--rows: {size!r} is no batch size; 1,8,N or all, N being the whole batch")
    if sizes and set(sizes) == {"N"}:
        raise CommandError("--rows: N is the whole batch; name a smaller size beside it, e.g. 1,N")
    if repeat and sizes:
        raise CommandError("--repeat and --rows: choose one")
    if repeat == 1 or repeat > _MOST_RUNS:
        raise CommandError(f"--repeat {repeat}: from 2 to {_MOST_RUNS:,} runs")
    return repeat, sizes


def named_of(op: str, shapes: Sequence[str], dtype: str, more: Sequence[str]) -> dict[str, Any] | None:
    """The operator named by hand as a job has it; None where there is none. Raises CommandError."""
    if not op:
        if shapes or more:
            raise CommandError("--shape and --with belong to --op")
        return None
    if not shapes:
        raise CommandError("--op needs --shape: its tensors, e.g. 7x64,64x32")
    return {"op": op, "shapes": list(shapes), "dtypes": [d.strip() for d in dtype.split(",")], "more": _values(more)}


def _values(more: Sequence[str]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for text in more:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"--with {text!r}: NAME=VALUE, e.g. eps=1e-6")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def say_here(job: Job, rows: list[Checked], out: Path, most: int | None) -> None:
    """The report of `--repeat` and `--rows`. Raises typer.Exit."""
    import json

    from vllm_accprobe.opcheck.repeat import told
    from vllm_accprobe.opcheck.run import table
    from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL
    from vllm_accprobe.opcheck.run.totals import totals
    from vllm_accprobe.whole_file import write_text

    counted = totals(rows)
    if not counted.checked and not counted.statuses.get(ERROR):
        reason = next(iter(counted.skipped), "no call matches" if job.ops or job.ids else "the dump holds no call")
        raise NothingThere(f"{job.dump or 'opcheck'}: nothing could be run: {reason}")
    mode = told.mode_of(job.repeat, job.batch)
    said = told.lines(rows, counted, mode, most)
    for line in said:
        typer.echo(line)
    files = [out / name for name in (told.REPEAT_FILES if job.repeat else told.ROWS_FILES)]
    table.write_result(rows, out / "result.csv")
    write_text(files[0], json.dumps(told.to_json(rows, counted, mode), indent=1) + "\n")
    write_text(files[1], told.page(rows, said, f"opcheck: {mode}"))
    say_written(out / "opcheck.csv", out / "result.csv", *files)
    answer(**told.to_json(rows, counted, mode))
    raise typer.Exit(1 if counted.statuses.get(FAIL) or counted.statuses.get(ERROR) else 0)


def check_here(
    dump: Path | None, named: bool, standard: str, against: str, rerun: bool, backward: bool, kl: bool,
    save: Path | None,
) -> None:  # fmt: skip
    """Raises CommandError for options that say nothing of this machine's kernels alone."""
    given = {"--against": against != "float64", "--rerun": rerun, "--backward": backward, "--kl": kl,
             "--save-failed": save is not None}  # fmt: skip
    if used := [name for name, is_given in given.items() if is_given]:
        raise CommandError(f"{used[0]} does not go with --repeat, --rows or --op: those run this machine's kernels")
    if standard not in ("operator", "strict"):
        raise CommandError("--repeat, --rows and --op know --standard operator and strict, where any difference fails")
    if named and dump is not None:
        raise CommandError("--op takes no DUMP: its inputs are drawn")


class LaterBar:
    """A progress bar that learns its length later."""

    def __init__(self) -> None:
        from contextlib import ExitStack

        self._stack = ExitStack()
        self.one = lambda: None

    def start(self, taps: int) -> None:
        self.one = self._stack.enter_context(progress("opcheck", taps))

    def end(self) -> None:
        self._stack.close()
