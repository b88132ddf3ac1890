"""``accprobe run [options] -- CMD ...``: any command with the probe on.

Not here: the command's signals and terminal (run/launcher.py), ATB's variables (run/atb.py), ``ait llm dump``'s names
(aliases.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options
from vllm_accprobe.cli.aliases import is_quiet
from vllm_accprobe.cli.options import argument, hidden, option
from vllm_accprobe.cli.output import answer
from vllm_accprobe.progress import USUAL as say  # on stderr: stdout is the command's
from vllm_accprobe.refusals import CommandError
from vllm_accprobe.report.text import count, size

if TYPE_CHECKING:
    from vllm_accprobe.config import ProbeConfig
    from vllm_accprobe.run.atb import AtbOptions
    from vllm_accprobe.run.watcher import Progress, Watcher


@dataclass(frozen=True)
class RunOptions:
    """What is run, and the capture's settings."""

    command: list[str] = argument("-- CMD...", "vllm serve ..., a script, a shell line.", [])
    exec: str | None = options.exec_line()
    dir: str | None = options.dump_dir()
    task: str | None = option("--task", None, "tensor, or stats (statistics and hashes only).")
    ranks: str | None = options.ranks()
    parts: str | None = option("--parts", None, "Of input, output, params.", metavar="PARTS")
    max_gb: float | None = option("--max-gb", None, "Disk budget per rank.", metavar="GB")
    ops: bool | None = option("--ops/--no-ops", None, "Capture operator calls too.")
    heal: str | None = option("--heal", None, "Modules whose outputs are replaced by their references. Captures only "
                              "with an option that chooses what.", metavar="GLOBS")  # fmt: skip
    graphs: bool | None = option("--graphs/--eager", None, "Leave compiled and captured graphs as configured.")
    settings: list[str] = option("--set", [], "Any other setting, e.g. ops_mode=dedup. Can be repeated.",
                                 metavar="NAME=VALUE")  # fmt: skip
    config: str | None = option("--config", None, "A TOML file with such settings.", metavar="FILE")
    log_level: str | None = options.log_level()
    quiet: bool = options.quiet()


@dataclass(frozen=True)
class RunAtbOptions:
    """What Ascend's ATB writes meanwhile."""

    atb: bool = option("--atb", False, "Let Ascend's ATB write its tensors too; they go to DIR/atb.")
    atb_ids: str | None = option("--atb-ids", None, "Operations, e.g. 2,3_1; all by default.", metavar="IDS")
    atb_range: str | None = option("--atb-range", None, "First and last executions, e.g. 3,5,7,7; 0,0 by default.")
    atb_op: str | None = option("--atb-op", None, "Beginnings of operation names, e.g. self,linear.", metavar="GLOBS")
    atb_time: int | None = option("--atb-time", None, "0 before, 1 after (the default), 2 both, 3 inputs before, "
                                  "outputs after.")  # fmt: skip
    atb_part: int | None = option("--atb-part", None, "0 inputs, 1 outputs, 2 both (the default).")
    atb_child: bool | None = option("--atb-child/--no-atb-child", None, "With --atb-ids: their operations too (the "
                                    "default).")  # fmt: skip
    save_operation_child: str | None = hidden("--save-operation-child", None, "The same, as ait has it.",
                                              metavar="True|False")  # fmt: skip
    atb_tiling: bool = option("--atb-tiling", False, "Tiling data too.")
    atb_describe: bool = option("--atb-describe", False, "Descriptions without values.")
    atb_type: str | None = option("--atb-type", None, "Of model, layer, op, kernel, tensor (the default), "
                                  "cpu_profiling, stats; onnx draws model and layer.", metavar="TYPES")  # fmt: skip
    atb_device: int | None = option("--atb-device", None, "Only this device.", metavar="N")


def run(what: RunOptions, capture: options.CaptureOptions, atb: RunAtbOptions) -> None:
    """Run any command with the probe on: accprobe run --tokens 0-4 -- vllm serve MODEL.

    Settings left out here are those of the environment (VLLM_ACCPROBE_*). Signals reach the command, and its exit code
    is the exit code here; 2: it could not be started, 3: it ended with 0 and nothing was captured.
    """
    from vllm_accprobe.run.atb import AIT, DIRECTORY, options_of

    quiet = is_quiet(what.log_level) or what.quiet
    if what.exec is not None and what.command:
        raise CommandError("the command is named twice, behind --exec and at the end: name it once")
    words = [what.exec] if what.exec else list(what.command)
    if not words:
        raise CommandError("no command is named; write `accprobe run [options] -- CMD ...`")
    named = vars(what) | vars(capture)
    more = options.pairs(what.settings, "--set {}: write NAME=VALUE, for example ops_mode=dedup")
    settings = {name: _word(named[name]) for name in _NAMED} | {name.lower(): value for name, value in more}
    if settings.get("heal") and not any(
        settings.get(name) is not None or os.environ.get(f"VLLM_ACCPROBE_{name.upper()}") for name in _CHOOSE
    ):
        settings["armed"] = "0"  # it serves an evaluation, whose tensors are not needed
    child = _truth(atb.save_operation_child) if atb.atb_child is None else atb.atb_child
    of_atb = {
        "ids": atb.atb_ids, "ranges": atb.atb_range, "names": atb.atb_op, "time": atb.atb_time, "part": atb.atb_part,
        "types": atb.atb_type, "child": child, "tiling": atb.atb_tiling or None, "describe": atb.atb_describe or None,
        "device": atb.atb_device,
    }  # fmt: skip
    chosen = None
    if atb.atb or what.exec is not None or any(value is not None for value in of_atb.values()):
        chosen, notes = options_of(of_atb, os.environ)
        for note in notes:
            say(note)
    folder = DIRECTORY if what.exec is None else AIT
    raise typer.Exit(conclude(launched(words, settings, chosen, quiet, {}, folder), quiet))


_CHOOSE = ("tokens", "steps", "modules", "requests", "parts", "task", "armed")
"""Settings that say what a capture takes, or when."""
_NAMED = (*_CHOOSE[:-1], "dir", "ranks", "max_gb", "config", "ops", "graphs", "heal")
"""Settings that have an option."""


def _word(value: str | bool | float | None) -> str | None:
    """An option as an environment variable has it."""
    if value is None or isinstance(value, str):
        return value
    return f"{value:.12g}" if isinstance(value, float) else str(int(value))


def _truth(word: str | None) -> bool | None:
    """As ait reads it. Raises CommandError."""
    if word is None or word.lower() in ("true", "1", "yes", "t", "y"):
        return None if word is None else True
    if word.lower() not in ("false", "0", "no", "f", "n"):
        raise CommandError(f"--save-operation-child {word}: write True or False")
    return False


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
    command: Sequence[str], settings_of: Mapping[str, str | None], atb: AtbOptions | None, quiet: bool,
    more: Mapping[str, str], folder: str = "",
) -> EndedRun:  # fmt: skip
    """Runs ``command`` with the probe on. settings_of: by name, None: the environment's; atb: None for no ATB; more:
    further variables for the command; folder: where ATB writes, below the dump. Raises CommandError, ConfigError before
    anything is started."""
    import tempfile
    import time

    from vllm_accprobe.cli import output_paths
    from vllm_accprobe.doctor.checks import ERROR, WARNING, free_space
    from vllm_accprobe.formats.common.sniff import is_own
    from vllm_accprobe.gate import preflight
    from vllm_accprobe.gate.bisect.edits import ServeCommand
    from vllm_accprobe.gate.served_run import serves
    from vllm_accprobe.run import atb as atb_room
    from vllm_accprobe.run.launcher import REGISTER, command_line, environment, run as launch
    from vllm_accprobe.run.watcher import Watcher

    environ, settings, notes = environment(settings_of, os.environ)
    environ |= more
    root = Path(settings.dir)
    if not is_own(root):  # its own earlier dump: who writes it says so
        output_paths.check_place(root, option="--dir")
    output = root / (folder or atb_room.DIRECTORY)
    if atb is not None:
        environ |= atb.variables(output)
        library, why = atb_room.preload(environ)
        if library is not None:
            environ["LD_PRELOAD"] = library
        else:
            notes.append(why)
    place = next(p for p in (root, *root.parents) if p.exists())
    for finding in free_space(place, settings.budget_bytes if settings.armed else 0):
        if finding.level == ERROR:
            raise CommandError(f"{finding.text}: {finding.todo}")
        if finding.level == WARNING and not quiet:
            notes.append(f"{finding.text}: {finding.todo}")
    if serves(command):
        line = ServeCommand(tuple(command), base=environ)
        preflight.check(line, captured=True)
        command, added = preflight.prepared(line)
        notes += [added] if added else []
    command_line(command, environ)  # a mistake says nothing of the disk
    for note in notes:
        say(note)
    if atb is not None:
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix="accprobe-run-") as register:
        environ[REGISTER] = register.name
        watcher, status, began = Watcher(root, Path(register.name)), _Status(settings, quiet), time.time()
        before = _killed_for_memory()
        code = launch(command, environ, tick=lambda: status.show(watcher.poll()), busy=watcher.writing)
        status.clear()
        watcher.settle()
    files = 0
    if atb is not None:
        files, nbytes = atb_room.collect(root, environ, began, output.name)
        if files and not quiet:
            say(f"ATB wrote {files:,} files, {size(nbytes)}, in {output}")
        if files and atb.draws:
            _draw(output, quiet)
    return EndedRun(watcher, settings, root, code, files, max(_killed_for_memory() - before, 0))


def _draw(output: Path, quiet: bool) -> None:
    """The topologies that ATB wrote as ONNX files next to them; what cannot be drawn is a line, and the rest goes
    on."""
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.topology.model_graph import atb_json_to_onnx

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

    ending = f"exit code {code}"
    if code - 128 in set(signal.Signals):
        ending += f", {signal.Signals(code - 128).name}"
    if killed:
        return f"{ending}; this machine ran out of memory meanwhile and killed {killed} process{'es' * (killed > 1)}"
    return f"{ending}: killed, most often for lack of memory" if code == 128 + signal.SIGKILL else ending


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
    found, dumps = watcher.poll(), watcher.dumps()
    if ran.settings.heal:
        return _healed(ran, dumps, found, quiet)
    answer(dumps=dumps, captured=found, files_of_atb=files, command_exit_code=code)
    for reason in found.stops:
        say(f"capture stopped early: {reason}")
    if found.errors:
        say(f"{found.errors} errors inside the probe: `accprobe inspect {dumps[0]}` shows the first")
    open_ranks = found.ranks - found.ended
    if open_ranks and dumps:
        say(
            f"{count(open_ranks, 'rank')} not closed: what is there is readable; `accprobe inspect {dumps[0]} --repair`"
        )
    if not found.tensors and not files:
        if code and not found.steps:
            what = "a step was computed" if dumps else "a probe could begin"
            why = f"the command failed before {what} ({_ending(code, killed)}): its own last lines say why"
        elif not dumps:
            why = "no process of it loaded vLLM's plugin, a Probe, or labels; `accprobe doctor` finds the reason"
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


def _healed(ran: EndedRun, dumps: list[Path], found: Progress, quiet: bool) -> int:
    """What `conclude` says and gives of a command whose modules were healed."""
    from vllm_accprobe.heal import outcome

    ranks = [one for dump in dict.fromkeys([ran.root, *dumps]) for one in outcome.read(dump)]
    answer(dumps=dumps, captured=found, healed=[vars(one) for one in ranks], command_exit_code=ran.code)
    lines = outcome.lines(ranks)
    if not ranks:
        why = f"the command failed before its model was loaded ({_ending(ran.code, ran.killed)})" if ran.code else (
            "no process of it loaded vLLM's plugin and a model; `accprobe doctor` finds the reason")  # fmt: skip
        lines = [f"NOTHING was healed: {why}"]
    for line in lines:
        say(line)
    if found.tensors and not quiet:
        say(_summary(found))
    for dump in dumps if found.tensors and not quiet else ():
        say(f"dump: {dump}")
    return ran.code or (0 if any(n for one in ranks for n in one.healed.values()) else 3)


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
