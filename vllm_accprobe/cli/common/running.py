"""What ``run`` and ``labels --exec`` have in common: a command with the probe on, watched to its end.

Not here: the options (cli/run.py, cli/labels.py), the command's signals and terminal (run/launcher.py), ATB's variables
(run/atb.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.json_answer import answer
from vllm_accprobe.cli.common.options import CommandError, size
from vllm_accprobe.report.text import count

if TYPE_CHECKING:
    from vllm_accprobe.config import ProbeConfig
    from vllm_accprobe.run.atb import AtbOptions
    from vllm_accprobe.run.watcher import Progress, Watcher


@dataclass(frozen=True)
class EndedRun:
    """A command that has ended. code: its exit code; files: how many ATB wrote; killed: see `_ending`."""

    watcher: Watcher
    settings: ProbeConfig
    root: Path
    code: int
    files: int
    killed: int


def launched(
    command: Sequence[str],
    given: Mapping[str, str | None],
    atb: AtbOptions | None,
    quiet: bool,
    more: Mapping[str, str],
    folder: str = "",
) -> EndedRun:
    """Runs ``command`` with the probe on. given: settings by name, None: the environment's; atb: None for no ATB; more:
    further variables for the command; folder: where ATB writes, below the dump. Raises CommandError, ConfigError before
    anything is started."""
    import tempfile
    import time

    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.formats.common.sniff import is_own
    from vllm_accprobe.run import atb as atb_room
    from vllm_accprobe.run.launcher import LaunchError, command_line
    from vllm_accprobe.run.launcher import run as launch
    from vllm_accprobe.run.settings import REGISTER, environment
    from vllm_accprobe.run.watcher import Watcher

    environ, settings, notes = environment(given, os.environ)
    environ |= more
    root = Path(settings.dir)
    if not is_own(root):  # its own earlier dump: who writes it says so
        outputs.check_place(root, option="--dir")
    output = root / (folder or atb_room.DIRECTORY)
    if atb is not None:
        environ |= atb.variables(output)
        library, why = atb_room.preload(environ)
        if library is not None:
            environ["LD_PRELOAD"] = library
        else:
            notes.append(why)
    for note in notes:
        say(note)
    try:
        command_line(command, environ)
        if atb is not None:
            output.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix="accprobe-run-") as register:
            environ[REGISTER] = register.name
            watcher, status, began = Watcher(root, Path(register.name)), _Status(settings, quiet), time.time()
            before = _killed_for_memory()
            code = launch(command, environ, tick=lambda: status.show(watcher.look()), busy=watcher.writing)
            status.clear()
            watcher.settle()
    except LaunchError as error:
        raise CommandError(str(error)) from None
    files = 0
    if atb is not None:
        files, nbytes = atb_room.collect(root, environ, began, output.name)
        if files and not quiet:
            say(f"ATB wrote {files:,} files, {size(nbytes)}, in {output}")
        if files and atb.draws:
            _draw(output, quiet)
    return EndedRun(watcher, settings, root, code, files, max(_killed_for_memory() - before, 0))


def _draw(output: Path, quiet: bool) -> None:
    """The topologies that ATB wrote as ONNX files beside them; what cannot be drawn is a line, and the rest goes on."""
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.topology.atb_json import atb_json_to_onnx

    found = [f for kind in ("model", "layer") for f in sorted(output.rglob(f"{kind}/*/*.json"))]
    made = 0
    for file in found:
        try:
            atb_json_to_onnx(file)
            made += 1
        except (DumpError, OSError) as error:
            say(f"{file.name} was not drawn: {error}")
    if not found:
        say("ATB wrote no topology: nothing to draw as ONNX")
    elif made and not quiet:
        say(f"{count(made, 'topology', 'topologies')} drawn as ONNX, beside the json")


def _ending(code: int, killed: int) -> str:
    """How a command ended. killed: processes that this machine ended meanwhile because memory ran out."""
    import signal

    said = f"exit code {code}"
    if code > 128:
        try:
            said += f", {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    if killed:
        return f"{said}; this machine ran out of memory meanwhile and killed {killed} process{'es' * (killed > 1)}"
    return f"{said}: killed, most often for lack of memory" if code == 128 + signal.SIGKILL else said


def _killed_for_memory() -> int:
    """How many processes this machine has killed for lack of memory since it was started; 0 where it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as f:
            return next((int(line.split()[1]) for line in f if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def conclude(ran: EndedRun, quiet: bool) -> int:
    """Says what there is and gives the exit code."""
    watcher, code, files, killed = ran.watcher, ran.code, ran.files, ran.killed
    found, dumps = watcher.look(), watcher.dumps()
    answer(dumps=dumps, captured=found, files_of_atb=files, command_exit_code=code)
    for reason in found.stops:
        say(f"capture stopped early: {reason}")
    if found.errors:
        say(f"{found.errors} errors inside the probe: `accprobe summary {dumps[0]}` shows the first")
    open_ranks = found.ranks - found.ended
    if open_ranks and dumps:
        say(f"{count(open_ranks, 'rank')} not closed: what was written is readable; `accprobe repair {dumps[0]}`")
    if not found.tensors and not files:
        if code and not found.steps:
            what = "a step was computed" if dumps else "a probe could begin"
            why = f"the command failed before {what} ({_ending(code, killed)}): its own last lines say why"
        elif not dumps:
            why = "no process of it loaded vLLM's plugin, a Probe, or labels; `accprobe doctor` looks for the reason"
        elif not found.steps:
            why = "no step was computed, or none was selected: check --steps, --tokens, --requests, --ranks"
        else:
            why = f"{count(found.steps, 'step')}, but no tensor selected: check --modules, --parts"
        say(f"NOTHING was captured: {why}")
        return code or 3
    if not quiet:
        closed = "closed" if not open_ranks else "not closed"
        say(f"{_summary(found)}; {closed}")
        for dump in dumps:
            say(f"dump: {dump}")
    return code


class _Status:
    """One line that is written over, on a terminal; nothing in a pipe."""

    def __init__(self, settings: ProbeConfig, quiet: bool):
        self._on = sys.stderr.isatty() and not quiet
        self._budget = settings.budget_bytes

    def show(self, found: Progress) -> None:
        if not self._on or not found.ranks:
            return
        import shutil

        budget = size(self._budget * found.ranks)
        text = f"accprobe: {_summary(found)} of {budget}" + (" (capture stopped)" if found.stops else "")
        # The cursor goes back to the beginning, so that the command's next line is written over this one.
        sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}\r")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _summary(found: Progress) -> str:
    steps, tensors, ranks = count(found.steps, "step"), count(found.tensors, "tensor"), count(found.ranks, "rank")
    return f"{steps}, {tensors}, {ranks}, {size(found.nbytes)}"


def say(line: str) -> None:
    """On stderr: stdout is the command's."""
    typer.echo(f"accprobe: {line}", err=True)
