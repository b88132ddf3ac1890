"""What of the weights' life cannot be looked at is counted, and ends nothing."""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.capture.weights.life import NOT_ASKED, WeightLife
from vllm_accprobe.dump.weights.weight_life import LOAD


class Stubborn:
    """A kernel that hides its weight and wants more than its input."""

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        raise RuntimeError("where is the metadata?")


def test_a_kernel_that_does_not_give_its_weight_back_is_a_counted_skip() -> None:
    lines: list[dict[str, Any]] = []
    skips: list[tuple[str, str]] = []
    failed: list[BaseException] = []
    life = WeightLife(
        lines.append, lambda path, cls: True, lambda: 0, failed.append,
        skip=lambda path, reason: skips.append((path, reason)),
    )  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(8, 4).bfloat16())
    model[0].quant_method = Stubborn()
    life.begin(LOAD)
    life.look("0", model[0])
    model[0].weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))  # packed out of sight
    life.finish(model, given=True)
    assert skips == [("0", f"{NOT_ASKED} (RuntimeError)")]
    assert failed == []
    assert not life.off
    assert lines
