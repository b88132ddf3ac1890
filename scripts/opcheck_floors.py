"""Runs opcheck over clean dumps and prints how near honest kernels come to its limits: the measured constants' source.

The problem: a limit that follows from a model of rounding is as good as the model, and no honest call may be above it.
The idea: every clean dump that was kept (``scripts/faults.sh --keep`` leaves them under ``_runs``) is checked, and for
each class and measure the worst share of what is allowed is printed, then the variance and the scale of all calls of a
tap together, in units of the model; MODEL and BIAS (opcheck/floors/verdict.py, pooled.py) are to lie above these.
Exit codes: 0 where at most 1 output in 10,000 is above its limit, 1 where more are, 2 for bad usage.

    python scripts/opcheck_floors.py LAB/_runs/* [--list]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.dump.reader import DumpError, model_of
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.floors import output_rows, pooled
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run import check_calls, pair
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS

MOST = 1e-4
"""Of all outputs, above their limits (issue 11, point 4)."""
MEASURES = ("row", "gain", "column", "element")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path, help="directories of dumps")
    parser.add_argument("--list", action="store_true", help="name every output above its limit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dumps = [d for d in args.dumps if (d / "run.json").is_file()]
    if not dumps:
        print("error: none of these directories is a dump (no run.json)", file=sys.stderr)
        return 2
    found = Found()
    for dump in dumps:
        try:
            found.add(dump, args.list)
        except DumpError as error:
            print(f"not read: {dump}: {error}")
    found.say(len(dumps))
    return 0 if found.above + found.pools_above <= MOST * found.outputs else 1


class Found:
    def __init__(self) -> None:
        self.calls = self.outputs = self.above = self.pools = self.pools_above = 0
        self.of: Counter[str] = Counter()
        self.beyond: Counter[str] = Counter()
        self.worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.worst_pooled: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.figures: dict[str, list[tuple[float, float, float, float, str, str]]] = defaultdict(list)
        self.references = default_references()
        self._seen: list[Any] = []
        self._pools: list[Any] = []

    def add(self, path: Path, listed: bool) -> None:
        dump = open_dump(path)
        calls = Calls(dump, model_of(dump.run))
        judge, breach = output_rows.judge, pooled.Pool.breach

        def watched(*args: Any, **more: Any) -> Any:
            self._seen.append(judge(*args, **more))
            return self._seen[-1]

        def breached(pool: pooled.Pool, chance: float) -> Any:
            self._pools.append((pool, pool.measures(chance)))
            return breach(pool, chance)

        output_rows.judge, pooled.Pool.breach = watched, breached  # type: ignore[method-assign]
        try:
            for rank, tap, cls in calls.taps():
                self._tap(path, cls, calls, pair.Task(0, rank, tap), listed)
        finally:
            output_rows.judge, pooled.Pool.breach = judge, breach  # type: ignore[method-assign]

    def _tap(self, path: Path, cls: str, calls: Calls, task: pair.Task, listed: bool) -> None:
        self._seen.clear()
        self._pools.clear()
        budget = calls.budget()
        rows, _ = pair.check_task(calls, task, self.references, check_calls.Options(measured=False, budget=budget))
        self.calls += len({(r.step, r.call) for r in rows})
        judged = [r for r in rows if r.status in (PASS, FAIL)]
        for v in self._seen:
            for measure, ratio in v.ratios:
                self.worst[cls][measure] = max(ratio, self.worst[cls][measure])
        for pool, measures in self._pools:
            found = pool.pooled()
            if found is not None:
                ratio, freedom, scale, error = found
                u = pool.unit
                self.figures[cls].append((ratio, freedom, abs(scale) / u, error / u, path.name, task.tap))
            for m in measures:
                self.worst_pooled[cls][m.measure] = max(m.severity, self.worst_pooled[cls][m.measure])
        self.pools += len(self._pools)
        for r in judged:
            if r.measure in pooled.MEASURES:
                self.pools_above += 1
                if listed:
                    print(f"  above: {path} {r.tap} {r.role} {r.dtype} {r.rounding}: {r.message}")
                continue
            self.outputs += 1
            self.of[cls] += 1
            if r.status == FAIL:
                self.above += 1
                self.beyond[cls] += 1
                if listed:
                    print(f"  above: {path} {r.tap} {r.id} {r.role} {r.shape} {r.dtype} {r.rounding}: {r.message}")

    def say(self, dumps: int) -> None:
        print(f"{dumps} dumps, {self.calls:,} calls, {self.outputs:,} outputs, {self.above} above their limits")
        head = "  ".join(f"{m:>7}" for m in MEASURES)
        print(f"{'worst share of what is allowed':<36} {'outputs':>8} {'above':>5}  {head}")
        for cls in sorted(self.of):
            worst = "  ".join(f"{self.worst[cls].get(m, 0.0):7.2f}" for m in MEASURES)
            print(f"{cls:<36} {self.of[cls]:>8} {self.beyond[cls]:>5}  {worst}")
        print(f"\nall calls of a tap together: {self.pools:,} outputs, {self.pools_above} above their limits")
        print(f"{'worst share; variance, scale in units':<36} " + "  ".join(f"{m[-12:]:>12}" for m in pooled.MEASURES))
        for cls, figures in sorted(self.figures.items()):
            worst = "  ".join(f"{self.worst_pooled[cls].get(m, 0.0):12.2f}" for m in pooled.MEASURES)
            ratios = [f[0] for f in figures]
            scales = [f[2] for f in figures]
            print(f"{cls:<36} {worst}   variance {min(ratios):.3f} to {max(ratios):.3f}, scale to {max(scales):.3f}")


if __name__ == "__main__":
    sys.exit(main())
