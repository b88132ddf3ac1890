"""Blocks against what was captured inside them."""

from __future__ import annotations

import pytest
import torch
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.reference import Call, Declined

draw = drawer(3)


def block(
    cls: str, out: torch.Tensor, parts: dict[str, torch.Tensor], more: dict[str, torch.Tensor] | None = None
) -> Call:
    """A block with one output and the outputs of its parts, by ``path/role``."""
    children = [(*key.split("/"), value) for key, value in parts.items()]
    return Call("b", cls, outputs={"output.0": out, **(more or {})}, extra={"children": children, "read": lambda r: r})


def test_blocks_hand_on_what_their_last_part_gave() -> None:
    a, b = draw(2, 3), draw(2, 3)
    layer = block("LlamaDecoderLayer", a, {"post_attention_layernorm/output.1": b, "mlp/output.0": a}, {"output.1": b})
    found = evaluated(layer)
    assert {k: v.value.tolist() for k, v in found.items()} == {"output.0": a.tolist(), "output.1": b.tolist()}
    assert {v.unit for v in found.values()} == {0.0}  # must be equal
    with pytest.raises(Declined, match="adds its residual"):
        evaluated(block("LlamaDecoderLayer", a, {"mlp/output.0": a}))
    sandwich = {"mlp/output.0": b, "pre_feedforward_layernorm/output.1": b, "post_feedforward_layernorm/output.0": a}
    found = evaluated(block("Gemma3DecoderLayer", a, sandwich, {"output.1": b}))
    assert found["output.0"].value.tolist() == a.tolist()
    with pytest.raises(Declined, match="do not tell"):  # something else runs behind the projection
        evaluated(block("OddAttention", a, {"o_proj/output.0": a, "post_norm/output.0": b}))
    with pytest.raises(Declined, match="nothing inside"):
        evaluated(block("LlamaMLP", a, {}))


@pytest.mark.parametrize("cls", ["QwenDecoderLayer", "LlamaAttention", "LlamaMLP", "GlmMoE", "MoERunner", "Sequential"])
def test_a_block_is_judged_only_if_all_its_parts_were_captured(cls: str) -> None:
    """A layer whose unseen MLP runs last does not hand on what its attention gave."""
    a = draw(2, 3)
    call = block(cls, a, {"self_attn/output.0": a, "o_proj/output.0": a})
    with pytest.raises(Declined, match=r"parts were not captured \(mlp and 1 more\)"):
        evaluated(Call(**{**call.__dict__, "extra": {**call.extra, "unseen": ("mlp", "post_norm")}}))


def test_blocks_that_add_up() -> None:
    a, b, gate = draw(2, 3), draw(2, 3), draw(2, 1)
    parts = {"routed_experts.quant_method/output.0": a, "_shared_experts._layer/output.0": b}
    torch.testing.assert_close(evaluated(block("MoERunner", a, parts))["output.0"].value, a + b)
    gated = block("Qwen2MoeMLP", a, {"expert_gate/output.0": gate, "down_proj/output.0": b})
    torch.testing.assert_close(evaluated(gated)["output.0"].value, b * torch.sigmoid(gate))
    scaled = block("MoERunner", a, parts)
    with pytest.raises(Declined, match="scaling factor"):
        evaluated(Call(**{**scaled.__dict__, "config": {"routed_scaling_factor": 2.5}}))
