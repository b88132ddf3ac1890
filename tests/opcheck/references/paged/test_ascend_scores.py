"""Ascend's fused attention against its definition in loops, and against wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_loops import attended
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined

G = torch.Generator().manual_seed(11)
HEADS, KV, WIDTH, SIZE = 4, 2, 8, 4
PAGES, LENGTHS, ROWS = [[3, 1, 0], [5, 2, 4]], [7, 10], [2, 3]
Q = torch.randn(5, HEADS, WIDTH, generator=G).bfloat16()
BLOCKS = [torch.randn(6, SIZE, KV * WIDTH, generator=G).bfloat16() for _ in range(2)]


def past(n: int, blocks: torch.Tensor) -> torch.Tensor:
    return torch.stack([blocks[PAGES[n][p // SIZE], p % SIZE] for p in range(LENGTHS[n])]).reshape(-1, KV, WIDTH)


def call(fault: str = "", paged: bool = True, causal: bool = True, **more: Any) -> Call:
    parts = []
    for n, begin in enumerate((0, 2)):
        of = 1 - n if fault == "another request's blocks" else n
        k, v = (past(of, b).double().numpy() for b in BLOCKS)
        q = Q[begin : begin + ROWS[n]].double().numpy()
        parts.append(attended(q, k, v, 0.3, causal=causal, fault=fault)[0])
    y = torch.from_numpy(np.concatenate(parts)).bfloat16()
    told: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": KV, "input_layout": "TND", "scale": 0.3,
                            "sparse_mode": 3 if causal else 0, "actual_seq_lengths": [2, 5]}  # fmt: skip
    if paged:
        told |= {"block_table": torch.tensor(PAGES), "actual_seq_lengths_kv": LENGTHS}
        sides = BLOCKS
    else:
        told["actual_seq_lengths_kv"] = [7, 17]
        sides = [torch.cat([past(n, b) for n in range(2)]) for b in BLOCKS]
    return Call("x", "npu.npu_fused_infer_attention_score.default", args=(Q, *sides), kwargs=told | more,
                outputs={"output.0": y})  # fmt: skip


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_or_side_by_side(paged: bool, causal: bool) -> None:
    right = call(paged=paged, causal=causal)
    assert verdict(right, "output.0", right.outputs["output.0"]).passed


@pytest.mark.parametrize("fault", ["another request's blocks", "queries at the front", "heads interleaved"])
def test_a_wrong_kernel_is_found(fault: str) -> None:
    wrong = call(fault)
    assert not verdict(call(), "output.0", wrong.outputs["output.0"]).passed


@pytest.mark.parametrize(
    "more", [{"input_layout": "BSH"}, {"sparse_mode": 4}, {"antiquant_scale": Q}, {"actual_seq_lengths": [2]}]
)
def test_what_has_no_reference_is_declined(more: dict[str, Any]) -> None:
    found = TABLE.evaluate(call(**more))
    assert isinstance(found, Declined)
    assert not found.failed, found.reason
