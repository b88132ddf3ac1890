"""One table of all that has a goal: two checkouts of this repository in turn, three times, medians beside the goal.

The problem: a figure of another day, or of a machine that did something else, compares nothing. The idea: dumps are
made once; in each round each measurement is made with the one checkout and then with the other, in processes of their
own, and the table has the medians and the largest memory. What fails is a cell that says so; when the time is over, the
rounds that are complete count. Not here: what only minutes of an engine show (bench_graphs.py; `gate --localize`).

    python benchmarks/issue_table.py --before TREE --after TREE [--rounds 3] [--minutes 20] [--msprobe PROGRAM]
                                     [--dir DISK] [--only WORD ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_replay
import numpy as np
from bench_compare import peer, run, touch
from bench_identical import FEW, own
from big_dumps import write_dump, write_pair
from engine_rounds import compared

Figures = Iterator[tuple[str, str, float, float]]
"""(row, what was wanted, value, GB of memory or 0)."""
PAIRS = 4000


@dataclass
class Bench:
    """One checkout's measurements, on dumps in ``root``, which are made when they are first needed."""

    tree: Path
    root: Path
    msprobe: Path | None
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """As installed: compiled modules and kernels are kept."""
        home = self.root / f"home-{hashlib.sha256(str(self.tree).encode()).hexdigest()[:8]}"
        return {"PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(home / "pyc"),
                "XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home)}  # fmt: skip

    def dump(self, name: str, make: Callable[..., Any], *words: Any, **options: Any) -> Any:
        if name not in self.made:
            # Its memory goes with it; a fork would wait for OpenMP's threads, which it lacks.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as writer:
                self.made[name] = writer.submit(make, self.root / name, *words, **options).result()
            touch(self.root / name)
        return self.made[name]

    def accprobe(self, *words: Any, **env: str) -> tuple[float, float, float]:
        """(seconds, CPU seconds, GB). Not run from here: ``python -m`` takes a checkout that lies here."""
        command = [sys.executable, "-m", "vllm_accprobe", *map(str, words)]
        return run(command, self.env | env, self.root)

    def compare(self, *words: Any, **env: str) -> tuple[float, float, float]:
        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        return self.accprobe("compare", *words, "--out", out, **env)

    def script(self, name: str, *words: str) -> Any:
        """The JSON of one of the checkout's own benchmarks."""
        file, place = self.tree / "benchmarks" / name, self.root / "said.json"
        to_file = name in ("bench_capture.py",)
        command = [sys.executable, str(file), *words, "--json", *([str(place)] if to_file else [])]
        environ = {**os.environ, "PYTHONPATH": str(self.tree)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1][:100])
        return json.loads(place.read_text() if to_file else done.stdout)

    # --- measurements -----------------------------------------------------------------------------------------------

    def large(self) -> Figures:
        for name, equal, wanted in (("differ", False, "–"), ("equal", True, "–")):
            pair = self.dump(name, write_pair, 1_000_000_000, equal=equal)
            wall, cpu, gb = self.compare(*pair, "--no-replay")
            yield f"compare, 2 x 1 GB, {name}: GB/s", wanted, 2 / wall, gb
            yield f"compare, 2 x 1 GB, {name}: CPU s", wanted, cpu, gb
        if self.msprobe is not None:
            theirs, ours = peer(self.root / "peer", self.msprobe, 200_000_000, self.env)
            yield "compare against msprobe, its dumps: times", "40", theirs["wall_s"] / ours["wall_s"], ours["rss_gb"]

    def small(self) -> Figures:
        for kind, kb, options in (("equal hashes", 4, {}), ("statistics", 4, {"stats": True}), ("64 KB equal", 64, {})):
            name = kind.replace(" ", "-")
            many = self.dump(f"{name}-many", own, PAIRS, kb << 10, **options)
            few = self.dump(f"{name}-few", own, FEW, kb << 10, **options)
            wall, cpu, gb = self.compare(*many, "--no-replay")
            start = self.compare(*few, "--no-replay")[1]
            if kb == 64:
                yield f"{kind}: GB/s", "≥ 10", 2 * PAIRS * (kb << 10) / wall / 1e9, gb
            yield f"{kind}, 2 x {PAIRS} tensors: us of CPU a pair", "≤ 10", (cpu - start) / (PAIRS - FEW) * 1e6, gb

    def kernel(self) -> Figures:
        found = self.script("bench_kernel.py", "--elements", str(1 << 20), "--rounds", "3")
        for bits, wanted in (("float16", "≥ 0.25"), ("float32", "≥ 0.5")):
            ratios = [r["ratio"] for r in found if r["golden"].endswith(bits) and r["mine"] == r["golden"]]
            yield f"kernel against np.sum, {bits}, worst width", wanted, min(ratios), 0.0

    def replay(self) -> Figures:
        pair = [self.dump(way, bench_replay.captured, way, 10.0) for way in bench_replay.ATTENTION]
        wall, cpu, gb = self.compare(*pair)
        yield "compare with its replay, 2 x 10 MB: s", "≤ 3", wall, gb
        yield "compare with its replay, 2 x 10 MB: CPU s", "≤ 5", cpu, gb
        fresh = Path(tempfile.mkdtemp(dir=self.root))
        places = {"HOME": fresh, "XDG_CACHE_HOME": fresh / "cache", "PYTHONPYCACHEPREFIX": fresh / "pyc"}
        wall, _, gb = self.compare(*pair, **{name: str(place) for name, place in places.items()})
        yield "first compare after an install: s", "≤ 6", wall, gb

    def opcheck(self) -> Figures:
        dump, out = self.dump("decode", decode_dump, 1000), self.root / "opcheck"
        shutil.rmtree(out, ignore_errors=True)
        wall, _, gb = self.accprobe("opcheck", dump, "--out", out, "-j", "1", OMP_NUM_THREADS="1")
        with (out / "opcheck.csv").open() as lines:
            yield "opcheck -j 1, decode: outputs a second", "≥ 1000", (sum(1 for _ in lines) - 1) / wall, gb

    def records(self) -> Figures:
        _, cpu, gb = self.accprobe("inspect", self.dump("million", million))
        yield "inspect, 10^6 records: CPU s", "≤ 5", cpu, gb

    def page(self) -> Figures:
        found = self.script("bench_page.py", "--rounds", "1")
        yield "page of 20,000 pairs: opens, s", "0.66", found["s"]["opens"], 0.0
        yield "page of 20,000 pairs: MB", "1.34", found["mb"]["whole"], 0.0

    def capture(self) -> Figures:
        times = self.script("bench_capture.py", "--rounds", "2")["times_s"]
        goals = {"stats": ("≤ 1.15", "≤ 1.10"), "tensor": ("≤ 1.45", "≤ 1.25")}
        for kind, wanted in goals.items():
            for step, goal in zip(("decode", "prefill"), wanted, strict=True):
                yield f"{step} with {kind} against bare", goal, compared(times, step, kind)[1], 0.0


def decode_dump(place: Path, calls: int) -> Path:
    from decode_dump import written

    return written(place, calls, 512)


def million(place: Path) -> Path:
    """8 ranks with statistics of 125,760 tensors each."""
    source = np.random.default_rng(0).integers(0, 1 << 14, 1 << 20, np.uint16)
    for rank in range(8):
        write_dump(place, source, 125_760 * 400, 2, 512, 40, rank, 8, stats=True)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--msprobe", type=Path)
    parser.add_argument("--dir", type=Path)
    names = ("large", "small", "kernel", "replay", "opcheck", "records", "page", "capture")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: {"before": [], "after": []})
    memory: dict[str, float] = defaultdict(float)
    failed: dict[str, str] = {}
    end = time.monotonic() + 60 * options.minutes
    longest: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory(prefix="accprobe-table-", dir=options.dir and options.dir.resolve()) as name:
        made: dict[str, Any] = {}
        trees = {side: Bench(getattr(options, side).resolve(), Path(name), options.msprobe, made)
                 for side in ("before", "after")}  # fmt: skip
        try:
            for bench in trees.values():
                Path(bench.env["HOME"]).mkdir(exist_ok=True)
                if "small" in options.only:  # kernels are compiled, modules too
                    bench.compare(*bench.dump("64-KB-equal-few", own, FEW, 64 << 10), "--no-replay")
            for number in range(options.rounds):
                for which in options.only:
                    for side, bench in trees.items():
                        start = time.monotonic()
                        if start + longest[which] > end:
                            continue
                        try:
                            for row, wanted, value, gb in getattr(bench, which)():
                                values[row, wanted][side].append(value)
                                memory[row] = max(memory[row], gb)
                        except (Exception, SystemExit) as error:
                            failed[f"{which}, {side}"] = " ".join(str(error).split())[:160]
                        longest[which] = max(longest[which], time.monotonic() - start)
                        print(f"round {number + 1}, {which}, {side}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        except KeyboardInterrupt:
            failed["all"] = "interrupted: the table has what was measured until then"
    print("\n".join(table(values, memory)))
    print(f"\n{options.rounds} rounds, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    for which, why in failed.items():
        print(f"failed: {which}: {why}")


def table(values: dict[tuple[str, str], dict[str, list[float]]], memory: dict[str, float]) -> Iterator[str]:
    yield "| what | before | after | wanted | GB | runs |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (row, wanted), sides in values.items():
        cells = [f"{statistics.median(v):.3g}" if (v := sides[side]) else "–" for side in ("before", "after")]
        gb = f"{memory[row]:.2f}" if memory[row] else "–"
        yield f"| {row} | {' | '.join(cells)} | {wanted} | {gb} | {len(sides['before'])}, {len(sides['after'])} |"


if __name__ == "__main__":
    main()
