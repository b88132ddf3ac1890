"""``--json`` of every command: one JSON object on stdout and nothing else there.

The problem: two dozen commands print lines for people, some from several processes, and a script must be able to parse
what stdout holds. The idea: `answering` wraps a command; where --json is given, what it prints on stdout goes nowhere
(its children's to stderr), while `answer` and `say_written`, which do nothing else otherwise, gather the object, which
is printed at the end: ``schema``, ``command``, ``exit_code``, ``written``, ``notes``, and the command's own fields. A
refusal prints nothing on stdout, one line on stderr, and has its exit code. Numbers that JSON cannot hold are the
strings "nan", "inf" and "-inf", as in compare.json.
Not here: compare, gate, bisect, doctor and size, whose objects are their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli.common.declared import JSON

SCHEMA = 1
_HELD: ContextVar[dict[str, Any] | None] = ContextVar("answer", default=None)


def wanted() -> bool:
    """Whether a program reads: what costs time for people only may be left out."""
    return _HELD.get() is not None


def answer(**fields: Any) -> None:
    """Puts ``fields`` into the object. Dataclasses, paths and numpy's numbers may be in them."""
    if (held := _HELD.get()) is not None:
        held.update(fields)


def add_notes(lines: Iterable[str]) -> None:
    """What whoever looks at the result should know."""
    if (held := _HELD.get()) is not None:
        held["notes"] += list(lines)


def say_written(*paths: Path, about: str = "", err: bool = False) -> None:
    """``wrote PATH (about)`` for each of them, the one form that all commands have."""
    for path in paths:
        typer.echo(f"wrote {path}" + (f" ({about})" if about else ""), err=err)
    if (held := _HELD.get()) is not None:
        held["written"] += [str(path) for path in paths]


def answering(command: Callable[..., Any]) -> Callable[..., Any]:
    """``command`` with --json, unless it has one of its own."""
    signature = inspect.signature(command)
    room = command.__module__.rpartition(".")[2]
    name = command.__name__ if room == command.__name__ else f"{room} {command.__name__}"
    if any(getattr(p.default, "param_decls", None) == JSON.param_decls for p in signature.parameters.values()):
        return command

    @functools.wraps(command)
    def run(*args: Any, as_json: bool, **kwargs: Any) -> Any:
        if not as_json:
            return command(*args, **kwargs)
        held: dict[str, Any] = {"schema": SCHEMA, "command": name, "exit_code": 0, "written": [], "notes": []}
        token, code = _HELD.set(held), 0
        try:
            with _stdout_kept_free():
                command(*args, **kwargs)
        except typer.Exit as end:
            code = end.exit_code
        finally:
            _HELD.reset(token)
        held["exit_code"] = code
        typer.echo(json.dumps(plain(held), indent=1, allow_nan=False))
        raise typer.Exit(code)

    more = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=JSON, annotation="bool")
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "as_json": "bool"}
    return run


@contextlib.contextmanager
def _stdout_kept_free() -> Iterator[None]:
    """Lines for people go nowhere; what a child process writes on file descriptor 1 goes to stderr."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        kept = -1
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            if kept >= 0:
                os.dup2(2, 1)
            yield
        finally:
            if kept >= 0:
                os.dup2(kept, 1)
                os.close(kept)


def plain(value: Any) -> Any:
    """What JSON has no word for as what it has: see the module's docstring."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # an array or a number of numpy, which is not imported for it
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
