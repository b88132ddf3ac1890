"""Carries out one run: starts the command with its environment, asks it where it serves, ends it.

The problem: a server must be up before it is asked, and its dump is whole only after its end; a program must come to
its end by itself, and either may fail or hang. The idea: one function from a run to hashes of answers; everything that
goes wrong is one error with the end of the command's own log. Not here: which runs (runs.py), the process
(run/background.py), the requests (asking.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_accprobe.doctor.graphs.asking import AskingError, Client, Prompt
from vllm_accprobe.doctor.graphs.runs import TapRun
from vllm_accprobe.run.background import Background
from vllm_accprobe.run.server_command import ServerCommand


class RunFailed(Exception):
    """A run could not be carried out. The message is one line; ``tail`` the last lines of the command's log."""

    def __init__(self, message: str, tail: Sequence[str] = ()):
        super().__init__(message)
        self.tail = tuple(tail)


def carry_out(
    run: TapRun, command: ServerCommand, prompts: Sequence[Prompt], max_tokens: int, timeout: float
) -> list[str]:
    """Hashes of a server's answers, none for a program. timeout: seconds until the run is given up.

    Raises RunFailed, LaunchError, OSError.
    """
    until = time.monotonic() + timeout
    run.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Background(command.words, run.environ, log=run.log) as process:
        try:
            if not command.url:
                code = process.wait(timeout)
                if code is None:
                    why = (
                        f"the command still runs after {timeout:g} s (--timeout); is it a server? Then name its --port"
                    )
                    raise RunFailed(f"run `{run.name}`: {why}", process.tail())
                if code:
                    raise RunFailed(f"run `{run.name}`: the command ended with exit code {code}", process.tail())
                return []
            client = Client(command, lambda: process.code is None, until)
            if not client.ready():
                why = f"the server ended with exit code {process.code} before it answered"
                raise RunFailed(f"run `{run.name}`: {why}", process.tail())
            return client.ask(prompts, max_tokens)
        except AskingError as error:
            code = process.wait(1.0)  # what refuses a connection may be about to die
            ended = "" if code is None else f"; the server ended with exit code {code}"
            raise RunFailed(f"run `{run.name}`: {error}{ended}", process.tail()) from None
