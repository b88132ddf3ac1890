"""``accprobe run [options] -- CMD ...``: any command with the probe on.

Not here: what becomes of it (cli/common/running.py); ``ait llm dump``'s words behind one option (cli/spelling/told.py).
"""

from __future__ import annotations

import typer

from vllm_accprobe.cli.common.declared import DIR_OUTPUT, MODULES, RANKS, REQUESTS, STEPS, TOKENS
from vllm_accprobe.cli.common.options import CommandError


def run(
    command: list[str] = typer.Argument(None, metavar="-- CMD...", help="vllm serve ..., a script, a shell line."),
    exec: str = typer.Option(
        None, "--exec", metavar="LINE", help="A command as one line, as ait has it; with --atb, into DIR/ait_dump."
    ),
    dir: str = DIR_OUTPUT,
    task: str = typer.Option(None, "--task", help="tensor, or stats (statistics and hashes only)."),
    tokens: str = TOKENS,
    steps: str = STEPS,
    ranks: str = RANKS,
    modules: str = MODULES,
    parts: str = typer.Option(None, "--parts", metavar="PARTS", help="Of input, output, params."),
    requests: str = REQUESTS,
    max_gb: float = typer.Option(None, "--max-gb", metavar="GB", help="Disk budget per rank."),
    ops: bool = typer.Option(None, "--ops/--no-ops", help="Capture operator calls too."),
    graphs: bool = typer.Option(None, "--graphs/--eager", help="Leave compiled and captured graphs as configured."),
    more: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Any other setting, e.g. ops_mode=dedup. Can be repeated."
    ),
    config: str = typer.Option(None, "--config", metavar="FILE", help="A TOML file with such settings."),
    atb: bool = typer.Option(False, "--atb", help="Let Ascend's ATB write its tensors too; they go to DIR/atb."),
    atb_ids: str = typer.Option(
        None, "--atb-ids", "--save-operation-ids", "-ids", metavar="IDS", help="Operations, e.g. 2,3_1; all by default."
    ),
    atb_range: str = typer.Option(
        None,
        "--atb-range",
        "--execute-range",
        "-er",
        help="First and last executions, e.g. 3,5,7,7; 0,0 by default.",
    ),
    atb_op: str = typer.Option(
        None,
        "--atb-op",
        "--operation-name",
        "-opname",
        metavar="GLOBS",
        help="Beginnings of operation names, e.g. self,linear.",
    ),
    atb_time: int = typer.Option(
        None,
        "--atb-time",
        "--save-time",
        "-time",
        help="0 before, 1 after (the default), 2 both, 3 inputs before, outputs after.",
    ),
    atb_part: int = typer.Option(
        None, "--atb-part", "--save-tensor-part", "-stp", help="0 inputs, 1 outputs, 2 both (the default)."
    ),
    atb_child: bool = typer.Option(
        None, "--atb-child/--no-atb-child", help="With --atb-ids: their operations too (the default)."
    ),
    save_operation_child: str = typer.Option(
        None, "--save-operation-child", "-child", metavar="True|False", help="The same, as ait has it."
    ),
    atb_tiling: bool = typer.Option(False, "--atb-tiling", "--save-tiling", "-tiling", help="Tiling data too."),
    atb_describe: bool = typer.Option(
        False, "--atb-describe", "--only-save-desc", "-sd", help="Descriptions without values."
    ),
    atb_type: str = typer.Option(
        None,
        "--atb-type",
        "--type",
        metavar="TYPES",
        help="Of model, layer, op, kernel, tensor (the default), cpu_profiling, stats; onnx draws model and layer.",
    ),
    atb_device: int = typer.Option(
        None, "--atb-device", "--device-id", "-device", metavar="N", help="Only this device."
    ),
    log_level: str = typer.Option(None, "--log-level", "-l", metavar="LEVEL", help="warning and above: as --quiet."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Say less: what is wrong."),
) -> None:
    """Run any command with the probe on: accprobe run --tokens 0-4 -- vllm serve MODEL.

    Settings not given here are those of the environment (VLLM_ACCPROBE_*). Signals reach the command, and its exit code
    is the exit code here; 2: it could not be started, 3: it ended with 0 and nothing was captured.
    """
    import os

    from vllm_accprobe.cli.common.running import conclude, launched, say
    from vllm_accprobe.cli.spelling.told import quiet as quietly
    from vllm_accprobe.run.atb import AIT, DIRECTORY, options_of

    quiet = quietly(log_level) or quiet
    words = _command(command, exec)
    given = {
        "dir": dir, "task": task, "tokens": tokens, "steps": steps, "ranks": ranks, "modules": modules, "parts": parts,
        "requests": requests, "max_gb": None if max_gb is None else f"{max_gb:.12g}", "config": config,
        "ops": _flag(ops), "graphs": _flag(graphs),
    } | _settings(more)  # fmt: skip
    asked = {
        "ids": atb_ids, "ranges": atb_range, "names": atb_op, "time": atb_time, "part": atb_part, "types": atb_type,
        "child": _truth(save_operation_child) if atb_child is None else atb_child,
        "tiling": atb_tiling or None, "describe": atb_describe or None, "device": atb_device,
    }  # fmt: skip
    options = None
    if atb or exec is not None or any(value is not None for value in asked.values()):
        options, notes = options_of(asked, os.environ)
        for note in notes:
            say(note)
    folder = DIRECTORY if exec is None else AIT
    raise typer.Exit(conclude(launched(words, given, options, quiet, {}, folder), quiet))


def _command(words: list[str] | None, line: str | None) -> list[str]:
    """What is started. Raises CommandError."""
    if line is not None and words:
        raise CommandError("the command is given twice, behind --exec and at the end: give it once")
    found = [line] if line else list(words or [])
    if not found:
        raise CommandError("no command is given; write `accprobe run [options] -- CMD ...`")
    return found


def _truth(word: str | None) -> bool | None:
    """As ait reads it. Raises CommandError."""
    if word is None:
        return None
    if word.lower() not in ("true", "false", "1", "0", "yes", "no", "t", "f", "y", "n"):
        raise CommandError(f"--save-operation-child {word}: write True or False")
    return word.lower() in ("true", "1", "yes", "t", "y")


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
