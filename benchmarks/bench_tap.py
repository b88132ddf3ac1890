"""What one captured tensor costs: CPU microseconds per record with ``stats`` and with ``tensor``.

    python benchmarks/bench_tap.py [--rounds 20] [--steps 5] [--rows 8] [--width 1024] [--json FILE]

A toy model calls 300 identity modules, each with a tensor that has just been computed, [rows, width] in bfloat16; so a
step has 600 records, half of them new bytes (the inputs) and half seen before (the outputs), as in a real model. In
every round the model runs bare, with a wrapper around each forward that only copies the tensor (what no tap can do
without), and with the probe; bare is subtracted. Quoted are the median of the rounds and, since other processes on the
same cores make everything slower and nothing faster, the quietest round; of the model's thread and of the whole
process, which includes the writer's threads up to the moment when everything is on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = 300
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="where the dumps go (default: a temporary directory)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accprobe-tap-", dir=options.dir))
    try:
        result = measure(root, options.rounds, options.steps, options.rows, options.width)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in report(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(root: Path, rounds: int, steps: int, rows: int, width: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per record and round of ``copy``, ``stats`` and ``tensor``, above the bare model's."""
    import torch

    from vllm_accprobe import Probe

    torch.set_num_threads(1)
    model, ids = toy(rows, width), torch.arange(rows)[None]
    gc.freeze()  # as vLLM does when its engine is built
    result: dict[str, dict[str, list[float]]] = {k: {"own": [], "all": []} for k in ("copy", "stats", "tensor")}
    with torch.inference_mode():
        bare = [min(side) for side in zip(*(timed(lambda: model(ids), steps) for _ in range(10)), strict=True)]
        for number in range(rounds + 1):
            bare = [min(side) for side in zip(bare, timed(lambda: model(ids), steps), strict=True)]
            for kind in result:
                place = root / f"{kind}-{number}"
                if kind == "copy":
                    undo = copying(model)
                    spent = timed(lambda: model(ids), steps)
                    undo()
                else:
                    probe = Probe(model, dir=str(place), task=kind, max_gb=50)
                    session: Any = probe.session
                    session.flatten = None  # as in vLLM, where tensors already are rows of tokens
                    for _ in range(WARM_UP):
                        model(ids)
                    session.sink.writer.flush()
                    spent = timed(lambda: model(ids), steps, session.sink.writer.flush)
                    probe.close()
                    if session.sink.stopped:
                        raise SystemExit(f"the capture stopped: {session.sink.stopped}")
                    shutil.rmtree(place, ignore_errors=True)
                if number:  # the first round warms up
                    for side, a, b in zip(("own", "all"), spent, bare, strict=True):
                        result[kind][side].append((a - b) / (steps * 2 * MODULES) * 1e6)
    return result


def timed(run: Callable[[], Any], steps: int, finish: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    """CPU seconds of this thread and of the process, for ``steps`` runs and ``finish``."""
    own, both = time.thread_time(), time.process_time()
    for _ in range(steps):
        run()
    finish()
    return time.thread_time() - own, time.process_time() - both


def toy(rows: int, width: int) -> Any:
    """300 modules that give back what they get; tensor k goes into module k."""
    import torch

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Toy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Same() for _ in range(MODULES))
            self.values = [torch.randn(rows, width).to(torch.bfloat16) for _ in range(MODULES)]

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            for layer, value in zip(self.layers, self.values, strict=True):
                layer(value.neg())
            return input_ids

    return Toy()


def copying(model: Any) -> Callable[[], None]:
    """Wraps each forward in a function that copies its input, and nothing else; gives the way back."""
    target = ctypes.create_string_buffer(model.values[0].nbytes)
    memmove = ctypes.memmove

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            memmove(target, args[0].data_ptr(), args[0].nbytes)
            return original(*args, **kwargs)

        return forward

    for layer in model.layers:
        layer.__dict__["forward"] = wrap(layer.forward)

    def undo() -> None:
        for layer in model.layers:
            del layer.__dict__["forward"]

    return undo


def report(result: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = [
        f"{'us per record':<14}{'own thread':>12}{'quietest':>10}{'process':>10}{'quietest':>10}{'/ copy':>8}   (CPU)"
    ]
    for kind, sides in result.items():
        own, both = sides["own"], sides["all"]
        ratio = statistics.median(both) / statistics.median(result["copy"]["all"])
        lines.append(
            f"{kind:<14}{statistics.median(own):>12.2f}{min(own):>10.2f}{statistics.median(both):>10.2f}"
            f"{min(both):>10.2f}{ratio:>8.1f}"
        )
    return lines


if __name__ == "__main__":
    main()
