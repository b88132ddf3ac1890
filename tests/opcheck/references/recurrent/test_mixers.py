"""Opaque operators: the rows that what runs inside them made must lie in their buffers, in the batch's order."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_verdict import verdict
from reference_calls import TABLE

from vllm_accprobe.opcheck.reference import Call, Declined

G = torch.Generator().manual_seed(2)
PROMPT, MIXED = torch.randn(5, 12, generator=G).bfloat16(), torch.randn(3, 2, 4, generator=G).bfloat16()
CONVOLVED = torch.randn(7, 12, generator=G).bfloat16()
PADDING = torch.full((2, 12), 9.0).bfloat16()


def latent() -> Call:
    """Two decode rows of 3 heads by 4, then five rows of prompts, then padding that nobody made."""
    rows = [torch.stack([MIXED[h, r] for h in range(3)]).reshape(-1) for r in range(2)]
    out = torch.cat((torch.stack(rows), PROMPT, PADDING))
    inner: list[tuple[str, Any]] = [
        ("aten.copy_.default", torch.zeros(5, 3, 4)), ("aten.copy_.default", PROMPT),
        ("aten.bmm.out", torch.zeros(3, 2, 8)),
        ("_C.mla_decode_kvcache.default", torch.zeros(2, 3, 8)), ("aten.bmm.out", MIXED),
    ]  # fmt: skip
    return Call("x", "vllm.unified_mla_attention_with_output.default", outputs={"inplace.input.3": out},
                extra={"inner": inner})  # fmt: skip


def convolution() -> Call:
    out = torch.cat((CONVOLVED, PADDING))
    last = ("aten.copy_.default", CONVOLVED)
    inner = [("aten.copy_.default", torch.zeros(12, 7)), ("aten.vstack.default", None), last]
    return Call("x", "vllm.short_conv.default", outputs={"inplace.input.1": out}, extra={"inner": inner})


@pytest.mark.parametrize("make", [latent, convolution])
def test_rows_lie_where_they_belong(make: Any) -> None:
    call = make()
    ((role, out),) = call.outputs.items()
    assert verdict(call, role, out).passed
    exchanged = out[[1, 0, *range(2, len(out))]]
    assert not verdict(call, role, exchanged).passed
    turned = out.roll(2, 0)  # as if prompts came first
    assert not verdict(call, role, turned).passed
    padded = torch.cat((out[:-2], 0 * PADDING))
    assert verdict(call, role, padded).passed


@pytest.mark.parametrize("make", [latent, convolution])
def test_what_was_not_captured_inside_is_declined(make: Any) -> None:
    call = make()
    inner = [(op, None if op.startswith(("aten.copy_", "aten.bmm")) else t) for op, t in call.extra["inner"]]
    for changed in ([], inner):
        found = TABLE.evaluate(replace(call, extra={"inner": changed}))
        assert isinstance(found, Declined)
        assert "inside" in found.reason


@pytest.mark.parametrize("op", ["vllm.unified_kv_cache_update.default", "vllm.unified_mla_kv_cache_update.default"])
def test_a_write_has_an_operator_inside_that_writes(op: str) -> None:
    empty = torch.zeros(0)
    call = Call("x", op, outputs={"output.0": empty}, extra={"inner": [("aten.index_put_.default", PROMPT)]})
    assert not isinstance(TABLE.evaluate(call), Declined)
    assert isinstance(TABLE.evaluate(replace(call, extra={"inner": [("aten.ge.Scalar", None)]})), Declined)


@pytest.mark.parametrize("cls", ["MambaMixer2", "ShortConv", "MiniMaxText01LinearAttention"])
def test_a_block_is_not_right_by_its_projection_alone(cls: str) -> None:
    record = SimpleNamespace(shape=PROMPT.shape)
    extra = {"children": [("out_proj", "output.0", record)], "read": lambda r: PROMPT}
    found = TABLE.evaluate(Call("x", cls, outputs={"output.0": PROMPT}, extra=extra))
    assert not isinstance(found, Declined)
    assert "the recurrence in front of that" in found["output.0"].unseen
