"""Blocks around a recurrence, and caches that an opaque operator writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined


@pytest.mark.parametrize("cls", ["MambaMixer2", "ShortConv", "MiniMaxText01LinearAttention"])
def test_a_block_is_not_right_by_its_projection_alone(cls: str) -> None:
    y = torch.ones(5, 12)
    extra = {"children": [("out_proj", "output.0", SimpleNamespace(shape=y.shape))], "read": lambda r: y}
    found = TABLE.evaluate(Call("x", cls, outputs={"output.0": y}, extra=extra))
    assert not isinstance(found, Declined)
    assert "the recurrence in front of that" in found["output.0"].unseen


@pytest.mark.parametrize("op", ["vllm.unified_kv_cache_update.default", "vllm.unified_mla_kv_cache_update.default"])
def test_a_write_has_an_operator_inside_that_writes(op: str) -> None:
    inner = [("aten.index_put_.default", torch.ones(2))]
    call = Call("x", op, outputs={"output.0": torch.zeros(0)}, extra={"inner": inner})
    assert not isinstance(TABLE.evaluate(call), Declined)
