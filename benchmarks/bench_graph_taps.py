"""CPU microseconds of a call of the operators that stand in compiled graphs: off, copying, measuring; no vLLM.

A call is what a compiled graph makes of it, a torch operator with its dispatch. Each figure is the least of 7 rounds'
means, of the thread's CPU time, since the machine is shared. ``host``: what a capture with VLLM_ACCPROBE_TASK=stats
spends on hash and statistics of the same bytes alone.

    python benchmarks/bench_graph_taps.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from vllm_accprobe.capture.graphs.graph_ops import (
    choose,
    choose_stats,
    selection,
    stats_buffer,
    stats_selection,
    tap,
    tap_stats,
)
from vllm_accprobe.dump.journal_writer import digest
from vllm_accprobe.dump.stats import moments_at

SIZES = ((1, 512), (8, 4096), (64, 4096), (512, 4096))
MOST = 512
CPU = torch.device("cpu")


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Of one call."""
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(7):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time() - begin) / calls)
    return best * 1e6


def of_size(rows: int, width: int) -> dict[str, float]:
    """Of tensors [rows, width] in bfloat16, all of whose rows are wanted."""
    x = torch.randn(rows, width).bfloat16()
    buffer, select = torch.empty(MOST, width, dtype=x.dtype), selection(MOST, CPU)
    line, stats_select = stats_buffer(CPU), stats_selection(MOST, CPU)
    calls = max(20, min(2000, (1 << 22) // (rows * width)))
    parts = [(x.data_ptr(), x.nbytes)]
    found = {
        "rows": rows,
        "width": width,
        "tap off": microseconds(lambda: tap(x, buffer, select), calls),
        "stats off": microseconds(lambda: tap_stats(x, line, stats_select), calls),
        "host": microseconds(lambda: (digest(parts), moments_at(*parts[0], "bfloat16")), calls),
    }
    choose(select, range(rows))
    choose_stats(stats_select, 1, [(0, rows)])
    found["tap"] = microseconds(lambda: tap(x, buffer, select), calls)
    found["stats"] = microseconds(lambda: tap_stats(x, line, stats_select), calls)
    return found


def main() -> None:
    """Prints one line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [of_size(*size) for size in SIZES]
    if arguments.json:
        print(json.dumps(found))
        return
    names = list(found[0])
    print("  ".join(f"{name:>9}" for name in names))
    for line in found:
        print("  ".join(f"{line[name]:9.1f}" if isinstance(line[name], float) else f"{line[name]:9}" for name in names))


if __name__ == "__main__":
    main()
