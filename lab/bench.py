"""Makes the laboratory's runs: engines with and without a planted fault, each run once.

The problem: hundreds of faults in a dozen models against seven kinds of golden are a thousand engines if each pair
makes its own. The idea: a `Bench` owns the engines of one or more models, one after another in shared child processes,
and remembers each run under its way; a case needs one run of its own, the faulty one. What lies on the disk and is
finished is not made again, so that an interrupted laboratory goes on where it was.
Not here: comparing (judging.py), what is planted (cases.py), ways and clean pairs (client.py).
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny_model
import train_tiny
from support.engine import TP2_ENV, V2_ENV, Ask, EngineHost

from lab.cases import HANDWRITTEN, TUNED, Case, half
from lab.ways import TRANSFORMERS, WAYS

ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
HOSTS = {"v1": ONE_THREAD, "v2": V2_ENV | ONE_THREAD, "tp2": TP2_ENV}
KERNELS = "kernels"
"""Name of the file beside the runs that says what they were computed with."""
RENEWED = 40
"""Engines after which a host is begun anew. Measured: each engine leaves threads and memory behind, and after 200 a run
takes twice the processor time of the first; beginning takes two runs' time."""


class Bench:
    """Makes the runs of one or more models under ``root``. Runs that lie there already are used again.

    models: where the weights are, which may be shared by several roots; ``root/_models`` if None."""

    def __init__(self, root: Path, log: Path | None = None, models: Path | None = None) -> None:
        self.root = root
        self.models = models or root / "_models"
        self.log = log or root / "_log"
        self._hosts: dict[str, EngineHost] = {}
        self._made: dict[str, int] = {}

    def model(self, name: str) -> Path:
        kind = train_tiny if name in train_tiny.CONFIGS else tiny_model
        return kind.make(name, self.models / name)

    def clean_run(self, model: str, way: str) -> Path:
        return self._run(self.root / "_runs" / f"{model}-{way}", model, way, None)

    def pair(self, case: Case) -> tuple[Path, Path, float]:
        """(golden, mine, seconds that mine took)."""
        golden = self.clean_run(case.model, case.golden)
        (self.root / case.name).mkdir(parents=True, exist_ok=True)
        link(self.root / case.name / "golden", golden)
        return golden, *self.faulty_run(case)

    def faulty_run(self, case: Case) -> tuple[Path, float]:
        """(mine, seconds that it took)."""
        folder = self.root / case.name
        folder.mkdir(parents=True, exist_ok=True)
        planted, mine = folder / "fault.json", folder / "mine"
        text = json.dumps([case.model, case.mine, case.faults])
        if not planted.exists() or planted.read_text() != text:
            shutil.rmtree(mine, ignore_errors=True)
        began = time.monotonic()
        self._run(mine, case.model, case.mine, case.faults)
        planted.write_text(text)
        return mine, time.monotonic() - began

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def _run(self, out: Path, model: str, name: str, faults: list[dict[str, Any]] | None) -> Path:
        done = out.with_name(f"{out.name}.done")
        if done.exists() and out.exists():
            return out
        shutil.rmtree(out, ignore_errors=True)
        way = WAYS[name]
        if way.host == TRANSFORMERS:
            capture_transformers(self.model(model), way.requests(model), out)
        else:
            self._host(way.host).capture(
                self.model(model), way.requests(model), out=out, fault=faults, how=way.how, **way.engine_of(model)
            )
        done.touch()
        return out

    def _host(self, kind: str) -> EngineHost:
        self._made[kind] = self._made.get(kind, 0) + 1
        if self._made[kind] % RENEWED == 0 and kind in self._hosts:
            self._hosts.pop(kind).close()
        if kind not in self._hosts:
            self._hosts[kind] = self._new_host(kind, self.log.with_name(f"{self.log.name}-{kind}.txt"))
        return self._hosts[kind]

    def _new_host(self, kind: str, log: Path) -> EngineHost:
        return EngineHost(log, HOSTS[kind])


def link(at: Path, to: Path) -> None:
    if at.is_symlink():
        at.unlink()
    at.symlink_to(Path("..") / to.parent.name / to.name)


def kernels_of(root: Path) -> str:
    """What the runs under ``root`` were made with, as a file there says; else the folder's name."""
    said = root / KERNELS
    return said.read_text().strip() if said.exists() else root.name


def in_turn(cases: Sequence[Case]) -> list[Case]:
    """The tuned half before the other, in each the groups by turns, so that what is there early is of use; cases
    written by hand last."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.group, half(case.name, case.group)), []).append(case)
    places = {
        case.name: (group == HANDWRITTEN, part != TUNED, i / len(own))
        for (group, part), own in groups.items()
        for i, case in enumerate(own)
    }
    return sorted(cases, key=lambda case: places[case.name])


def capture(
    bench: Bench,
    cases: Sequence[Case],
    clean: Sequence[tuple[str, str, str]],
    said: Callable[[str], None],
) -> list[str]:
    """Makes the runs of all clean pairs and of all cases, and judges nothing; returns the names of what failed.

    Goldens come first, then cases as they are given. ``said`` gets a line for each run that was made."""
    runs = dict.fromkeys([(model, way) for model, *ways in clean for way in ways])
    runs |= dict.fromkeys([(case.model, golden) for case in cases for golden in case.goldens])
    failed = []

    def made(name: str, make: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            make()
        except RuntimeError as e:
            failed.append(name)
            said(f"{name}: {e}")
        else:
            said(f"{name} {time.monotonic() - began:.1f} s")

    for model, way in sorted(runs, key=lambda run: WAYS[run[1]].host):  # one after another in each host
        made(f"{model}-{way}", lambda model=model, way=way: bench.clean_run(model, way))
    for case in cases:
        made(case.name, lambda case=case: bench.pair(case))
    return failed


def capture_transformers(model: Path, asks: Sequence[Ask], out: Path) -> None:
    """Writes to ``out`` a dump of the transformers library, of the same checkpoint and requests, in float32: often the
    golden that people have, with other modules and names. Greedy, one request at a time.

    Raises RuntimeError for a request with a picture."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_accprobe import Probe

    if any(ask.image for ask in asks):
        raise RuntimeError("transformers goldens of requests with pictures are not made here")
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.generation_config.eos_token_id = None  # as the engine's ignore_eos
    with Probe(net, dir=str(out)), torch.no_grad():
        for ask in asks:
            net.generate(torch.tensor([list(ask.ids)]), max_new_tokens=ask.max_tokens, do_sample=False)
