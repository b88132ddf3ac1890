"""One spelling of each option in all commands, with the older ones behind it, and one way to give a list.

The problem: ``--step`` here and ``--steps`` there, ``--json`` here and ``--format json`` there; a list that takes
commas in one command and is repeated in the next, where the last one wins. The idea: help has one name (the plural, as
VLLM_ACCPROBE_STEPS has it), an older one is rewritten before anything reads it, and so goes on working; an option whose
metavar is one of LISTS takes commas and repeats alike. What one name means in two commands on purpose is in DIFFERENT,
with why. Not here: other tools' options (told.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_accprobe.cli.spelling.refusal import CommandError

OLDER: dict[str, tuple[str, ...]] = {
    "--steps": ("--step",),
    "--ranks": ("--rank",),
    "--requests": ("--request",),
    "--roles": ("--role",),
    "--calls": ("--call",),
    "--positions": ("--position",),
    "--tasks": ("--task",),
    "--metrics": ("--metric",),
    "--filters": ("--filter",),
    "--limit": ("--most",),
    "--tolerance": ("--limit",),
}
"""What help says → what is taken for it too, by commands that have no option of that name themselves."""
LISTS = ("GLOBS", "RANGES", "IDS", "SIZES", "TYPES", "SETTINGS", "WORDS", "DTYPES", "PARTS", "KINDS", "DEVICES", "HOW")
"""Metavars of lists: with commas, repeated, or both. Paths, commands, NAME=VALUE and shapes may hold commas of their
own, and are repeated only."""
DIFFERENT: dict[str, str] = {
    "--ops": "VLLM_ACCPROBE_OPS is a switch, which run and summary have; opcheck's are ait's operators",
    "--tokens": "VLLM_ACCPROBE_TOKENS are ordinals; size counts tokens",
    "--rows": "show names rows of a tensor, opcheck sizes of a batch",
    "--graphs": "VLLM_ACCPROBE_GRAPHS is a switch, which run and errcheck have; doctor proves what the taps in them do",
    "--config": "VLLM_ACCPROBE_CONFIG is a TOML file of settings; opcheck's and online's is msprobe's json",
    "--device-id": "ait's word in two of its own commands: a card to run on, a card to write of",
    "--output": "ait's word for --out, and in ait llm dump for --dir",
    "--type": "ait's word for what is written, and in ait errcheck for what is an error",
    "--operation-name": "ait's word in two of its own commands: operators to check, operators to write",
    "-d": "msprobe's devices, elsewhere --dir",
    "-n": "msprobe's splits, elsewhere --limit",
    "-o": "--out, and in ait llm dump --dir",
    "-device": "as --device-id",
    "-ids": "ait's word in two of its own commands: calls to check, operations to write",
    "-opname": "as --operation-name",
}  # fmt: skip
"""Names of more than one meaning, and why."""
_FORMATS = ("terminal", "lines", "text")


def one_spelling(words: Sequence[str], params: Iterable[Any], interspersed: bool = True) -> list[str]:
    """``words`` with today's names, each list given once. params: the command's, as click has them; interspersed: False
    where the first word that is no option, and all behind it, is another command's. Raises CommandError."""
    options = {name: p for p in params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    today = {old: new for new, all_old in OLDER.items() if new in options for old in all_old if old not in options}
    out: list[str] = []
    lists: dict[str, int] = {}
    own = list(words)
    while own:
        word = own.pop(0)
        if word == "--" or (not interspersed and not word.startswith("-")):
            return [*out, word, *own]
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name == "--format" and name not in options and "--json" in options:
            kind = value if equals else (own.pop(0) if own else "")
            if kind not in ("json", *_FORMATS):
                raise CommandError(f"--format {kind}: lines for people, or json, which --json says, too")
            out += ["--json"] if kind == "json" else []
            continue
        name = today.get(name, name)
        option = options.get(name)
        if option is None or option.is_flag or not (equals or own):
            out.append(name + equals + value)
            continue
        value = value if equals else own.pop(0)
        if option.metavar not in LISTS:
            out += [f"{name}={value}"] if equals else [name, value]
        elif option.multiple:
            for item in [item for part in value.split(",") if (item := part.strip())] or [value]:
                out += [name, item]
        elif (at := lists.get(option.name)) is not None:
            out[at] = f"{out[at]},{value}".strip(",")
        else:
            out += [name, value]
            lists[option.name] = len(out) - 1
    return out
