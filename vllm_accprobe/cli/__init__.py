"""The command ``accprobe``: names, help, and that anything that goes wrong is one line.

The problem: ``accprobe --help`` must answer at once, and no user should ever read a traceback. The idea: this package's
modules import typer and nothing heavier; a command's body imports what it needs; ``main`` turns every exception into
one line and an exit code: 0 done or pass, 1 differences, 2 bad usage or unreadable input, 3 nothing to compare or show,
130 interrupted, 143 and 129 ended by SIGTERM and SIGHUP. Not here: what the commands do (one file each, with a function
of the same name); the lines (refusals.py, and endings.py after a signal)."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from vllm_accprobe import refusals
from vllm_accprobe.cli import aliases, endings
from vllm_accprobe.cli.options import Command, Commands, expanded
from vllm_accprobe.cli.output import folded, without_reader

COMMANDS = {
    "compare": "Compare two dumps; name the operator that introduced the error",
    "inspect": "List a dump's tensors, or show one; name a path's format",
    "opcheck": "Run captured calls again: which operator is wrong by itself?",
    "gentest": "Write captured calls as tests that need torch and pytest only",
    "convert": "Export a dump to another layout, or its model as ONNX",
    "run": "Run any command with the probe on",
    "send": "Send the same prompts to a server, and keep its answers",
    "gate": "Compare two servers by their answers",
    "self-check": "Compare a server with itself: alone, batched, cached, in chunks",
    "eval-diff": "Compare two evaluations, or a trainer's numbers with a server's",
    "bisect": "Find the settings that make a server's numbers wrong",
    "errcheck": "Find the first NaN, Inf or overflow of an engine or script",
    "doctor": "Check whether a capture would work here",
    "patches": "List patches, or check which of them fit the installed vLLM",
    "arm": "Switch a running server's capture on or off",
}
"""Name → what `accprobe --help` says of it, in a line of 80 columns."""
GROUPS = {
    "golden": "Pack a golden into one small file; check and compare packs",
    "online": "Check calls on one machine while another computes them",
}
"""Commands with commands of their own."""
STARTERS = ("run", "errcheck", "bisect", "self-check")
"""Commands that start one: what follows its first word, options too, belongs to it, with or without ``--``."""


def build(only: str | None = None) -> typer.Typer:
    """The command line with all its commands. only: the one that was typed; of the others just the names are there,
    which takes a fifth of the time."""
    app = typer.Typer(
        name="accprobe",
        cls=Commands,
        help="Finds out why a model served by vLLM gives other numbers on one machine than on another.",
        add_completion=True,
        rich_markup_mode=None,  # plain help: rich alone would take as long to load as everything else
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, short in (COMMANDS | GROUPS).items():
        if only not in (None, name):
            app.command(name, short_help=short)(_not_typed)
        elif name in GROUPS:
            app.add_typer(_function(name), name=name, short_help=short)
        else:
            settings = {"allow_interspersed_args": name not in STARTERS}
            app.command(name, cls=Command, context_settings=settings, short_help=short)(expanded(_function(name), name))
    for old, (name, _) in aliases.MOVED.items():
        if only in (None, old):
            app.command(old, cls=Command, hidden=True)(expanded(_function(name), old, name=old))
    return app


def _not_typed() -> None:
    """Stands for a command in the list of all."""


def _function(command: str) -> Any:
    """Of its own module, which has its name."""
    module = command.replace("-", "_")
    return getattr(importlib.import_module(f"{__name__}.{module}"), module)


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
    # Records, pairs and what hangs on them stay until the end: looking through all of them now and then for what has
    # gone would take a fifth of the time that a dump's lines take.
    gc.set_threshold(100_000, 50, 50)
    if arguments is None:  # the process is this command's
        atexit.register(_leave)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started it: the next file would have its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a locale without a dash or an arrow has "?" there
    words = list(sys.argv[1:] if arguments is None else arguments)
    endings.begin(alone=arguments is None)
    with without_reader():
        return _answered(words)


def _leave() -> None:
    """Python looks through all objects once more before it ends, 0.05 s, for what libraries of torch count on."""
    if "torch" not in sys.modules:
        gc.freeze()


def _answered(words: list[str]) -> int:
    """The command's exit code."""
    try:
        aliases.check_words(words)
        with endings.unwinding(), endings.insisting(), folded():
            typed = None if "_ACCPROBE_COMPLETE" in os.environ else (words or [""])[0]  # Tab needs all
            result = build(typed)(args=words, prog_name="accprobe", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort, endings.CommandInterrupted, endings.CommandTerminated) as end:
        if isinstance(end.__cause__, EOFError):  # typer takes a file that ends too soon for Ctrl-D
            print(f"accprobe: {refusals.explain(end.__cause__)[0]}", file=sys.stderr)
            return 2
        code = int(end.code or 0) if isinstance(end, endings.CommandTerminated) else 130
        with contextlib.suppress(OSError):  # the terminal has gone
            print(f"accprobe: {refusals.one_line(endings.interrupted(words, code))}", file=sys.stderr)
        return code
    except typer.Exit as e:
        return e.exit_code
    except (Exception, SystemExit) as error:
        why = error.__context__ if isinstance(error, SystemExit) else error  # click exits where a connection broke
        if not isinstance(why, BrokenPipeError if isinstance(error, SystemExit) else Exception):
            raise
        message, code = refusals.explain(why)
        print(f"accprobe: {message}", file=sys.stderr)
        if os.environ.get(refusals.TRACEBACK) == "1":
            raise
        return code
