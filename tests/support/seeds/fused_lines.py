"""The fused operators of documents 001 and 002: each replayed from a dump of msprobe, right and wrong.

Document 002 lists them under "List of Supported Fused Operators"; document 001 by the files of their benchmark
functions. What a card would have given is made by a kernel in float32; a wrong one is the same with a fault.
"""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opcheck.samples.fused import CASES, drawn, ran
from support.backward_dump import BackwardDump
from support.seeds.line import Line

_ATTENTION = "npu_fusion_attention"
_LISTED = {
    "npu_apply_adam_w": 331, "npu_confusion_transpose": 333, "fast_gelu": 335, "npu_layer_norm_eval": 337,
    "npu_linear": 339, _ATTENTION: 341, "npu_rms_norm": 343, "npu_rotary_mul": 345, "npu_scaled_masked_softmax": 347,
    "npu_swiglu": 349, "npu_apply_adam": 351, "npu_group_norm_silu": 353, "npu_mish": 355,
    "npu_moe_gating_top_k_softmax": 357, "npu_sort_v2": 359,
}  # fmt: skip
"""Operator → the line of document 002."""


def _stored(value: Any) -> torch.Tensor:
    found = torch.from_numpy(np.ascontiguousarray(value))
    return found.float() if found.is_floating_point() else found


def _attention(scale: float) -> tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Arguments, keywords, what a kernel with this scale gives, and its gradients."""
    g = torch.Generator().manual_seed(4)
    q, k, v, up = (torch.randn(2, 4, 6, 8, generator=g) for _ in range(4))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = (leaves[0] @ leaves[1].transpose(-1, -2) * scale).masked_fill(causal, -math.inf)
    y = torch.softmax(scores, -1) @ leaves[2]
    largest = scores.amax(-1, keepdim=True)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    grads = torch.autograd.grad(y, leaves, up.double())
    kwargs = {"scale": 0.35, "sparse_mode": 2, "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1)}
    made = (y, largest.expand(-1, -1, -1, 8), total.expand(-1, -1, -1, 8))
    return (q, k, v, 4, "BNSD"), kwargs, tuple(t.detach().float() for t in made), (up, [t.float() for t in grads])


def prepare(home: Path) -> None:
    """``fused`` and ``fused-wrong``, dumps with a call of each operator and attention's gradient."""
    for folder, wrong in (("fused", False), ("fused-wrong", True)):
        dump = BackwardDump(home / folder)
        for name in _LISTED:
            if name == _ATTENTION:
                args, kwargs, outputs, (up, grads) = _attention(0.3 if wrong else 0.35)
                dump.forward(f"NPU.{name}.0.forward", args, kwargs, outputs)
                dump.backward(f"NPU.{name}.0.backward", (up,), (*grads, None, None))
                continue
            case = CASES[name]
            args, kwargs = drawn(name, 1, torch.float32)
            kernel = next(iter(case.wrong.values())) if wrong else case.right
            made = ran(kernel, args, kwargs)
            dump.forward(f"NPU.{name}.0.forward", args, kwargs, tuple(_stored(y) for y in made))
        dump.close()


def _all_fail(home: Path, said: str) -> None:
    with (home / "fused-wrong-out" / "opcheck.csv").open(newline="") as f:
        failed = {row["op"] for row in csv.DictReader(f) if row["status"] == "fail"}
    assert failed == {f"NPU.{name}" for name in _LISTED} | {f"backward.NPU.{_ATTENTION}"}


LINES_001 = [
    Line(146, "msprobe/pytorch/bench_functions/npu_fusion_attention.py",
         ("opcheck", "fused", "-j", "0", "--out", "fused-out"), prints=("PASS: 16 of 16 calls checked",)),
]  # fmt: skip
LINES_002 = [
    Line(_LISTED["npu_apply_adam_w"], "the fused operators, each by its name",
         ("opcheck", "fused", "--ops", ",".join(f"*NPU.{name}" for name in _LISTED), "-j", "0", "--out", "fused-out"),
         prints=("PASS: 16 of 16 calls checked",), also=tuple(_LISTED.values())),
    Line(_LISTED["npu_sort_v2"], "npu_sort_v2", ("opcheck", "fused-wrong", "-j", "0", "--out", "fused-wrong-out"),
         code=1, check=_all_fail),
]  # fmt: skip
