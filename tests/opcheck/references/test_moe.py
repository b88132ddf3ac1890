"""Experts and their routing, by hand, by transformers and token by token."""

from __future__ import annotations

from typing import Any

import family_verdict
import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.moe import dense, route

draw = drawer(3)


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
    torch.testing.assert_close(evaluated(call)["output.0"].value, expected, rtol=1e-12, atol=1e-12)


def test_experts_that_are_not_understood_are_declined() -> None:
    for call, why in (
        (experts_call({})[0], "neither recorded"),
        (experts_call({"hidden_act": "relu"})[0], "neither recorded"),
        (experts_call({"hidden_act": "silu"}, w13_bias=draw(3, 12))[0], "biases"),
        (experts_call({"hidden_act": "silu"}, w2_weight=draw(3, 6, 8))[0], "unknown form"),
    ):
        with pytest.raises(Declined, match=why):
            evaluated(call)


def test_router_weights_are_checked_where_the_model_says_how() -> None:
    logits = draw(5, 3)
    call, _ = experts_call({"hidden_act": "silu", "model_type": "mixtral"})
    found = evaluated(Call(**{**call.__dict__, "extra": {"router_logits": logits}}))
    p = torch.softmax(logits, -1)
    best = p.topk(2, -1)
    for t in range(5):
        chosen = set(best.indices[t].tolist())
        for k in range(2):
            e = int(call.inputs["topk_ids"][t, k])
            want = float(p[t, e] / best.values[t].sum()) if e in chosen else 0.0
            assert found["input.topk_weights"].value[t, k].item() == pytest.approx(want)
    call, _ = experts_call({"hidden_act": "silu", "model_type": "unheard_of"})
    for extra, why in (({"router_logits": logits}, "chosen and weighed"), ({}, "logits were not captured")):
        found = evaluated(Call(**{**call.__dict__, "extra": extra}))["input.topk_weights"]
        assert not found.rows.any()
        assert why in found.reason


def glm_call(bias: torch.Tensor | None, **router: Any) -> Call:
    """GLM-4 MoE as vLLM has it: config.json has no scoring_func and no topk_method, the objects say both."""
    config = {"hidden_act": "silu", "model_type": "unheard_of", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    call, _ = experts_call(config)
    parent = {"top_k": 2, "renormalize": True, "scoring_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
              "use_grouped_topk": True, "routed_scaling_factor": 1.0, "has_correction_bias": True}  # fmt: skip
    gate = {} if bias is None else {"e_score_correction_bias": bias}
    extra = {"router_logits": LOGITS, "gate": gate, "router": router}
    return Call(**{**call.__dict__, "parent": parent, "extra": extra})


LOGITS = draw(5, 3)


def test_what_config_does_not_say_is_taken_from_the_captured_objects() -> None:
    bias = torch.tensor([3.0, 0.0, 0.0])
    want, _ = route(LOGITS, 2, scoring="sigmoid", bias=bias.double())
    call = glm_call(bias, **{"class": "GroupedTopKRouter"})
    ids = call.inputs["topk_ids"]
    found = evaluated(call)["input.topk_weights"]
    torch.testing.assert_close(found.value, want.gather(1, ids))
    scaled = evaluated(glm_call(bias, **{"class": "CPURouter", "routed_scaling_factor": 2.5}))["input.topk_weights"]
    torch.testing.assert_close(scaled.value, 2.5 * want.gather(1, ids))


@pytest.mark.parametrize(
    ("bias", "router", "why"),
    [
        (None, {}, "corrects the scores"),
        (torch.zeros(3), {"class": "ZeroExpertRouter"}, "ZeroExpertRouter"),
        (torch.zeros(3), {"custom_routing": "Llama4MoE.custom_routing_function"}, "Llama4MoE.custom_routing_function"),
        (torch.zeros(3), {"use_grouped_topk": False, "has_correction_bias": False, "routed_scaling_factor": 2.5},
         "routed scaling factor"),
    ],
)  # fmt: skip
def test_what_nobody_says_is_not_checked_and_counted(bias: Any, router: dict[str, Any], why: str) -> None:
    found = evaluated(glm_call(bias, **router))["input.topk_weights"]
    assert not found.rows.any()
    assert why in found.reason


def inside(logits: torch.Tensor, **parent: Any) -> Call:
    """A kernel of old, which chooses the experts itself."""
    call, _ = experts_call({"hidden_act": "silu", "model_type": "qwen2_moe", "num_experts_per_tok": 2})
    inputs = {"x": call.inputs["x"], "router_logits": logits}
    out = torch.zeros(5, 8, dtype=torch.float64)
    return Call(**{**call.__dict__, "inputs": inputs, "outputs": {"output.0": out}, "parent": parent})


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_that_a_kernel_chooses_itself_token_by_token(renormalize: bool) -> None:
    logits = draw(5, 3)
    logits[3] = torch.tensor([2.0, 1.0, 1.0])  # its second expert is a tie
    call = inside(logits, renormalize=renormalize, top_k=2, scoring_func="softmax", routed_scaling_factor=1.0)
    found = evaluated(call)["output.0"]
    assert found.rows is not None
    assert found.rows.tolist() == [True, True, True, False, True]
    x, w13, w2 = call.inputs["x"], call.params["w13_weight"], call.params["w2_weight"]
    for t in (0, 1, 2, 4):
        p = torch.softmax(logits[t], 0)
        best = p.topk(2)
        expected = torch.zeros(8, dtype=torch.float64)
        for w, e in zip(best.values, best.indices, strict=True):
            gate, up = w13[e, :6] @ x[t], w13[e, 6:] @ x[t]
            expected += (w / best.values.sum() if renormalize else w) * (w2[e] @ (F.silu(gate) * up))
        torch.testing.assert_close(found.value[t], expected, rtol=1e-12, atol=1e-12)


def test_how_a_kernel_chooses_must_be_known() -> None:
    logits = draw(5, 3)
    plain = inside(logits, top_k=2)
    other = evaluated(inside(logits, renormalize=True))["output.0"].value
    assert not torch.equal(evaluated(plain)["output.0"].value, other)
    for call in (inside(logits, routed_scaling_factor=2.5),
                 Call(**{**plain.__dict__, "config": {"hidden_act": "silu", "model_type": "unheard_of"}}),
                 Call(**{**plain.__dict__, "inputs": {**plain.inputs, "router_logits": draw(5, 4)}})):  # fmt: skip
        with pytest.raises(Declined, match="was not recorded"):
            evaluated(call)


def test_a_kernel_that_takes_the_next_expert_is_caught() -> None:
    """Honest numbers in bfloat16 pass; one token's second expert exchanged for the third fails."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(32, 64, generator=generator).bfloat16()
    w13 = (torch.randn(4, 96, 64, generator=generator) * 0.1).bfloat16()
    w2 = (torch.randn(4, 64, 48, generator=generator) * 0.1).bfloat16()
    logits = torch.randn(32, 4, generator=generator).bfloat16()
    call = Call(
        "m.experts.quant_method", "UnquantizedFusedMoEMethod", {"x": x, "router_logits": logits},
        params={"w13_weight": w13, "w2_weight": w2}, parent={"top_k": 2, "renormalize": True},
        config={"hidden_act": "silu", "model_type": "mixtral"}, outputs={"output.0": torch.zeros(32, 64).bfloat16()},
    )  # fmt: skip

    def kernel(wrong: int | None) -> torch.Tensor:
        weights = torch.softmax(logits.float(), -1)
        out = torch.zeros(32, 64)
        for t in range(32):
            ids = weights[t].topk(3).indices.tolist()
            chosen = [ids[0], ids[2] if t == wrong else ids[1]]
            total = weights[t, ids[:2]].sum()
            for e, by in zip(chosen, ids[:2], strict=True):
                gate, up = (w13[e].float() @ x[t].float()).chunk(2)
                hidden = (F.silu(gate) * up).bfloat16().float()
                out[t] += weights[t, by] / total * (w2[e].float() @ hidden)
        return out.bfloat16()

    assert family_verdict.verdict(call, "output.0", kernel(None)).passed
    rows = evaluated(call)["output.0"].rows
    assert rows is not None
    at = int(rows.nonzero()[0])
    assert not family_verdict.verdict(call, "output.0", kernel(at)).passed
