"""Routing, experts and blocks against transformers' modules and numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.moe import dense, route
from vllm_accprobe.opcheck.registry import default_references

G = torch.Generator().manual_seed(3)
TABLE = default_references()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def run(call: Call) -> dict[str, Expected]:
    found = TABLE.evaluate(call)
    if isinstance(found, Declined):
        raise found
    return found


def test_routing_by_hand() -> None:
    """Softmax of log 1, 2, 4, 3 is 0.1, 0.2, 0.4, 0.3; the best two are 2 and 3."""
    logits = torch.log(torch.tensor([[1.0, 2.0, 4.0, 3.0]], dtype=torch.float64))
    plain, clear = route(logits, 2, renormalize=False)
    assert plain[0].tolist() == pytest.approx([0, 0, 0.4, 0.3])
    assert bool(clear.all())
    assert route(logits, 2)[0][0].tolist() == pytest.approx([0, 0, 4 / 7, 3 / 7])
    assert route(logits, 2, factor=2.5)[0][0, 2].item() == pytest.approx(10 / 7)
    # sigmoid of log n is n / (n + 1); a bias of 0.5 chooses expert 0 and does not weigh it
    bias = torch.tensor([0.5, 0, 0, 0], dtype=torch.float64)
    biased, _ = route(logits, 2, scoring="sigmoid", renormalize=False, bias=bias)
    assert biased[0].tolist() == pytest.approx([1 / 2, 0, 4 / 5, 0])


def test_groups_by_hand() -> None:
    """Two groups of two; the best group is by its largest score, and with a bias by the sum of its two largest."""
    logits = torch.log(torch.tensor([[5.0, 0.1, 4.0, 3.0]], dtype=torch.float64))
    first, _ = route(logits, 1, renormalize=True, groups=2, top_groups=1)
    assert first[0].tolist() == pytest.approx([1, 0, 0, 0])
    zero = torch.zeros(4, dtype=torch.float64)
    second, _ = route(logits, 1, scoring="sigmoid", bias=zero, groups=2, top_groups=1)
    assert second[0].tolist() == pytest.approx([0, 0, 1, 0])


def test_deepseek_routing_by_transformers() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, hidden_size=16,
                              routed_scaling_factor=2.5, norm_topk_prob=True)  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    router.weight.data = draw(8, 16).float()
    router.e_score_correction_bias.data = draw(8).float() * 0.1
    logits, weights, ids = router(draw(40, 16).float())
    mine, clear = route(logits.detach().double(), 3, scoring="sigmoid", bias=router.e_score_correction_bias.double(),
                        groups=4, top_groups=2, factor=2.5)  # fmt: skip
    theirs = dense(weights.detach(), ids, 8)
    torch.testing.assert_close(mine[clear], theirs[clear], rtol=0, atol=1e-6)
    assert int(clear.sum()) >= 38


def test_ties_decide_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    assert route(logits, 1)[1].tolist() == [False, True]
    assert route(logits, 2)[1].tolist() == [True, False]


def experts_call(config: dict[str, Any], **params: torch.Tensor) -> tuple[Call, torch.Tensor]:
    x, ids = draw(5, 8), torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0]])
    weights = draw(5, 2).abs()
    w13, w2 = draw(3, 12, 8), draw(3, 8, 6)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for t in range(5):  # token by token, as the paper writes it
        for w, e in zip(weights[t], ids[t], strict=True):
            gate, up = w13[e, :6] @ x[t], w13[e, 6:] @ x[t]
            expected[t] += w * (w2[e] @ (F.silu(gate) * up))
    inputs = {"x": x, "topk_weights": weights, "topk_ids": ids}
    call = Call("m.experts.routed_experts.quant_method", "UnquantizedFusedMoEMethod", inputs,
                params={"w13_weight": w13, "w2_weight": w2, **params}, config=config,
                outputs={"output.0": expected})  # fmt: skip
    return call, expected


def test_experts_token_by_token() -> None:
    call, expected = experts_call({"hidden_act": "silu"})
    torch.testing.assert_close(run(call)["output.0"].value, expected, rtol=1e-12, atol=1e-12)


def test_experts_that_are_not_understood_are_declined() -> None:
    for call, why in (
        (experts_call({})[0], "neither recorded"),
        (experts_call({"hidden_act": "relu"})[0], "neither recorded"),
        (experts_call({"hidden_act": "silu"}, w13_bias=draw(3, 12))[0], "biases"),
        (experts_call({"hidden_act": "silu"}, w2_weight=draw(3, 6, 8))[0], "unknown form"),
    ):
        with pytest.raises(Declined, match=why):
            run(call)


def test_router_weights_are_checked_where_the_model_says_how() -> None:
    logits = draw(5, 3)
    call, _ = experts_call({"hidden_act": "silu", "model_type": "mixtral"})
    found = run(Call(**{**call.__dict__, "extra": {"router_logits": logits}}))
    p = torch.softmax(logits, -1)
    best = p.topk(2, -1)
    for t in range(5):
        chosen = set(best.indices[t].tolist())
        for k in range(2):
            e = int(call.inputs["topk_ids"][t, k])
            want = float(p[t, e] / best.values[t].sum()) if e in chosen else 0.0
            assert found["input.topk_weights"].value[t, k].item() == pytest.approx(want)
    call, _ = experts_call({"hidden_act": "silu", "model_type": "unheard_of"})
    found = run(Call(**{**call.__dict__, "extra": {"router_logits": logits}}))
    assert "input.topk_weights" not in found


# --- blocks ---------------------------------------------------------------------------------------------------------


def block(
    cls: str, out: torch.Tensor, parts: dict[str, torch.Tensor], more: dict[str, torch.Tensor] | None = None
) -> Call:
    """A block with one output and the outputs of its parts, by ``path/role``."""
    children = [(*key.split("/"), value) for key, value in parts.items()]
    return Call("b", cls, outputs={"output.0": out, **(more or {})}, extra={"children": children, "read": lambda r: r})


def test_blocks_hand_on_what_their_last_part_gave() -> None:
    a, b = draw(2, 3), draw(2, 3)
    layer = block("LlamaDecoderLayer", a, {"post_attention_layernorm/output.1": b, "mlp/output.0": a}, {"output.1": b})
    found = run(layer)
    assert {k: v.value.tolist() for k, v in found.items()} == {"output.0": a.tolist(), "output.1": b.tolist()}
    assert {v.unit for v in found.values()} == {0.0}  # must be equal
    with pytest.raises(Declined, match="adds its residual"):
        run(block("LlamaDecoderLayer", a, {"mlp/output.0": a}))
    sandwich = {"mlp/output.0": b, "pre_feedforward_layernorm/output.1": b, "post_feedforward_layernorm/output.0": a}
    found = run(block("Gemma3DecoderLayer", a, sandwich, {"output.1": b}))
    assert found["output.0"].value.tolist() == a.tolist()
    with pytest.raises(Declined, match="do not tell"):  # something else runs behind the projection
        run(block("OddAttention", a, {"o_proj/output.0": a, "post_norm/output.0": b}))
    with pytest.raises(Declined, match="nothing inside"):
        run(block("LlamaMLP", a, {}))


def test_blocks_that_add_up() -> None:
    a, b, gate = draw(2, 3), draw(2, 3), draw(2, 1)
    parts = {"routed_experts.quant_method/output.0": a, "_shared_experts._layer/output.0": b}
    torch.testing.assert_close(run(block("MoERunner", a, parts))["output.0"].value, a + b)
    gated = block("Qwen2MoeMLP", a, {"expert_gate/output.0": gate, "down_proj/output.0": b})
    torch.testing.assert_close(run(gated)["output.0"].value, b * torch.sigmoid(gate))
    scaled = block("MoERunner", a, parts)
    with pytest.raises(Declined, match="scaling factor"):
        run(Call(**{**scaled.__dict__, "config": {"routed_scaling_factor": 2.5}}))
