"""What is recorded of a draft's layer before it is packed."""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.capture.vllm.modes import record_draft_layer


class Lines:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, int]] = []

    def whole(self, tap: str, name: str, tensor: torch.Tensor) -> None:
        self.said.append((tap, name, tensor.numel()))


def test_a_drafts_head_waits_until_it_has_the_targets() -> None:
    lines: Any = Lines()
    record_draft_layer(lines, "layers.0.proj", torch.nn.Linear(3, 2))
    head = torch.nn.Linear(3, 2)
    head.org_vocab_size = 2  # type: ignore[assignment]
    record_draft_layer(lines, "lm_head", head)
    assert lines.said == [("draft:layers.0.proj", "weight", 6), ("draft:layers.0.proj", "bias", 2)]
