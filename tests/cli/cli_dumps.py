"""A small dump for the commands' tests, through the real writer."""

from pathlib import Path
from typing import Any

import numpy as np
from dump.dumps import put_event

from vllm_accprobe.dump.writer import RankWriter, write_run_json

TAPS = (
    ("model.embed_tokens", "VocabParallelEmbedding"),
    ("model.layers.0.input_layernorm", "RMSNorm"),
    ("model.layers.0.post_attention_layernorm", "RMSNorm"),
    ("model.layers.0.mlp.down_proj", "RowParallelLinear"),
)


def bf16(array: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(array, "<f4").view("<u4") >> 16).astype("<u2")


def value(step: int, tap: int, role: int, rows: int) -> np.ndarray:
    """rows x 8 small integers, exact in bfloat16."""
    return np.arange(rows * 8, dtype="<f4").reshape(rows, 8) % 100 + step + 10 * tap + 0.5 * role


def make(root: Path, ranks: int = 1, *, close: bool = True, stats: bool = False) -> Path:
    """Two requests; step 0 prefills 3 and 2 tokens, steps 1 and 2 decode one each. In step 2 the last tap has a NaN."""
    write_run_json(root, {"model": "tiny"})
    for rank in range(ranks):
        w = RankWriter(root, rank, {"local_rank": rank % 2}, budget_bytes=1 << 30, block_bytes=1 << 16)
        for req, name, n in ((0, "chat-1", 3), (1, "chat-2", 2)):
            w.line({"event": "request", "req": req, "id": name, "prompt": f"{req}a" * 16, "prompt_len": n})
        for index, (tap, cls) in enumerate((*TAPS, ("model.rotary", "Rotary"))):
            w.line({"event": "module", "tap": tap, "class": cls, "index": index})

        def put(array: np.ndarray, dtype: str, w: RankWriter = w, **event: object) -> None:
            if stats:
                from vllm_accprobe.dump.stats import tensor_stats

                w.line({"dtype": dtype, "shape": list(array.shape), "stats": tensor_stats(array, dtype), **event})
            else:
                put_event(w, array, {"dtype": dtype, "shape": list(array.shape), **event})

        for tap, cls in TAPS[1:]:
            weight = np.linspace(0, 1, 8, dtype="<f4")
            put(weight, "float32", event="param", tap=tap, **{"class": cls}, role="param.weight")
        for step in range(3):
            w.line({"event": "step", "step": step, "batch": {"requests": 2, "tokens": 5 if step == 0 else 2}})
            spans = [(0, 0, 3), (1, 0, 2)] if step == 0 else [(0, 2 + step, 1), (1, 1 + step, 1)]
            rows, segments = 0, []
            for req, pos, n in spans:
                phase = "decode" if step else "prefill"
                segments.append({"req": req, "pos": pos, "n": n, "row": rows, "phase": phase})
                rows += n
            ids = list(range(100, 100 + rows))
            space = {"event": "rows", "step": step, "space": "tokens", "src_rows": rows}
            w.line({**space, "segments": segments, "ids": ids})
            for t, (tap, cls) in enumerate(TAPS):
                for r, role in enumerate(("input.x", "output.0")):
                    array = value(step, t, r, rows)
                    if (step, t, r) == (2, 3, 1):
                        array[1, 3], array[0, 0] = np.nan, np.inf
                    put(bf16(array), "bfloat16", event="tensor", step=step, tap=tap, **{"class": cls}, role=role,
                        seq=2 * t + r, rows="tokens", row_dim=0)  # fmt: skip
        w.line({"event": "skip", "tap": "model.rotary", "reason": "not a plain tensor", "count": 3})
        if close:
            w.close("done", {})
        else:
            assert w.flush()
    return root


def tensor(role: str, shape: list[int], low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"tensor": {"role": role, "dtype": "float32", "shape": shape, "stride": [1] * len(shape), "device": "cpu",
                       "min": low, "max": high, "nan": 0, "inf": 0, **more}}  # fmt: skip


def dump_of_operators(root: Path) -> Path:
    """Two calls of mm in two modules and shapes, one of them stored, and one of add_ in step 1 outside any module."""
    write_run_json(root, {"model": "tests"})
    writer = RankWriter(root, 0, {}, budget_bytes=1 << 20)
    values = np.arange(4, dtype=np.float32)
    event = {"event": "tensor", "step": 0, "tap": "a::aten.mm.default", "class": "aten.mm.default", "role": "output.0",
             "call": 0, "seq": 1, "dtype": "float32", "shape": [2, 2]}  # fmt: skip
    put_event(writer, values, event)
    for module, rows, high in (("a", 2, 3.0), ("b", 5, 9.0)):
        writer.line({
            "event": "op", "step": 0, "tap": f"{module}::aten.mm.default", "op": "aten.mm.default", "call": 0, "seq": 0,
            "module": module, "args": [tensor("input.0", [rows, 2], 0, 1), tensor("input.1", [2, 2], 0, 1)],
            "outputs": [tensor("output.0", [rows, 2], -1.5, high, nan=rows)], "mutates": [],
        })  # fmt: skip
    x = tensor("input.0", [7], 0, 1, after={"min": 2.0, "max": 4.0, "nan": 0, "inf": 1})
    writer.line({
        "event": "op", "step": 1, "tap": "::aten.add_.Tensor", "op": "aten.add_.Tensor", "call": 0, "seq": 0,
        "module": None, "args": [x, 2], "outputs": [], "mutates": ["input.0"],
    })  # fmt: skip
    writer.close("test", {"skipped": {}})
    return root
