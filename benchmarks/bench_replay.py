"""What the replay of a small pair costs that `accprobe compare` makes unasked.

    python benchmarks/bench_replay.py [--megabytes 10] [--rounds 5] [--pair GOLDEN MINE] [--before CHECKOUT]

Two captures of one decoder of transformers (bfloat16, made up, nothing is fetched; its two ways of attention round
differently), prompts and then decode steps, about so many megabytes each; with --pair two others. In turn within each
round, each a command of its own, from the shell's prompt to the last file written:

- now: `accprobe compare GOLDEN MINE`;
- comparison: the same with --no-replay;
- torch: `python -c "import torch"`, what no replay can do without;
- before, before-1: with --before, the default command of another checkout of this repository, as it comes and with
  OMP_NUM_THREADS=1.

Told are medians of seconds by the clock and of processor seconds of all its processes, and medians of ratios within a
round. Processor seconds are what a busy machine measures rightly.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPARE = "import sys; from vllm_accprobe.cli import main; sys.exit(main())"
ATTENTION = ("eager", "sdpa")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pair", type=Path, nargs=2)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accprobe-bench-"))
    try:
        pair = options.pair or [captured(root / way, way, options.megabytes) for way in ATTENTION]
        result = measure(root, [p.resolve() for p in pair], options.rounds, options.before)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in report(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def captured(root: Path, way: str, megabytes: float) -> Path:
    """A dump of about so many megabytes: a prompt of 24 tokens, 20 steps of decoding, and again."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_accprobe import Probe

    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attn_implementation=way,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), Probe(model, dir=str(root)):
        while size(root) < megabytes * 1e6:
            cache = None
            for n in (24, *(1,) * 20):
                ids = torch.randint(0, 1024, (2, n), generator=generator)
                cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
            time.sleep(0.5)  # the writer's blocks reach the disk
    return root


def size(dump: Path) -> int:
    return sum(f.stat().st_size for f in dump.rglob("seg-*"))


def measure(root: Path, pair: list[Path], rounds: int, before: Path | None) -> dict[str, Any]:
    golden, mine = map(str, pair)

    def compare(checkout: Path, *more: str, **env: str) -> tuple[list[str], dict[str, str]]:
        words = [sys.executable, "-c", COMPARE, "compare", golden, mine, "--out", str(root / "out"), *more]
        return words, {**os.environ, **installed, "PYTHONPATH": str(checkout.resolve()), **env}

    installed = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(root / "pycache")}
    kinds = {"now": compare(ROOT), "comparison": compare(ROOT, "--no-replay")}
    kinds["torch"] = [sys.executable, "-c", "import torch"], {**os.environ, **installed}
    if before is not None:
        kinds |= {"before": compare(before), "before-1": compare(before, OMP_NUM_THREADS="1")}
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    checked = 0
    for _ in range(rounds):
        for kind, (words, env) in kinds.items():
            times[kind].append(run(words, env, root))
            if kind == "now":
                checked = json.loads((root / "out" / "replay.json").read_text())["checked"]
    return {"times_s": times, "bytes": [size(p) for p in pair], "checked": checked, "load": os.getloadavg()}


def run(words: list[str], env: dict[str, str], cwd: Path) -> tuple[float, float]:
    """Seconds by the clock, and of all processors."""
    shutil.rmtree(cwd / "out", ignore_errors=True)
    used, start = children(), time.perf_counter()
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start, children() - used


def children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(result: dict[str, Any]) -> list[str]:
    times = result["times_s"]
    sizes = " and ".join(f"{n / 1e6:.1f}" for n in result["bytes"])
    lines = [f"{sizes} MB, {result['checked']:,} outputs of mine checked; load average {result['load'][0]:.1f}"]
    for kind, rows in times.items():
        clock, used = (statistics.median(r[i] for r in rows) for i in (0, 1))
        by = [statistics.median(r[i] / n[i] for r, n in zip(rows, times["now"], strict=True)) for i in (0, 1)]
        lines.append(f"{kind}: {clock:.1f} s, processor {used:.1f} s; times `now`: {by[0]:.2f}, processor {by[1]:.2f}")
    return lines


if __name__ == "__main__":
    main()
