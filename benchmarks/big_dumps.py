"""Synthetic dumps for the benchmarks: what a decoder leaves behind, in bfloat16, of any size.

Each step is a prefill of one request; each layer has the taps that a capture of vLLM has, with inputs and outputs. Mine
differs from the golden by rounding noise, or not at all. Payloads come from a few megabytes of random numbers taken at
changing offsets, so that writing is quick and no two tensors are equal unless they should be. Of several ranks, each
holds its columns of every tensor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from dump.dumps import put_event

from vllm_accprobe.dump.journal_writer import TensorTemplate
from vllm_accprobe.dump.schema import hash_tokens
from vllm_accprobe.dump.stats import StatsCell, tensor_stats
from vllm_accprobe.dump.writer import RankWriter, write_run_json

TAPS = (
    ("input_layernorm", "RMSNorm", 1),
    ("self_attn.qkv_proj", "QKVParallelLinear", 1.5),
    ("self_attn.attn", "Attention", 1),
    ("self_attn.o_proj", "RowParallelLinear", 1),
    ("post_attention_layernorm", "RMSNorm", 1),
    ("mlp.gate_up_proj", "MergedColumnParallelLinear", 4),
    ("mlp.act_fn", "SiluAndMul", 2),
    ("mlp.down_proj", "RowParallelLinear", 1),
)


def write_pair(
    root: Path,
    nbytes: int,
    *,
    rows: int = 512,
    hidden: int = 1024,
    layers: int = 8,
    equal: bool = False,
    ranks: int = 1,
    stats: bool = False,
) -> tuple[Path, Path]:
    """Two dumps of about ``nbytes`` each in root/golden and root/mine. hidden: of all ranks together. stats: statistics
    alone are written, of as many tensors."""
    rng = np.random.default_rng(0)
    largest = int(rows * hidden * max(factor for _, _, factor in TAPS)) // ranks
    values = rng.standard_normal(max(16 << 20, largest + (1 << 20)), np.float32)
    noisy = values if equal else values * (1 + 2**-9 * rng.standard_normal(len(values), np.float32))
    for name, source in (("golden", values), ("mine", values if equal else noisy)):
        for rank in range(ranks):
            write_dump(root / name, _bfloat16(source), nbytes // ranks, rows, hidden, layers, rank, ranks, stats)
    return root / "golden", root / "mine"


def write_dump(
    path: Path, source: np.ndarray, nbytes: int, rows: int, hidden: int, layers: int, rank: int = 0, ranks: int = 1,
    stats: bool = False,
) -> int:  # fmt: skip
    """Writes a rank's tensors of ``source`` (bfloat16 bits) until there are ``nbytes``; returns how many tensors."""
    if not rank:
        path.mkdir(parents=True)
        write_run_json(path, {"model": "synthetic"})
    writer = RankWriter(path, rank, {}, budget_bytes=1 << 50)
    order = [f"model.layers.{i}.{tap}" for i in range(layers) for tap, _, _ in TAPS]
    for i, tap in enumerate(order):
        writer.line({"event": "module", "tap": tap, "class": TAPS[i % len(TAPS)][1], "index": i, "attrs": {}})
    written = tensors = step = 0
    while written < nbytes:
        ids = [(step * 7 + k) % 1000 for k in range(rows)]
        writer.line({"event": "step", "step": step, "batch": {"requests": 1, "tokens": rows, "padded": rows}})
        writer.line({"event": "request", "req": step, "id": f"r{step}", "internal_id": f"r{step}",
                     "prompt": hash_tokens(ids), "prompt_len": rows})  # fmt: skip
        segment = {"req": step, "pos": 0, "n": rows, "row": 0, "phase": "prefill"}
        writer.line({"event": "rows", "step": step, "space": "tokens", "src_rows": rows, "segments": [segment],
                     "ids": ids})  # fmt: skip
        for seq, tap in enumerate(order):
            _, cls, factor = TAPS[seq % len(TAPS)]
            width = int(hidden * factor) // ranks
            size = rows * width * 2
            at = ((tensors * ranks + rank) * 4096) % (len(source) * 2 - size)
            cut = {"kind": "shard", "group": "tp", "index": rank, "size": ranks, "dim": -1, "parts": [[width, 1]]}
            bits = source.view(np.uint8)[at : at + size]
            front = {"event": "tensor", "tap": tap, "class": cls, "role": "output.0", "rows": "tokens", "row_dim": 0,
                     **({"layout": cut} if ranks > 1 else {})}  # fmt: skip
            if stats:
                template = TensorTemplate(front, "bfloat16", (rows, width), 0)
                writer.line((template, step, 0, seq, StatsCell(tensor_stats(bits.view(np.uint16), "bfloat16"))))
            else:
                form = {"step": step, "call": 0, "seq": seq, "dtype": "bfloat16", "shape": [rows, width]}
                put_event(writer, bits, {**front, **form})
            written, tensors = written + size, tensors + 1
            if written >= nbytes:
                break
        step += 1
    writer.close("done", {"steps": step})
    if writer.stopped:
        raise SystemExit(f"the writer stopped: {writer.stopped}")
    return tensors


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)
