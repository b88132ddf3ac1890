"""How fast the compare kernel is against np.sum over the same bytes, on one core, in the same run.

The problem: GB/s mean nothing on a shared machine. The idea: np.sum over float32 reads memory about as fast as numpy
can, so the kernel's speed is told as a share of it: rounds alternate, thread CPU time counts, the median is reported.
The row tables alone, and with the sums over elements that compare saves for other tools' standards.

    python benchmarks/bench_kernel.py [--elements 4194304] [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.kernels import definition, rows

KINDS = (("bfloat16", "bfloat16", 0.25), ("float16", "float16", 0.25), ("float32", "float32", 0.5),
         ("float32", "bfloat16", 0.5))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    report = []
    for width in (64, 512, 1024, 4096, 8192):
        g = rng.standard_normal((arguments.elements // width, width)).astype(np.float32)
        m = g * (1 + 2**-9 * rng.standard_normal(g.shape).astype(np.float32))
        for golden, mine, goal in KINDS:
            report.append({"width": width, "golden": golden, "mine": mine, "goal": goal,
                           **measure(store(g, golden), golden, store(m, mine), mine, arguments.rounds)})  # fmt: skip
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    print("width  golden    mine       kernel   np.sum   ratio  goal   elements too   numpy, float64")
    for r in report:
        print(f"{r['width']:5}  {r['golden']:8}  {r['mine']:8} {r['kernel']:6.2f}   {r['sum']:6.1f}   "
              f"{r['ratio']:.3f}  {r['goal']:.2f}   "
              f"{r['with_elements']:.3f}          {r['oracle']:.2f} GB/s")  # fmt: skip


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def measure(g: np.ndarray, gd: str, m: np.ndarray, md: str, rounds: int) -> dict[str, float]:
    """GB/s of both inputs, CPU time. ratio: median over rounds."""
    at = np.arange(len(g))
    nbytes = g.nbytes + m.nbytes
    ones, sums = np.ones(nbytes // 4, np.float32), np.zeros(len(definition.ELEMENT_FIELDS))
    some = slice(0, max(len(g) // 8, 1))
    runs: list[Callable[[], object]] = [
        lambda: rows.rows(g, gd, at, m, md, at, widen),
        lambda: np.sum(ones),
        lambda: rows.rows(g, gd, at, m, md, at, widen, elements=sums),
    ]
    for run in runs:
        run()
    times = [[cpu(run) for run in runs] for _ in range(rounds)]
    slow = cpu(lambda: definition.row_table(widen(g[some], gd), widen(m[some], md)))
    return {
        "kernel": statistics.median(nbytes / t[0] / 1e9 for t in times),
        "sum": statistics.median(nbytes / t[1] / 1e9 for t in times),
        "ratio": statistics.median(t[1] / t[0] for t in times),
        "with_elements": statistics.median(t[1] / t[2] for t in times),
        "oracle": nbytes * (some.stop / len(g)) / slow / 1e9,
    }


def cpu(run: Callable[[], object]) -> float:
    begin = time.thread_time()
    run()
    return max(time.thread_time() - begin, 1e-9)


if __name__ == "__main__":
    main()
