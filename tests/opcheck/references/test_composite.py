"""Blocks against what was captured inside them: vLLM's, and transformers', which add their residuals themselves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.composite import (
    BY_OWN_CODE,
    LEFT_OUT,
    NOT_RECEIVED,
    routed_factor,
)

draw = drawer(3)
A, B, X, M, GATE = draw(2, 3), draw(2, 3), draw(2, 3), draw(2, 3), draw(2, 1)


def block(
    cls: str, out: torch.Tensor, inside: dict[str, torch.Tensor], more: dict[str, torch.Tensor] | None = None,
    x: torch.Tensor | None = None, extra: dict[str, Any] | None = None, **fields: Any,
) -> Call:  # fmt: skip
    """A block and what its parts gave, by ``path`` or ``path/role``."""
    children = [(path.partition("/")[0], path.partition("/")[2] or "output.0", y) for path, y in inside.items()]
    return Call("b", cls, {} if x is None else {"hidden_states": x}, outputs={"output.0": out, **(more or {})},
                extra={"children": children, "read": lambda y: y, **(extra or {})}, **fields)  # fmt: skip


def layer(cls: str, out: torch.Tensor = X, **inside: torch.Tensor) -> Call:
    """Of transformers."""
    return block(cls, out, inside, x=X)


def coded(formula: str, inside: dict[str, torch.Tensor]) -> Call:
    return block("OddBlock", X, inside, x=X, attrs={"forward": {"output.0": formula}})


ROUTED = {"routed_experts.quant_method": A, "_shared_experts._layer": B}
NORMS = {"mlp": B, "pre_feedforward_layernorm/output.1": B, "post_feedforward_layernorm": A}
MOE, OWN = "Qwen2MoeSparseMoeBlock", "a layer that adds its residual itself"
ADDED = block(MOE, A + M, {"shared_expert": A, "experts": A, "experts/output.1": M}, x=X)
GIVEN: dict[str, tuple[Call, dict[str, torch.Tensor]]] = {
    "what its last part gave": (
        block("LlamaDecoderLayer", A, {"post_attention_layernorm/output.1": B, "mlp": A}, {"output.1": B}),
        {"output.0": A, "output.1": B}),
    "a norm's behind the MLP": (block("Gemma3DecoderLayer", A, NORMS, {"output.1": B}), {"output.0": A, "output.1": B}),
    "routed and shared experts": (block("MoERunner", A, ROUTED), {"output.0": A + B}),
    "a gated MLP": (block("Qwen2MoeMLP", A, {"expert_gate": GATE, "down_proj": B}), {"output.0": B * GATE.sigmoid()}),
    "its residual": (layer("LlamaDecoderLayer", self_attn=A, mlp=M), {"output.0": X + A + M}),
    "its residual, of factored parts": (block("GraniteDecoderLayer", X, {"self_attn": A, "mlp": M}, x=X,
                                              attrs={"residual_multiplier": 0.25}), {"output.0": X + A / 4 + M / 4}),
    "a factor by its depth": (block("MiniCPMDecoderLayer", X, {"self_attn": A, "mlp": M}, x=X,
                                    config={"scale_depth": 1.0, "num_hidden_layers": 4}),
                              {"output.0": X + A / 2 + M / 2}),
    "attention and MLP side by side, by its code": (
        block("CohereDecoderLayer", A, {"self_attn": A, "mlp": M}, {"output.1": B}, x=B,
              attrs={"forward": {"output.0": "(hidden_states + self_attn[0]) + mlp[0]", "output.1": "hidden_states"}}),
        {"output.0": A + M + B, "output.1": B}),
    "a factor by its code": (
        coded("(hidden_states + (attn.proj[0] * 0.25))", {"attn.proj": M}), {"output.0": X + M / 4}),
    "a negative factor by its code": (coded("(hidden_states + (mlp[0] * -0.25))", {"mlp": M}),
                                      {"output.0": X - M / 4}),
    "what is there, by its code": (
        coded("((mlp[0] + mlp[1]) if mlp[1] else (mlp[0] + hidden_states))", {"mlp": M, "mlp/output.1": A}),
        {"output.0": M + A}),
    "a bias for all rows, by its code": (
        coded("(mlp[0] + mlp[1])", {"mlp": M, "mlp/output.1": A[0]}), {"output.0": M + A[0]}),
    "what is not there, by its code": (
        coded("((mlp[0] + mlp[1]) if mlp[1] else (mlp[0] + hidden_states))", {"mlp": M}), {"output.0": M + X}),
    "what its model gave, by code that was not followed": (
        block("OddForCausalLM", A, {"model": A}, attrs={"forward": {}}), {"output.0": A}),
    "all that a part gave": (
        block("OddBlock", A, {"norm": A, "norm/output.1": B}, {"output.1": B}, attrs={"forward": {"output": "norm"}}),
        {"output.0": A, "output.1": B}),
    "an MLP with a factor": (block("FalconH1MLP", A, {"down_proj": B}, config={"mlp_multipliers": [3.0, 0.5]}),
                             {"output.0": B / 2}),
    "shared experts": (layer(MOE, experts=A, shared_expert=M), {"output.0": A + M}),
    "gated shared experts": (layer(MOE, experts=A, shared_expert=M, shared_expert_gate=GATE),
                             {"output.0": A + M * GATE.sigmoid()}),
    "shared experts that are given out apart": (ADDED, {"output.0": A + M}),  # vLLM up to 0.18
    "the shared experts alone": (block("SharedFusedMoE", A, {"_shared_experts": A}, {"output.1": M}), {"output.0": A}),
}  # fmt: skip
DECLINED: dict[str, tuple[Call, str]] = {
    "no residual": (block("LlamaDecoderLayer", A, {"mlp": A}), OWN),
    "no MLP": (layer("LlamaDecoderLayer", self_attn=A), OWN),
    "a norm in its sum": (layer("GemmaDecoderLayer", self_attn=A, pre_feedforward_layernorm=A, mlp=M), OWN),
    "something behind its projection": (block("OddAttention", A, {"o_proj": A, "post_norm": B}), "does not follow"),
    "code that was not followed": (block("OddForCausalLM", A, {"model": B}, attrs={"forward": {}}), "does not follow"),
    "a part called twice": (block("OddBlock", A, {"mlp": A}, extra={"children": [("mlp", "output.0", A)] * 2},
                                  attrs={"forward": {"output.0": "mlp[0]"}}), "mlp was called 2 times"),
    "a list for a formula": (block("OddBlock", X, {"mlp": A}, attrs={"forward": []}), "does not know"),
    "a division by 0": (coded("(mlp[0] * (1 / 0))", {"mlp": A}), "does not know"),
    "a number of many digits": (coded("(mlp[0] * " + "9" * 3900 + ")", {"mlp": A}), "does not know"),
    "no formula": (coded("__import__('os').getcwd()", {"mlp": A}), "does not know"),
    "a formula of great depth": (coded("(" * 900 + "mlp[0]" + ")" * 900, {"mlp": A}), "does not know"),
    "nothing inside": (block("LlamaMLP", A, {}), "nothing inside it was captured"),
    "another shape": (block(MOE, A + M, {"shared_expert": A, "experts": A, "experts/output.1": M[:, :1]}, x=X),
                      "the output of this block does not follow"),
    "an attention that adds its residual": (replace(
        block("BloomAttention", X, {"dense": A}), inputs={"residual": M}), "does not follow"),
    "a factor of nobody": (block("MoERunner", A, ROUTED, config={"routed_scaling_factor": 2.5}), "scaling factor"),
    **{f"{cls} without all its parts": (
        block(cls, A, {"self_attn": A, "o_proj": A}, extra={"unseen": ("mlp", "post_norm")}),
        r"parts were not captured \(mlp and 1 more\)")
       for cls in ("QwenDecoderLayer", "LlamaAttention", "LlamaMLP", "GlmMoE", "MoERunner", "Sequential")},
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_block_gives(name: str) -> None:
    call, wanted = GIVEN[name]
    found = evaluated(call)
    assert set(found) == set(wanted)  # other outputs have a reference of their own, or none
    for role, y in wanted.items():
        torch.testing.assert_close(found[role].value, y, rtol=1e-15, atol=0.0)
        assert (found[role].unit == 0.0) == any(y is t for t in (A, B))  # what is handed on must be equal


def test_what_a_part_receives() -> None:
    """Where it was captured, by the block's code; the block's outputs besides."""
    code = {"output.0": "mlp[0]", "inside.norm/x": "(hidden_states + self_attn[0])", "inside.mlp/x": "norm[0]",
            "inside.mlp/y": "odd[0]"}  # fmt: skip
    call = block("OddBlock", A, {"self_attn": B, "norm": M, "mlp": A}, x=X, attrs={"forward": code},
                 more={"inside.norm/x": X, "inside.mlp/x": M, "inside.mlp/y": X})  # fmt: skip
    found = evaluated(call)
    assert found.pop("inside.mlp/y").reason == "odd was not captured"
    assert {role: e.unit for role, e in found.items()} == {"output.0": 0.0, "inside.norm/x": None, "inside.mlp/x": 0.0}
    torch.testing.assert_close(found["inside.norm/x"].value, X + B, rtol=1e-15, atol=0.0)
    assert torch.equal(found["inside.mlp/x"].value, M)
    assert found["inside.mlp/x"].note == NOT_RECEIVED


def test_a_long_formula_of_many_parts_reads_their_list_few_times() -> None:
    class Counted(list[Any]):
        reads = 0

        def __iter__(self) -> Any:
            self.reads += 1
            return super().__iter__()

    y = torch.ones(1, 4)
    call = block("OddBlock", y * 100, {"mlp": y}, x=y, attrs={"forward": {
        "output.0": "without_batch(" * 50 + " + ".join(["mlp[0]"] * 100) + ")" * 50}})  # fmt: skip
    children = Counted(call.extra["children"])
    found = evaluated(replace(call, extra={**call.extra, "children": children}))
    assert torch.equal(found["output.0"].value, y.double() * 100)
    assert children.reads < 10


def test_what_parts_received_alone_is_no_result_of_a_block() -> None:
    """It may show a fault, and never that the block is right."""
    code = {"output.0": "mlp[0]", "own_code": "mlp", "inside.mlp/x": "self_attn[0]"}
    call = block("OddBlock", A, {"self_attn": B, "mlp": A}, x=X, attrs={"forward": code}, more={"inside.mlp/x": X})
    found = evaluated(call)
    assert set(found) == {"output.0", "inside.mlp/x"}
    assert all(e.unseen for e in found.values())


HALF = {"scale_depth": 1.0, "num_hidden_layers": 4}
FORGETS = {"forward": {"output.0": "((hidden_states + self_attn[0]) + mlp[0])"}}
HALVES = {"forward": {"output.0": "((hidden_states + (self_attn[0] * 0.5)) + (mlp[0] * 0.5))"}}
BARE, TIMES = {"forward": {"output.0": "down_proj[0]"}}, {"forward": {"output.0": "(down_proj[0] * 0.5)"}}
PARTS = {"self_attn": A, "mlp": M}


@pytest.mark.parametrize(("call", "value", "note", "unseen"), [
    (block("OddDecoderLayer", X, PARTS, x=X, config=HALF, attrs=FORGETS), X + A / 2 + M / 2, True, False),
    (block("OddDecoderLayer", X, PARTS, x=X, config=HALF, attrs=HALVES), X + A / 2 + M / 2, False, False),
    (block("OddDecoderLayer", X, PARTS, x=X, attrs=HALVES), X + A / 2 + M / 2, False, False),
    *((block("OddDecoderLayer", X, PARTS, {"output.1": X}, X, config=HALF, attrs={"forward": {"output.0": code}}),
       M * n, False, left) for code, n, left in (("mlp[0] * 0.5", 0.5, False), ("mlp[0]", 1.0, True))),
    (block("OddMLP", X, {"down_proj": B}, config={"mlp_multipliers": [3.0, 0.5]}, attrs=BARE), B / 2, True, False),
    (block("OddMLP", X, {"down_proj": B}, config={"mlp_multipliers": [3.0, 0.5]}, attrs=TIMES), B / 2, False, False),
    (block("OddMLP", X, {"expert_gate": GATE, "down_proj": B}, attrs=BARE), B, False, True),
    (block("OddMLP", X, {"down_proj": B}, attrs=BARE), B, False, False),
])  # fmt: skip
def test_own_code_is_not_right_without_what_config_or_parts_require(call, value, note, unseen):
    found = evaluated(call)["output.0"]
    torch.testing.assert_close(found.value, value, rtol=1e-15, atol=0.0)
    assert (found.note == LEFT_OUT, found.unseen.startswith(LEFT_OUT)) == (note, unseen)
    assert found.source == ("" if note else BY_OWN_CODE)


@pytest.mark.parametrize("name", DECLINED)
def test_a_block_is_declined(name: str) -> None:
    with pytest.raises(Declined, match=DECLINED[name][1]):
        evaluated(DECLINED[name][0])


@pytest.mark.parametrize(("config", "own", "factors", "wanted"), [
    (None, None, {}, 1.0), (1, None, {}, 1.0), (1.0, None, {}, 1.0),
    (2.5, 2.5, {"experts": 2.5, "routed": 1.0}, 1.0), (2.5, None, {"experts": 1.0, "routed": 2.5}, 1.0),  # vLLM 0.32
    (2.5, 2.5, {"experts": 1.0}, 2.5),  # a block of up to 0.18, whose experts got 1
    (None, None, {"experts": 2.5}, 1.0),  # DeepSeek's name for it elsewhere
    (2.5, None, {}, None), (2.5, 2.5, {"experts": 2.0}, None),
])  # fmt: skip
def test_a_block_scales_by_what_no_object_inside_it_applies(config, own, factors, wanted):
    named = [{} if f is None else {"routed_scaling_factor": f} for f in (config, own)]
    call = Call("t", "T", config=named[0], attrs=named[1], extra={"factors": factors} if factors else {})
    if wanted is None:
        with pytest.raises(Declined, match="routed scaling factor"):
            routed_factor(call)
    else:
        assert routed_factor(call) == wanted


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


def test_a_router_adds_its_bias() -> None:
    x, w, b = draw(2, 4), draw(3, 4), draw(3)
    call = Call("r", "GptOssTopKRouter", {"hidden_states": x}, params={"weight": w, "bias": b},
                outputs={"output.0": x @ w.T + b})  # fmt: skip
    torch.testing.assert_close(evaluated(call)["output.0"].value, x.double() @ w.double().T + b)


@pytest.mark.parametrize("cls", ["MambaMixer2", "ShortConv", "MiniMaxText01LinearAttention"])
def test_a_block_is_not_right_by_its_projection_alone(cls: str) -> None:
    y = torch.ones(5, 12)
    found = evaluated(block(cls, y, {"out_proj": SimpleNamespace(shape=y.shape)}, extra={"read": lambda r: y}))
    assert "convolution and recurrence were not recomputed" in found["output.0"].unseen


@pytest.mark.parametrize("op", ["vllm.unified_kv_cache_update.default", "vllm.unified_mla_kv_cache_update.default"])
def test_a_write_has_an_operator_inside_that_writes(op: str) -> None:
    call = Call("x", op, outputs={"output.0": torch.zeros(0)})
    assert evaluated(replace(call, extra={"inner": [("aten.index_put_.default", torch.ones(2))]}))
    with pytest.raises(Declined):
        evaluated(call)
