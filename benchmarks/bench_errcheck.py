"""What errcheck costs: CPU time per engine step with it on against the bare engine, in one run.

    python benchmarks/bench_errcheck.py [--rounds 10] [--json FILE]

One real vLLM engine (engine_rounds.py) serves the same requests again and again; in turn nothing is attached, errcheck
as it runs on a CPU ("host": numbers are read at once), as it runs on a device ("deferred": numbers go into a buffer;
this shows what the host has to do there, not a device's time), and the same with calls held to the step's end ("held":
in host memory this costs fresh pages, which a device's caching allocator has no such trouble with). Quoted are medians
of ratios within a round, their quartiles, and what that is per watched module.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from engine_rounds import BARE, STEPS, Options, build, compared, in_turn, observed, run  # noqa: E402

KINDS = (BARE, "host", "deferred", "held")
HELD = {"deferred": 0, "held": 1 << 28}
"""Bytes of a step's calls that may be held, by kind."""


def measure(root: Path, options: Options) -> dict[str, Any]:
    from vllm_accprobe.capture.errcheck import observer
    from vllm_accprobe.config import ProbeConfig

    engine = build(root)
    found: dict[str, Any] = {"taps": 0}
    original = observer.Watch

    def attach(kind: str, place: Path) -> Any:
        config = ProbeConfig.from_kwargs(enabled=False, dir=str(place), errcheck="overflow,nan")
        probe = observed(engine, observer.ErrcheckObserver, config)
        if kind in HELD:
            observer.Watch = functools.partial(_deferred, original, HELD[kind])  # type: ignore
        try:
            probe.loaded()
        finally:
            observer.Watch = original  # type: ignore[misc]
        return probe

    def detach(kind: str, probe: Any, number: int) -> None:
        assert probe.watch.dead is None, probe.watch.dead
        assert probe.findings.steps > 0
        assert probe.findings.first is None, probe.findings.first
        found["taps"] = len(probe.taps.taps)
        probe.close("benchmark")
        engine.bare_again()

    return {"times_s": in_turn(engine, KINDS, options.rounds, root, attach, detach)} | found


def _deferred(original: Any, keep_bytes: int, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **(kwargs | {"keep_bytes": keep_bytes}), deferred=True)


def report(result: dict[str, Any]) -> list[str]:
    times, taps = result["times_s"], result["taps"]
    heads = f"{'step':<10}{'kind':<10}{'ms':>8}{'/bare':>8}{'quartiles':>14}{'us per module':>15}"
    lines = [f"{heads}   (CPU, {taps} modules)"]
    for step in STEPS:
        bare = times[BARE][step]
        lines.append(f"{step:<10}{BARE:<10}{statistics.median(bare) * 1e3:>8.1f}")
        for kind in KINDS[1:]:
            ms, ratio, spread = compared(times, step, kind)
            each = statistics.median(a - b for a, b in zip(times[kind][step], bare, strict=True)) / taps * 1e6
            lines.append(f"{step:<10}{kind:<10}{ms:>8.1f}{ratio:>8.3f}{spread:>14}{each:>15.1f}")
    return lines


if __name__ == "__main__":
    run(__doc__ or "", measure, report, rounds=10)
