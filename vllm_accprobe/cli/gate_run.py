"""``accprobe gate A B``: each side becomes a folder of answers, both are compared, and a failure is localized.

With ``--localize``, a gate that fails captures the worst tokens of both sides, compares the dumps and names the
culprit. Not here: the options (gate.py), sending and measuring (gate/)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from vllm_accprobe.cli import output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.output import report, say_notes, show
from vllm_accprobe.config import default_dir
from vllm_accprobe.gate import localize as by_hand, preflight, sides
from vllm_accprobe.gate.localize import (
    KeptServers,
    Localization,
    Localized,
    LocalizeError,
    LocalizePlan,
    Recapturing,
    Token,
)
from vllm_accprobe.gate.measure import gating
from vllm_accprobe.gate.sending import prompts as prompts_file
from vllm_accprobe.gate.sending.client import NotServed, SendError
from vllm_accprobe.gate.sending.passes import TeacherForcingError, digest
from vllm_accprobe.gate.sending.replies import FolderError, Sent
from vllm_accprobe.gate.sides import COMMAND, FOLDER, SendSettings, ServerSide, SideError
from vllm_accprobe.progress import Pace, progress, waiting
from vllm_accprobe.refusals import CODES, CommandError, NothingThere
from vllm_accprobe.whole_file import NoSpace, write_private

RESULT = "gate.json"


@dataclass(frozen=True)
class Opened:
    """All folders of a gate, compared. names: of the floors."""

    golden: Sent
    mine: Sent
    floors: tuple[Sent, ...]
    names: tuple[str, ...]
    gate: gating.Gate


def run(what: Any, localizing: Any, sending: SendSettings, heal: Callable[..., list[dict[str, Any]]]) -> NoReturn:
    """Compares, prints, writes OUT/gate.json, and ends with compare's exit codes. what, localizing: gate.GateOptions,
    gate.LocalizeOptions; heal: gate_heal.heal."""
    unnamed = what.out is None and not all(Path(side).is_dir() for side in (what.golden, what.mine, *what.floor))
    if unnamed:
        what = replace(what, out=Path("accprobe-gate") / Path(default_dir()).name)
    out, gigabytes = what.out, localizing.localize_gb
    if localizing.localize and out is not None:
        _check_room(out, gigabytes)
        gigabytes = preflight.room_for(out, 2 * gigabytes) / 2
    kept = KeptServers(root=(out or Path()) / LOCALIZED, gigabytes=gigabytes)
    try:
        verdict = _followed(what, localizing, sending, heal, kept, unnamed)
    finally:
        kept.close()
    raise typer.Exit(CODES[verdict])


def _followed(
    what: Any, localizing: Any, sending: SendSettings, heal: Callable[..., list[dict[str, Any]]], kept: KeptServers,
    unnamed: bool,
) -> str | None:  # fmt: skip
    """The verdict, once all that follows from it is done and printed. kept: servers that may be captured."""
    from vllm_accprobe.report import servers

    out, as_json, gigabytes = what.out, what.as_json, localizing.localize_gb
    opened = compare(what, sending, kept if localizing.localize else None)
    if unnamed:
        to_stderr(f"the answers are in {out}")
    result = opened.gate
    fields = servers.gap_json(result, opened.names)

    lost: list[NoSpace] = []

    def keep() -> None:
        lost.clear()
        try:
            if out is not None:
                write_private(out / RESULT, json.dumps(fields, indent=1))
        except NoSpace as e:  # the verdict is printed all the same
            lost.append(e)

    keep()
    if not as_json:
        show(servers.gap_lines(result, opened.names))
    tell = to_stderr if as_json else typer.echo
    if localizing.localize and result.verdict == "fail" and result.numbers != "fail":
        tell("dig: no number is further away than it may be with golden's token ids; there is nothing to capture")
    if localizing.localize and result.numbers == "fail":
        both = sides.side(what.golden), sides.side(what.mine)
        failed = FailedGate(opened.golden, opened.mine, result.worst, both, kept)
        found = localize(failed, out, sending, gigabytes, tell)
        fields |= {} if found is None else {"dig": found.to_json()}
        if localizing.heal:
            fields["heal"] = heal(what, opened, found, sending, gigabytes, tell)
        keep()
    report(as_json, fields, ())
    if lost:
        raise lost[0]
    return result.verdict


def compare(what: Any, sending: SendSettings, kept: KeptServers | None = None) -> Opened:
    """Makes what is no folder yet, golden first, and compares. what: gate.GateOptions; kept: of a gate whose sides are
    captured where they differ; mine starts last then. Raises CommandError, NothingThere, and what the sides raise."""
    golden, mine, out, dtype = what.golden, what.mine, what.out, what.floor_dtype
    try:
        left, right, *floor_sides = map(sides.side, (golden, mine, *what.floor))
    except sides.SideError as e:
        raise CommandError(f"{e}; answers of an evaluation are compared by `accprobe eval-diff A B`") from None
    if left.kind == right.kind == FOLDER:
        output_paths.refuse_same(("GOLDEN", Path(golden)), ("MINE", Path(mine)), "folder")
    elif left == right and left.kind != COMMAND:
        raise CommandError("GOLDEN and MINE are the same server: name two, or use `accprobe self-check`")
    if dtype and dtype not in sides.DTYPES:
        raise CommandError(f"--floor-dtype: {dtype} is none of {', '.join(sides.DTYPES)}")
    if dtype and left.kind != COMMAND:
        raise CommandError("--floor-dtype is for a GOLDEN that is a command; name a server or a folder with --floor")
    if out is not None:
        output_paths.check(out, {RESULT: output_paths.SCHEMA_AND_VERDICT})
    place = out if out is not None else Path()  # of folders nothing is written
    environ, tell = dict(os.environ), bars(sending)
    named = {"golden": (left, place / "golden"), "mine": (right, place / "mine")}
    named |= {f"floor {i}": (side, place / f"floor-{i}") for i, side in enumerate(floor_sides)}
    sides.check(named, sending, environ, kept is not None, lambda line: say_notes([line]))
    if out is not None:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        going_on("the answers are", out)
    servers, own = kept or KeptServers(), left.kind == COMMAND and not floor_sides and not what.no_floor
    if kept is not None:
        started = [side.text for side in floor_sides if side.kind == COMMAND]
        lines = prompts_file.read(sending.prompts)
        kept.sides = sides.kept(left, right, [*started, *([left.text] if own else [])], environ, lines)
    first = sides.made("golden", left, place / "golden", sending, None, tell, environ, servers)

    def sent_floors() -> list[tuple[Sent, str]]:
        made = []
        for i, side in enumerate(floor_sides):
            sent = sides.made(f"floor {i}", side, place / f"floor-{i}", sending, first, tell, environ, servers)
            if gating.has_numbers(first, sent):
                made.append((sent, str(side)))
            else:
                to_stderr(f"note: floor {i} ({side}) has no numbers for some tokens: it is left out")
        return made + (_own_floor(left, right, dtype, place, sending, first, environ) if own else [])

    made = sent_floors() if servers.sides else []
    second = sides.made("mine", right, place / "mine", sending, first, tell, environ, servers)
    made = made if servers.sides else sent_floors()
    try:
        result = gating.compare(
            first, second, [sent for sent, _ in made], gating.RATE if what.rate is None else what.rate,
            names=[name for _, name in made],
        )  # fmt: skip
    except gating.GateError as e:
        raise NothingThere(f"{e} ({first.path}, {second.path})") from None
    used = [made[i] for i in result.kept]
    return Opened(first, second, tuple(sent for sent, _ in used), tuple(name for _, name in used), result)


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
    golden: ServerSide, mine: ServerSide, dtype: str, out: Path, sending: SendSettings, first: Sent,
    environ: dict[str, str],
) -> list[tuple[Sent, str]]:  # fmt: skip
    """Golden's command in another dtype, the first that its server takes, and its name; [] where it takes none. One
    that is further away than rounding explains only where no other is nearer: the gate says so."""
    selected = [dtype] if dtype else sides.candidates(golden.text, mine.text if mine.kind == COMMAND else None)
    refused: list[str] = []
    far: list[tuple[Sent, str]] = []
    for i, one in enumerate(selected):
        name, side = f"golden's command with --dtype={one}", ServerSide(COMMAND, sides.command(golden.text, one))
        try:
            sent = sides.made(
                "floor 0", side, out / f"floor-{i}", sending, first, bars(sending), environ, KeptServers()
            )
        except NotServed as e:
            refused.append(f"{one}: {e}")
            continue
        if not gating.has_numbers(first, sent):
            refused.append(f"{one}: it answers with no numbers")
        elif gating.beyond_rounding(first, sent, name):
            far.append((sent, name))
        else:
            return [(sent, name)]
    if far:
        return far
    if dtype:
        raise sides.SideError(f"--floor-dtype {refused[0]}")
    to_stderr(f"note: golden's command makes no floor ({'; '.join(refused)})")
    return []


def bars(sending: SendSettings) -> by_hand.Progress:
    """How far the sending is, at the pace of the settings."""
    return partial(progress, steps=True, pace=sending.say)


LOCALIZED = "dig"


@dataclass(frozen=True)
class FailedGate:
    """What is left of a gate that failed: both sides' answers, tokens beyond their limits, the sides as typed, and the
    servers that still run."""

    golden: Sent
    mine: Sent
    worst: Sequence[Token]
    commands: tuple[ServerSide, ServerSide]
    kept: KeptServers = field(default_factory=KeptServers)


def localize(
    gate: FailedGate, out: Path | None, sending: SendSettings, gigabytes: float, say: Callable[[str], None]
) -> Localized | None:
    """Captures both sides and compares, or says which commands would. say: gets the lines for people. None where there
    is nothing to localize, or it is to be done by hand. Raises CommandError, NothingThere."""
    from vllm_accprobe.report import servers

    if not gate.worst:
        say("dig: no single token is beyond its limit; there is nothing to capture")
        return None
    plan = by_hand.choose(gate.golden, gate.mine, gate.worst)
    if out is None or any(side.kind != COMMAND for side in gate.commands):
        for line in [*servers.planned(plan), *by_hand.lines(plan, gate.golden.path, gigabytes)]:
            say(line)
        return None
    try:
        done = _captured(plan, gate, out / LOCALIZED, sending, gigabytes, say)
        _compared(done.dump("golden"), done.dump("mine"), done.root / "compare", sending.say)
        found = by_hand.dug(done, done.root / "compare", gate.golden)
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
    how = Recapturing(
        room, sending.timeout, sending.ready_s, sending.model, environ, bars(sending), sending.say, gate.kept
    )
    # One that runs already goes first: it may have the device that the other one needs.
    order = sorted((("golden", golden.text), ("mine", mine.text)), key=lambda side: not gate.kept.runs(side[0]))
    for i, (side, command) in enumerate(order):
        done.capture(side, command, gate.golden, how)
        for line in servers.planned(done.plan) if not i else ():
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


to_stderr = partial(typer.echo, err=True)
"""Where stdout is a program's."""
