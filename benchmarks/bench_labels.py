"""What a label costs while nothing captures, and while something does.

    python benchmarks/bench_labels.py [--calls 200000] [--rounds 9] [--json FILE]

Nanoseconds of CPU time per call, median and (quietest) of the rounds: an empty function with the same arguments, for
comparison; set_label and gen_id while nothing captures; one pair (gen_id and two labels) beside the matrix product of a
small layer; a label of [8, 1024] bfloat16 in a step of a plain script's dump.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.calls, options.rounds)
    for name, rounds in result.items():
        print(f"{name:40} {statistics.median(rounds):10.0f} ns ({min(rounds):.0f})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(calls: int, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per call, by round."""
    import torch

    from vllm_accprobe import gen_id, labels, set_label, set_task_id

    torch.set_num_threads(1)
    value = torch.randn(8, 1024).bfloat16()
    layer, x = torch.nn.Linear(1024, 1024).bfloat16(), torch.randn(8, 1024).bfloat16()

    def nothing(data_src: str, data_id: str, data_val: Any = None, tensor_path: str | None = None) -> None:
        return

    def pair() -> None:
        out = layer(x)
        data_id = gen_id("layer")
        set_label("pta", data_id, out)
        set_label("acl", data_id, out)

    result: dict[str, list[float]] = {}
    with torch.inference_mode():
        off: dict[str, tuple[Callable[[], Any], int]] = {
            "an empty function": (lambda: nothing("pta", "x", value), calls),
            "set_label, off": (lambda: set_label("pta", "x", value), calls),
            "gen_id(name), off": (lambda: gen_id("x"), calls),
            "gen_id(), off": (lambda: gen_id(), calls),
            "a layer of 1024 x 1024": (lambda: layer(x), calls // 200),
            "a layer and a pair of labels, off": (pair, calls // 200),
        }
        for _ in range(rounds):
            for name, (function, n) in off.items():
                result.setdefault(name, []).append(timed(function, n))
        root = Path(tempfile.mkdtemp(prefix="accprobe-labels-"))
        os.environ["VLLM_ACCPROBE_DIR"] = str(root / "d")
        try:
            set_task_id()
            set_label("pta", "x", value)
            for _ in range(rounds):
                result.setdefault("set_label, captured", []).append(timed(lambda: set_label("pta", "x", value), 2000))
            labels.close()
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return result


def timed(function: Callable[[], Any], calls: int) -> float:
    begin = time.process_time_ns()
    for _ in range(calls):
        function()
    return (time.process_time_ns() - begin) / calls


if __name__ == "__main__":
    main()
