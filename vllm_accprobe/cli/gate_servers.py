"""``accprobe gate GOLDEN MINE`` of servers: each side becomes a folder, then they are compared. Not here: --samples."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress
from vllm_accprobe.gate import floor_dtype, sides
from vllm_accprobe.gate.measure import gating
from vllm_accprobe.gate.sending.replies import FolderError, Sent
from vllm_accprobe.gate.sides import COMMAND, FOLDER, Asking, ServerSide

RESULT = "gate.json"


@dataclass(frozen=True)
class Floors:
    """As the options say: sides; the dtype of golden's command, "" for the default; whether it makes one at all."""

    sides: tuple[str, ...]
    dtype: str
    none: bool


@dataclass(frozen=True)
class Opened:
    """All folders of a gate, compared. names: of the floors."""

    golden: Sent
    mine: Sent
    floors: tuple[Sent, ...]
    names: tuple[str, ...]
    gate: gating.Gate


def run(
    golden: str, mine: str, out: Path | None, floors: Floors, asking: Asking, rate: float | None, as_json: bool,
    dig_gb: float | None = None,
) -> NoReturn:  # fmt: skip
    """Compares, prints, writes OUT/gate.json, and ends with compare's exit codes. dig_gb: the disk budget of a dig
    after a gate that fails; None: there is none."""
    from vllm_accprobe.report import gap_lines

    opened = compare(golden, mine, out, floors, asking, rate)
    result = opened.gate
    said = gap_lines.to_json(result, opened.names)
    if out is not None:
        write(out / RESULT, said)
    if not as_json:
        for line in gap_lines.lines(result, opened.names):
            typer.echo(line)
    if dig_gb is not None and result.verdict == "fail":
        from vllm_accprobe.cli import gate_dig

        tell = gate_dig.to_stderr if as_json else typer.echo
        failed = gate_dig.Failed(opened.golden, opened.mine, result.worst, (sides.side(golden), sides.side(mine)))
        found = gate_dig.dig(failed, out, asking, dig_gb, _progress, tell)
        said |= {} if found is None else {"dig": found.to_json()}
        if out is not None:
            write(out / RESULT, said)
    if as_json:
        typer.echo(json.dumps(said, indent=1))
    raise typer.Exit({"pass": 0, "fail": 1, None: 3}[result.verdict])


def compare(golden: str, mine: str, out: Path | None, floors: Floors, asking: Asking, rate: float | None) -> Opened:
    """Makes what is no folder yet, golden first, and compares. Raises CommandError, NothingThere."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.cli.interrupts import kept

    try:
        left, right = sides.side(golden), sides.side(mine)
        given = [sides.side(text) for text in floors.sides]
    except sides.SideError as e:
        raise CommandError(f"{e}; with --samples GOLDEN and MINE are the answers of an evaluation") from None
    if left.kind == right.kind == FOLDER:
        refuse_same(("GOLDEN", Path(golden)), ("MINE", Path(mine)), "folder")
    elif left == right and left.kind != COMMAND:
        raise CommandError("GOLDEN and MINE are the same server: name two, or use --self")
    if floors.dtype and floors.dtype not in floor_dtype.DTYPES:
        raise CommandError(f"--floor-dtype: {floors.dtype} is none of {', '.join(floor_dtype.DTYPES)}")
    if floors.dtype and left.kind != COMMAND:
        raise CommandError("--floor-dtype is for a GOLDEN that is a command; name a server or a folder with --floor")
    if out is None and any(side.kind != FOLDER for side in (left, right, *given)):
        raise CommandError("a server's answers need a place: name one with --out DIR")
    if out is not None:
        outputs.check(out, {RESULT: outputs.SCHEMA_AND_VERDICT})
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept.going_on("the answers are", out)
    place = out if out is not None else Path()  # of folders nothing is written
    environ = dict(os.environ)
    try:
        first = sides.made("golden", left, place / "golden", asking, None, _progress, environ)
        second = sides.made("mine", right, place / "mine", asking, first, _progress, environ)
        made, names = [], []
        for i, side in enumerate(given):
            sent = sides.made(f"floor {i}", side, place / f"floor-{i}", asking, first, _progress, environ)
            if not gating.has_numbers(first, sent):
                typer.echo(f"note: floor {i} ({side}) has no numbers for some tokens: it is left out", err=True)
                continue
            made.append(sent)
            names.append(str(side))
        if left.kind == COMMAND and not given and not floors.none:
            found = _own_floor(left, right, floors.dtype, place, asking, first, environ)
            if found is not None:
                made.append(found[0])
                names.append(found[1])
        result = gating.compare(first, second, made, gating.RATE if rate is None else rate)
    except sides.NotComparable as e:
        raise NothingThere(str(e)) from None
    except (sides.SideError, FolderError) as e:
        raise CommandError(str(e)) from None
    except gating.GateError as e:
        raise NothingThere(f"{e} ({first.path}, {second.path})") from None
    return Opened(first, second, tuple(made), tuple(names), result)


def _own_floor(
    golden: ServerSide, mine: ServerSide, dtype: str, out: Path, asking: Asking, first: Sent, environ: dict[str, str]
) -> tuple[Sent, str] | None:
    """Golden's command in another dtype, the first that its server takes; None where it takes none."""
    wanted = [dtype] if dtype else floor_dtype.candidates(golden.text, mine.text if mine.kind == COMMAND else None)
    refused = []
    for i, one in enumerate(wanted):
        side = ServerSide(COMMAND, floor_dtype.command(golden.text, one))
        try:
            sent = sides.made("floor 0", side, out / f"floor-{i}", asking, first, _progress, environ)
        except sides.NotServed as e:
            refused.append(f"{one}: {e}")
            continue
        if gating.has_numbers(first, sent):
            return sent, f"golden's command with --dtype={one}"
        refused.append(f"{one}: it answers with no numbers")
    if dtype:
        raise sides.SideError(f"--floor-dtype {refused[0]}")
    typer.echo(f"note: golden's command makes no floor ({'; '.join(refused)})", err=True)
    return None


def _progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    return progress(what, total, steps=True)


def write(path: Path, value: object) -> None:
    """json, whole, only for its owner."""
    from vllm_accprobe.whole_file import write_private

    write_private(path, json.dumps(value, indent=1))
