"""How fast RankWriter is against writing the same bytes raw, past the page cache.

The problem: on a shared machine the disk's own speed changes by the second, so an absolute number means nothing.
The idea: in every round the same bytes are written once raw (O_DIRECT, 8 MiB blocks, one thread, nothing computed) and
once through RankWriter (copied, hashed, statistics taken, journalled), in alternating order, both synced; the result is
the median of the rounds' ratios, and CPU seconds per GB. Needs a disk with O_DIRECT under --dir.

    python benchmarks/bench_writer.py --dir /some/disk --gb 1 --rounds 7

Sizes are those of a decoder of hidden size 1024 in bfloat16 with 1 to 512 tokens: 2 KB to 1 MB, and one in forty large.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from dump.dumps import put_event

from vllm_accprobe.dump.stats import warm_up
from vllm_accprobe.dump.writer import RankWriter

BLOCK = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("."), help="where to write (default: here)")
    parser.add_argument("--gb", type=float, default=1.0, help="bytes per round and side (default: 1 GB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hash-at-capture", action="store_true", help="lines come with a hash, as the sink's do")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    rng = np.random.default_rng(0)
    source = (rng.standard_normal(16 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    sizes = tensor_sizes(rng, int(arguments.gb * 1e9))
    warm_up()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="accprobe-bench-", dir=arguments.dir) as root:
        for i in range(arguments.rounds):
            both = [lambda: raw(Path(root), source, sum(sizes)),
                    lambda: through(Path(root), source, sizes, arguments.hash_at_capture)]  # fmt: skip
            results = [f() for f in (both if i % 2 == 0 else both[::-1])]
            base, ours = results if i % 2 == 0 else results[::-1]
            rounds.append((base, ours))
    gb = sum(sizes) / 1e9
    report = {
        "tensors": len(sizes),
        "gb": gb,
        "raw_gb_per_s": statistics.median(gb / base[0] for base, _ in rounds),
        "writer_gb_per_s": statistics.median(gb / ours[0] for _, ours in rounds),
        "ratio": statistics.median(base[0] / ours[0] for base, ours in rounds),
        "ratio_min": min(base[0] / ours[0] for base, ours in rounds),
        "ratio_max": max(base[0] / ours[0] for base, ours in rounds),
        "raw_cpu_s_per_gb": statistics.median(base[1] / gb for base, _ in rounds),
        "writer_cpu_s_per_gb": statistics.median(ours[1] / gb for _, ours in rounds),
        "put_us": statistics.median(ours[2] / len(sizes) * 1e6 for _, ours in rounds),
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{report['tensors']:,} tensors, {gb:.2f} GB, {arguments.rounds} rounds")
    print(f"raw O_DIRECT  {report['raw_gb_per_s']:.2f} GB/s  {report['raw_cpu_s_per_gb']:.2f} CPU s/GB")
    print(f"RankWriter    {report['writer_gb_per_s']:.2f} GB/s  {report['writer_cpu_s_per_gb']:.2f} CPU s/GB")
    print(f"ratio         {report['ratio']:.2f}  ({report['ratio_min']:.2f} to {report['ratio_max']:.2f})")
    print(f"put           {report['put_us']:.1f} us CPU of the caller's thread per tensor")


def tensor_sizes(rng: np.random.Generator, total: int) -> list[int]:
    sizes: list[int] = []
    while total > 0:
        n = 8 << 20 if rng.random() < 0.025 else int(2048 * 2 ** rng.uniform(0, 9)) // 2 * 2
        sizes.append(min(n, total // 2 * 2 or 2))
        total -= sizes[-1]
    return sizes


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def raw(root: Path, source: np.ndarray, nbytes: int) -> tuple[float, float]:
    """(wall s, CPU s) of writing ``nbytes`` in aligned blocks and syncing."""
    memory = mmap.mmap(-1, BLOCK)
    memory[:] = source[: BLOCK // 2].tobytes()
    path = root / "raw"
    begin, begin_cpu = time.perf_counter(), cpu()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    for offset in range(0, nbytes, BLOCK):
        os.pwrite(fd, memory, offset)
    os.fdatasync(fd)
    os.close(fd)
    result = time.perf_counter() - begin, cpu() - begin_cpu
    path.unlink()
    return result


def through(root: Path, source: np.ndarray, sizes: list[int], hashed: bool) -> tuple[float, float, float]:
    """(wall s, CPU s, CPU s of the calling thread) of the same through RankWriter, from creation to closed."""
    room = source.nbytes - (8 << 20)
    begin, begin_cpu, begin_own = time.perf_counter(), cpu(), time.thread_time()
    writer = RankWriter(root / "dump", 0, {}, budget_bytes=1 << 50)
    for i, nbytes in enumerate(sizes):
        event = {
            "event": "tensor", "step": i // 320, "tap": f"model.layers.{i % 320 // 10}.mlp.down_proj",
            "class": "RowParallelLinear", "role": "output.0", "call": 0, "seq": i % 320, "dtype": "bfloat16",
            "shape": [nbytes // 2], "rows": "tokens", "row_dim": 0, "layout": {"kind": "replicated"},
        }  # fmt: skip
        if hashed:
            event["hash"] = "0123456789abcdef" * 2
        at = i * 4096 % room
        put_event(writer, source.view(np.uint8)[at : at + nbytes], event)
    own = time.thread_time() - begin_own
    writer.close("done", {})
    result = time.perf_counter() - begin, cpu() - begin_cpu, own
    if writer.stopped:
        raise SystemExit(f"the writer stopped: {writer.stopped}")
    shutil.rmtree(root / "dump")
    return result


if __name__ == "__main__":
    main()
