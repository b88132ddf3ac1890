"""What transformers' modules do otherwise: residuals inside layers, tables of cosines, routers, gated mixtures."""

from __future__ import annotations

import pytest
import torch
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.reference import Call, Declined

draw = drawer(17)
X, A, M = draw(2, 3), draw(2, 3), draw(2, 3)


def layer(cls: str, x: torch.Tensor, out: torch.Tensor, **children: torch.Tensor) -> Call:
    inside = [(path, "output.0", y) for path, y in children.items()]
    return Call("l", cls, {"hidden_states": x}, outputs={"output.0": out},
                extra={"children": inside, "read": lambda y: y})  # fmt: skip


def test_a_layer_adds_its_residual_itself() -> None:
    y = evaluated(layer("LlamaDecoderLayer", X, X, self_attn=A, mlp=M))["output.0"]
    assert y.value.equal(X + A + M)
    with pytest.raises(Declined, match="a layer that adds its residual itself"):
        evaluated(layer("LlamaDecoderLayer", X, X, self_attn=A))
    with pytest.raises(Declined, match="a layer that adds its residual itself"):
        evaluated(layer("GemmaDecoderLayer", X, X, self_attn=A, pre_feedforward_layernorm=A, mlp=M))


def test_shared_experts_with_and_without_a_gate() -> None:
    y = evaluated(layer("Qwen2MoeSparseMoeBlock", X, X, experts=A, shared_expert=M))["output.0"]
    assert y.value.equal(A + M)
    gate = draw(2, 1)
    gated = layer("Qwen2MoeSparseMoeBlock", X, X, experts=A, shared_expert=M, shared_expert_gate=gate)
    y = evaluated(gated)["output.0"]
    assert y.value.equal(A + M * gate.sigmoid())


def test_shared_experts_that_are_given_out_apart() -> None:
    """SharedFusedMoE of vLLM up to 0.18: the block adds them, whatever else lies inside."""
    block = layer("Qwen2MoeSparseMoeBlock", X, A + M)
    inside = [("shared_expert", "output.0", A), ("experts", "output.0", A), ("experts", "output.1", M)]
    block.extra["children"] = inside
    assert evaluated(block)["output.0"].value.equal(A + M)
    block.extra["children"] = [*inside[:2], ("experts", "output.1", M[:, :1])]
    with pytest.raises(Declined, match="a block whose parts do not tell"):
        evaluated(block)
    experts = layer("SharedFusedMoE", X, A, _shared_experts=A)
    experts.outputs["output.1"] = M
    assert set(evaluated(experts)) == {"output.0"}  # the routed ones have a reference of their own, or none
    assert evaluated(experts)["output.0"].value.equal(A)


def test_tables_of_cosines() -> None:
    places, frequencies = torch.arange(4)[None], torch.tensor([1.0, 0.1])
    call = Call("r", "LlamaRotaryEmbedding", {"position_ids": places}, params={"inv_freq": frequencies},
                attrs={"attention_scaling": 2.0}, outputs={"output.0": torch.zeros(1, 4, 4)})  # fmt: skip
    found = evaluated(call)
    angle = torch.cat([places[..., None].double() * frequencies.double()] * 2, -1)
    assert found["output.0"].value.equal(2 * angle.cos())
    assert found["output.1"].value.equal(2 * angle.sin())


def test_a_router_is_held_to_its_own_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    p = torch.softmax(logits.double(), -1)
    ids = torch.tensor([[1, 0], [0, 1]])
    call = Call("r", "Qwen3MoeTopKRouter", {"hidden_states": draw(2, 4)}, params={"weight": draw(3, 4)},
                config={"model_type": "qwen3_moe"},
                outputs={"output.0": logits, "output.1": p.gather(1, ids), "output.2": ids})  # fmt: skip
    found = evaluated(call)
    assert found["output.0"].value.shape == (2, 3)
    assert found["output.1"].rows.tolist() == [True, False]  # all scores of the second row are equal
    assert found["output.1"].value[0].tolist() == [p[0, 1].item(), 0.0]
    assert found["output.2"].value[0].tolist() == [1, -1]  # expert 0 should not have been chosen
    assert found["output.2"].reason == "two experts are tied"
