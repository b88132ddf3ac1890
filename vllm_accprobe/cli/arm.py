"""``accprobe arm DUMP``: a server that runs with the probe on captures these requests from now on, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import answer
from vllm_accprobe.refusals import CommandError


def arm(
    *,
    dump: Path = argument("DUMP", "The directory into which the server captures."),
    off: bool = option("--off", False, "Capture nothing from now on."),
    capture: options.CaptureOptions,
) -> None:
    """Switch a running server's capture on for these requests, or off.

    Writes DUMP/arm.json, which the server reads before each step. Options that are left out are as the server was
    started: with VLLM_ACCPROBE=1, and VLLM_ACCPROBE_ARMED=0 to begin disarmed.
    Exit code 0: written, 2: not a place that a server captures into.
    """
    from vllm_accprobe import arm_file
    from vllm_accprobe.dump.schema import RUN_JSON
    from vllm_accprobe.run.watcher import Watcher

    names = ("requests", "tokens", "modules", "steps")
    chosen = {name: value for name in names if (value := getattr(capture, name)) is not None}
    if off and chosen:
        raise CommandError(f"--off captures nothing: leave --{next(iter(chosen))} away")
    selection = arm_file.parse_selection({"on": not off, **chosen})
    if not dump.is_dir():
        raise CommandError(f"{dump} is no directory: name the one that the server captures into (VLLM_ACCPROBE_DIR)")
    if dump.stat().st_uid != os.geteuid():
        raise CommandError(f"{dump} belongs to another user, and only the server's own user can arm it")
    output_paths.writable(dump, "DUMP")
    watcher = Watcher(dump.absolute())
    found = watcher.poll()
    if not found.ranks and any(path.name not in (RUN_JSON, arm_file.NAME) for path in dump.iterdir()):
        raise CommandError(f"{dump}: no server captures here; name its VLLM_ACCPROBE_DIR, a folder of its own")
    if found.ranks and not watcher.writing():
        raise CommandError(f"{dump}: no server writes into this dump any more")
    path = arm_file.write(dump, selection)
    when = "before its next step" if found.ranks else "at its first step, once it has one"
    answer(armed=not off, file=path, selection=chosen, running=bool(found.ranks))
    typer.echo(f"{'disarmed' if off else 'armed'}: the server reads {path} {when}")
