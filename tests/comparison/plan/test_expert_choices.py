"""By what experts are chosen, and where their factor is applied, as the plan takes it from both dumps."""

from __future__ import annotations

from typing import Any

from vllm_accprobe.comparison.plan.relations import scaled_elsewhere, with_routers
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.judge.near_ties import Chooser

BLOCK = "model.layers.1.mlp"
METHOD = f"{BLOCK}.experts.routed_experts.quant_method"


def unit(tap: str, role: str, golden: str = "", groups: list[Any] | None = None) -> Unit:
    return Unit((tap, role, 0), (golden or tap, role, 0), "", "", 0, 0, groups or [], groups or [])


def modules(within: float, behind: float, **more: Any) -> list[Module]:
    routed = {"top_k": 2, "scoring_func": "sigmoid", "routed_scaling_factor": within, **more}
    return [
        Module(BLOCK, "Glm4MoE", 0, {"routed_scaling_factor": 2.5}),
        Module(f"{BLOCK}.experts", "MoERunner", 1, {"router.class": "CPURouter", "routed_scaling_factor": behind}),
        Module(f"{BLOCK}.experts.routed_experts", "RoutedExperts", 2, routed),
    ]


def test_a_choice_is_by_what_the_captured_objects_say() -> None:
    bias = [object()]
    units = [unit(f"{BLOCK}.gate", "param.e_score_correction_bias", groups=bias), unit(f"{BLOCK}.gate", "output.0"),
             unit(METHOD, "input.topk_ids")]  # fmt: skip
    found = with_routers(units, modules(1.0, 2.5, num_expert_group=4, topk_group=2, use_grouped_topk=True))[-1]
    assert (found.chooser, found.bias) == (Chooser("sigmoid", 4, 2), (bias[0], bias[0]))
    plain = with_routers(units[1:], modules(1.0, 2.5))[-1]
    assert (plain.router, plain.chooser) == (([], []), None)  # its logits alone decide
    unsaid = with_routers(units[1:], modules(1.0, 2.5, has_correction_bias=True))[-1]
    assert unsaid.chooser is None  # a bias that nobody captured


def test_a_factor_in_the_weights_of_one_side_alone_is_no_error() -> None:
    units = [unit(METHOD, "input.topk_weights"), unit(METHOD, "output.0"), unit(METHOD, "input.x"),
             unit(f"{BLOCK}.experts", "output.0")]  # fmt: skip
    assert scaled_elsewhere(units, modules(2.5, 1.0), modules(1.0, 2.5)) == {0, 1}
    assert not scaled_elsewhere(units, modules(1.0, 2.5), modules(1.0, 2.5))
    assert not scaled_elsewhere(units, modules(2.5, 1.0), modules(1.0, 1.0))  # one side has lost it
