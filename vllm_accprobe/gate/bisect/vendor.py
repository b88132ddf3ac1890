"""A vendor's own switches, from a file: variables, options and words that no table of ours knows.

The problem: each card's plugin has kernels that a variable switches off (``XMLIR_...``, ``VLLM_ASCEND_ENABLE_...``),
and these are the first suspects. The idea: a toml or json file names each switch and its plain value; what the
command has differs from it or there is nothing to vary.

    [[switch]]
    name = "fused norm"                       # as it is printed
    environment = "VLLM_VENDOR_FUSED_NORM"    # or: option = "--vendor-kernels", or: words = ["--vendor-plain"]
    plain = "0"                               # of the variable or option; left away: unset, taken away

Not here: the settings of vLLM itself (axes.py).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.bisect.axes import ServerSetting
from vllm_accprobe.gate.bisect.edits import BisectError, Edit, ServeCommand

MAX_BYTES = 1 << 20
"""Chosen: a list of switches is a few KB."""
_FIELDS = {"name", "environment", "option", "words", "plain"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")


def read(path: Path, command: ServeCommand) -> list[ServerSetting]:
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
    given = [key for key in ("environment", "option", "words") if entry.get(key) is not None]
    if len(given) != 1:
        raise BisectError(f"--switches {where}: write one of environment, option and words")
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        plain = str(plain)
    if plain is not None and (not isinstance(plain, str) or "\0" in plain):
        raise BisectError(f"--switches {where}: plain is a text, or is left away")
    what = entry[given[0]]
    if given[0] == "words":
        return _words(name, what, plain, where, command)
    if given[0] == "environment":
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
    good = isinstance(what, list) and what and all(isinstance(w, str) and w and "\0" not in w for w in what)
    if not good or plain is not None:
        raise BisectError(f"--switches {where}: words is a list of texts that make the command plain, without plain")
    if all(word in command.words for word in what):
        return None
    return ServerSetting(name, "without " + " ".join(what), "with it", Edit(add=tuple(what)))
