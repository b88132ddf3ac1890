"""The best logits of a sampler."""

from __future__ import annotations

import torch
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined


def test_the_best_logits_and_ties() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 2.0], [2.0, 2.0, 1.0, 0.0]])
    call = Call("s", "Sampler", outputs={"output.top_logits": logits.topk(2).values}, extra={"logits": logits})
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined)
    assert found["output.top_logits"].value.tolist() == [[5.0, 3.0], [2.0, 2.0]]
    assert found["output.top_ids"].value[0].tolist() == [1, 2]
    assert found["output.top_ids"].rows.tolist() == [True, False]
    assert "output.token" not in found
