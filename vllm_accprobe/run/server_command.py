"""What kind of command is to be run again and again: a server that must be asked and ended, or a program that ends.

The problem: `vllm serve` listens somewhere, wants a key perhaps, never ends; a script ends by itself. The idea: read
it off the command's words, and give a server that names no port a free one. Not here: running it (background.py),
asking it (doctor/graphs/asking.py, gate/sending).
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SERVER_MODULE = "vllm.entrypoints."
_DEFAULT_PORT = 8000
"""derived: vLLM's own."""
_EVERYWHERE = ("", "0.0.0.0", "::", "localhost")
_REFUSED = ("--uds", "--ssl-keyfile", "--ssl-certfile", "--headless")


class ServerCommandError(ValueError):
    """The command cannot be used; one line."""


@dataclass(frozen=True)
class ServerCommand:
    """words: the command as it is run. url: where it serves, "" for a program that ends by itself. key: for its
    clients; never printed."""

    words: tuple[str, ...]
    url: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"ServerCommand({self.words[:1]}, {self.url!r})"


def understood(words: Sequence[str], environ: Mapping[str, str], port: int | None = None) -> ServerCommand:
    """How ``words`` are run. port: given by the user: the command is a server, and listens there.

    Raises ServerCommandError for a server that cannot be asked, or whose port is taken.
    """
    if not words:
        raise ServerCommandError("no command is given; write `accprobe doctor --graphs -- vllm serve MODEL ...`")
    one_line = len(words) == 1 and " " in words[0]
    parts = _split(words[0]) if one_line else list(words)
    if port is None and not _serves(parts):
        return ServerCommand(tuple(words))
    for option in _REFUSED:
        if any(part == option or part.startswith(option + "=") for part in parts):
            raise ServerCommandError(f"{option}: a server is asked over plain HTTP; leave it away for this")
    said = option_of(parts, "--port")
    if port is not None and said is not None and said != str(port):
        raise ServerCommandError(f"--port={port}, and the command says --port {said}")
    host = option_of(parts, "--host") or ""
    host = "127.0.0.1" if host in _EVERYWHERE else host
    full = tuple(words)
    if said is None and port is None and not one_line:
        port = _free_port()
        full += (f"--port={port}",)
    elif port is None:
        port = int(said) if said is not None and said.isdecimal() else _DEFAULT_PORT
    if _taken(host, port):
        raise ServerCommandError(f"something listens on port {port} of {host} already: end it, or name another --port")
    key = option_of(parts, "--api-key") or environ.get("VLLM_API_KEY", "")
    return ServerCommand(full, f"http://{f'[{host}]' if ':' in host else host}:{port}", key)


def _serves(parts: Sequence[str]) -> bool:
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if Path(part).name == "vllm" and after == "serve":
            return True
        if part.startswith(_SERVER_MODULE) and part.endswith("api_server"):
            return True
    return False


def option_of(parts: Sequence[str], name: str) -> str | None:
    """The last value of the option ``name`` (``--port``) among a command's words."""
    found = None
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if part == name and after:
            found = after
        elif part.startswith(name + "="):
            found = part[len(name) + 1 :]
    return found


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a line for the shell may be more than words
        return line.split()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False
