"""Makes the large laboratory's runs, each once, under one folder.

    DIR/models/NAME                 checkpoints
    DIR/runs/MODEL-KERNELS-WAY      goldens and clean runs
    DIR/faults/NAME                 runs with a fault, of a pair's name

A run is finished when ``NAME.done`` stands beside it, with what it was made of; one of anything else is made again. Not
here: the pairs (large_cases.py), the engines' process (tests/support/engine.py).
"""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from support import kernels
from support.engine import EngineHost

from lab import large_models
from lab.large_cases import WAYS, Run

NEEDS_GB = 6.0
"""Room that a run may need: three times what a capture of float32 takes."""
RENEWED = 20
"""Engines after which a host is begun anew, see bench.RENEWED; here each leaves more behind."""
_ENGINE = {"kv_cache_memory_bytes": 1 << 26}
_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Runs:
    """One host of engines for each set of kernels."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hosts: dict[str, EngineHost] = {}
        self._made = 0

    def at(self, run: Run) -> Path:
        return self.root / ("faults" if run.faults else "runs") / run.name

    def there(self, run: Run) -> bool:
        done = self._done(run)
        return done.exists() and done.read_text() == _text(run) and self.at(run).exists()

    def make(self, run: Run) -> bool:
        """Whether it was made now. Raises RuntimeError where an engine fails, OSError where there is no room."""
        if self.there(run):
            return False
        self.delete(run)
        self.root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.root).free < NEEDS_GB * 1e9:
            raise OSError(f"{self.root} has less than {NEEDS_GB:g} GB left: delete runs there, or use --delete")
        way = WAYS[run.way]
        model = large_models.make(run.model, self.root / "models" / run.model)
        out = self.at(run)
        out.parent.mkdir(parents=True, exist_ok=True)
        faults = [dict(fault) for fault in run.faults]
        engine = _ENGINE | way.engine
        self._host(run.kernels).capture(model, run.asks, out=out, fault=faults, how=way.how, env=way.env, **engine)
        self._done(run).write_text(_text(run))
        return True

    def delete(self, run: Run) -> None:
        self._done(run).unlink(missing_ok=True)
        shutil.rmtree(self.at(run), ignore_errors=True)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def _done(self, run: Run) -> Path:
        return self.at(run).with_name(f"{run.name}.done")

    def _host(self, name: str) -> EngineHost:
        """One at a time: two would take twice the memory."""
        self._made += 1
        if name not in self._hosts or self._made % RENEWED == 0:
            self.close()
            self._hosts[name] = EngineHost(self.root / f"log-{name}.txt", _ENV, forced=name)
        return self._hosts[name]


def possible(name: str) -> bool:
    """Whether this processor has these kernels."""
    return kernels.possible(name)


def _text(run: Run) -> str:
    """All that a run is made of, but for the kinds' code."""
    way = {k: v for k, v in asdict(WAYS[run.way]).items() if v or k != "env"}
    made_of = [large_models.MODELS[run.model].config, way, [asdict(ask) for ask in run.asks], _ENGINE]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return json.dumps(asdict(run) | {"made of": digest}, sort_keys=True)
