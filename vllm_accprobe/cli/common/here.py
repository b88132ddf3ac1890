"""Options of opcheck that run this machine's own kernels: `--repeat`, `--rows`, and operators named by hand.

Not here: running them (opcheck/repeat), opcheck's other options (cli/opcheck.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from vllm_accprobe.cli.common.options import CommandError

REPEAT = typer.Option(0, "--repeat", min=0, metavar="N", help="Run each call N times here: races, unwritten memory.")
ROWS = typer.Option("", "--rows", metavar="SIZES", help="Rows in batches of these sizes, e.g. 1,N or all, here.")
OP = typer.Option("", "--op", metavar="NAME", help="No dump: this operator, or FILE.py:FUNCTION, on drawn inputs.")
SHAPE = typer.Option([], "--shape", metavar="SHAPES", help="Its tensors, e.g. 7x64,64x32. Repeated: further calls.")
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
