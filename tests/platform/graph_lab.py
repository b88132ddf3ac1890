"""Makes the runs of graph_cases.py, each once, and pairs them for the fault laboratory's judge.

The problem and the idea are the laboratory's (lab/bench.py): runs lie on the disk under their way, what is
finished is not made again, judging is apart. What differs is the engine: each faulty one has a compile cache of its
own, because nothing in its key tells of a fault, or none where inductor compiles: there one process makes all. Not
here: the judge (lab/judging.py), the cases (graph_cases.py).
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import captured_bench as bench
import tiny_model
import train_tiny
from graph_cases import ASKS, WAYS, GraphCase
from support.engine import Ask, EngineHost

from lab.bench import capture_transformers
from lab.judging import Pair
from lab.ways import TRANSFORMERS

_MODELS = "modelinfos"
"""vLLM's name for that."""
INDUCTOR = ("inductor", "inductor-taps")
"""Ways in which one process makes one engine after another."""
STEPS = 60
"""Chosen: of training; the loss falls from 6.3 to below 3, and outlier channels and sinks are there."""
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class GraphBench:
    """Runs under ``root``; those that lie there are used again. Close it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hosts: dict[str, EngineHost] = {}

    def clean_run(self, model: str, way: str) -> Path:
        """The run of ``model`` without a fault."""
        return self._run(self.root / "_runs" / f"{model}-{way}", model, way)

    def faulty_run(self, case: GraphCase) -> Path:
        """The run with ``case``'s fault; another fault of that name is made anew."""
        out = self.root / case.name / "mine"
        planted, text = out.with_name("fault.json"), json.dumps([case.faults, case.recorded, case.mine, case.fill])
        if not planted.exists() or planted.read_text() != text:
            shutil.rmtree(out, ignore_errors=True)
        self._run(out, case.model, case.mine, case)
        planted.write_text(text)
        return out

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def _run(self, out: Path, model: str, name: str, case: GraphCase | None = None) -> Path:
        done = out.with_name(f"{out.name}.done")
        if done.exists() and out.exists():
            return out
        shutil.rmtree(out, ignore_errors=True)
        way, own = WAYS[name], f"{out.parent.name}-{out.name}"
        out.parent.mkdir(parents=True, exist_ok=True)
        at = self.root / "_models" / model
        trained = model in train_tiny.CONFIGS
        weights = train_tiny.make(model, at, steps=STEPS) if trained else tiny_model.make(model, at)
        if name == TRANSFORMERS:
            capture_transformers(weights, _asks(model), out)
            done.touch()
            return out
        env = dict(way.env) | {"VLLM_CACHE_ROOT": str(self._cache(own))}
        if way.captured:
            faults = case.recorded if case is not None else ()
            fill = case.fill if case is not None else 1.0
            env |= bench.options(log=out.with_name(f"{out.name}.calls"), faults=faults, fill=fill)
        kind = name if name in INDUCTOR else own if name == "inductor-fused" else "captured" if way.captured else "own"
        fault = case.faults if case is not None else None
        self._host(kind, captured=way.captured).capture(
            weights, _asks(model), out=out, how=way.how, env=env, fault=fault, **way.engine
        )
        if kind == own:
            self._hosts.pop(kind).close()
        done.touch()
        return out

    def _cache(self, own: str) -> Path:
        """A compile cache of its own, but what vLLM finds out of each model, in half a minute, is shared."""
        folder, shared = self.root / "_cache" / own, self.root / "_cache" / _MODELS
        folder.mkdir(parents=True, exist_ok=True)
        shared.mkdir(exist_ok=True)
        if not (folder / _MODELS).exists():
            (folder / _MODELS).symlink_to(shared)
        return folder

    def _host(self, kind: str, *, captured: bool) -> EngineHost:
        if kind not in self._hosts:
            folder = self._cache(kind)
            env = bench.environment(folder) | ONE_THREAD | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
            if kind in INDUCTOR:  # no graph of another engine, faulty or not; kernels are found by their source
                env |= {"VLLM_DISABLE_COMPILE_CACHE": "1"}
            if not captured:
                env |= {"ACCPROBE_CAPTURED": ""}
            self._hosts[kind] = EngineHost(self.root / f"_log-{kind}.txt", env)
        return self._hosts[kind]


def _asks(model: str) -> list[Ask]:
    """Of a trained model what it was trained on: text."""
    if model not in train_tiny.CONFIGS:
        return ASKS
    return [replace(ask, ids=train_tiny.library_prompt(len(ask.ids), i)) for i, ask in enumerate(ASKS)]


def pairs_of(bench: GraphBench, cases: Iterable[GraphCase], clean: Iterable[tuple[str, str, str]]) -> list[Pair]:
    """All pairs of runs, whether they are there or not; clean ones last."""
    runs, found = bench.root / "_runs", []
    for case in cases:
        mine = bench.root / case.name / "mine"
        found += [
            Pair(case, case.model, golden, case.mine, (runs / f"{case.model}-{golden}", mine))
            for golden in case.goldens
        ]
    for model, golden, mine in clean:
        found.append(Pair(None, model, golden, mine, (runs / f"{model}-{golden}", runs / f"{model}-{mine}")))
    return found


def made(bench: GraphBench, pair: Pair) -> None:
    """Makes the runs of a pair that are not there. Raises EngineError."""
    bench.clean_run(pair.model, pair.golden)
    if isinstance(pair.case, GraphCase):
        bench.faulty_run(pair.case)
    else:
        bench.clean_run(pair.model, pair.mine)


def planted(run: Path) -> Mapping[str, Any]:
    """What the run's pieces did, by ``did``: how many replays there were. {} for an engine without graphs."""
    calls = bench.calls(run.with_name(f"{run.name}.calls"))
    return {did: sum(call.did == did for call in calls) for did in ("capture", "replay", "plain")} if calls else {}
