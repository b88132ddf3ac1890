"""Experts and their routing, by hand, and by transformers; token by token in opcheck/samples/modules.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from opcheck.samples.modules import experts_call
from opcheck.samples.sample import Draw
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.moe import dense, route, routed

draw = drawer(3)


def test_groups_by_hand() -> None:
    """Without a bias the best of two groups is that with the largest score; with one, by transformers below."""
    logits = torch.log(torch.tensor([[5.0, 0.1, 4.0, 3.0]], dtype=torch.float64))
    first, _ = route(logits, 1, renormalize=True, groups=2, top_groups=1)
    assert first[0].tolist() == pytest.approx([1, 0, 0, 0])


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


def test_the_sparse_mixer_by_transformers() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = draw(400, 6).float() * 0.03 + 1.0  # many within the threshold, and many at its edge
    logits[:, 5] = 1.0 + 0.0201 * torch.arange(400) / 400
    weights, ids = sparsemixer(logits, 0.01, False)
    mine, clear = route(logits.double(), 2, scoring="sparse mixer", tie=1e-4)
    torch.testing.assert_close(mine[clear], dense(weights, ids, 6)[clear], rtol=0, atol=1e-6)
    assert 300 <= int(clear.sum()) < 400
    off = weights.clone()
    off[:, 1] = 1.0  # as if nothing were near the second
    assert not torch.allclose(mine[clear], dense(off, ids, 6)[clear], rtol=0, atol=1e-2)


def test_ties_decide_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    assert route(logits, 1)[1].tolist() == [False, True]
    assert route(logits, 2)[1].tolist() == [True, False]


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.1, False)])
def test_a_factor_on_softmax_weights_is_found_where_one_row_has_large_logits(factor: float, passed: bool) -> None:
    """Each row has its own error of e**(x - log sum e**x) in bfloat16, which grows with its logits."""
    logits = draw(64, 60) * 2
    logits[0] += 60.0
    logits = logits.bfloat16()
    value, ids = logits.double().softmax(-1).topk(6, -1)
    total = logits.double().logsumexp(-1, keepdim=True).bfloat16()
    narrow = (logits - total).exp().double().gather(1, ids)
    expected = routed(logits, ids, 2.0**-8, {"scoring": "softmax", "renormalize": False})
    assert OutputRows.of(expected, (value * factor).float(), 0).judge("float32").passed is passed
    assert OutputRows.of(expected, narrow.float(), 0).judge("float32").passed


LOGITS = draw(12, 3)


def test_router_weights_are_unchecked_where_nobody_says_how() -> None:
    call = experts_call(Draw(3), config={"hidden_act": "silu", "model_type": "unheard_of"}).call
    for extra, why in (({"router_logits": LOGITS}, "chosen and weighed"), ({}, "logits were not captured")):
        found = evaluated(replace(call, extra=extra))["input.topk_weights"]
        assert not found.rows.any()
        assert why in found.reason


def glm_call(bias: torch.Tensor | None, **router: Any) -> Call:
    """GLM-4 MoE as vLLM has it: config.json has no scoring_func and no topk_method, the objects say both."""
    config = {"hidden_act": "silu", "model_type": "unheard_of", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    parent = {"top_k": 2, "renormalize": True, "scoring_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
              "use_grouped_topk": True, "routed_scaling_factor": 1.0, "has_correction_bias": True}  # fmt: skip
    gate = {} if bias is None else {"e_score_correction_bias": bias}
    extra = {"router_logits": LOGITS, "gate": gate, "router": router}
    return experts_call(Draw(3), config=config, parent=parent, extra=extra).call


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


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_routers_logits_are_found_wherever_it_gives_them_out(factor: float) -> None:
    """Granite's router gives out the chosen experts, their weights, and the logits last."""
    x, weight = torch.randn(5, 16), torch.randn(4, 16)
    logits = factor * (x @ weight.T)
    top = logits.topk(2)
    outputs = {"output.0": top.indices, "output.1": top.values.softmax(-1), "output.2": logits}
    call = Call("router", "GraniteMoeTopKRouter", {"hidden_states": x}, params={"weight": weight}, outputs=outputs)
    found = evaluated(call)
    assert set(found) == {"output.2"}
    assert torch.allclose(found["output.2"].value.float(), logits, atol=1e-4) == (factor == 1.0)
