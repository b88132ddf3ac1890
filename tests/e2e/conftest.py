"""Engines and captures that the end-to-end tests share: each capture is made once per session, when first asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
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


class Engines:
    """Makes captures and remembers them by name. Hosts are started when first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hosts: dict[str, EngineHost] = {}
        self._runs: dict[str, Run] = {}

    def model(self, name: str) -> Path:
        return make(name, self.root / "models" / name)

    def host(self, kind: str = "v1") -> EngineHost:
        """``v1``; ``v2``: the V2 model runner; ``tp2``: two ranks, one core each; ``bare``: no probe."""
        if kind not in self._hosts:
            env: Mapping[str, str] = {"v1": {}, "bare": {}, "v2": V2_ENV, "tp2": TP2_ENV}[kind]
            self._hosts[kind] = EngineHost(self.root / f"{kind}.log", env, probe=kind != "bare")
        return self._hosts[kind]

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
        return self.run(f"{model}-serial", model, asks, how="serial")

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def compared() -> Callable[[Run, Run], Any]:
    from vllm_accprobe.compare.engine import compare

    done: dict[tuple[Path | None, Path | None], Any] = {}

    def once(golden: Run, mine: Run) -> Any:
        key = (golden.dump, mine.dump)
        assert golden.dump is not None
        assert mine.dump is not None
        if key not in done:
            done[key] = compare(golden.dump, mine.dump)
        return done[key]

    return once
