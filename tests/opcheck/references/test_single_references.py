"""References by hand: samplers, adapters, aten's operators, gradients of what autograd saved."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_verdict import judged
from opcheck.samples.modules import adapters
from opcheck.samples.sample import Draw
from reference_calls import drawer, evaluated, same

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.gradients import by_torch, exact_gradients
from vllm_accprobe.opcheck.references.linear import NO_ADAPTER_KNOWN, RowAdapters
from vllm_accprobe.opcheck.references.parts import param_if
from vllm_accprobe.opcheck.roundings import within_float32

draw = drawer(5)


def test_a_parameter_that_a_kernel_packed_is_no_missing_one() -> None:
    call = Call("t", "T", params={"weight": torch.ones(0)})
    assert param_if(call, "scale") is None
    with pytest.raises(Declined, match="parameter weight was packed"):
        param_if(call, "weight")


def test_a_norm_hands_on_the_residuals_that_it_gets() -> None:
    x, r = draw(2, 4), draw(2, 4)
    call = Call("n", "LayerNorm", {"hidden_states": x, "residuals": r}, attrs={"variance_epsilon": 1e-5},
                outputs={"output.0": x, "output.1": r})  # fmt: skip
    assert torch.equal(evaluated(call)["output.1"].value, r)
    assert "output.1" not in evaluated(replace(call, inputs={"hidden_states": x}))


def test_the_best_logits_and_ties() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 2.0], [2.0, 2.0, 1.0, 0.0]])
    call = Call("s", "Sampler", outputs={"output.top_logits": logits.topk(2).values}, extra={"logits": logits})
    found = evaluated(call)
    assert found["output.top_logits"].value.tolist() == [[5.0, 3.0], [2.0, 2.0]]
    assert found["output.top_ids"].value[0].tolist() == [1, 2]
    assert found["output.top_ids"].rows.tolist() == [True, False]
    assert "output.token" not in found


def test_rows_whose_adapter_is_not_known_are_left_out_and_the_others_judged() -> None:
    call = adapters(Draw(3), "", "down_proj").call
    names = ("a", None, "never seen", "", *("b",) * 20)
    found = evaluated(replace(call, extra={"adapters": RowAdapters(names, call.extra["adapters"].weights)}))["output.0"]
    assert (found.rows.tolist(), found.reason) == ([True, False, False, True] + [True] * 20, NO_ADAPTER_KNOWN)


def test_aten_calls_itself_in_float64() -> None:
    def aten(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [e.value for e in evaluated(Call(name, name, args=args, kwargs=kwargs)).values()]

    a, b = draw(3, 4).bfloat16(), draw(4, 2).bfloat16()
    same(aten("aten.mm", a, b)[0], a.double() @ b.double())
    assert aten("torch.ops.aten.max.dim", a, 1)[1].tolist() == a.double().max(1).indices.tolist()
    assert aten("aten._to_copy.default", a, dtype=torch.float16)[0].dtype == torch.float64
    assert aten("aten.mul.Tensor", torch.tensor([1j]), torch.tensor([1j]))[0].tolist() == [-1 + 0j]
    for name, why in (("aten.rand_like", "random"), ("aten.empty_like", "no defined"), ("aten.nothing", "no operator"),
                      ("aten.mm.nope", "no operator"), ("aten.mm", "refuses")):  # fmt: skip
        with pytest.raises(Declined, match=why):
            aten(name, a)


@pytest.mark.parametrize("captured", [True, False])
def test_torchs_own_softmax_backward_is_right(captured: bool) -> None:
    """Of sharp rows it is off by what rounding their probabilities costs; a gradient with a scale is still wrong."""
    leaf, up = (8 * draw(64, 512)).bfloat16().requires_grad_(), draw(64, 512).bfloat16()
    y = torch.softmax(leaf, -1)
    (mine,) = torch.autograd.grad(y, leaf, up)
    call = Call("m", "aten._softmax", args=(leaf.detach(), -1, False))
    exact = exact_gradients(call, by_torch, {"output.0": up}, {"output.0": y.detach()} if captured else None)["input.0"]
    exact = replace(exact, common=unit("bfloat16"))
    assert judged(exact, mine).passed
    assert not judged(exact, 1.1 * mine).passed


ROWS = torch.ones(3, 8, dtype=torch.bfloat16)
ROWS[1] = 1e20
W, ZERO = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
EPS = {"variance_epsilon": 1e-5, "eps": 1e-5}
NORMS = {
    **{cls: Call("n", cls, {"x": ROWS, **more}, attrs={**EPS, **attrs}, params={"weight": W}, config={"n_groups": 2},
                 extra={"ranks": []}, outputs={"output.0": ROWS})
       for cls, more, attrs in (
           ("RMSNorm", {}, {}), ("GemmaRMSNorm", {"residual": ROWS}, {}), ("LayerNorm", {}, {}),
           ("RMSNormGated", {"z": W.expand(3, 8)}, {"norm_before_gate": True}), ("FusedRMSNormGated", {}, {}),
           ("Mixer2RMSNormGated", {"gate": W.expand(3, 8)}, {}), ("GroupNorm", {}, {"num_groups": 2}))},
    **{name: Call("n", name, args=args, outputs={role: ROWS})
       for name, role, args in (
           ("torch.ops._C.rms_norm", "inplace.input.0", (ROWS, ROWS, W, 1e-5)),
           ("aten.native_layer_norm.default", "output.0", (ROWS, [8], W, W, 1e-5)),
           ("torch.ops.aten.group_norm.default", "output.0", (ROWS, 2, W, W)),
           ("aten.native_group_norm", "output.0", (ROWS, W, W, 3, 8, 1, 2, 1e-5)),
           ("Functional.layer_norm", "output.0", (ROWS, (8,))), ("Torch.rms_norm", "output.0", (ROWS, (8,))),
           ("npu_rms_norm", "output.1", (ROWS, W)), ("npu_deep_norm", "output.2", (ROWS, ROWS, ZERO, W)),
           ("npu_group_norm_silu", "output.0", (ROWS, W, W, 2)))},
    **{f"{cls} {role}": Call("n", cls, dict(zip("0123", inputs, strict=False)), attrs={"param": param},
                             outputs={"output.0": ROWS, "output.1": ROWS[:, :1].float()})
       for cls, role, inputs, param in (
           ("RmsNormOperation", "output.0", (ROWS, W), {"layerType": 1}),
           ("RmsNormOperation", "output.1", (ROWS, W), {"layerType": 1, "normParam": {"rstd": True}}),
           ("LayerNormOperation", "output.0", (ROWS, W, ZERO), {"layerType": 1, "normParam": {"beginNormAxis": 1}}),
           ("CohereLayerNormOperation", "output.0", (ROWS, W), {}))},
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_row_whose_squares_overflow_float32_has_no_reference(name: str) -> None:
    found = evaluated(NORMS[name])
    one = found[name.split()[1] if " " in name else next(iter(NORMS[name].outputs))]
    assert (one.rows.tolist(), one.reason) == ([True, False, True], "its squares overflow float32")


def test_a_group_that_overflows_beside_one_with_nan() -> None:
    x = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[1e20, 1.0], [math.nan, 1.0]]], dtype=torch.float64)
    found = within_float32(Expected(x), x)
    assert found.rows is not None
    assert found.rows.tolist() == [True, False]
