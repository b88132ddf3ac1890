"""A mode of `vllm serve`: replicas, several front ends. One run, as support/engine.py makes those of engines.

The problem: replicas and several API servers are processes of one server, which no engine inside a process shows. The
idea: a real server with the arguments, each request sent on its own thread (several front ends take what comes), and,
where there are replicas, to a given one; the tokens come back as ids. The server's parts are forked from one process
that has imported vLLM (preloaded_vllm.py).
Not here: which modes there are (mode_table.py), what is asked of a run (modes.py).
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from preloaded_vllm import preloaded
from support.engine import ROOT, Ask, EngineError, Run
from vllm_server import ENV, Server

from vllm_accprobe.gate.sending.client import NotServed


class ServedRuns:
    """Servers one after another, of one process that has vLLM imported; it is made when it is first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._preloaded: Any = None
        self._bin: Path | None = None

    def capture(self, model: Path, asks: Sequence[Ask], *, out: Path, args: Sequence[str], replicas: int,
                fault: Mapping[str, Any] | None) -> Run:  # fmt: skip
        """One server's run: all requests at once, the i-th to replica i modulo ``replicas`` where there are any. Raises
        EngineError."""
        env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(out), "OMP_NUM_THREADS": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": _PLACES}  # fmt: skip
        if fault:
            env["ACCPROBE_FAULT"] = json.dumps(fault)
        log = self.root / f"_log-{out.parent.name}-{out.name}.txt"
        try:
            with Server(model, log=log, env=env, args=args, vllm=self._command()) as server:
                with ThreadPoolExecutor(len(asks)) as pool:
                    turns = [i % replicas if replicas else None for i in range(len(asks))]
                    tokens = list(pool.map(lambda one: _asked(server.url, *one), zip(asks, turns, strict=True)))
                ready = server.ready_s
        except (NotServed, OSError) as error:
            raise EngineError(str(error)) from None
        return Run(out if (out / "run.json").exists() else None, tokens, {"build_s": ready})

    def _command(self) -> Path:
        if self._bin is None:
            environ = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "ACCPROBE_FAULT"))}
            folder = self.root / "_vllm"
            self._preloaded = preloaded(folder, environ | ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _PLACES})
            self._bin = self._preloaded.__enter__()
        return self._bin / "vllm"

    def close(self) -> None:
        if self._preloaded is not None:
            self._preloaded.__exit__(None, None, None)


_PLACES = os.pathsep.join(str(ROOT / place) for place in ("lab/planted", "tests"))


def _asked(url: str, ask: Ask, replica: int | None) -> list[int]:
    body = {"model": "tiny", "prompt": list(ask.ids), "max_tokens": ask.max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if replica is not None:
        headers["X-data-parallel-rank"] = str(replica)
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return list(json.load(response)["choices"][0]["token_ids"])
