"""Blocks against what was captured inside them: vLLM's, and transformers', which add their residuals themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference_calls import TABLE, drawer, evaluated

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


# --- transformers ---------------------------------------------------------------------------------------------------

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
