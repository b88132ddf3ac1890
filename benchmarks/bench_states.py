"""What the ledger of states costs: CPU time per engine step with it on against the bare engine, in one run.

    python benchmarks/bench_states.py [--rounds 10] [--tiny] [--json FILE]

One real vLLM engine (CPU, eager, single process; see bench_capture.py, whose engine it is) serves the same eight
requests again and again; in turn nothing is attached, or a ledger in one of its modes. Quoted are medians of ratios
within a round and their quartiles. ``--tiny``: a model of 4 layers of hidden size 128 and prompts of 400 tokens in
blocks of 32, where a step is hardly anything but Python: the most that a ledger can cost. The aim is a decode step of
at most 1.3 of the bare one's time in mode `sample`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]

import bench_capture  # noqa: E402
from bench_capture import Engine, build  # noqa: E402

KINDS = ("bare", "events", "sample", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accprobe-bench-"))
    try:
        result = measure(tiny(root) if options.tiny else build(root), root, options.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in report(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def tiny(root: Path) -> Engine:
    """See ``--tiny``."""
    sys.path.insert(0, str(HERE.parent / "tests" / "faults"))
    import state_lab

    state_lab.prepare()
    from tiny_model import make
    from vllm import LLM

    bench_capture.PREFILL = 8 * 400
    more = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 4096, "disable_log_stats": True}
    return Engine(LLM(model=str(make("qwen2", root / "model")), **(state_lab.ENGINE | more)))


def measure(engine: Engine, root: Path, rounds: int) -> dict[str, Any]:
    engine.steps("warm-up")
    times: dict[str, dict[str, list[float]]] = {k: {"prefill": [], "decode": []} for k in KINDS}
    looked: dict[str, list[int]] = {}
    for number in range(rounds + 1):
        for kind in KINDS:
            ledger = attach(engine, kind, root / f"{kind}-{number}") if kind != "bare" else None
            for first in range(2):
                engine.steps(f"{number}-{kind}-{first}", 3)
            prefill, decode = engine.steps(f"{number}-{kind}")
            if ledger is not None:
                looked[kind] = [ledger.books.bytes.hashed, ledger.books.bytes.checked, ledger.books.held]
                detach(engine, ledger)
            if number:  # the first round warms up
                times[kind]["prefill"].append(prefill)
                times[kind]["decode"].append(decode)
    return {"times_s": times, "looked": looked}


def attach(engine: Any, kind: str, place: Path) -> Any:
    from vllm_accprobe.capture.states.observer import StatesObserver
    from vllm_accprobe.capture.vllm.runner import RunnerAdapter
    from vllm_accprobe.capture.vllm.vllm_compat import parallel_of
    from vllm_accprobe.config import ProbeConfig

    config = ProbeConfig.from_kwargs(enabled=False, dir=str(place), states=kind)
    runner = engine.runner
    adapter = RunnerAdapter(engine.worker, runner, parallel_of(runner.vllm_config))
    ledger = StatesObserver(config, adapter)
    adapter.add(ledger)
    ledger.loaded()
    return ledger


def detach(engine: Any, ledger: Any) -> None:
    """Also what the adapter has wrapped, so that the bare engine is bare again."""
    assert ledger.dead is None, ledger.dead
    assert ledger.books.steps > 0
    assert ledger._findings.count == 0
    ledger.close("benchmark")
    for owner in (engine.worker, engine.runner):
        for name, value in list(vars(owner).items()):
            if hasattr(value, "__accprobe__"):
                delattr(owner, name)


def report(result: dict[str, Any]) -> list[str]:
    times = result["times_s"]
    lines = [f"{'step':<10}{'mode':<10}{'ms':>8}{'/bare':>8}{'quartiles':>14}   (CPU)"]
    for step in ("prefill", "decode"):
        bare = times["bare"][step]
        lines.append(f"{step:<10}{'bare':<10}{statistics.median(bare) * 1e3:>8.2f}")
        for kind in KINDS[1:]:
            mine = times[kind][step]
            ratios = sorted(a / b for a, b in zip(mine, bare, strict=True))
            spread = f"{ratios[len(ratios) // 4]:.3f}-{ratios[-1 - len(ratios) // 4]:.3f}"
            ms = statistics.median(mine) * 1e3
            lines.append(f"{step:<10}{kind:<10}{ms:>8.2f}{statistics.median(ratios):>8.3f}{spread:>14}")
    for kind, (hashed, checked, held) in result["looked"].items():
        lines.append(f"{kind}: {hashed:,} blocks hashed, {checked:,} looked at, {held:,} numbers held, per round")
    return lines


if __name__ == "__main__":
    main()
