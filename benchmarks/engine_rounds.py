"""One real vLLM engine for several benchmarks, and rounds in which they take turns on it.

The problem: what a probe, errcheck or a ledger costs is a ratio to the bare engine, and a shared machine drifts by more
than that between two runs. The idea: one engine, in each round once with each kind of observer; quoted are medians of
ratios within a round. CPU time is measured (all threads, so a writer's count), because wall clock says little here.
The first two runs of each kind are not counted: in them a probe looks for inputs that are changed in place, and makes
what it keeps for all later ones.
Not here: what is attached, and what is said of it (bench_capture.py, bench_errcheck.py, bench_states.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

PREFILL, DECODES, REQUESTS = 512, 16, 8
STEPS = ("prefill", "decode")
BARE = "bare"
Times = dict[str, dict[str, list[float]]]
"""kind → step → CPU seconds, one for each round."""
Options = argparse.Namespace


def run(doc: str, measure: Callable[[Path, Options], dict[str, Any]], report: Callable[[dict[str, Any]], list[str]],
        rounds: int, more: Callable[[argparse.ArgumentParser], None] = lambda parser: None) -> None:  # fmt: skip
    """A benchmark's command: ``measure`` gets a temporary folder and the options, ``report`` says its result."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="where the dumps go (default: a temporary directory)")
    more(parser)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accprobe-bench-", dir=options.dir))
    try:
        result = measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in report(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def in_turn(engine: Engine, kinds: Sequence[str], rounds: int, root: Path, attach: Callable[[str, Path], Any],
            detach: Callable[[str, Any, int], None]) -> Times:  # fmt: skip
    """One more round than asked for: the first one warms up. attach: (kind, folder) → what observes, for all kinds but
    BARE; detach: (kind, that, round)."""
    engine.steps("warm-up")
    times: Times = {kind: {step: [] for step in STEPS} for kind in kinds}
    for number in range(rounds + 1):
        for kind in kinds:
            place = root / f"{kind}-{number}"
            observer = attach(kind, place) if kind != BARE else None
            for first in range(2):
                engine.steps(f"{number}-{kind}-{first}", 3)
            spent = engine.steps(f"{number}-{kind}")
            if observer is not None:
                detach(kind, observer, number)
            shutil.rmtree(place, ignore_errors=True)
            if number:
                for step, seconds in zip(STEPS, spent, strict=True):
                    times[kind][step].append(seconds)
    return times


def compared(times: Times, step: str, kind: str) -> tuple[float, float, str]:
    """(median milliseconds of a step, median ratio to the bare one of the same round, quartiles of it)."""
    mine = times[kind][step]
    ratios = sorted(a / b for a, b in zip(mine, times[BARE][step], strict=True))
    spread = f"{ratios[len(ratios) // 4]:.3f}-{ratios[-1 - len(ratios) // 4]:.3f}"
    return statistics.median(mine) * 1e3, statistics.median(ratios), spread


def observed(engine: Engine, observer: Callable[[Any, Any], Any], config: Any) -> Any:
    """``observer(config, adapter)`` attached to the engine, its model as loaded."""
    from vllm_accprobe.capture.vllm.runner import RunnerAdapter
    from vllm_accprobe.capture.vllm.vllm_compat import parallel_of

    adapter = RunnerAdapter(engine.worker, engine.runner, parallel_of(engine.runner.vllm_config))
    one = observer(config, adapter)
    adapter.add(one)
    return one


class Engine:
    """One in-process engine, driven step by step so that prefill and decode steps are timed apart."""

    def __init__(self, llm: Any, prefill: int = PREFILL):
        self.llm, self.prefill = llm, prefill
        self.core = llm.llm_engine
        worker = self.core.model_executor.driver_worker.worker
        self.worker, self.runner = worker, worker.model_runner

    def bare_again(self) -> None:
        """Takes off what an adapter has wrapped."""
        for owner in (self.worker, self.runner):
            for name, value in list(vars(owner).items()):
                if hasattr(value, "__accprobe__"):
                    delattr(owner, name)

    def steps(self, name: str, tokens: int = DECODES) -> tuple[float, float]:
        """CPU seconds of a prefill step (``prefill`` tokens) and, on average, of a decode step (8 requests)."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        each = self.prefill // REQUESTS
        for request in range(REQUESTS):
            ids = [(7 * request + 3 * i + 11) % 500 + 10 for i in range(each)]
            self.core.add_request(f"{name}-{request}", {"prompt_token_ids": ids}, sampling)
        spent: list[float] = []
        while self.core.has_unfinished_requests():
            before = time.process_time()
            self.core.step()
            spent.append(time.process_time() - before)
        return spent[0], statistics.fmean(spent[1:])


def build(root: Path) -> Engine:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # One compute thread: a second one would spin while the first runs Python, and the spinning counts as CPU time.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        del os.environ[name]
    from tiny_model import make
    from vllm import LLM

    model = make("bench-h1024", root / "model")
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=256 << 20,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    return Engine(llm)
