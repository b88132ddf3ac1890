"""``accprobe arm DUMP``: a server that runs with the probe on captures these requests from now on, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from vllm_accprobe.cli.common.declared import MODULES, REQUESTS, STEPS, TOKENS
from vllm_accprobe.cli.common.json_answer import answer
from vllm_accprobe.cli.common.options import CommandError


def arm(
    dump: Path = typer.Argument(..., metavar="DUMP", help="The directory into which the server captures."),
    requests: str = REQUESTS,
    tokens: str = TOKENS,
    modules: str = MODULES,
    steps: str = STEPS,
    off: bool = typer.Option(False, "--off", help="Capture nothing from now on."),
) -> None:
    """Switch a running server's capture on for these requests, or off.

    Writes DUMP/arm.json, which the server looks at before each step; what is not given is as the server was started.
    Modules are of those that it taps.
    Start it with VLLM_ACCPROBE=1, and with VLLM_ACCPROBE_ARMED=0 where it is to begin disarmed.
    Exit code 0: written, 2: not a place that a server captures into.
    """
    from vllm_accprobe import arm_file
    from vllm_accprobe.run.watcher import Watcher

    given = {k: v for k, v in (("requests", requests), ("tokens", tokens), ("modules", modules), ("steps", steps))
             if v is not None}  # fmt: skip
    if off and given:
        raise CommandError(f"--off captures nothing: leave --{next(iter(given))} away")
    if not dump.is_dir():
        raise CommandError(f"{dump} is no directory: name the one that the server was given (VLLM_ACCPROBE_DIR)")
    if dump.stat().st_uid != os.geteuid():
        raise CommandError(f"{dump} belongs to another user, and only the server's own user can arm it")
    watcher = Watcher(dump.absolute())
    found = watcher.look()
    if found.ranks and not watcher.writing():
        raise CommandError(f"{dump}: no server writes into this dump any more")
    try:
        selection = arm_file.understood({"on": not off, **given})
    except arm_file.ArmFileError as e:
        raise CommandError(str(e)) from None
    path = arm_file.write(dump, selection)
    when = "before its next step" if found.ranks else "at its first step, once it has one"
    answer(armed=not off, file=path, selection=given, running=bool(found.ranks))
    typer.echo(f"{'disarmed' if off else 'armed'}: the server reads {path} {when}")
