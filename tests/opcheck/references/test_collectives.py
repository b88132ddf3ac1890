"""What ranks exchange, by hand."""

from __future__ import annotations

import torch

from vllm_accprobe.opcheck.references import collectives


def test_collectives_by_hand() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    assert collectives.all_reduce(parts).value.tolist() == [11.0, 22.0]
    assert collectives.all_gather(parts).value.tolist() == [1.0, 2.0, 10.0, 20.0]
    assert collectives.reduce_scatter(parts, 1).value.tolist() == [22.0]
