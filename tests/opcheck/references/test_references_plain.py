"""Norms, products, activations, embeddings, sampling, pictures and collectives against independent definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import collectives
from vllm_accprobe.opcheck.references.sampling import probabilities
from vllm_accprobe.opcheck.registry import default_references

G = torch.Generator().manual_seed(5)
TABLE = default_references()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def run(cls: str, inputs: Mapping[str, Any], out: Any = None, **more: Any) -> dict[str, Expected]:
    outputs = {} if out is None else {"output.0": out}
    found = TABLE.evaluate(Call("tap", cls, inputs, outputs=outputs, **more))
    if isinstance(found, Declined):
        raise found
    return found


def value(cls: str, inputs: Mapping[str, Any], out: Any = None, **more: Any) -> torch.Tensor:
    return run(cls, inputs, out, **more)["output.0"].value


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- norms ----------------------------------------------------------------------------------------------------------


def test_rms_norm_by_torch_and_with_a_residual() -> None:
    x, r, w = draw(5, 16), draw(5, 16), draw(16)
    attrs = {"variance_epsilon": 1e-3}
    same(value("RMSNorm", {"x": x}, attrs=attrs, params={"weight": w}), F.rms_norm(x, (16,), w, 1e-3))
    both = run("RMSNorm", {"x": x, "residual": r}, attrs=attrs, params={"weight": w})
    same(both["output.0"].value, F.rms_norm(x + r, (16,), w, 1e-3))
    same(both["output.1"].value, x + r)


def test_rms_norm_by_hand() -> None:
    found = value("RMSNorm", {"x": torch.tensor([[3.0, 4.0]])}, attrs={"eps": 0.0}, params={"weight": torch.ones(2)})
    same(found, torch.tensor([[3.0, 4.0]], dtype=torch.float64) / math.sqrt(12.5))


def test_gemma_weighs_with_one_more() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    theirs = GemmaRMSNorm(8, 1e-6).double()
    theirs.weight.data = draw(8)
    x = draw(3, 8)
    mine = value("GemmaRMSNorm", {"x": x}, attrs={"variance_epsilon": 1e-6}, params={"weight": theirs.weight.detach()})
    torch.testing.assert_close(mine, theirs(x).detach().double(), rtol=2e-6, atol=1e-6)  # theirs works in float32


def test_layer_and_group_norm_by_torch() -> None:
    x, w, b = draw(4, 6, 10), draw(10), draw(10)
    params = {"weight": w, "bias": b}
    same(value("LayerNorm", {"input": x}, attrs={"eps": 1e-5, "normalized_shape": [10]}, params=params),
         F.layer_norm(x, (10,), w, b, 1e-5))  # fmt: skip
    params = {"weight": draw(6), "bias": draw(6)}
    same(value("GroupNorm", {"input": x}, attrs={"eps": 1e-5, "num_groups": 3}, params=params),
         F.group_norm(x, 3, params["weight"], params["bias"], 1e-5))  # fmt: skip


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls", ["ColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "Linear", "GateLinear"]
)
def test_products_by_torch(cls: str) -> None:
    x, w, b = draw(3, 8), draw(5, 8), draw(5)
    same(value(cls, {"x": x}, params={"weight": w, "bias": b}), F.linear(x, w, b))


def test_a_row_parallel_sum_needs_all_ranks() -> None:
    x, w, b = draw(3, 8), draw(5, 8), draw(5)
    calls = [
        Call("t", "RowParallelLinear", {"input_": x_part}, params={"weight": w_part, "bias": b},
             attrs={"tp_size": 2, "tp_rank": k})
        for k, (x_part, w_part) in enumerate(zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
    ]  # fmt: skip
    attrs = {"tp_size": 2, "tp_rank": 0, "reduce_results": True}
    same(value("RowParallelLinear", {"input_": x}, attrs=attrs, extra={"ranks": calls}), F.linear(x, w, b))
    with pytest.raises(Declined, match="not all of them"):
        run("RowParallelLinear", {"input_": x}, attrs=attrs, extra={"ranks": calls[:1]})
    alone = value("RowParallelLinear", {"input_": x[:, :4]}, attrs={**attrs, "reduce_results": False, "tp_rank": 1},
                  params={"weight": w[:, :4], "bias": b})  # fmt: skip
    same(alone, x[:, :4] @ w[:, :4].T)


def test_a_weight_of_another_shape_is_declined() -> None:
    with pytest.raises(Declined, match="does not fit"):
        run("Linear", {"input": draw(2, 8)}, params={"weight": draw(5, 7)})


def test_logits_are_capped_and_scaled() -> None:
    z = draw(2, 7) * 30
    found = value("LogitsProcessor", {}, z, attrs={"scale": 0.5}, config={"final_logit_softcapping": 30.0},
                  extra={"lm_head": z})  # fmt: skip
    same(found, 0.5 * 30 * torch.tanh(z / 30))


# --- activations ----------------------------------------------------------------------------------------------------

_HALVES: dict[str, Callable[[Any, Any], Any]] = {
    "SiluAndMul": lambda a, b: F.silu(a) * b,
    "MulAndSilu": lambda a, b: a * F.silu(b),
}
_ALONE: dict[str, Callable[[Any], Any]] = {
    "GELU": F.gelu,
    "NewGELU": lambda x: F.gelu(x, approximate="tanh"),
    "GELUTanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "ReLUSquaredActivation": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("cls", _HALVES)
def test_gated_activations_by_torch(cls: str) -> None:
    x = draw(4, 12)
    same(value(cls, {"x": x}), _HALVES[cls](x[:, :6], x[:, 6:]))


@pytest.mark.parametrize("cls", _ALONE)
def test_activations_by_torch(cls: str) -> None:
    x = draw(4, 12)
    same(value(cls, {"x": x}), _ALONE[cls](x))


@pytest.mark.parametrize(("act", "approximate"), [("gelu", "none"), ("gelu_pytorch_tanh", "tanh")])
def test_geglu_is_told_by_the_configuration(act: str, approximate: str) -> None:
    x = draw(4, 12)
    found = value("GeluAndMul", {"x": x}, config={"hidden_act": act})
    same(found, F.gelu(x[:, :6], approximate=approximate) * x[:, 6:])
    with pytest.raises(Declined, match="approximate"):
        run("GeluAndMul", {"x": x})


def test_quick_gelu_and_clamped_swiglu_by_transformers() -> None:
    from transformers.activations import ACT2FN

    x = draw(4, 12)
    same(value("QuickGELU", {"x": x}), ACT2FN["quick_gelu"](x))
    # gpt-oss: gate 10 is cut to 7, up -9 to -7; y = gate * sigmoid(1.702 gate) * (up + 1)
    found = value("SwigluOAIAndMul", {"x": torch.tensor([[10.0, -9.0]])})
    same(found, torch.tensor([[7.0 / (1.0 + math.exp(-1.702 * 7.0)) * -6.0]], dtype=torch.float64))


# --- tables, sampling, pictures, ranks ------------------------------------------------------------------------------


def test_embeddings_whole_and_sharded() -> None:
    table, ids = draw(10, 4), torch.tensor([3, 9, 0])
    same(value("VocabParallelEmbedding", {"input_": ids}, params={"weight": table}), F.embedding(ids, table))
    calls = [Call("t", "VocabParallelEmbedding", params={"weight": table[k * 5 : k * 5 + 5]}, attrs={"tp_rank": k})
             for k in range(2)]  # fmt: skip
    found = value("VocabParallelEmbedding", {"input_": ids}, attrs={"tp_size": 2}, extra={"ranks": calls})
    same(found, F.embedding(ids, table))
    with pytest.raises(Declined, match="outside"):
        run("VocabParallelEmbedding", {"input_": torch.tensor([10])}, params={"weight": table})


def test_sampling_probabilities_by_hand() -> None:
    z = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64))

    def expect(got: torch.Tensor, *p: float) -> None:
        same(got, torch.tensor([p], dtype=torch.float64))

    expect(probabilities(z), 0.5, 0.3, 0.15, 0.05)
    expect(probabilities(z, top_k=2), 0.625, 0.375, 0, 0)
    expect(probabilities(z, top_p=0.6), 0.625, 0.375, 0, 0)
    expect(probabilities(z, top_p=0.45), 1, 0, 0, 0)
    expect(probabilities(z, min_p=0.3), *(x / 0.95 for x in (0.5, 0.3, 0.15)), 0)
    expect(probabilities(z, temperature=0.0), 1, 0, 0, 0)


def test_the_best_logits_and_ties() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 2.0], [2.0, 2.0, 1.0, 0.0]])
    call = Call("s", "Sampler", outputs={"output.top_logits": logits.topk(2).values}, extra={"logits": logits})
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined)
    assert found["output.top_logits"].value.tolist() == [[5.0, 3.0], [2.0, 2.0]]
    assert found["output.top_ids"].value[0].tolist() == [1, 2]
    assert found["output.top_ids"].rows.tolist() == [True, False]
    assert "output.token" not in found


@pytest.mark.parametrize("dims", [2, 3])
def test_patch_convolutions_by_torch(dims: int) -> None:
    kernel = (2, 3, 4)[-dims:]
    x, w, b = draw(5, 3, *(2 * k for k in kernel)), draw(6, 3, *kernel), draw(6)
    theirs = (F.conv2d if dims == 2 else F.conv3d)(x, w, b, stride=kernel)
    same(value(f"Conv{dims}dLayer", {"x": x}, theirs, params={"weight": w, "bias": b}), theirs)
    with pytest.raises(Declined, match="stride"):
        run(f"Conv{dims}dLayer", {"x": x[:, :, 1:]}, theirs, params={"weight": w})


def test_pixels_by_hand() -> None:
    x = torch.tensor([[0, 255, 10, 20]], dtype=torch.uint8)
    params = {"weight": torch.tensor([2.0, 0.5]), "bias": torch.tensor([1.0, -1.0])}
    assert value("FusedMMInputNorm", {"pixel_values": x}, params=params).tolist() == [[1.0, 511.0, 4.0, 9.0]]


def test_collectives_by_hand() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    assert collectives.all_reduce(parts).value.tolist() == [11.0, 22.0]
    assert collectives.all_gather(parts).value.tolist() == [1.0, 2.0, 10.0, 20.0]
    assert collectives.reduce_scatter(parts, 1).value.tolist() == [22.0]


def test_aten_calls_itself_in_float64() -> None:
    def aten(name: str, *args: Any, **kwargs: Any) -> dict[str, Expected]:
        found = TABLE.evaluate(Call(name, name, args=args, kwargs=kwargs))
        if isinstance(found, Declined):
            raise found
        return found

    a, b = draw(3, 4).bfloat16(), draw(4, 2).bfloat16()
    same(aten("aten.mm", a, b)["output.0"].value, a.double() @ b.double())
    two = aten("torch.ops.aten.max.dim", a, 1)
    assert two["output.1"].value.tolist() == a.double().max(1).indices.tolist()
    low = aten("aten._to_copy.default", a, dtype=torch.float16)
    assert low["output.0"].value.dtype == torch.float64
    turned = aten("aten.mul.Tensor", torch.tensor([1j]), torch.tensor([1j]))
    assert turned["output.0"].value.tolist() == [-1 + 0j]
    for name, why in (("aten.rand_like", "random"), ("aten.empty_like", "no defined"), ("aten.nothing", "no operator"),
                      ("aten.mm.nope", "no operator"), ("aten.mm", "refuses")):  # fmt: skip
        with pytest.raises(Declined, match=why):
            aten(name, a)


# --- the contract ---------------------------------------------------------------------------------------------------


def test_a_users_reference_in_ten_lines_and_what_wins() -> None:
    from vllm_accprobe.opcheck.reference import reference

    @reference("torch.ops.vendor.twice", "RMSNorm")
    def twice(call: Call) -> torch.Tensor:
        return call.wide("x") * 2

    table = default_references()
    table.add(twice)
    for cls in ("torch.ops.vendor.twice", "RMSNorm"):
        found = table.evaluate(Call("t", cls, {"x": torch.ones(1, 2)}))
        assert not isinstance(found, Declined)
        assert found["output.0"].value.tolist() == [[2.0, 2.0]]
    assert table.find("Gemma3RMSNorm") is TABLE.find("GemmaRMSNorm")
    assert table.find("LlamaRMSNorm") is TABLE.find("Qwen3RMSNorm")


def test_a_device_kernel_is_found_as_a_reference_is_and_is_none() -> None:
    @device_kernel("RMSNorm", "Half*")
    def here(call: Call) -> torch.Tensor:
        return call.tensor("x") / 2

    table = default_references()
    table.add(here)
    for cls in ("RMSNorm", "HalfNorm"):  # in the place of ours, and beside it
        found = table.run(Call("t", cls, {"x": torch.ones(2, dtype=torch.bfloat16)}))
        assert not isinstance(found, Declined)
        assert (found["output.0"].dtype, found["output.0"].tolist()) == (torch.bfloat16, [0.5, 0.5])
    assert table.find("RMSNorm") is TABLE.find("RMSNorm")
    assert isinstance(table.find("HalfNorm"), Declined)
    missing = table.run(Call("t", "RMSNorm"))
    assert isinstance(missing, Declined)
    assert missing.reason == "input x was not captured"
    assert isinstance(table.run(Call("t", "LlamaMLP")), Declined)  # a block has a reference and no kernel
    with pytest.raises(ValueError, match="at least one name"):
        device_kernel()


def test_a_lookup_declines_and_a_crash_is_a_value() -> None:
    def broken(call: Call) -> torch.Tensor:
        raise RuntimeError("two\nlines")

    from vllm_accprobe.opcheck.reference import reference

    table = References([reference("Broken")(broken)])
    missing, crash = (table.evaluate(Call("t", cls)) for cls in ("Unknown", "Broken"))
    assert isinstance(missing, Declined)
    assert (missing.reason, missing.failed) == ("no reference for Unknown", False)
    assert isinstance(crash, Declined)
    assert (crash.reason, crash.failed) == ("the reference failed: RuntimeError: two lines", True)
    with pytest.raises(ValueError, match="no function marked"):
        References([math])
