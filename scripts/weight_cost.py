"""What looking at weights adds to loading a model: the probe against none, in turns (docs/state-checks.md).

The problem: loading runs under a dispatch mode, which sees every operator, and is followed by a pass over all weights;
both must cost little beside what vLLM does. The idea: one process builds engines of one model in turns, without the
probe and with it (VLLM_ACCPROBE_WEIGHTS off, prints, full), and measures vLLM's own load_model; the first turn warms
up. The model is llama with a few hundred parameters, or as told.

    python scripts/weight_cost.py --out DIR [--layers N] [--hidden N] [--pairs N]

Not here: whether anything is found (scripts/weight_cases.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / p) for p in ("scripts", "tests", "tests/support", "")]

from support import weight_lab as lab  # noqa: E402


def timed(model: Path, out: Path | None) -> float:
    """Seconds of processor time in load_model, which other processes disturb less than the clock."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    seconds: list[float] = []

    def make(original: Any) -> Any:
        def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return original(worker, *args, **kwargs)
            finally:
                seconds.append(time.process_time() - begin)

        return load_model

    with lab.replaced(CPUWorker, "load_model", make):
        engine = lab.WeightEngine(model, out, kv_cache_memory_bytes=64 << 20)
        engine.close()
    return seconds[0]


def model(path: Path, layers: int, hidden: int) -> Path:
    """A llama of this size, random."""
    import json

    import torch
    from safetensors.torch import save_file
    from tiny_model import make

    if (path / "config.json").exists():
        return path
    make("llama", path)
    config = json.loads((path / "config.json").read_text())
    ffn, vocab = 2 * hidden, config["vocab_size"]
    config |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "head_dim": 32,
               "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    kv = hidden // 2
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        of = f"model.layers.{i}."
        shapes |= {f"{of}input_layernorm.weight": (hidden,), f"{of}post_attention_layernorm.weight": (hidden,)}
        shapes |= {
            f"{of}self_attn.{n}_proj.weight": (rows, hidden)
            for n, rows in zip("qkvo", (hidden, kv, kv, hidden), strict=True)
        }
        shapes |= {f"{of}mlp.{n}_proj.weight": (ffn, hidden) for n in ("gate", "up")}
        shapes[f"{of}mlp.down_proj.weight"] = (hidden, ffn)
    made = {n: torch.randn(s).mul(0.02).bfloat16() for n, s in shapes.items()}
    save_file(made, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm_accprobe.formats import open_dump

    path = model(args.out / f"llama-{args.layers}x{args.hidden}", args.layers, args.hidden)
    took: dict[str, list[float]] = {"none": [], "off": [], "prints": [], "full": []}
    seconds = nbytes = 0.0
    prints = 0
    for turn in range(args.pairs + 1):
        for name, found in took.items():
            out = args.out / "dump"
            shutil.rmtree(out, ignore_errors=True)
            os.environ["VLLM_ACCPROBE_WEIGHTS"] = "full" if name == "none" else name
            found.append(timed(path, None if name == "none" else out))
            if name == "full":
                lives = open_dump(out).lives
                prints, seconds, nbytes = len(lives.prints), lives.events[0].seconds, lives.events[0].nbytes
        print(turn, {name: round(found[-1], 3) for name, found in took.items()}, flush=True)
    middle = {name: statistics.median(found[1:]) for name, found in took.items()}
    print(f"{args.layers} layers of {args.hidden}: {prints} prints of {nbytes / 1e6:.0f} MB in {seconds:.3f} s")
    for name, value in middle.items():
        print(f"{name:12} {value:7.3f} s  x {value / middle['none']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
