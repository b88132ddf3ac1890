"""A `vllm serve` that always ends, with small defaults.

Used by the demo and by the tests that need a real server. Not here: how it is started and ended
(vllm_accprobe/gate/served_run.py), what is asked of it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_accprobe.gate.served_run import ServedRun, server_command

READY_TIMEOUT_S = 300
SMALL = (
    "--served-model-name=tiny",
    "--dtype=bfloat16",
    "--max-model-len=512",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=16M",
)
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}


class Server(ServedRun):
    """``with Server(model, log=...) as server: ... server.url``. Raises NotServed.

    env: added to this process's environment. args: after ``vllm serve MODEL``, over small defaults. vllm: the command.
    ready_s, stop_s: seconds it took to answer the first time, and to end.
    """

    def __init__(
        self, model: Path, *, log: Path, env: Mapping[str, str] | None = None, args: Sequence[str] = (),
        vllm: Path | None = None,
    ) -> None:  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        program = str(vllm or Path(sys.executable).parent / "vllm")
        environ = os.environ | ENV | dict(env or {})
        words = [program, "serve", str(model), "--host=127.0.0.1", *SMALL, *args]
        super().__init__("the server", server_command(words, environ), environ, log=log)
        self.model, self.url = model, self.command.url
        self.ready_s = self.stop_s = 0.0

    def __enter__(self) -> Server:
        begin = time.monotonic()
        super().__enter__()
        try:
            self.ready(begin + READY_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - begin
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int | None:
        """Ends it as ServedRun does. Returns its exit code."""
        begin = time.monotonic()
        super().__exit__()
        self.stop_s = time.monotonic() - begin
        return self.code


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
