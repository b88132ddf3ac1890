"""``accprobe errcheck [options] -- CMD ...``: any command with every step watched for NaN, Inf and overflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import answer, show
from vllm_accprobe.cli.output_paths import check_place, require_directory
from vllm_accprobe.refusals import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.dump.findings import RankReport

_GRACE_S = 10.0
"""How long an engine that stops itself has for it before its command is signalled."""


def errcheck(
    command: list[str] = argument("[-- CMD...]", "vllm serve ..., a script, a shell line.", []),
    exec: str | None = options.exec_line(),
    dir: str | None = options.dump_dir(),
    kinds: str = option("--kinds", "overflow,nan", "What is an error: overflow, nan, or both.", metavar="KINDS"),
    ranks: str | None = options.ranks(),
    exit: bool = option("--exit", False, "Stop the command at the first finding; exit code 1."),
    graphs: bool = option("--graphs", False, "Leave compiled and captured graphs as configured; modules inside are "
                          "not seen."),
    read: Path | None = option("--read", None, "Print what a finished run found there.", metavar="DIR"),
) -> None:  # fmt: skip
    """Find the first NaN, Inf or overflow of a running engine or script: accprobe errcheck -- vllm serve MODEL.

    Prints module, step, request and position, whether its inputs were good, and which rank was first; keeps that
    call's tensors, and writes nothing where nothing is found. Serving continues, unless --exit stops it. Signals reach
    the command.
    Exit code 0: nothing bad, 1: something bad was found, 2: it could not be started, 3: nothing was watched; where
    nothing bad was found and the command failed, the command's own.
    """
    from vllm_accprobe.dump.findings import alive, read as read_reports, remove_clean

    def reports(root: Path) -> list[RankReport]:
        return read_reports(root) or read_reports(root / "errcheck")

    command = _command(command, exec)
    if read is not None:
        if command:
            raise CommandError("--read is of a run that has ended; leave the command away")
        require_directory(read, "--read")
        found = reports(read)
        if not found:
            raise CommandError(f"--read: {read} holds no findings of errcheck: name the --dir of that run")
        show(_lines(found))
        answer(findings=found, dir=read)
        raise typer.Exit(_code(found, 0))
    if not command:
        raise CommandError("no command is named; write `accprobe errcheck [options] -- CMD ...`, or --read DIR")

    import contextlib
    import os
    import signal
    import time

    from vllm_accprobe.children import HOME
    from vllm_accprobe.config import ENV, PREFIX, ProbeConfig, default_dir
    from vllm_accprobe.run.launcher import allow_plugin, run as launch

    environ = dict(os.environ)
    environ[PREFIX + "ERRCHECK"] = ",".join([kinds, *(["exit"] if exit else [])])
    for name, value in (("DIR", dir), ("RANKS", ranks), ("GRAPHS", "1" if graphs else None)):
        if value is not None:
            environ[PREFIX + name] = value
    config = ProbeConfig.from_env(environ)
    root = Path(config.dir or default_dir()).absolute()
    if (root / "run.json").exists() or list(root.glob("errcheck-rank*.json")):
        raise CommandError(f"--dir={root} already holds a dump or findings; name another directory")
    check_place(root, option="--dir")
    environ[PREFIX + "DIR"] = str(root)
    above, was_there = root.parent, root.parent.exists()
    allow_plugin(environ)
    startup = str(HOME / "capture/errcheck/startup")  # watches plain scripts
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [startup, environ.get("PYTHONPATH")]))
    seen: list[float] = []

    def tick() -> None:
        if exit and any(r.first is not None for r in reports(root)):
            seen.append(time.monotonic())
            if seen[-1] - seen[0] > _GRACE_S:
                os.kill(os.getpid(), signal.SIGTERM)  # the launcher passes it on
                seen[:] = [time.monotonic()]

    code = launch(command, environ, tick=tick, busy=lambda: alive(reports(root)))
    found = reports(root)
    show(_lines(found))
    answer(findings=found, dir=root, command_exit_code=code)
    for place in (root / "errcheck", root):
        remove_clean(place)
    if not was_there:
        with contextlib.suppress(OSError):  # not empty, or never made
            above.rmdir()
    if found and environ.get(ENV, "") not in ("", "0"):
        typer.echo(f"dump: {root}", err=True)
    raise typer.Exit(_code(found, code))


def _command(command: list[str] | None, line: str | None) -> list[str]:
    """The words of the command. Raises CommandError."""
    import shlex

    if line is None:
        return command or []
    if command:
        raise CommandError("--exec is the whole command: leave what follows it away")
    if set(line) & set("|&;<>()$`*?[#~="):
        return [line]  # for the shell
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CommandError(f"--exec: {error}: {line!r}") from None
    if not words:
        raise CommandError("--exec: no command is named")
    return words


def _lines(found: list[RankReport]) -> list[str]:
    from vllm_accprobe.dump.findings import lines
    from vllm_accprobe.report.text import safe

    return [f"errcheck: {safe(line)}" for line in lines(found)]


def _code(found: list[RankReport], code: int) -> int:
    if any(r.first is not None for r in found):
        return 1
    if not any(r.steps for r in found):
        return code or 3
    return code
