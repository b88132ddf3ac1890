"""The settings that bisect varies in a `vllm serve` command, and how it changes them.

The problem: one setting has many spellings (``--max_num_batched_tokens 64``, ``-tp=2``, ``-cc.mode=0``, a JSON field,
a variable), an option that this release does not have ends a trial, and vendors have switches of their own. The idea: a
command is words and an environment, which an `Edit` changes. A `ServerSetting` is one whose value is not the plain one,
with its Edit; settings of many parts (compilation, custom operators) are one axis first. What the command's vLLM has is
read from its source (nothing is imported); where there is none, all options are taken to be there. A vendor's file:

    [[switch]]
    name = "fused norm"                       # as it is printed
    environment = "VLLM_VENDOR_FUSED_NORM"    # or: option = "--vendor-kernels", or: words = ["--vendor-plain"]
    plain = "0"                               # of the variable or option; left out: unset, taken away
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import Text, fits, value_at
from vllm_accprobe.run.launcher import PLUGIN

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
        """Of an option with ``--no-`` beside it: what is reported last, None where nothing is."""
        last = None
        for name, value, _ in _options(self.words):
            if name in (option, "--no-" + option[2:]):
                last = name == option and (value or "true").lower() != "false"
        return last

    def names(self) -> Iterator[str]:
        """Of all long options, without fields of JSON: ``--compilation-config`` of ``-cc.mode=0``."""
        return (name.partition(".")[0] for name, _, _ in _options(self.words) if name.startswith("--"))

    def json(self, option: str) -> dict[str, Any]:
        """The fields of an option that is JSON, its dotted spellings too. Raises BisectError."""
        made: dict[str, Any] = {}
        for name, value, _ in _options(self.words):
            if name == option and value:
                if not value.lstrip().startswith("{"):  # -cc 3 is its mode
                    made["mode"] = _value(value)
                    continue
                try:
                    fields = json.loads(value)
                except ValueError:
                    raise BisectError(f"{option} is no json: bisect cannot change it") from None
                made.update(fields)
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
        raise BisectError("no command is named; write `vllm serve MODEL ...`")
    if any(part in ("|", "&&", ";", ">", "||") for part in parts):
        raise BisectError("a line for the shell cannot be changed: write the `vllm serve` in it alone")
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


_WHERE = """
import importlib.util, sys
from importlib import metadata
spec = importlib.util.find_spec("vllm")
print(spec.submodule_search_locations[0] if spec else "")
names = set(metadata.packages_distributions().get("vllm", ()))
print(" ".join(f"{n}={metadata.version(n)}" for n in sorted(names)))
for kind in ("general", "platform"):
    print(" ".join(e.name for e in metadata.entry_points(group=f"vllm.{kind}_plugins")))
"""
_WAIT_S = 60.0
_OPTION = re.compile(r"""["'](--[a-z0-9][a-z0-9-]*)["']""")
_CUSTOM = re.compile(r"""(?:CustomOp|PluggableLayer)?\.?register\(\s*["']([a-z0-9_]+)["']""")
_VARIABLE = re.compile(r"""["'](VLLM_[A-Z0-9_]+)["']\s*:""")


@dataclass(frozen=True)
class Offered:
    """options: names of options, variables among them; None: not known, everything is taken to be there. passes,
    custom_ops, ir_ops: names. version: of the distribution, "" where it is not known."""

    options: frozenset[str] | None = None
    passes: tuple[str, ...] = ()
    custom_ops: tuple[str, ...] = ()
    ir_ops: tuple[str, ...] = ()
    version: str = ""

    def __contains__(self, option: str) -> bool:
        return self.options is None or option in self.options


def options_offered(command: ServeCommand) -> Offered:
    """Never raises for what is not found there."""
    environ = command.full()
    python = interpreter(command.words, environ)
    there = Installed() if python is None else installed(python, neutral(environ))
    return Offered() if there.package is None else read_offered(there.package, there.version)


@dataclass(frozen=True)
class Installed:
    """The vLLM of an interpreter. package: its folder, None where nothing is known; version: of its distributions;
    plugin: whether vLLM would load ours; cpu: whether it computes on the CPU."""

    package: Path | None = None
    version: str = ""
    plugin: bool = False
    cpu: bool = False


Environ = tuple[tuple[str, str], ...]


def neutral(environ: Mapping[str, str]) -> Environ:
    """Neither the probe nor the working directory, which may have a folder named vllm, may matter when an
    interpreter lists what it has."""
    kept = {k: v for k, v in environ.items() if not k.startswith("VLLM_ACCPROBE")}
    return tuple(sorted((kept | {"PYTHONSAFEPATH": "1"}).items()))


@functools.lru_cache(maxsize=8)
def installed(python: str, environ: Environ) -> Installed:
    """What ``python`` has in this environment; nothing of vLLM is imported."""
    try:
        done = subprocess.run([python, "-c", _WHERE], env=dict(environ), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=_WAIT_S, cwd="/")  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return Installed()
    folder, version, plugins, platforms = (*done.stdout.splitlines(), "", "", "", "")[:4]
    if done.returncode or not folder:
        return Installed()
    cpu = "cpu" in version and not {*platforms.split()} - {PLUGIN}
    return Installed(Path(folder), version, PLUGIN in plugins.split(), cpu)


def interpreter(words: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    """The Python that the command runs in: the word itself, or the first line of the script."""
    for word in words:
        path = shutil.which(word, path=environ.get("PATH"))
        name = os.path.basename(word)
        if path is None or not (name.startswith("python") or name == "vllm"):
            continue
        if name.startswith("python"):
            return path
        try:
            with open(path, "rb") as f:
                head = f.read(4096).decode(errors="replace").splitlines()
        except OSError:
            return None
        return _shebang(head)
    return None


def _shebang(head: list[str]) -> str | None:
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and os.path.basename(words[0]) == "sh" and len(head) > 1 and "exec" in head[1]:
        # pip's way around a long path: '''exec' /long/python "$0" "$@"
        words = shlex.split(head[1].replace("'''exec'", "", 1))
    if words and os.path.basename(words[0]) == "env":
        words = words[1:]
    return shutil.which(words[0]) if words and "python" in os.path.basename(words[0]) else None


def read_offered(package: Path, version: str = "") -> Offered:
    """From vLLM's folder."""
    files = "engine/arg_utils.py", "config/compilation.py"
    options = {name for file in files for name in _OPTION.findall(source(package / file))}
    if not options:
        return Offered(version=version)
    options |= set(_VARIABLE.findall(source(package / "envs.py")))
    passes = _fields(source(package / "config" / "compilation.py"), "PassConfig", "bool")
    ir = _fields(source(package / "config" / "kernel.py"), "IrOpPriorityConfig", "list[str]")
    ops: set[str] = set()
    for file in sorted((package / "model_executor").rglob("*.py")):
        text = source(file)
        if "CustomOp" in text:
            ops |= set(_CUSTOM.findall(text))
    return Offered(frozenset(options), tuple(passes), tuple(sorted(ops)), tuple(ir), version)


def source(path: Path) -> str:
    """Of a module, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(text: str, of: str, kind: str) -> Iterator[str]:
    """The annotated fields of class ``of`` whose annotation is ``kind``."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == of:
            for line in node.body:
                if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                    continue
                if ast.unparse(line.annotation) == kind:
                    yield line.target.id


CC, IR = "--compilation-config", "--ir-op-priority"
TOKENS, CHUNKED, BLOCK = "--max-num-batched-tokens", "--enable-chunked-prefill", "--block-size"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
MODEL_LENGTH = "{model length}"
"""Stands in an edit for what the first run tells."""


@dataclass(frozen=True)
class ServerSetting:
    """One setting. value, plain: for people; edit: makes it plain; parts: what it is made of, each an axis; fact: what
    an engine's log says of it (trials.py), "" where it says nothing; scale: (option, the command's number, the
    plain one's, None: the first run tells)."""

    name: str
    value: str
    plain: str
    edit: Edit
    parts: tuple[ServerSetting, ...] = ()
    fact: str = ""
    scale: tuple[str, int, int | None] | None = None


def axes(
    command: ServeCommand, offered: Offered, vendor: Sequence[ServerSetting] = (), plain: Mapping[str, str] = {}
) -> list[ServerSetting]:
    """All whose value is not plain already. plain: by axis, another plain value (`--plain attention=TRITON_ATTN`).
    Raises BisectError."""
    found = [a for a in (f(command, offered) for f in _TABLE) if a is not None]
    found += [a for a in _values(command, offered, plain) if a is not None]
    names = {a.name for a in found} | {a.name for a in vendor}
    if len(names) < len(found) + len(vendor):
        raise BisectError("--switches: a switch has the name of one of bisect's own axes, or two have the same")
    return [*found, *vendor]


def _switch(
    name: str, option: str, fact: str, on: bool, command: ServeCommand, offered: Offered
) -> ServerSetting | None:
    """on: the plain value of ``option``."""
    now = command.flag(option)
    if option not in offered or now is on:
        return None
    words = (option if on else "--no-" + option[2:],)
    edit = Edit(drop=(option,), add=words)
    return ServerSetting(name, _state(now), "on" if on else "off", edit, fact=fact)


def _state(flag: bool | None) -> str:
    return "as by default" if flag is None else "on" if flag else "off"


def _compilation(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    if command.flag("--enforce-eager") or "--enforce-eager" not in offered:
        return None
    config = command.json(CC)
    parts: list[ServerSetting] = []
    if CC in offered:
        fields: list[tuple[str, str, Any]] = [("mode", "mode", 0), ("graphs", "cudagraph_mode", "NONE")]
        fields += [(name, f"pass_config.{name}", False) for name in offered.passes]
        for name, path, value in fields:
            now = value_at(config, *path.split("."))
            if now != value or type(now) is not type(value):
                edit = Edit(fields=((CC, path, value),))
                parts.append(ServerSetting(f"compilation: {name}", _shown(now), _shown(value), edit))
    level = command.get("--optimization-level")
    value = "as by default" if level is None and not config else "-O" + (level or "") if not config else "as given"
    return ServerSetting("compilation", value, "eager", Edit(add=("--enforce-eager",)), tuple(parts), "eager")


def _custom_ops(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    words = command.json(CC).get("custom_ops") or []
    if CC not in offered or not isinstance(words, list) or ("none" in words and not any(o[:1] == "+" for o in words)):
        return None
    off = {op[1:] for op in words if op[:1] == "-"}
    on = {op[1:] for op in words if op[:1] == "+"}
    names = on if "none" in words else set(offered.custom_ops) - off | on
    parts = tuple(
        ServerSetting(f"custom operators: {name}", "as by default" if name not in on else "on", "native",
             Edit(fields=((CC, "custom_ops+", f"-{name}"),)))
        for name in sorted(names)
    )  # fmt: skip
    shown = "as by default" if not words else ",".join(words)
    return ServerSetting(
        "custom operators", shown, "native", Edit(fields=((CC, "custom_ops", ["none"]),)), parts, "custom operators"
    )


def _ir_ops(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    """vLLM IR (0.2x on): each operator has a list of who implements it, the first that can is taken."""
    if IR not in offered or not offered.ir_ops:
        return None
    config = command.json(IR)
    left = [name for name in offered.ir_ops if config.get(name) not in (["native"], "native")]
    parts = tuple(
        ServerSetting(
            f"IR operators: {name}", _shown(config.get(name)), "native", Edit(fields=((IR, name, ["native"]),))
        )
        for name in left
    )
    if not left:
        return None
    edit = Edit(fields=tuple((IR, name, ["native"]) for name in left))
    value = "as given" if config else "as by default"
    return ServerSetting("IR operators", value, "native", edit, parts, "IR operators")


def _chunks(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    """Plain is a step that takes any prompt whole: as many tokens as the model's length, and no chunks where vLLM can
    be told so."""
    if TOKENS not in offered:
        return None
    length = number(command.get("--max-model-len"))
    now = number(command.get(TOKENS))
    switch = ("--no-" + CHUNKED[2:],) if CHUNKED in offered else ()
    if now is not None and length is not None and now >= length and (not switch or command.flag(CHUNKED) is False):
        return None
    whole = str(max(now or 0, length)) if length is not None else MODEL_LENGTH
    drop = (TOKENS, CHUNKED) if switch else (TOKENS,)
    value = f"{now} tokens a step" if now is not None else "as by default"
    edit = Edit(drop=drop, add=(*switch, TOKENS, whole))
    plain = length if now is not None and (length is None or length > now) else None
    return ServerSetting("chunked prefill", value, "off", edit, fact="chunks",
                scale=(TOKENS, now, plain) if now is not None and (plain or length is None) else None)  # fmt: skip


def _runner(command: ServeCommand, offered: Offered) -> ServerSetting | None:
    now = command.full().get(V2)
    if now is None or now == "0" or V2 not in offered:
        return None
    return ServerSetting("model runner", "V2", "V1", Edit(environ=((V2, "0"),)))


_TABLE = (
    _compilation,
    lambda c, o: _switch("prefix caching", "--enable-prefix-caching", "prefix", False, c, o),
    _chunks,
    lambda c, o: _switch("async scheduling", "--async-scheduling", "async", False, c, o),
    _runner,
    _custom_ops,
    _ir_ops,
)

_VALUES = (
    ("tensor parallel", "--tensor-parallel-size", "1"),
    ("KV cache dtype", "--kv-cache-dtype", "auto"),
    ("block size", BLOCK, None),
    ("attention", "--attention-backend", None),
    ("speculation", "--speculative-config", None),
)
"""(axis, option, the plain value; None: the option is taken away)."""


def _values(command: ServeCommand, offered: Offered, plain: Mapping[str, str]) -> list[ServerSetting | None]:
    if unknown := set(plain) - {name for name, _, _ in _VALUES}:
        raise BisectError(
            f"--plain {min(unknown)}=...: only {', '.join(n for n, _, _ in _VALUES)} have other plain values"
        )
    found: list[ServerSetting | None] = []
    for name, option, usual in _VALUES:
        now, due = command.get(option), plain.get(name, usual)
        if name in plain and option not in offered:
            raise BisectError(f"--plain {name}=...: this vLLM has no {option}")
        if option not in offered or now == due or (now is None and name not in plain):
            continue
        edit = Edit(drop=(option,), add=() if due is None else (option, due))
        scale = None
        if name == "block size" and (n := number(now)) is not None:
            scale = (option, n, number(due))
        fact = name if name in ("block size", "KV cache dtype") else ""
        found.append(ServerSetting(name, _shown(now), due or "as by default", edit, fact=fact, scale=scale))
    return found


def partial(axis: ServerSetting, names: Sequence[str]) -> ServerSetting:
    """The same with only these of its parts."""
    return replace(axis, parts=tuple(p for p in axis.parts if p.name in set(names)))


def _shown(value: Any) -> str:
    return "as by default" if value is None else value if isinstance(value, str) else json.dumps(value)


MAX_BYTES = 1 << 20
"""Chosen: a list of switches is a few KB."""
_FIELDS = {"name", "environment", "option", "words", "plain"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")


def read_vendor(path: Path, command: ServeCommand) -> list[ServerSetting]:
    """The switches whose value in ``command`` is not plain. Raises BisectError, OSError."""
    if not path.is_file():
        raise BisectError(f"--switches {path} is no file")
    if path.stat().st_size > MAX_BYTES:
        raise BisectError(f"--switches {path} is larger than 1 MiB: it is no list of switches")
    try:
        value = _load(path, path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise BisectError(f"--switches {path} is neither json nor toml") from None
    entries = value.get("switch") if isinstance(value, dict) else value
    if not isinstance(entries, list) or not entries:
        raise BisectError(f"--switches {path}: write [[switch]] with name, environment and plain (docs/gate.md)")
    return [axis for i, entry in enumerate(entries, 1) if (axis := _axis(entry, f"{path}, switch {i}", command))]


def _load(path: Path, text: str) -> Any:
    if path.suffix == ".json" or (text.lstrip()[:1] in ("{", "[") and not text.lstrip().startswith("[[")):
        return json.loads(text)
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _axis(entry: Any, where: str, command: ServeCommand) -> ServerSetting | None:
    if not isinstance(entry, dict):
        raise BisectError(f"--switches {where}: write an object with name, environment and plain")
    if unknown := sorted(set(map(str, entry)) - _FIELDS):
        raise BisectError(f"--switches {where}: {unknown[0][:60]!r} is none of {', '.join(sorted(_FIELDS))}")
    name, plain = entry.get("name"), entry.get("plain")
    if not isinstance(name, str) or not name.strip() or len(name) > 100 or not name.isprintable() or "," in name:
        raise BisectError(f"--switches {where}: name is a printable text of at most 100 characters without commas")
    kinds = [key for key in ("environment", "option", "words") if entry.get(key) is not None]
    if len(kinds) != 1:
        raise BisectError(f"--switches {where}: write one of environment, option and words")
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        plain = str(plain)
    if plain is not None and (not isinstance(plain, str) or "\0" in plain):
        raise BisectError(f"--switches {where}: plain is a text, or is left away")
    what = entry[kinds[0]]
    if kinds[0] == "words":
        return _words(name, what, plain, where, command)
    if kinds[0] == "environment":
        if not isinstance(what, str) or not _NAME.fullmatch(what):
            raise BisectError(f"--switches {where}: environment is the name of one variable")
        now = command.full().get(what)
        edit = Edit(environ=((what, plain),))
    else:
        if not isinstance(what, str) or not re.fullmatch(r"--[A-Za-z0-9][A-Za-z0-9_.-]*", what):
            raise BisectError(f"--switches {where}: option is the name of one, such as --vendor-kernels")
        now = command.get(what.replace("_", "-"))
        edit = Edit(drop=(what.replace("_", "-"),), add=() if plain is None else (what, plain))
    if now == plain:
        return None
    return ServerSetting(name, "not set" if now is None else now or "on", "not set" if plain is None else plain, edit)


def _words(name: str, what: Any, plain: str | None, where: str, command: ServeCommand) -> ServerSetting | None:
    if not what or not fits(list[Text], what) or "\0" in "".join(what) or plain is not None:
        raise BisectError(f"--switches {where}: words is a list of texts that make the command plain, without plain")
    if all(word in command.words for word in what):
        return None
    return ServerSetting(name, "without " + " ".join(what), "with it", Edit(add=tuple(what)))
