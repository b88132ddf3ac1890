"""``accprobe gate GOLDEN MINE --dig``: after a gate that failed, a capture of its worst tokens, and the culprit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from vllm_accprobe.cli.common.options import CommandError, NothingThere
from vllm_accprobe.gate.dig import by_hand
from vllm_accprobe.gate.dig.choose import DigPlan, Token, choose
from vllm_accprobe.gate.dig.culprit import Dug, dug
from vllm_accprobe.gate.dig.recapture import Dig, DigError, Progress, Recapturing
from vllm_accprobe.gate.sending.along import AlongError, digest
from vllm_accprobe.gate.sending.client import SendError
from vllm_accprobe.gate.sending.replies import FolderError, Sent
from vllm_accprobe.gate.sides import COMMAND, Asking, ServerSide, SideError

FOLDER = "dig"


@dataclass(frozen=True)
class Failed:
    """What is left of a gate that failed: both sides' answers, tokens beyond their limits, the sides as given."""

    golden: Sent
    mine: Sent
    worst: Sequence[Token]
    commands: tuple[ServerSide, ServerSide]


def dig(
    gate: Failed, out: Path | None, asking: Asking, gigabytes: float, progress: Progress, say: Callable[[str], None]
) -> Dug | None:
    """Captures both sides and compares, or says which commands would. say: gets the lines for people. None where there
    is nothing to dig for, or it is to be done by hand. Raises CommandError, NothingThere."""
    from vllm_accprobe.report.servers import dig_lines

    if not gate.worst:
        say("dig: no single token is beyond its limit; there is nothing to capture")
        return None
    plan = choose(gate.golden, gate.mine, gate.worst)
    if out is None or any(side.kind != COMMAND for side in gate.commands):
        for line in [*dig_lines.planned(plan), *by_hand.lines(plan, gate.golden.path, gigabytes)]:
            say(line)
        return None
    try:
        done = _captured(plan, gate, out / FOLDER, asking, gigabytes, progress, say)
        _compared(done.dump("golden"), done.dump("mine"), done.root / "compare")
        found = dug(done, done.root / "compare", gate.golden)
    except (DigError, SendError, AlongError, FolderError, SideError, ValueError) as e:
        raise CommandError(f"dig: {str(e).replace('--engine: ', '')} (the gate itself has failed, see above)") from None
    for line in dig_lines.lines(found):
        say(line)
    return found


def _captured(
    plan: DigPlan, gate: Failed, root: Path, asking: Asking, gigabytes: float, progress: Progress,
    say: Callable[[str], None],
) -> Dig:  # fmt: skip
    from vllm_accprobe.report.servers import dig_lines

    golden, mine = gate.commands
    key = {"golden": golden.digest, "mine": mine.digest, "along": digest(gate.golden), "gigabytes": gigabytes}
    done = Dig(root, key, plan)
    how = Recapturing(gigabytes, asking.timeout, asking.ready_s, asking.model, dict(os.environ), progress)
    for side, command in (("golden", golden.text), ("mine", mine.text)):
        done.capture(side, command, gate.golden, how)
        if side == "golden":
            for line in dig_lines.planned(done.plan):
                say(line)
    return done


def _compared(golden: Path, mine: Path, out: Path) -> None:
    """`accprobe compare`, in a process of its own, whose memory goes with it. Raises CommandError, NothingThere."""
    from vllm_accprobe.children import Child

    words = ("compare", str(golden), str(mine), "--out", str(out), "--format", "json")
    with Child("vllm_accprobe.cli", *words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        _, said = child.communicate()
    if child.returncode in (0, 1):
        return
    line = (said.strip().splitlines() or ["it ended without a word"])[-1].removeprefix("accprobe: ")
    raise (NothingThere if child.returncode == 3 else CommandError)(f"dig: {line}")


def to_stderr(line: str) -> None:
    """Where stdout is a program's."""
    typer.echo(line, file=sys.stderr)
