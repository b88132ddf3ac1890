"""A `vllm serve` command whose settings can be changed, whichever way they were spelled.

The problem: one setting has many spellings (``--max_num_batched_tokens 64``, ``-tp=2``, ``--no-async-scheduling``,
``-cc.mode=0``, a JSON with ten other fields in it, a variable in front of the command), and a change must replace that
one and leave the others. The idea: a command is words and an environment; an `Edit` takes options away by any of their
names, adds words at the end, sets fields of an option that is JSON, and sets or unsets variables.
Not here: which settings there are (axes.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ALIASES = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-cc": "--compilation-config",
           "-ac": "--attention-config", "-O": "--optimization-level", "-sc": "--speculative-config"}  # fmt: skip
"""vLLM's short names."""
SECRET = ("--api-key", "--hf-token")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_HUMAN = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BisectError(Exception):
    """One line: what was given and cannot be used. Exit code 2."""


@dataclass(frozen=True)
class Edit:
    """One change. drop: options that are taken away, in all spellings; add: words at the end; fields: (option, field
    with dots, value) of options that are JSON, a field that ends in + is a list to which ``value`` is added;
    environ: (variable, value, None: unset)."""

    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    fields: tuple[tuple[str, str, Any], ...] = ()
    environ: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True)
class ServeCommand:
    """words: of the program; environ: what stands before it, None: unset. base: the environment it runs in."""

    words: tuple[str, ...]
    environ: tuple[tuple[str, str | None], ...] = ()
    base: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def full(self) -> dict[str, str]:
        """The whole environment."""
        made = dict(self.base)
        for name, value in self.environ:
            if value is None:
                made.pop(name, None)
            else:
                made[name] = value
        return made

    def get(self, option: str) -> str | None:
        """The last value of ``--option``; "" where it stands without one, None where it is not there."""
        found = None
        for name, value, _ in _options(self.words):
            if name == option:
                found = value or ""
        return found

    def flag(self, option: str) -> bool | None:
        """Of an option with ``--no-`` beside it: what is said last, None where nothing is."""
        said = None
        for name, value, _ in _options(self.words):
            if name in (option, "--no-" + option[2:]):
                said = name == option and (value or "true").lower() != "false"
        return said

    def json(self, option: str) -> dict[str, Any]:
        """The fields of an option that is JSON, its dotted spellings too. Raises BisectError."""
        made: dict[str, Any] = {}
        for name, value, _ in _options(self.words):
            if name == option and value:
                if not value.lstrip().startswith("{"):  # -cc 3 is its mode
                    made["mode"] = _value(value)
                    continue
                try:
                    given = json.loads(value)
                except ValueError:
                    raise BisectError(f"{option} is no json: bisect cannot change it") from None
                made.update(given)
            elif name.startswith(option + "."):
                _set(made, name[len(option) + 1 :], _value(value or "true"))
        return made

    def edited(self, edits: Sequence[Edit]) -> ServeCommand:
        """With the changes, one after another."""
        words, environ = list(self.words), dict(self.environ)
        for edit in edits:
            gone = set(edit.drop) | {"--no-" + name[2:] for name in edit.drop}
            words = _without(words, lambda name, gone=gone: name in gone)  # type: ignore[misc]
            words += edit.add
            for option, path, value in edit.fields:
                made = ServeCommand(tuple(words)).json(option)
                _set(made, path, value)
                words = _without(words, lambda name, o=option: name == o or name.startswith(o + "."))  # type: ignore[misc]
                words += [option, json.dumps(made, separators=(",", ":"))]
            for name, text in edit.environ:
                environ[name] = text
                if text is None and name not in self.base:
                    del environ[name]
        return ServeCommand(tuple(words), tuple(environ.items()), self.base)

    def line(self) -> str:
        """What a person types; a key is not shown."""
        unset = [name for name, value in self.environ if value is None]
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environ if value is not None]
        if unset:
            before = ["env", *(f"-u {name}" for name in unset), *before]
        words, hidden = [], False
        for word in self.words:
            name, has, _ = word.partition("=")
            words.append('"$KEY"' if hidden else f'{name}="$KEY"' if has and name in SECRET else shlex.quote(word))
            hidden = word in SECRET
        return " ".join([*before, *words])


def command(words: Sequence[str], base: Mapping[str, str]) -> ServeCommand:
    """From what was typed: variables in front, with or without ``env``, are the command's environment. Raises
    BisectError."""
    parts = list(words)
    if len(parts) == 1:
        try:
            parts = shlex.split(parts[0])
        except ValueError as e:
            raise BisectError(f"the command: {e}") from None
    if not parts:
        raise BisectError("no command is given; write `accprobe bisect -- vllm serve MODEL ...`")
    if any(part in ("|", "&&", ";", ">", "||") for part in parts):
        raise BisectError("a line for the shell cannot be changed: give the `vllm serve` in it alone")
    if os.path.basename(parts[0]) == "env" and len(parts) > 1 and not parts[1].startswith("-"):
        parts.pop(0)
    environ: dict[str, str | None] = {}
    while parts and _ASSIGNED.match(parts[0]):
        name, _, value = parts.pop(0).partition("=")
        environ[name] = value
    if not parts:
        raise BisectError("the command has variables and no program")
    return ServeCommand(tuple(parts), tuple(environ.items()), dict(base))


def number(text: str | None) -> int | None:
    """``2048``, ``2k`` and ``2K`` as vLLM reads them; None for what is none."""
    match = re.fullmatch(r"(\d+)([kmgKMG]?)", (text or "").strip())
    return int(match[1]) * _HUMAN.get(match[2], 1) if match else None


def _options(words: Sequence[str]) -> list[tuple[str, str | None, int]]:
    """(name, value, how many words) in their order; what is no option has the name ""."""
    found: list[tuple[str, str | None, int]] = []
    i = 0
    while i < len(words):
        word = words[i]
        if not word.startswith("-") or not word.strip("-"):
            found.append(("", word, 1))
            i += 1
            continue
        name, has, value = word.partition("=")
        if re.fullmatch(r"-O\d", word):
            name, has, value = "-O", "=", word[2:]
        name = _name(name)
        after = words[i + 1] if i + 1 < len(words) else None
        option = after is not None and after.startswith("-") and not re.fullmatch(r"-\d+", after)
        if has or after is None or (option and not name.endswith("+")):  # -cc.custom_ops+ -rms_norm
            found.append((name, value if has else None, 1))
            i += 1
        else:
            found.append((name, after, 2))
            i += 2
    return found


def _name(name: str) -> str:
    head, dot, rest = name.partition(".")
    head = ALIASES.get(head, head)
    return (head.replace("_", "-") if head.startswith("--") else head) + dot + rest


def _without(words: Sequence[str], gone: Any) -> list[str]:
    """A switch that takes no value may be followed by the model's name, which stays."""
    kept: list[str] = []
    at = 0
    for name, _, n in _options(words):
        taken = words[at : at + n]
        at += n
        if not name or not gone(name):
            kept += taken
        elif n == 2 and (name in SWITCHES or name.startswith("--no-")):
            kept.append(taken[1])
    return kept


SWITCHES = frozenset({"--enforce-eager", "--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling",
                      "--disable-cascade-attn"})  # fmt: skip
"""Options that we change and that take no value."""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(made: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        inner = made.get(name)
        made[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        made = inner
    if not last.endswith("+"):
        made[last] = value
        return
    had = made.get(last[:-1])
    old = [v for v in had if not _opposite(v, value)] if isinstance(had, list) else []
    made[last[:-1]] = [*old, *(value if isinstance(value, list) else [value])]


def _opposite(a: Any, b: Any) -> bool:
    """``+rms_norm`` and ``-rms_norm``."""
    return isinstance(a, str) and isinstance(b, str) and a[:1] in "+-" and b[:1] in "+-" and a[1:] == b[1:]
