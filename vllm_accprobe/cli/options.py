"""Options of commands, each declared once, as fields of frozen dataclasses that a command takes and passes on whole.

The problem: an option that five commands have was declared five times, and a command with thirty parameters copied them
by hand into calls of thirty parameters. The idea: a group is a frozen dataclass whose fields are ``Annotated`` with
typer's Option or Argument; groups inherit from groups; `expanded` turns a function of groups into one of fields, which
is what typer reads, and builds the groups again when the command line was parsed. `Command` is how a command reads its
words: names of other tools and older names of ours become today's first (aliases.py).

One name means one thing in all commands, and its help begins with the same sentence everywhere
(tests/cli/test_options.py). Metavars in the plural are lists, with commas or repeated.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from typer import Argument, Option

from vllm_accprobe.cli import aliases
from vllm_accprobe.cli.endings import CommandError, CommandInterrupted
from vllm_accprobe.cli.output import answered

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Ranges, Selection

# --- the mechanism ---


HIDDEN = "hidden"
"""``Annotated[Group, HIDDEN]``: the group's options are taken, and are not in --help."""


def expanded(function: Callable[..., Any], command: str, **fixed: Any) -> Callable[..., Any]:
    """``function``, each of whose parameters is a group, as a function of the groups' fields. It gets --json where no
    group has it (output.answered). command: its name, in that JSON; fixed: arguments that no option stands for."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = [name for name, p in inspect.signature(function).parameters.items() if p.default is inspect.Parameter.empty]
    groups: dict[str, Any] = {name: hints[name] for name in own}
    parameters: dict[str, inspect.Parameter] = {}

    def add(name: str, annotation: Any, default: Any) -> None:
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                             annotation=annotation)  # fmt: skip

    for name, group in groups.items():
        hidden = typing.get_origin(group) is Annotated
        groups[name] = group = typing.get_args(group)[0] if hidden else group
        types = typing.get_type_hints(group, include_extras=True)
        for f in dataclasses.fields(group):
            annotation = types[f.name]
            if hidden:
                plain, option = typing.get_args(annotation)
                option = copy.copy(option)
                option.hidden = True
                annotation = Annotated[plain, option]
            add(
                f.name,
                annotation,
                inspect.Parameter.empty if (value := default_of(f)) is dataclasses.MISSING else value,
            )
    own_json = "as_json" in parameters
    if not own_json:
        add("as_json", Json, False)

    def run(**values: Any) -> Any:
        made = {name: group(**{f.name: values[f.name] for f in dataclasses.fields(group)})
                for name, group in groups.items()}  # fmt: skip
        return answered(command, not own_json and values["as_json"], lambda: function(**made, **fixed))

    run.__doc__, run.__name__, run.__module__ = function.__doc__, function.__name__, function.__module__
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters.values()}
    return run


def default_of(f: dataclasses.Field[Any]) -> Any:
    """MISSING where it has none."""
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def used(*groups: Any) -> dict[str, Any]:
    """name of the option → value, of all fields that are not at their defaults."""
    found = {}
    for group in groups:
        types = typing.get_type_hints(type(group), include_extras=True)
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if value != default_of(f) and value is not None:
                declared = [w for m in types[f.name].__metadata__ for w in (m.default, *(m.param_decls or ()))]
                names = [w for w in declared if isinstance(w, str) and w.startswith("--")]
                found[names[0].partition("/")[0] if names else f.name] = value
    return found


class Command(typer.core.TyperCommand):
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


def filled(text: str, command: str) -> str:
    """An option's help with the names of standards in place of ``{standards}`` and ``{tables}``."""
    if "{standards}" not in text:
        return text
    from vllm_accprobe.standards import MACHINES, OUTPUT, PAIRS, names

    of = ", ".join(names(OUTPUT if command == "opcheck" else PAIRS))
    return text.replace("{standards}", of).replace("{tables}", ", ".join(names(MACHINES)))


Hidden = functools.partial(Option, hidden=True)
"""Another tool's option: taken, and not in --help (docs/migration.md has them)."""


# --- options that several commands have ---

Dump = Annotated[Path, Argument(metavar="DUMP", help="Directory of a dump.")]
Globs = Annotated[list[str], Argument(metavar="[GLOB]...", help="Taps, e.g. '*.mlp.*'; '!...' excludes.")]
Ops = Annotated[list[str], Option("--ops", metavar="GLOBS", help="Classes, operators, paths; '!...' excludes.")]
Ids = Annotated[
    str, Option("--ids", metavar="IDS", help="Calls by opcheck.csv's column id, e.g. 0.0.57,0.1.3.")
]  # fmt: skip
Weights = Annotated[
    Path | None,
    Option("--weights", metavar="DIR", help="The model's directory; by default the path in the dump's run.json."),
]
_STEPS, _RANKS, _REQUESTS = "Engine steps, e.g. 0-3,7", "Global ranks, e.g. 0,2-3", "Requests: globs over ids"
Ranks = Annotated[str | None, Option("--ranks", metavar="RANGES", help=f"{_RANKS}.")]
Modules = Annotated[
    str | None,
    Option("--modules", metavar="GLOBS", help="Modules: globs over paths, class names, or presets such as attention."),
]
Level = Annotated[
    int | None,
    Option("--level", min=0, metavar="N", help="How deep modules are opened: 1 is what the model calls; all by "
           "default."),
]  # fmt: skip
Dir = Annotated[
    str | None,
    Option("--dir", "-d", metavar="DIR", help="Where the command's dump goes; by default ./accprobe/<UTC time>."),
]
Json = Annotated[bool, Option("--json", help="Print one json object, not lines.")]
Jobs = Annotated[
    int, Option("-j", "--jobs", min=0, max=256, metavar="N", help="Processes that work; 0: none besides this one.")
]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Say more: all that fails, not the first ten.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Say less: the verdict and what is wrong.")]
LogLevel = Annotated[str | None, Hidden("--log-level", "-l", metavar="LEVEL", help="warning and above: as --quiet.")]
Rate = Annotated[
    float | None,
    Option("--false-alarm-rate", metavar="P", help="How probable a false alarm may be, in a whole comparison of equal "
           "sides. Default: 0.001; between two servers 0.05."),
]  # fmt: skip
Floors = Annotated[
    list[str],
    Option("--floor", metavar="RUN", help="Another run of golden's side, or what --calibrate wrote. Can be repeated."),
]
Seed = Annotated[int, Option("--seed", help="Of inputs that are drawn, and of gradients.")]
Exec = Annotated[str | None, Option("--exec", metavar="LINE", help="A command as one line, in place of -- CMD...")]
Tokenizer = Annotated[
    Path | None,
    Option("--tokenizer", metavar="PATH", help="A model's folder or its tokenizer.json: shows tokens' text."),
]
Prompts = Annotated[
    str | None,
    Option("--prompts", metavar="FILE", help="What a server gets: one prompt a line, or JSONL as of accprobe send."),
]


def out(what: str) -> Any:
    """The option ``--out``. what: is written there."""
    return Option("--out", "-o", metavar="DIR", help=f"Where the results go: {what}.")


@dataclass(frozen=True)
class SelectionOptions:
    """Tensors of a dump."""

    steps: Annotated[str, Option("--steps", metavar="RANGES", help=f"{_STEPS}.")] = ""
    ranks: Ranks = None
    roles: Annotated[
        list[str], Option("--roles", metavar="GLOBS", help="E.g. output.0 or 'input.*'; '!...' excludes.")
    ] = field(default_factory=list)
    requests: Annotated[
        list[str],
        Option("--requests", metavar="GLOBS", help=f"{_REQUESTS}, or starts of the prompts' hashes; '!...' excludes. "
               "Only tensors with rows of these."),
    ] = field(default_factory=list)  # fmt: skip

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

    tokens: Annotated[
        str | None, Option("--tokens", metavar="RANGES", help="Token ordinals, e.g. 0-4,7; 0 is the prompt.")
    ] = None
    steps: Annotated[
        str | None, Option("--steps", metavar="RANGES", help=f"{_STEPS}; 0 is the next one of a server that runs.")
    ] = None
    modules: Modules = None
    requests: Annotated[str | None, Option("--requests", metavar="GLOBS", help=f"{_REQUESTS}; all by default.")] = None


@dataclass(frozen=True)
class ServingOptions:
    """How prompts are sent to a server, or to a command that serves."""

    max_tokens: Annotated[
        int, Option("--max-tokens", metavar="N", min=1, help="Tokens to generate for a prompt, where it says no other.")
    ] = 32
    concurrency: Annotated[
        int | None,
        Option("--concurrency", metavar="N", min=1, max=1024, help="Requests at a time. Default: 64; golden's."),
    ] = None
    timeout: Annotated[
        float, Option("--timeout", metavar="S", min=0.1, help="How long to wait; here for one request.")
    ] = 600.0
    ready: Annotated[
        float, Option("--ready-timeout", metavar="S", min=1, help="How long a command may take until it answers.")
    ] = 1800.0


@dataclass(frozen=True)
class ScoringOptions(ServingOptions):
    """The same, and what a server's answers are scored by."""

    model: Annotated[
        str, Option("--model", metavar="NAME", help="Where a server has several; the first by default.")
    ] = ""
    score: Annotated[
        bool | None,
        Option("--score/--no-score", help="A last pass that scores prompt and answer. Default: where a server can."),
    ] = None

    def asking(self, prompts: str) -> Any:
        """gate.sides.Asking."""
        from vllm_accprobe.gate.sides import Asking

        return Asking(
            prompts=prompts, max_tokens=self.max_tokens, concurrency=self.concurrency or 64, model=self.model,
            timeout=self.timeout, ready_s=self.ready, score=self.score,
        )  # fmt: skip


def check_rate(rate: float | None) -> None:
    """Raises CommandError."""
    if rate is not None and not 0 < rate < 1:
        raise CommandError(f"--false-alarm-rate: {rate} is no probability between 0 and 1")


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


def flag(value: bool | None) -> str | None:
    """An option that is on or off as an environment variable has it."""
    return None if value is None else str(int(value))
