"""The captures that the end-to-end tests share: each is made once per session, when it is first asked for."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from preloaded_vllm import FORKED
from support import kernels
from support.engine import TP2_ENV, V2_ENV, Ask, EngineHost, Run
from support.prompts import prompt, prompts
from tiny_model import make

FIVE = [Ask(ids, 8) for ids in prompts(40, 23, 57, 31, 70)]
"""Five requests of 221 prompt tokens in all, eight tokens each."""
VISION = [
    Ask([*prompt(12, 1), 4, 6, 5, *prompt(9, 2)], 6, image=(112, 112, 5)),
    Ask(prompt(20, 3), 6),
    Ask([*prompt(5, 4), 4, 6, 5, *prompt(9, 2)], 6, image=(84, 140, 6)),
]
"""Two pictures of 16 and 15 merged patches (64 and 60 patches), and one request without."""


TWO_LAYERS = "qwen2/2"
"""What compiled engines serve: each layer takes seconds to compile."""


class Engines:
    """Makes captures and remembers them by name. Hosts are started when first needed.

    forced: the kernels that they compute with, see kernels.py. forks: where preloaded_vllm.py's commands are, of a
    process with vLLM's usual runner and of one with its V2 runner; those with forced kernels start from nothing."""

    def __init__(self, root: Path, forced: str = kernels.NATIVE, forks: Callable[[str], Path] | None = None) -> None:
        self.root = root
        self.forced = forced
        self.forks = forks
        self._hosts: dict[str, EngineHost] = {}
        self._runs: dict[str, Run] = {}

    def model(self, name: str) -> Path:
        """One of tiny_model.py's, ``name/N`` with N layers."""
        whole, _, layers = name.partition("/")
        more = {"num_hidden_layers": int(layers)} if layers else {}
        return make(whole, self.root / "models" / name.replace("/", "-"), **more)

    def host(self, kind: str = "v1") -> EngineHost:
        """``v1``; ``v2``: the V2 model runner; ``tp2``: two ranks, or stages, one core each; ``bare``: no probe;
        ``inductor``, ``dynamo``: engines that compile, or only trace, each with a cache of its own. In the process of
        ``inductor`` the probe begins with the first engine that is given it: see `uncaptured`."""
        if kind not in self._hosts:
            cache = {"VLLM_CACHE_ROOT": str(self.root / f"cache-{kind}")}
            forked = TP2_ENV | {"ACCPROBE_TEST_FORK": "1", "ACCPROBE_TEST_PP": "1", "OMP_NUM_THREADS": "1"}
            kinds: dict[str, Mapping[str, str]] = {
                "v1": {}, "bare": {}, "v2": V2_ENV, "tp2": forked,
                "inductor": cache, "dynamo": cache | {"VLLM_CPU_CI_ENV": "1"},
            }  # fmt: skip
            log = self.root / f"{kind}.log"
            self._hosts[kind] = self.new_host(log, kinds[kind], probe=kind not in ("bare", "inductor"), v2=kind == "v2")
        return self._hosts[kind]

    def new_host(self, log: Path, env: Mapping[str, str], *, probe: bool = True, v2: bool = False) -> EngineHost:
        """One that nobody shares, to be closed by whoever asked for it. v2: ``env`` has V2_ENV."""
        python = self.forks("v2" if v2 else "v1") / FORKED if self.forks else Path(sys.executable)
        return EngineHost(log, env, probe=probe, forced=self.forced, python=python)

    def run(
        self,
        name: str,
        model: str = "qwen2",
        asks: Sequence[Ask] = FIVE,
        *,
        host: str = "v1",
        **how: Any,
    ) -> Run:
        """The capture called ``name``: made now with these arguments, or the one made before."""
        if name not in self._runs:
            out = self.root / "dumps" / name
            self._runs[name] = self.host(host).capture(self.model(model), asks, out=out, **how)
        return self._runs[name]

    def serial(self, model: str = "qwen2", asks: Sequence[Ask] = FIVE) -> Run:
        """The golden of most pairs: the requests sent one at a time, unchunked."""
        return self.run(f"{model.replace('/', '-')}-serial", model, asks, how="serial")

    def uncaptured(self) -> Run:
        """A compiled engine without the probe. It is the first of its process, which has not loaded the probe then; the
        first pays for what inductor prepares once a process, half a minute."""
        return self.run("compiled-bare", TWO_LAYERS, host="inductor", enforce_eager=False)

    def compiled(self, name: str, **env: str) -> Run:
        """The capture of a compiled engine, all five requests at once; further keywords are of its environment."""
        self.uncaptured()
        on = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_GRAPHS": "1"}
        return self.run(name, TWO_LAYERS, host="inductor", env=on | env, enforce_eager=False)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


def explain(result: Any) -> str:
    """A Comparison in a few lines: what a failing test should show."""
    lines = [f"verdict {result.verdict}", f"first {result.first_divergence}", f"coverage {result.coverage}"]
    lines += [f"origin {o}" for o in result.origins[:5]]
    failed = [p for p in result.pairs if p.status == "fail"]
    lines += [f"{p.golden} {p.phase} rel_l2 {p.worst_row_rel_l2} limit {p.limit} {p.message}" for p in failed[:10]]
    return "\n".join([*lines, *result.notes])
