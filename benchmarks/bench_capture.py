"""What the probe costs: CPU time per engine step with ``stats`` and with ``tensor`` against the bare engine, and the
bytes per second written against raw writing, all in one run.

    python benchmarks/bench_capture.py [--rounds 8] [--json FILE] [--dir DIR]

One real vLLM engine (engine_rounds.py) serves the same requests again and again; in turn nothing is attached, a
``stats`` probe, and a ``tensor`` probe. Two kinds of steps: a prefill chunk of 512 tokens, and decodes of 8 requests.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from engine_rounds import BARE, STEPS, Options, build, compared, in_turn, observed, run  # noqa: E402


def measure(root: Path, options: Options) -> dict[str, Any]:
    from vllm_accprobe.capture.vllm.capturing import CaptureObserver
    from vllm_accprobe.config import ProbeConfig

    engine = build(root)
    found: dict[str, Any] = {"written": [], "taps": 0}
    begun: dict[str, float] = {}

    def attach(kind: str, place: Path) -> Any:
        config = ProbeConfig.from_kwargs(dir=str(place), task=kind, parts="input,output", max_gb=50)
        probe = observed(engine, CaptureObserver, config)
        probe.loaded()
        found["taps"], begun["at"] = len(probe.taps.taps), time.perf_counter()
        return probe

    def detach(kind: str, probe: Any, number: int) -> None:
        probe.close("benchmark")
        wall, size = time.perf_counter() - begun["at"], probe.session.sink.writer.bytes_written
        if kind == "tensor" and number:
            found["written"].append({"bytes": size, "wall_s": wall} | raw(root))
        engine.bare_again()

    times = in_turn(engine, (BARE, "stats", "tensor"), options.rounds, root, attach, detach)
    return {"times_s": times} | found


def report(result: dict[str, Any]) -> list[str]:
    times = result["times_s"]
    heads = f"{'step':<10}{'bare ms':>10}{'stats ms':>10}{'tensor ms':>11}{'stats/bare':>12}{'quartiles':>14}"
    lines = [heads + f"{'tensor/bare':>13}{'quartiles':>14}   (CPU)"]
    for step in STEPS:
        bare, (stats, ratio, spread), (tensor, more, wide) = (
            statistics.median(times[BARE][step]) * 1e3, *(compared(times, step, k) for k in ("stats", "tensor"))
        )  # fmt: skip
        ms = f"{step:<10}{bare:>10.1f}{stats:>10.1f}{tensor:>11.1f}"
        lines.append(f"{ms}{ratio:>12.2f}{spread:>14}{more:>13.2f}{wide:>14}")
    for w in result["written"]:
        w["ratio"] = w["bytes"] / w["wall_s"] / w["raw_bytes_per_s"]
    median = statistics.median(w["bytes"] / w["wall_s"] for w in result["written"])
    lines.append(f"written while serving: {median / 1e9:.3f} GB/s of wall time, the model's own time included")
    return lines


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
    run(__doc__ or "", measure, report, rounds=8)
