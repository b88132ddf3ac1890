"""What the vLLM that a command starts can be told, read from its source.

The problem: an option that this release does not have ends every trial before it began, and importing vLLM to ask its
parser takes 10 to 30 seconds, in an environment that need not be ours. The idea: the command's own Python is asked
where its vllm lies (nothing is imported), and the option's names, the fields of the passes, the custom operators and
those of vLLM IR stand in its source as literals. Where there is no such Python (a container, a remote host) all
options are taken to be there, and the engine's log tells which custom operators there are (engine_log.py). Not here:
what is made of it (axes.py)."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_accprobe.gate.bisect.edits import ServeCommand

_WHERE = """
import importlib.util, sys
from importlib import metadata
spec = importlib.util.find_spec("vllm")
print(spec.submodule_search_locations[0] if spec else "")
names = set(metadata.packages_distributions().get("vllm", ()))
print(" ".join(f"{n}={metadata.version(n)}" for n in sorted(names)))
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


def look(command: ServeCommand) -> Offered:
    """Never raises for what is not found there."""
    environ = command.full()
    python = interpreter(command.words, environ)
    if python is None:
        return Offered()
    # Neither the probe nor the working directory, which may have a folder named vllm, is anybody's business here.
    env = {k: v for k, v in environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run([python, "-c", _WHERE], env=env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=_WAIT_S, cwd="/")  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return Offered()
    said = done.stdout.splitlines()
    if done.returncode or not said or not said[0]:
        return Offered()
    return read(Path(said[0]), said[1] if len(said) > 1 else "")


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


def read(package: Path, version: str = "") -> Offered:
    """From vLLM's folder."""
    options = {m for f in ("engine/arg_utils.py", "config/compilation.py") for m in _OPTION.findall(_text(package / f))}
    if not options:
        return Offered(version=version)
    options |= set(_VARIABLE.findall(_text(package / "envs.py")))
    passes = _fields(_text(package / "config" / "compilation.py"), "PassConfig", "bool")
    ir = _fields(_text(package / "config" / "kernel.py"), "IrOpPriorityConfig", "list[str]")
    ops: set[str] = set()
    for file in sorted((package / "model_executor").rglob("*.py")):
        text = _text(file)
        if "CustomOp" in text:
            ops |= set(_CUSTOM.findall(text))
    return Offered(frozenset(options), tuple(passes), tuple(sorted(ops)), tuple(ir), version)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(source: str, of: str, kind: str) -> Iterator[str]:
    """The annotated fields of class ``of`` whose annotation is ``kind``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == of:
            for line in node.body:
                if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                    continue
                if ast.unparse(line.annotation) == kind:
                    yield line.target.id
