"""What the probe costs: CPU time per engine step with ``stats`` and with ``tensor`` against the bare engine, and the
bytes per second written against raw writing, all in one run.

    python benchmarks/bench_capture.py [--rounds 8] [--json FILE]

One real vLLM engine (CPU, eager, single process) serves the same requests again and again; in turn nothing is
attached, a ``stats`` probe, and a ``tensor`` probe. Measured is the process's CPU time (all threads, so the writer's
count), because wall clock on a shared machine says little. Quoted are medians of ratios within a round, and their
quartiles. Two kinds of steps: a prefill chunk of 512 tokens, and decodes of 8 requests. The first two steps of each
kind are not counted: in them the probe also looks for inputs that are changed in place, and makes what it keeps for
all later ones.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

PREFILL, DECODES, REQUESTS = 512, 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="where the dumps go (default: a temporary directory)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accprobe-bench-", dir=options.dir))
    try:
        result = measure(root, options.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in report(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(root: Path, rounds: int) -> dict[str, Any]:
    engine = build(root)
    engine.steps("warm-up")
    kinds = ("bare", "stats", "tensor")
    times: dict[str, dict[str, list[float]]] = {k: {"prefill": [], "decode": []} for k in kinds}
    written: list[dict[str, float]] = []
    for number in range(rounds + 1):
        for kind in kinds:
            place = root / f"{kind}-{number}"
            probe = engine.attach(kind, place) if kind != "bare" else None
            for first in range(2):
                engine.steps(f"{number}-{kind}-{first}", 3)
            begun, before = time.perf_counter(), probe.session.sink.writer.bytes_written if probe is not None else 0
            prefill, decode = engine.steps(f"{number}-{kind}")
            if probe is not None:
                probe.close("benchmark")
                wall = time.perf_counter() - begun
                if kind == "tensor" and number:
                    size = probe.session.sink.writer.bytes_written - before
                    written.append({"bytes": size, "wall_s": wall} | raw(root))
            shutil.rmtree(place, ignore_errors=True)
            if number:  # the first round warms up
                times[kind]["prefill"].append(prefill)
                times[kind]["decode"].append(decode)
    return {"times_s": times, "written": written, "taps": engine.taps}


def report(result: dict[str, Any]) -> list[str]:
    times = result["times_s"]
    heads = f"{'step':<10}{'bare ms':>10}{'stats ms':>10}{'tensor ms':>11}{'stats/bare':>12}{'quartiles':>12}"
    lines = [heads + f"{'tensor/bare':>13}{'quartiles':>12}   (CPU)"]
    for step in ("prefill", "decode"):
        bare, stats, tensor = (times[k][step] for k in ("bare", "stats", "tensor"))
        ratios = [sorted(a / b for a, b in zip(x, bare, strict=True)) for x in (stats, tensor)]
        ratio = [statistics.median(x) for x in ratios]
        spread = [f"{x[len(x) // 4]:.2f}-{x[-1 - len(x) // 4]:.2f}" for x in ratios]
        ms = [statistics.median(x) * 1e3 for x in (bare, stats, tensor)]
        lines.append(
            f"{step:<10}{ms[0]:>10.1f}{ms[1]:>10.1f}{ms[2]:>11.1f}"
            f"{ratio[0]:>12.2f}{spread[0]:>12}{ratio[1]:>13.2f}{spread[1]:>12}"
        )
    for w in result["written"]:
        w["ratio"] = w["bytes"] / w["wall_s"] / w["raw_bytes_per_s"]
    median = statistics.median(w["bytes"] / w["wall_s"] for w in result["written"])
    lines.append(f"written while serving: {median / 1e9:.3f} GB/s of wall time, the model's own time included")
    return lines


class Engine:
    """One in-process engine, driven step by step so that prefill and decode steps are timed apart."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.core = llm.llm_engine
        self.taps = 0
        worker = self.core.model_executor.driver_worker.worker
        self.worker, self.runner = worker, worker.model_runner

    def attach(self, kind: str, place: Path) -> Any:
        from vllm_accprobe.capture.vllm.capturing import CaptureObserver
        from vllm_accprobe.capture.vllm.runner import RunnerAdapter
        from vllm_accprobe.capture.vllm.vllm_compat import parallel_of
        from vllm_accprobe.config import ProbeConfig

        config = ProbeConfig.from_kwargs(dir=str(place), task=kind, parts="input,output", max_gb=50)
        adapter = RunnerAdapter(self.worker, self.runner, parallel_of(self.runner.vllm_config))
        probe = CaptureObserver(config, adapter)
        adapter.add(probe)
        probe.loaded()
        self.taps = len(probe.taps.taps)
        return probe

    def steps(self, name: str, tokens: int = DECODES) -> tuple[float, float]:
        """CPU seconds of a prefill step (512 tokens) and, on average, of a decode step (8 requests)."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        each = PREFILL // REQUESTS
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


def raw(root: Path, size: int = 256 << 20, block: int = 8 << 20) -> dict[str, float]:
    """Bytes per second of plain O_DIRECT writing of zero-copied blocks (buffered where the file system has none)."""
    import mmap

    path = root / "raw.bin"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        file = os.open(path, flags, 0o600)
    buffer = mmap.mmap(-1, block)
    buffer.write(os.urandom(block))
    begun = time.perf_counter()
    for _ in range(size // block):
        os.write(file, buffer)
    os.fsync(file)
    os.close(file)
    seconds = time.perf_counter() - begun
    path.unlink()
    return {"raw_bytes_per_s": size / seconds}


if __name__ == "__main__":
    main()
