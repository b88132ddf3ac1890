"""A server that `send` starts itself and ends again.

The problem: whoever compares two builds types the same three steps every time, and a server that is left behind holds
a card. The idea: `run/background.py` starts and ends the command, the port is ours, its output goes into the folder.
Not here: what is asked of it (passes.py).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vllm_accprobe.gate.sending import steps
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.run.background import Background
from vllm_accprobe.run.launcher import LaunchError
from vllm_accprobe.run.server_command import ServerCommandError, understood

FORCE = "VLLM_ACCPROBE_FORCE"
_LOOK_S = 0.25


@contextmanager
def served(command: str, environ: Mapping[str, str], out: Path, ready_s: float) -> Iterator[tuple[str, str]]:
    """(url, key) of the server that ``command`` starts, once it answers. out: an existing folder, where its output
    goes as engine-N.log; where accprobe is installed, its steps go into steps-N, and it can be forced. Raises
    SendError."""
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise SendError(f"--engine: {e}") from None
    if not words:
        raise SendError("--engine: write a command, for example --engine 'vllm serve MODEL'")
    number = next(i for i in range(10_000) if not (out / f"engine-{i}.log").exists())
    log = out / f"engine-{number}.log"
    if not environ.get(FORCE):
        environ = {**environ, FORCE: str((out / steps.folder_name(number)).absolute())}
    try:
        server = understood(words, environ)
        if not server.url:
            raise SendError(f"--engine: {words[0]} is no `vllm serve`: start it yourself, and give --url")
        with Background(server.words, environ, log=log) as running:
            _wait(running, server.url, server.key, time.monotonic() + ready_s)
            yield server.url, server.key
    except (ServerCommandError, LaunchError) as e:
        raise SendError(f"--engine: {e}") from None


def _wait(running: Background, url: str, key: str, until: float) -> None:
    sender = Sender(url, key, timeout=10.0)
    while time.monotonic() < until:
        if running.code is not None:
            raise SendError(
                f"--engine: the command ended with exit code {running.code} before it served; read {running.log}"
            )
        if sender.healthy():
            return
        time.sleep(_LOOK_S)
    raise SendError(f"--engine: nothing answers at {url} (--ready-timeout); read {running.log}")
