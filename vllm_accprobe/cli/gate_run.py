"""A gate between two servers: each side becomes a folder of answers, then they are compared; and what follows a
failure.

With ``--localize``, a gate that fails captures the worst tokens of both sides, compares the dumps and names the
culprit. Not here: the options (gate.py), sending and measuring (gate/)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from vllm_accprobe.cli import places
from vllm_accprobe.cli.endings import CommandError, NothingThere, going_on
from vllm_accprobe.cli.output import progress, say_notes
from vllm_accprobe.gate import localize as by_hand
from vllm_accprobe.gate import preflight, sides
from vllm_accprobe.gate.localize import (
    Localization,
    Localized,
    LocalizeError,
    LocalizePlan,
    Recapturing,
    Token,
    choose,
    dug,
)
from vllm_accprobe.gate.measure import gating
from vllm_accprobe.gate.sending.client import NotServed, SendError
from vllm_accprobe.gate.sending.passes import TeacherForcingError, digest
from vllm_accprobe.gate.sending.replies import FolderError, Sent
from vllm_accprobe.gate.sides import COMMAND, FOLDER, SendSettings, ServerSide, SideError
from vllm_accprobe.waiting import Pace, waiting

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
    golden: str, mine: str, out: Path | None, floors: Floors, sending: SendSettings, rate: float | None, as_json: bool,
    localize_gb: float | None = None, healing: Callable[..., list[dict[str, Any]]] | None = None,
) -> NoReturn:  # fmt: skip
    """Compares, prints, writes OUT/gate.json, and ends with compare's exit codes. localize_gb: the disk budget of what
    follows a gate that fails; None: nothing does. healing: gate_heal.heal, where the culprit is healed and
    the gate repeated."""
    from vllm_accprobe.report import servers

    if localize_gb is not None and out is not None:
        _check_room(out, localize_gb)
    opened = compare(golden, mine, out, floors, sending, rate, localize_gb is not None)
    result = opened.gate
    fields = servers.gap_json(result, opened.names)
    if out is not None:
        write(out / RESULT, fields)
    if not as_json:
        for line in servers.gap_lines(result, opened.names):
            typer.echo(line)
    tell = to_stderr if as_json else typer.echo
    if localize_gb is not None and result.verdict == "fail" and result.numbers != "fail":
        tell("dig: no number is further away than it may be with golden's token ids; there is nothing to capture")
    if localize_gb is not None and result.numbers == "fail":
        failed = FailedGate(opened.golden, opened.mine, result.worst, (sides.side(golden), sides.side(mine)))
        found = localize(failed, out, sending, localize_gb, tell)
        fields |= {} if found is None else {"dig": found.to_json()}
        if healing is not None:
            fields["heal"] = healing(golden, mine, opened, found, out, sending, rate, localize_gb, tell)
        if out is not None:
            write(out / RESULT, fields)
    if as_json:
        typer.echo(json.dumps(fields, indent=1))
    raise typer.Exit({"pass": 0, "fail": 1, None: 3}[result.verdict])


def compare(
    golden: str, mine: str, out: Path | None, floors: Floors, sending: SendSettings, rate: float | None,
    captured: bool = False,
) -> Opened:  # fmt: skip
    """Makes what is no folder yet, golden first, and compares. captured: both are captured where they differ. Raises
    CommandError, NothingThere."""
    try:
        left, right = sides.side(golden), sides.side(mine)
        floor_sides = [sides.side(text) for text in floors.sides]
    except sides.SideError as e:
        raise CommandError(f"{e}; answers of an evaluation are compared by `accprobe eval-diff A B`") from None
    if left.kind == right.kind == FOLDER:
        places.refuse_same(("GOLDEN", Path(golden)), ("MINE", Path(mine)), "folder")
    elif left == right and left.kind != COMMAND:
        raise CommandError("GOLDEN and MINE are the same server: name two, or use `accprobe self-check`")
    if floors.dtype and floors.dtype not in sides.DTYPES:
        raise CommandError(f"--floor-dtype: {floors.dtype} is none of {', '.join(sides.DTYPES)}")
    if floors.dtype and left.kind != COMMAND:
        raise CommandError("--floor-dtype is for a GOLDEN that is a command; name a server or a folder with --floor")
    if out is None and any(side.kind != FOLDER for side in (left, right, *floor_sides)):
        raise CommandError("a server's answers need a place: name one with --out DIR")
    if out is not None:
        places.check(out, {RESULT: places.SCHEMA_AND_VERDICT})
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        going_on("the answers are", out)
    place = out if out is not None else Path()  # of folders nothing is written
    environ, tell = dict(os.environ), bars(sending)
    try:
        named = {"golden": (left, place / "golden"), "mine": (right, place / "mine")}
        named |= {f"floor {i}": (side, place / f"floor-{i}") for i, side in enumerate(floor_sides)}
        sides.check(named, sending, environ, captured, lambda line: say_notes([line]))
        first = sides.made("golden", left, place / "golden", sending, None, tell, environ)
        second = sides.made("mine", right, place / "mine", sending, first, tell, environ)
        made, names = [], []
        for i, side in enumerate(floor_sides):
            sent = sides.made(f"floor {i}", side, place / f"floor-{i}", sending, first, tell, environ)
            if not gating.has_numbers(first, sent):
                typer.echo(f"note: floor {i} ({side}) has no numbers for some tokens: it is left out", err=True)
                continue
            made.append(sent)
            names.append(str(side))
        if left.kind == COMMAND and not floor_sides and not floors.none:
            found = _own_floor(left, right, floors.dtype, place, sending, first, environ)
            if found is not None:
                made.append(found[0])
                names.append(found[1])
        result = gating.compare(first, second, made, gating.RATE if rate is None else rate)
    except sides.NotComparable as e:
        raise NothingThere(str(e)) from None
    except (sides.SideError, NotServed, FolderError) as e:
        raise CommandError(str(e)) from None
    except gating.GateError as e:
        raise NothingThere(f"{e} ({first.path}, {second.path})") from None
    return Opened(first, second, tuple(made), tuple(names), result)


_LEAST_GB = 0.1
"""Chosen: a capture of a tiny model has some MB."""


def _check_room(out: Path, gigabytes: float) -> None:
    """Raises CommandError where the disk has no room for two captures; says where it has less than they may take."""
    free = preflight.room_for(out, 2 * gigabytes) / 2
    if free < min(_LEAST_GB, gigabytes):
        raise CommandError(f"--localize: {out} has {2 * free:.3g} GB of disk: make room, or name another --out")
    if free < gigabytes:
        to_stderr(f"note: {out} has room for {free:.3g} GB of each side, not for {gigabytes:g} (--localize-gb)")


def _own_floor(
    golden: ServerSide,
    mine: ServerSide,
    dtype: str,
    out: Path,
    sending: SendSettings,
    first: Sent,
    environ: dict[str, str],
) -> tuple[Sent, str] | None:
    """Golden's command in another dtype, the first that its server takes; None where it takes none."""
    wanted = [dtype] if dtype else sides.candidates(golden.text, mine.text if mine.kind == COMMAND else None)
    refused = []
    for i, one in enumerate(wanted):
        side = ServerSide(COMMAND, sides.command(golden.text, one))
        try:
            sent = sides.made("floor 0", side, out / f"floor-{i}", sending, first, bars(sending), environ)
        except NotServed as e:
            refused.append(f"{one}: {e}")
            continue
        if gating.has_numbers(first, sent):
            return sent, f"golden's command with --dtype={one}"
        refused.append(f"{one}: it answers with no numbers")
    if dtype:
        raise sides.SideError(f"--floor-dtype {refused[0]}")
    typer.echo(f"note: golden's command makes no floor ({'; '.join(refused)})", err=True)
    return None


def bars(sending: SendSettings) -> by_hand.Progress:
    """How far the sending is, at the pace of the settings."""
    return partial(progress, steps=True, pace=sending.say)


def write(path: Path, value: object) -> None:
    """json, whole, only for its owner."""
    from vllm_accprobe.whole_file import write_private

    write_private(path, json.dumps(value, indent=1))


# --- what follows a failure ---


LOCALIZED = "dig"


@dataclass(frozen=True)
class FailedGate:
    """What is left of a gate that failed: both sides' answers, tokens beyond their limits, the sides as typed."""

    golden: Sent
    mine: Sent
    worst: Sequence[Token]
    commands: tuple[ServerSide, ServerSide]


def localize(
    gate: FailedGate,
    out: Path | None,
    sending: SendSettings,
    gigabytes: float,
    say: Callable[[str], None],
) -> Localized | None:
    """Captures both sides and compares, or says which commands would. say: gets the lines for people. None where there
    is nothing to localize, or it is to be done by hand. Raises CommandError, NothingThere."""
    from vllm_accprobe.report import servers

    if not gate.worst:
        say("dig: no single token is beyond its limit; there is nothing to capture")
        return None
    plan = choose(gate.golden, gate.mine, gate.worst)
    if out is None or any(side.kind != COMMAND for side in gate.commands):
        for line in [*servers.planned(plan), *by_hand.lines(plan, gate.golden.path, gigabytes)]:
            say(line)
        return None
    try:
        done = _captured(plan, gate, out / LOCALIZED, sending, gigabytes, say)
        _compared(done.dump("golden"), done.dump("mine"), done.root / "compare", sending.say)
        found = dug(done, done.root / "compare", gate.golden)
    except (LocalizeError, SendError, TeacherForcingError, FolderError, SideError, ValueError) as e:
        raise CommandError(f"dig: {e} (the gate itself has failed, see above)") from None
    for line in servers.localize_lines(found):
        say(line)
    return found


def _captured(
    plan: LocalizePlan, gate: FailedGate, root: Path, sending: SendSettings, gigabytes: float,
    say: Callable[[str], None],
) -> Localization:  # fmt: skip
    from vllm_accprobe.report import servers

    golden, mine = gate.commands
    key = {"golden": golden.digest, "mine": mine.digest, "along": digest(gate.golden), "gigabytes": gigabytes}
    done = Localization(root, key, plan)
    environ = dict(os.environ)
    sides_left = 2 - len(done.done)
    room = preflight.room_for(root, sides_left * gigabytes) / sides_left if sides_left else gigabytes
    how = Recapturing(room, sending.timeout, sending.ready_s, sending.model, environ, bars(sending), sending.say)
    for side, command in (("golden", golden.text), ("mine", mine.text)):
        done.capture(side, command, gate.golden, how)
        if side == "golden":
            for line in servers.planned(done.plan):
                say(line)
    return done


def _compared(golden: Path, mine: Path, out: Path, say: Pace) -> None:
    """`accprobe compare`, in a process of its own, whose memory goes with it. Raises CommandError, NothingThere."""
    from vllm_accprobe.children import Child

    words = ("compare", str(golden), str(mine), "--out", str(out), "--format", "json")
    with (
        Child("vllm_accprobe.cli", *words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child,
        waiting(lambda: "dig: comparing the two captures", say),
    ):
        _, stderr = child.communicate()
    if child.returncode in (0, 1):
        return
    line = (stderr.strip().splitlines() or ["it ended without a line"])[-1].removeprefix("accprobe: ")
    raise (NothingThere if child.returncode == 3 else CommandError)(f"dig: {line}")


def to_stderr(line: str) -> None:
    """Where stdout is a program's."""
    typer.echo(line, file=sys.stderr)
