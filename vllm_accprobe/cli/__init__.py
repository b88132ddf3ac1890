"""The command ``accprobe``: names, help, and how anything that goes wrong is said.

The problem: ``accprobe --help`` must answer at once, and no user should ever read a traceback. The idea: this package's
modules import typer and nothing heavier; a command's body imports what it needs; ``main`` turns every exception into
one line and an exit code: 0 done or pass, 1 differences, 2 bad usage or unreadable input, 3 nothing to compare or show,
130 interrupted. Not here: what the commands do (one file each, with a function of the same name).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from vllm_accprobe.cli.common import folding, kept
from vllm_accprobe.cli.common.json_answer import answering
from vllm_accprobe.cli.common.options import Command
from vllm_accprobe.cli.spelling.insisting import insisting
from vllm_accprobe.cli.spelling.refusal import CommandInterrupted

COMMANDS = {
    "compare": "Compare two dumps; name the operator that created the error",
    "opcheck": "Run captured calls again: which operator is wrong by itself?",
    "gentest": "Write captured calls as tests that need torch and pytest only",
    "opdiff": "Join two machines' tables of operators, and judge them",
    "calibrate": "Measure the floor: what golden's own runs differ by",
    "summary": "List a dump's tensors with their statistics, or its operators",
    "show": "Show one tensor: statistics, histogram, rows; or save it",
    "convert": "Export a dump to another layout, or its model as ONNX",
    "repair": "Finish the files that a killed run left behind",
    "doctor": "Check whether a capture would work here",
    "labels": "Compare the pairs that a script labelled with set_label",
    "run": "Run any command with the probe on",
    "errcheck": "Find the first NaN, Inf or overflow of an engine or script",
    "formats": "List the formats of dumps, or say which one a path is of",
    "patches": "List patches, or check which of them fit the installed vLLM",
    "send": "Send the same prompts to a server, and keep what it answers",
    "gate": "Compare two servers by what they answer, or two evaluations",
    "bisect": "Find the settings that make a server's numbers wrong",
    "arm": "Switch a running server's capture on or off",
    "size": "Say how large a capture of a model will be",
}
"""Name → what `accprobe --help` says of it, in a line of 80 columns."""
GROUPS = {"online": "Check calls on one machine while another computes them"}
"""Commands with commands of their own."""
STARTERS = ("run", "errcheck", "bisect")
"""Commands that start one: what follows its first word, options too, belongs to it, with or without ``--``."""
TRACEBACK = "ACCPROBE_TRACEBACK"
"""Environment variable: 1 shows the traceback of an internal error."""


def build() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        name="accprobe",
        help="Finds out why a model served by vLLM gives other numbers on one machine than on another.",
        add_completion=True,
        rich_markup_mode=None,  # plain help: rich alone would take as long to load as everything else
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, short in COMMANDS.items():
        settings = {"allow_interspersed_args": name not in STARTERS}
        app.command(name, cls=Command, context_settings=settings, short_help=short)(
            answering(getattr(importlib.import_module(f"{__name__}.{name}"), name))
        )
    for name, short in GROUPS.items():
        app.add_typer(getattr(importlib.import_module(f"{__name__}.{name}"), name), name=name, short_help=short)
    return app


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        from vllm_accprobe import __version__

        typer.echo(f"accprobe {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; the console script exits with it. Prints errors as one line."""
    from vllm_accprobe.children import ignore_settings_here

    ignore_settings_here()
    given = None if arguments is None else list(arguments)
    kept.begin()
    try:
        with insisting(), folding.folded():
            result = build()(args=given, prog_name="accprobe", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort, CommandInterrupted):
        print(f"accprobe: {_one_line(kept.interrupted(sys.argv[1:] if given is None else given))}", file=sys.stderr)
        return 130
    except typer.Exit as e:
        return e.exit_code
    except (BrokenPipeError, SystemExit) as e:
        # click, too, ends with SystemExit(1) when the reader of a pipe, `head` perhaps, has seen enough.
        if not isinstance(e, BrokenPipeError) and not isinstance(e.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        message, code = explain(e)
        print(f"accprobe: {message}", file=sys.stderr)
        if os.environ.get(TRACEBACK) == "1":
            raise
        return code


_WHOLE = {"h5py", "llvmlite", "numba", "pandas", "plotly", "scipy"}
"""What the distribution vllm-accprobe-capture does without (scripts/two_wheels.py)."""


def explain(error: Exception) -> tuple[str, int]:
    """One line and the exit code for whatever a command raised."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "ClickException" in kinds:  # typer brings its own copy of click, older ones use the real one
        usage: Any = error
        command = usage.ctx.command_path if getattr(usage, "ctx", None) else "accprobe"
        said = _one_line(usage.format_message()).replace(" Value error, ", " ")
        return f"{said} (see `{command} --help`)", 2
    if kinds & {"NothingCompared", "NothingReadable", "NothingThere"}:
        return _one_line(error), 3
    if kinds & {"DumpError", "CompareError", "ConfigError", "CommandError"}:
        return _one_line(error), 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", 2
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _WHOLE:
        return (
            f"{error.name} is not installed, which this needs: pip install vllm-accprobe "
            "(vllm-accprobe-capture alone captures, and does not compare)",
            2,
        )
    if isinstance(error, RecursionError) and "JSON" in str(error):
        return "a JSON file that was read is nested far too deeply: it is damaged, or made to be", 2
    if isinstance(error, MemoryError):
        return "not enough memory; choose fewer tensors at a time", 2
    return (
        f"internal error, please report: {type(error).__name__}: {_one_line(error)} ({TRACEBACK}=1 shows where)",
        2,
    )


def _one_line(value: object) -> str:
    text = " ".join(str(value).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
