"""Servers that start in a few seconds: `vllm serve` in children of a process that has imported vLLM already.

The problem: the gate's laboratory starts dozens of servers, and most of a start is importing. The idea: this process
imports once, reads a json line {argv, env, log} for each server that is wanted, forks it, and answers with its pid.
The server is vLLM's own command in its own session; only its imports are inherited. Not here: what is asked of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    """Until stdin ends."""
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen2_moe
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ones are nobody's business
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _serve(wanted)
        print(pid, flush=True)


def _serve(wanted: dict) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(wanted["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(wanted["env"])
    sys.argv = ["vllm", *wanted["argv"]]
    from vllm.entrypoints.cli.main import main as command

    try:
        command()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
