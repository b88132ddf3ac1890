"""What errcheck costs: CPU time per engine step with it on against the bare engine, in one run.

    python benchmarks/bench_errcheck.py [--rounds 10] [--json FILE]

One real vLLM engine (CPU, eager, single process; see bench_capture.py, whose engine it is) serves the same requests
again and again; in turn nothing is attached, errcheck as it runs on a CPU ("host": numbers are read at once), as it
runs on a device ("deferred": numbers go into a buffer; this shows what the host has to do there, not a device's time),
and the same with calls held to the step's end ("held": in host memory this costs fresh pages, which a device's caching
allocator has no such trouble with). Quoted are medians of ratios within a round, their quartiles, and what that is per
watched module.
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

from bench_capture import build  # noqa: E402

KINDS = ("bare", "host", "deferred", "held")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accprobe-bench-"))
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
    times: dict[str, dict[str, list[float]]] = {k: {"prefill": [], "decode": []} for k in KINDS}
    taps = 0
    for number in range(rounds + 1):
        for kind in KINDS:
            probe = attach(engine, kind, root / f"{kind}-{number}") if kind != "bare" else None
            for first in range(2):
                engine.steps(f"{number}-{kind}-{first}", 3)
            prefill, decode = engine.steps(f"{number}-{kind}")
            if probe is not None:
                taps = len(probe.taps.taps)
                detach(engine, probe)
            if number:  # the first round warms up
                times[kind]["prefill"].append(prefill)
                times[kind]["decode"].append(decode)
    return {"times_s": times, "taps": taps}


def attach(engine: Any, kind: str, place: Path) -> Any:
    from vllm_accprobe.capture.nan_watch import observer
    from vllm_accprobe.capture.vllm.runner import RunnerAdapter
    from vllm_accprobe.capture.vllm.vllm_compat import parallel_of
    from vllm_accprobe.config import ProbeConfig

    config = ProbeConfig.from_kwargs(enabled=False, dir=str(place), errcheck="overflow,nan")
    runner = engine.runner
    adapter = RunnerAdapter(engine.worker, runner, parallel_of(runner.vllm_config))
    probe = observer.ErrcheckObserver(config, adapter)
    adapter.add(probe)
    original = observer.Watch
    if kind != "host":
        observer.Watch = lambda *args, **kwargs: original(*args, **kwargs, deferred=True)  # type: ignore
    try:
        probe.loaded()
    finally:
        observer.Watch = original  # type: ignore[misc]
    if kind == "deferred":
        observer.hold_bytes = lambda device: 0
    elif kind == "held":
        observer.hold_bytes = lambda device: 1 << 28
    return probe


def detach(engine: Any, probe: Any) -> None:
    """Also what the probe has wrapped, so that the bare engine is bare again."""
    assert probe.first is None, probe.first
    assert probe._seen_steps > 0
    probe.close("benchmark")
    for owner in (engine.worker, engine.runner):
        for name, value in list(vars(owner).items()):
            if hasattr(value, "__accprobe__"):
                delattr(owner, name)


def report(result: dict[str, Any]) -> list[str]:
    times, taps = result["times_s"], result["taps"]
    heads = f"{'step':<10}{'kind':<10}{'ms':>8}{'/bare':>8}{'quartiles':>14}{'us per module':>15}"
    lines = [f"{heads}   (CPU, {taps} modules)"]
    for step in ("prefill", "decode"):
        bare = times["bare"][step]
        lines.append(f"{step:<10}{'bare':<10}{statistics.median(bare) * 1e3:>8.1f}")
        for kind in KINDS[1:]:
            mine = times[kind][step]
            ratios = sorted(a / b for a, b in zip(mine, bare, strict=True))
            each = statistics.median(a - b for a, b in zip(mine, bare, strict=True)) / taps * 1e6
            spread = f"{ratios[len(ratios) // 4]:.3f}-{ratios[-1 - len(ratios) // 4]:.3f}"
            ms = statistics.median(mine) * 1e3
            lines.append(f"{step:<10}{kind:<10}{ms:>8.1f}{statistics.median(ratios):>8.3f}{spread:>14}{each:>15.1f}")
    return lines


if __name__ == "__main__":
    main()
