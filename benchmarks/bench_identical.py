"""How fast two equal dumps pass, by the size of their tensors: our own, whose hashes are compared, and plain files.

The problem: bytes that nobody reads take no time, so that GB/s of small tensors say only how small they are. The idea:
what a pair costs is told apart from what starting costs: the CPU time of the real command on a dump of many tensors,
less that on one of a few, over the number of pairs (microseconds), beside GB/s of both sides of the whole command. In
the same rounds, as a measure of the machine: what reading a line of journal with json.loads and nothing else costs,
and, for the files, what reading both sides into one buffer and np.array_equal on their bytes costs.

    python benchmarks/bench_identical.py [--dir DISK] [--rounds 3] [--kb 4 64 1024 65536] [--gb 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench_compare import run, touch
from big_dumps import write_pair

from vllm_accprobe.formats import open_dump

MOST = 4000
"""Tensors of a dump."""
FEW = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kb", type=int, nargs="+", default=[4, 64, 1024, 65536])
    parser.add_argument("--gb", type=float, default=1.0, help="of each dump at most")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    report = []
    with tempfile.TemporaryDirectory(prefix="accprobe-bench-", dir=asked.dir) as name:
        root = Path(name)
        environ = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(root / "pycache")}
        for kb in asked.kb:
            n = max(min(MOST, int(asked.gb * 1e9 / (kb << 10))), FEW + 1)
            for kind, make, alone in (("own", own, journals), ("files", files, read)):
                with ProcessPoolExecutor(1) as writer:  # its memory goes with it
                    many = writer.submit(make, root / "many", n, kb << 10).result()
                    few = writer.submit(make, root / "few", FEW, kb << 10).result()
                touch(root)
                report.append({"kind": kind, "kb": kb, **measured(root, many, few, environ, asked.rounds, alone)})
                shutil.rmtree(root / "many")
                shutil.rmtree(root / "few")
    if asked.json:
        print(json.dumps(report, indent=1))
        return
    for r in report:
        beside = "json.loads" if r["kind"] == "own" else "reading and np.array_equal"
        print(f"{r['kind']:6}{r['kb']:6} KB x {r['pairs']:5}: {r['us']:8.0f} us of CPU a pair, {r['to_alone']:.1f} "
              f"times {beside}; {r['gb_per_wall_s']:6.2f} GB/s, {r['gb_per_cpu_s']:6.2f} of CPU")  # fmt: skip


def measured(
    root: Path, many: tuple[Path, Path], few: tuple[Path, Path], environ: dict[str, str], rounds: int, alone: Any
) -> dict[str, Any]:
    command = [sys.executable, "-m", "vllm_accprobe", "compare", "--no-replay"]
    dumps = [open_dump(p) for p in many]
    pairs, nbytes = len(dumps[0].records), sum(r.payload.nbytes for d in dumps for r in d.records if r.payload)
    found = []
    for _ in range(rounds + 1):
        wall, cpu, _ = run([*command, *map(str, many), "--out", str(root / "out")], environ)
        start = run([*command, *map(str, few), "--out", str(root / "out")], environ)[1]
        begin = time.process_time()
        alone(*many)
        us, other = (cpu - start) / (pairs - FEW) * 1e6, (time.process_time() - begin) / pairs * 1e6
        found.append((us, us / other, nbytes / wall / 1e9, nbytes / cpu / 1e9))
    us, ratio, by_wall, by_cpu = (statistics.median(f[i] for f in found[1:]) for i in range(4))
    if json.loads((root / "out" / "compare.json").read_text())["verdict"] != "pass":
        raise SystemExit("equal dumps did not pass")
    return {"pairs": pairs, "us": us, "to_alone": ratio, "gb_per_wall_s": by_wall, "gb_per_cpu_s": by_cpu}


def own(root: Path, n: int, nbytes: int, *, stats: bool = False) -> tuple[Path, Path]:
    """Tensors of ``nbytes`` in the mean (big_dumps.TAPS: from 0.64 to 2.6 times that). stats: statistics alone, which
    differ by rounding."""
    rows = min(max(nbytes >> 11, 2), 512)
    hidden = int(nbytes / rows / 2 / 1.5625)
    return write_pair(root, n * nbytes, rows=rows, hidden=hidden, layers=32, equal=not stats, stats=stats)


def files(root: Path, n: int, nbytes: int) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    for side in ("golden", "mine"):
        (root / side).mkdir(parents=True)
    for i in range(n):
        value = rng.standard_normal((8, nbytes >> 5), np.float32)
        for side in ("golden", "mine"):
            np.save(root / side / f"layer{i}.npy", value)
    return root / "golden", root / "mine"


def journals(*sides: Path) -> None:
    for side in sides:
        for path in side.rglob("journal.jsonl"):
            with path.open("rb") as f:
                for line in f:
                    json.loads(line)


def read(golden: Path, mine: Path) -> None:
    buffers: list[np.ndarray] = []
    for path in golden.iterdir():
        size = path.stat().st_size
        if not buffers or len(buffers[0]) < size:
            buffers = [np.empty(size, np.uint8) for _ in range(2)]
        for side, buffer in zip((path, mine / path.name), buffers, strict=True):
            with side.open("rb", buffering=0) as f:
                f.readinto(buffer[:size].data)
        if not np.array_equal(buffers[0][:size], buffers[1][:size]):
            raise SystemExit(f"{path.name} differs")


if __name__ == "__main__":
    main()
