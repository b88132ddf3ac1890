"""The cases of the gate's laboratory: honest pairs of servers, and faults, some of which need a condition.

Not here: sending (gate_worker.py), running and judging (gate_lab.py).
"""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support.engine import TP2_ENV, V2_ENV


@dataclass(frozen=True)
class GateWay:
    """How an engine is built. host: processes are shared by engines of one host, which is its environment."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    host: str = "v1"


HOSTS: dict[str, dict[str, str]] = {
    "v1": {}, "v2": V2_ENV, "tp2": TP2_ENV | {"ACCPROBE_TEST_FORK": "1"}, "threads2": {"OMP_NUM_THREADS": "2"},
    "compiled": {},
}  # fmt: skip
BASE: dict[str, Any] = {
    "max_model_len": 704, "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
_TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
_HITS = {"enable_prefix_caching": True}
WAYS: dict[str, GateWay] = {
    "base": GateWay(), "chunk64": GateWay({"max_num_batched_tokens": 64}),
    "whole": GateWay({"max_num_batched_tokens": 2048}), "hits": GateWay(_HITS),
    "hits-chunk96": GateWay(_HITS | {"max_num_batched_tokens": 96}), "small-batches": GateWay({"max_num_seqs": 3}),
    "block64": GateWay({"block_size": 64}), "float32": GateWay({"dtype": "float32"}),
    "float16": GateWay({"dtype": "float16"}), "tp2": GateWay(_TP2, "tp2"),
    "tp2-chunk64": GateWay(_TP2 | {"max_num_batched_tokens": 64}, "tp2"), "v2": GateWay({}, "v2"),
    "threads2": GateWay({}, "threads2"), "compiled": GateWay({"enforce_eager": False}, "compiled"),
}  # fmt: skip


@dataclass(frozen=True)
class GateCase:
    """golden, mine: ways; prompts: the seed of what is sent. axis: the condition's, None where the fault has none."""

    model: str
    golden: str
    mine: str
    fault: Mapping[str, Any] | None = None
    axis: str | None = None
    name: str = ""
    prompts: int = 0

    @property
    def title(self) -> str:
        seeded = f", prompts {self.prompts}" if self.prompts else ""
        return self.name or f"{self.model}: {self.golden} → {self.mine}{seeded}"

    @property
    def half(self) -> str:
        return half(self.title)

    @property
    def floor(self) -> str:
        """golden's way in the dtype of `accprobe gate`'s rule (gate/sides.py)."""
        ours, theirs = (str(WAYS[way].engine.get("dtype", "bfloat16")) for way in (self.golden, self.mine))
        if ours != theirs:
            return theirs
        return {"bfloat16": "float16", "float16": "float32", "float32": "bfloat16"}[ours]


def half(title: str) -> str:
    """``tuned`` or ``held-out``, by the title alone."""
    return ("tuned", "held-out")[hashlib.sha256(title.encode()).digest()[0] % 2]


_CLEAN = [
    *(("qwen2", "base", way) for way in (
        "chunk64", "whole", "hits", "small-batches", "block64", "float32", "tp2", "v2", "threads2", "compiled",
    )),
    *(("llama", "base", way) for way in ("hits-chunk96", "float32", "tp2", "v2")),
    *(("qwen2-moe", "base", way) for way in ("chunk64", "float32", "tp2")),
    *(("qwen2", "float32", way) for way in ("base", "tp2-float32")),
    ("qwen2", "tp2", "hits"),
]  # fmt: skip
WAYS["tp2-float32"] = GateWay(_TP2 | {"dtype": "float32"}, "tp2")
CLEAN = [GateCase(*row) for row in _CLEAN]
_DOWN = "model.layers.{}.mlp.down_proj"


def _scale(module: str, factor: float, rows: str = "all") -> dict[str, Any]:
    return {"kind": "scale", "module": module, "factor": factor, "rows": rows}


FAULTS = [
    GateCase("qwen2", "base", "base", _scale(_DOWN.format(1), 1.05), name="one product 5 % too large"),
    GateCase("qwen2", "base", "chunk64", {"kind": "attn", "module": "model.layers.2.self_attn.attn", "factor": 1.12},
             name="softmax scale, 12 % off"),
    GateCase("qwen2", "base", "tp2", _scale("model.layers.0.self_attn.o_proj", 1.06), name="one product, two ranks"),
    GateCase("llama", "base", "base", {"kind": "coarse", "module": "model.layers.1.mlp.gate_up_proj", "factor": 5.0},
             name="five bits of mantissa"),
    GateCase("qwen2", "base", "base", _scale(_DOWN.format(2), 1.05, "decode"), "phase", "decode alone"),
    GateCase("qwen2", "base", "base", _scale("model.layers.2.mlp.gate_up_proj", 1.05, "position>=300"), "position",
             "from position 300 on"),
    GateCase("qwen2", "base", "base", _scale("model.layers.1.self_attn.o_proj", 1.06, "chunk>=2"), "chunk",
             "second chunks"),
    GateCase("qwen2", "base", "base", _scale(_DOWN.format(1), 1.05, "chunk>=2"), "chunk",
             "second chunks, twice as far"),
    GateCase("llama", "base", "hits", _scale("model.layers.1.self_attn.qkv_proj", 1.06, "hit"), "hit", "prefix hits"),
    GateCase("qwen2", "base", "base", _scale(_DOWN.format(2), 1.05, "batch>=9"), "batch", "batches over 8"),
    GateCase("llama", "base", "base", _scale(_DOWN.format(1), 1.05, "batch:1"), "batch", "batches of one"),
]  # fmt: skip
LENGTHS = (9, 17, 24, 33, 40, 52, 61, 75, 88, 97, 120, 150, 190, 230, 254, 270, 290, 330, 380, 430, 480, 540, 600, 660)
TOKENS = 12


def prompts(seed: int) -> list[dict[str, Any]]:
    """24 prompts of 9 to 660 tokens, in no order of length; every third of the longer ones begins as one before it."""
    draw = random.Random(seed)
    lengths = list(LENGTHS)
    draw.shuffle(lengths)
    shared = [draw.randrange(10, 500) for _ in range(200)]
    lines = []
    for i, n in enumerate(lengths):
        ids = [draw.randrange(10, 500) for _ in range(n)]
        if i % 2 and n > 40:
            keep = min(n - 8, 200)
            ids[:keep] = shared[:keep]
        lines.append({"id": f"p{i:02}", "token_ids": ids, "max_tokens": TOKENS})
    return lines
