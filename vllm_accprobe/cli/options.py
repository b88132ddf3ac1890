"""Options of commands, each declared once, as fields of frozen dataclasses that a command takes and passes on whole.

The problem: five commands have the same option, and a command with thirty parameters passes them on by hand. The idea:
a group is a frozen dataclass whose fields are made by `option`, `hidden` and `argument`; groups inherit from groups;
what one command alone has, and reads itself, are parameters of its function, made by the same three. `expanded` turns
such a function into one of all the options, which is what typer reads, and builds the groups again when the command
line was parsed. `Command` rewrites other tools' names and our older ones first (aliases.py).

One name means one thing in all commands, and its help begins with the same sentence everywhere
(tests/cli/test_options.py). Metavars in the plural are lists, with commas or repeated.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from vllm_accprobe.cli import aliases
from vllm_accprobe.cli.endings import CommandInterrupted
from vllm_accprobe.cli.output import answered
from vllm_accprobe.refusals import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Ranges, Selection

def _declared(declaration: Any, default: Any) -> Any:
    """A field of a group. default: ``...`` where a value is required."""
    if default is ...:
        return field(metadata={"option": declaration})
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"option": declaration})
    return field(default=default, metadata={"option": declaration})


def option(names: str, default: Any, text: str, **how: Any) -> Any:
    """A field that is an option. names: as ``--out -o`` or ``--ops/--no-ops``; how: typer.Option's arguments."""
    return _declared(typer.Option(*names.split(), help=text, **how), default)


hidden = functools.partial(option, hidden=True)
"""Another tool's option: taken, and not in --help (docs/migration.md has them)."""


def argument(metavar: str, text: str, default: Any = ...) -> Any:
    """A field that is an argument."""
    return _declared(typer.Argument(metavar=metavar, help=text), default)


def _shared(names: str, default: Any, text: str, **how: Any) -> Callable[..., Any]:
    """An option that several commands have: called for a field of each, with another default perhaps."""
    return lambda default=default: option(names, default, text, **how)


HIDDEN = "hidden"
"""``Annotated[Group, HIDDEN]``: the group's options are taken, and are not in --help."""


def expanded(function: Callable[..., Any], command: str, **fixed: Any) -> Callable[..., Any]:
    """``function``, whose parameters are groups and options of its own, as a function of all these options. It gets
    --json where it has none (output.answered). command: its name, in that JSON; fixed: arguments that no option stands
    for."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: dict[str, inspect.Parameter] = {}

    def add(name: str, f: dataclasses.Field[Any], kind: Any, unseen: bool = False) -> None:
        declaration = copy.copy(f.metadata["option"])
        declaration.hidden = declaration.hidden or unseen
        default = inspect.Parameter.empty if (value := default_of(f)) is MISSING else value
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declaration]
        )

    for name, p in inspect.signature(function).parameters.items():
        if isinstance(p.default, dataclasses.Field):
            add(name, p.default, hints[name])
        elif p.default is inspect.Parameter.empty:
            unseen = typing.get_origin(hints[name]) is Annotated
            groups[name] = group = typing.get_args(hints[name])[0] if unseen else hints[name]
            types = typing.get_type_hints(group)
            for f in dataclasses.fields(group):
                add(f.name, f, types[f.name], unseen)
    own_json = "as_json" in parameters
    if not own_json:
        add("as_json", as_json(), bool)

    def run(**values: Any) -> Any:
        to_json = not own_json and values.pop("as_json")
        made = {name: group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
                for name, group in groups.items()}  # fmt: skip
        return answered(command, to_json, lambda: function(**made, **values, **fixed))

    run.__doc__, run.__name__, run.__module__ = function.__doc__, function.__name__, function.__module__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters.values()}
    return run


def default_of(f: dataclasses.Field[Any]) -> Any:
    """MISSING where it has none."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def used(*groups: Any) -> dict[str, Any]:
    """name of the option → value, of all fields that are not at their defaults."""
    found = {}
    for group in groups:
        for f in dataclasses.fields(group):
            value, declaration = getattr(group, f.name), f.metadata["option"]
            if value != default_of(f) and value is not None:
                names = (declaration.default, *(declaration.param_decls or ()))
                names = tuple(n for n in names if isinstance(n, str) and n.startswith("--"))
                found[names[0].partition("/")[0] if names else f.name] = value
    return found


def refuse(what: str, *groups: Any, but: Sequence[str] = ()) -> None:
    """Raises CommandError for an option that means nothing with ``what``. but: those that do."""
    if wrong := [name for name in used(*groups) if name not in but]:
        raise CommandError(f"{wrong[0]} does not go with {what}: leave it out")


MOST_USED = {
    "compare": "--out --taps --standard --floor --verbose",
    "inspect": "--roles --steps --requests --save --size",
    "opcheck": "--ops --weights --against --out --verbose",
    "run": "--dir --tokens --modules --requests --task",
    "send": "--out --url --engine --teacher-force --max-tokens",
    "gate": "--prompts --localize --floor --heal --out",
    "bisect": "--golden --prompts --only --plan --out",
    "eval-diff": "--tasks --csv --prompts-out --verbose",
    "doctor": "--quick --dump --wheel --graphs",
    "online serve": "--host --port --tls --out",
}
"""Command, of which more than eleven options are shown → those that a first run needs."""


def _processed(param: Any, ctx: Any, value: Any) -> Any:
    """typer's own, which loads pydantic for 0.2 s of CPU, only where a word must become more than text or a path that
    can be read, or where it is refused."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    several = param.multiple or param.nargs == -1
    one = (typing.get_args(kind) or (kind,))[0]
    words = value if several and isinstance(value, (list, tuple)) else [value]
    if value is None and not param.required:
        value = () if several else None
        return value if param.callback is None else param.callback(ctx, param, value)
    if kind is None or param.required or param.callback is not None:
        return type(param).process_value(param, ctx, value)
    if one in (str, Path) and all(isinstance(w, str) and (one is str or _readable(w)) for w in words):
        return [one(w) for w in words] if several else one(value)
    if not several and isinstance(one, type) and isinstance(value, one) and value is param.default:
        return value
    return type(param).process_value(param, ctx, value)


def _readable(path: str) -> bool:
    """Whether a path can be read, or does not exist, which the command reports."""
    return os.access(path, os.R_OK) or not os.path.lexists(path)


class _Lean:
    """A command or group whose parameters are `_processed`."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            param.process_value = functools.partial(_processed, param)
        return found


class Commands(_Lean, typer.core.TyperGroup):
    """All commands."""


class Command(_Lean, typer.core.TyperCommand):
    """A command that understands other tools' names and its own older ones (aliases.py), and whose help may have
    ``{standards}``: their names take a while to gather, and few read them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = aliases.of_today(self.name or "", args, self.params, ctx.allow_interspersed_args)
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CommandInterrupted from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in (p for p in self.params if getattr(p, "help", None)):
            option.help = filled(option.help, self.name or "")  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as they are written here: typer puts them in brackets and braces once more."""
        arguments = (p for p in self.get_params(ctx) if p.param_type_name == "argument")
        return [self.options_metavar or "", *(p.metavar or str(p.name).upper() for p in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """In three sections where there are more options than fit one screen, the five that most need first."""
        shown = [(p, p.get_help_record(ctx)) for p in self.get_params(ctx)]
        most = MOST_USED.get(ctx.command_path.partition(" ")[2], "").split()
        sections: dict[str, list[Any]] = {"Arguments": [], "Options that most need": [], "More options": []}
        for p, record in shown:
            if record is not None:
                first = not most or any(name in most for name in p.opts)
                named = p.param_type_name == "argument"
                name = re.sub(r" <(path|str|list\[\w+\])>$", "", record[0]) if named else record[0]
                sections[[*sections][0 if named else 1 if first else 2]].append((name, record[1]))
        if not most:
            sections["Options"] = sections.pop("Options that most need")
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def filled(text: str, command: str) -> str:
    """An option's help with the names of standards in place of ``{standards}`` and ``{tables}``."""
    if "{standards}" not in text:
        return text
    from vllm_accprobe.standards import MACHINES, OUTPUT, PAIRS, names

    of = ", ".join(names(OUTPUT if command == "opcheck" else PAIRS))
    return text.replace("{standards}", of).replace("{tables}", ", ".join(names(MACHINES)))


_STEPS, _RANKS, _REQUESTS = "Engine steps, e.g. 0-3,7", "Global ranks, e.g. 0,2-3", "Requests: globs over ids"
dump = functools.partial(argument, "DUMP", "Directory of a dump.")
globs = functools.partial(argument, "[GLOB]...", "Taps, e.g. '*.mlp.*'; '!...' excludes.", [])
ops = _shared("--ops", [], "Classes, operators, paths; '!...' excludes.", metavar="GLOBS")
ids = _shared("--ids", "", "Calls by opcheck.csv's column id, e.g. 0.0.57,0.1.3.", metavar="IDS")
weights = _shared(
    "--weights", None, "The model's directory; by default the path in the dump's run.json.", metavar="DIR"
)
ranks = _shared("--ranks", None, f"{_RANKS}.", metavar="RANGES")
modules = _shared("--modules", None, "Modules: globs over paths, class names, or presets such as attention.",
                  metavar="GLOBS")  # fmt: skip
level = _shared("--level", None, "How deep modules are opened: 1 is what the model calls; all by default.", min=0,
                metavar="N")  # fmt: skip
dump_dir = _shared("--dir -d", None, "Where the command's dump goes; by default ./accprobe/<UTC time>.", metavar="DIR")
as_json = _shared("--json", False, "Print one json object, not lines.")
jobs = _shared("-j --jobs", 1, "Worker processes; 0: only this one.", min=0, max=256, metavar="N")
verbose = _shared("--verbose -v", False, "Print more: all that fails, not the first ten.")
quiet = _shared("--quiet -q", False, "Print less: the verdict and what is wrong.")
log_level = _shared("--log-level -l", None, "warning and above: as --quiet.", metavar="LEVEL", hidden=True)
rate = _shared("--false-alarm-rate", None, "How probable a false alarm may be, in a whole comparison of equal sides. "
               "Default: 0.001; between two servers 0.05.", metavar="P")  # fmt: skip
floors = _shared("--floor", [], "Another run of golden's side, or what --calibrate wrote. Can be repeated.",
                 metavar="RUN")  # fmt: skip
no_floor = _shared("--no-floor", False, "No floor from golden's command.")
seed = _shared("--seed", 0, "Of inputs that are drawn, and of gradients.")
exec_line = _shared("--exec", None, "A command as one line, in place of -- CMD...", metavar="LINE")
tokenizer = _shared("--tokenizer", None, "A model's folder or its tokenizer.json: shows tokens' text.", metavar="PATH")
prompts = _shared("--prompts", None, "What a server gets: one prompt a line, or JSONL as of accprobe send.",
                  metavar="FILE")  # fmt: skip
against = _shared("--against", "float64", "float64, device (this machine's accelerator), or a golden dump.",
                  metavar="WHAT")  # fmt: skip


def out(what: str, default: Any = ...) -> Any:
    """The option ``--out``. what: is written there."""
    return option("--out -o", default, f"Where the results go: {what}.", metavar="DIR")


@dataclass(frozen=True)
class SelectionOptions:
    """Tensors of a dump."""

    steps: str = option("--steps", "", f"{_STEPS}.", metavar="RANGES")
    ranks: str | None = ranks()
    roles: list[str] = option("--roles", [], "E.g. output.0 or 'input.*'; '!...' excludes.", metavar="GLOBS")
    requests: list[str] = option("--requests", [], f"{_REQUESTS}, or starts of the prompts' hashes; '!...' excludes. "
                                 "Only tensors with rows of these.", metavar="GLOBS")  # fmt: skip

    def selection(self, names: Sequence[str] = (), calls: str = "", parameters: bool = False) -> Selection:
        """Raises CommandError for a range that is none."""
        from vllm_accprobe.dump.reader import Selection

        return Selection(
            names=tuple(names), steps=ranges(self.steps, "--steps"), ranks=ranges(self.ranks or "", "--ranks"),
            requests=tuple(self.requests), roles=tuple(self.roles), calls=ranges(calls, "--calls"),
            parameters=parameters,
        )  # fmt: skip


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture takes; None: as the environment says."""

    tokens: str | None = option("--tokens", None, "Token ordinals, e.g. 0-4,7; 0 is the prompt.", metavar="RANGES")
    steps: str | None = option("--steps", None, f"{_STEPS}; 0 is the next one of a server that runs.", metavar="RANGES")
    modules: str | None = modules()
    requests: str | None = option("--requests", None, f"{_REQUESTS}; all by default.", metavar="GLOBS")


@dataclass(frozen=True)
class ServingOptions:
    """How prompts are sent to a server, or to a command that serves."""

    max_tokens: int = option("--max-tokens", 32, "Tokens to generate for a prompt, unless it names a number.",
                             metavar="N", min=1)  # fmt: skip
    concurrency: int | None = option("--concurrency", None, "Requests at a time. Default: 64; golden's.", metavar="N",
                                     min=1, max=1024)  # fmt: skip
    timeout: float = option("--timeout", 600.0, "How long to wait; for one answer.", metavar="S", min=0.1)
    ready: float = option("--ready-timeout", 1800.0, "How long a server may take to start.", metavar="S",
                          min=1)  # fmt: skip
    progress: bool = option("--progress", False, "Say every 5 s how far it is, also in a pipe. Default there: every "
                            "30 s.")  # fmt: skip

    def say(self) -> Any:
        """What gets lines while something takes long: progress.Pace."""
        from vllm_accprobe.progress import Pace

        return Pace(self.progress)


@dataclass(frozen=True)
class ScoringOptions(ServingOptions):
    """The same, and what a server's answers are scored by."""

    model: str = option("--model", "", "The model's name, where a server has several. Default: the first.",
                        metavar="NAME")  # fmt: skip
    score: bool | None = option("--score/--no-score", None, "A last pass that scores prompt and answer. Default: "
                                "where a server can.")  # fmt: skip

    def settings(self, prompts: str) -> Any:
        """gate.sides.SendSettings."""
        from vllm_accprobe.gate.sides import SendSettings

        return SendSettings(
            prompts=prompts, max_tokens=self.max_tokens, concurrency=self.concurrency or 64, model=self.model,
            timeout=self.timeout, ready_s=self.ready, score=self.score, say=self.say(),
        )  # fmt: skip


def check_rate(rate: float | None) -> None:
    """Raises CommandError."""
    if rate is not None and not 0 < rate < 1:
        raise CommandError(f"--false-alarm-rate: {rate} is no probability between 0 and 1")


def pairs(texts: Sequence[str], wrong: str, named: bool = True) -> list[tuple[str, str]]:
    """``NAME=VALUE`` of each. wrong: what is reported of one that is none, ``{}`` is its text; named: names are
    identifiers and values may be empty. Raises CommandError."""
    found = [text.partition("=") for text in texts]
    for text, (name, _, value) in zip(texts, found, strict=True):
        if "=" not in text or not (name.isidentifier() if named else value):
            raise CommandError(wrong.format(text))
    return [(name, value) for name, _, value in found]


def ranges(text: str, option: str) -> Ranges:
    """``0-4,7`` as ((0, 4), (7, 7)). Raises CommandError naming the option."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", item)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise CommandError(f"{option}: {item!r} is no range of numbers; write for example 0-3,7")
        found.append((low, high))
    return tuple(found)

