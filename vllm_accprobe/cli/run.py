"""``accprobe run [options] -- CMD ...``: any command with the probe on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.options import CommandError, size
from vllm_accprobe.report.text import count

if TYPE_CHECKING:
    from vllm_accprobe.config import ProbeConfig
    from vllm_accprobe.run.watcher import Progress, Watcher


def run(
    command: list[str] = typer.Argument(..., metavar="-- CMD...", help="vllm serve ..., a script, a shell line."),
    dir: str = typer.Option(None, "--dir", "-d", help="Where the dump goes; by default ./accprobe/<UTC time>."),
    task: str = typer.Option(None, "--task", help="tensor, or stats (statistics and hashes only)."),
    tokens: str = typer.Option(None, "--tokens", help="Token ordinals, e.g. 0-4,7; 0 is the prompt."),
    steps: str = typer.Option(None, "--steps", help="Engine steps, e.g. 0-3."),
    ranks: str = typer.Option(None, "--ranks", help="Global ranks."),
    modules: str = typer.Option(None, "--modules", help="Globs over module paths, or presets such as attention."),
    parts: str = typer.Option(None, "--parts", help="Of input, output, params."),
    requests: str = typer.Option(None, "--requests", help="Globs over request ids."),
    max_gb: str = typer.Option(None, "--max-gb", help="Disk budget per rank."),
    ops: bool = typer.Option(None, "--ops/--no-ops", help="Capture operator calls too."),
    graphs: bool = typer.Option(None, "--graphs/--eager", help="Leave compiled and captured graphs as configured."),
    more: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Any other setting, e.g. ops_mode=dedup."),
    config: str = typer.Option(None, "--config", metavar="FILE", help="A TOML file with such settings."),
    atb: bool = typer.Option(False, "--atb", help="Let Ascend's ATB write its tensors too; they go to DIR/atb."),
    atb_ids: str = typer.Option("", "--atb-ids", help="Operations, e.g. 2,3_1; all by default."),
    atb_range: str = typer.Option("0,0", "--atb-range", help="First and last executions, e.g. 1,3 or 3,5,7,7."),
    atb_op: str = typer.Option("", "--atb-op", help="Beginnings of operation names, e.g. self,linear."),
    atb_time: int = typer.Option(3, "--atb-time", help="0 before, 1 after, 2 both, 3 inputs before, outputs after."),
    atb_part: int = typer.Option(2, "--atb-part", help="0 inputs, 1 outputs, 2 both."),
    atb_child: bool = typer.Option(True, "--atb-child/--no-atb-child", help="With --atb-ids: their operations too."),
    atb_tiling: bool = typer.Option(False, "--atb-tiling", help="Tiling data too."),
    atb_describe: bool = typer.Option(False, "--atb-describe", help="Descriptions without values."),
    atb_type: str = typer.Option("tensor,model", "--atb-type", help="Of model, layer, op, kernel, tensor, stats."),
    atb_device: int = typer.Option(None, "--atb-device", help="Only this device."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Say only what is wrong."),
) -> None:
    """Run any command with the probe on: accprobe run --tokens 0-4 -- vllm serve MODEL.

    Settings not given here are those of the environment (VLLM_ACCPROBE_*). Signals reach the command, and its exit code
    is the exit code here; 2: it could not be started, 3: it ended with 0 and nothing was captured.
    """
    import os
    import tempfile
    import time

    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.formats.common.sniff import is_own
    from vllm_accprobe.run import atb as atb_room
    from vllm_accprobe.run.launcher import LaunchError, command_line
    from vllm_accprobe.run.launcher import run as launch
    from vllm_accprobe.run.settings import REGISTER, environment
    from vllm_accprobe.run.watcher import Watcher

    given = {
        "dir": dir, "task": task, "tokens": tokens, "steps": steps, "ranks": ranks, "modules": modules, "parts": parts,
        "requests": requests, "max_gb": max_gb, "config": config, "ops": _flag(ops), "graphs": _flag(graphs),
    } | _settings(more)  # fmt: skip
    environ, settings, notes = environment(given, os.environ)
    root = Path(settings.dir)
    if not is_own(root):  # its own earlier dump: who writes it says so
        outputs.check_place(root, option="--dir")
    if atb:
        options = atb_room.AtbOptions(
            atb_ids, atb_range, atb_op, atb_time, atb_part, atb_child, atb_tiling, atb_describe, atb_type, atb_device
        )
        output = root / atb_room.DIRECTORY
        environ |= options.variables(output)
        library, why = atb_room.preload(environ)
        if library is not None:
            environ["LD_PRELOAD"] = library
        else:
            notes.append(why)
    for note in notes:
        _say(note)
    try:
        command_line(command, environ)
        if atb:
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
    if atb:
        files, nbytes = atb_room.collect(root, environ, began)
        if files and not quiet:
            _say(f"ATB wrote {files:,} files, {size(nbytes)}, in {root / atb_room.DIRECTORY}")
    killed = max(_killed_for_memory() - before, 0)
    raise typer.Exit(_conclude(watcher, settings, code, files, quiet, killed))


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


def _conclude(watcher: Watcher, settings: ProbeConfig, code: int, files: int, quiet: bool, killed: int = 0) -> int:
    """Says what there is and gives the exit code. killed: see `_ending`."""
    found, dumps = watcher.look(), watcher.dumps()
    for reason in found.stops:
        _say(f"capture stopped early: {reason}")
    if found.errors:
        _say(f"{found.errors} errors inside the probe: `accprobe summary {dumps[0]}` shows the first")
    open_ranks = found.ranks - found.ended
    if open_ranks and dumps:
        _say(f"{count(open_ranks, 'rank')} not closed: what was written is readable; `accprobe repair {dumps[0]}`")
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
        _say(f"NOTHING was captured: {why}")
        return code or 3
    if not quiet:
        closed = "closed" if not open_ranks else "not closed"
        _say(f"{_summary(found)}; {closed}")
        for dump in dumps:
            _say(f"dump: {dump}")
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


def _settings(words: list[str]) -> dict[str, str | None]:
    """``ops_mode=dedup`` as a setting. Raises CommandError; an unknown name is refused where all are read."""
    found: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"--set {word}: write NAME=VALUE, for example ops_mode=dedup")
        found[name.lower()] = value
    return found


def _flag(value: bool | None) -> str | None:
    return None if value is None else str(int(value))


def _say(line: str) -> None:
    """On stderr: stdout is the command's."""
    typer.echo(f"accprobe: {line}", err=True)
