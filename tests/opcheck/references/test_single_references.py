"""References by hand, and what right kernels do that samples do not: rotary embeddings by transformers, products and
shared parameters in blocks, aten's operators and their roundings on the way, the order of equal values."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opcheck.samples.modules import adapters
from opcheck.samples.sample import Draw
from reference_calls import drawer, evaluated, judged, same

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.calls.grid import lies_on
from vllm_accprobe.opcheck.floors.verdict import judge
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, Params
from vllm_accprobe.opcheck.references import aten, quantised, rotary
from vllm_accprobe.opcheck.references.aten import Widened, itself
from vllm_accprobe.opcheck.references.gradients import by_torch, exact_gradients
from vllm_accprobe.opcheck.references.linear import NO_ADAPTER_KNOWN, RowAdapters, column, in_blocks, looked_up
from vllm_accprobe.opcheck.roundings import within_float32

draw = drawer(5)


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


@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (8, 24), (2, 5, 24), (0, 24), (24,)])
def test_rows_of_zeros_that_fill_a_block_are_not_seen(shape: tuple[int, ...]) -> None:
    x, right = draw(*shape), draw(24, 7)
    found = in_blocks(x, right)
    assert found.shape == (x @ right).shape
    torch.testing.assert_close(found, x @ right, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_that_is_widened_by_columns_gives_the_same(dtype, monkeypatch):
    x, w, b = draw(11, 24).to(dtype), draw(50, 24).to(dtype), draw(50).to(dtype)

    def expected() -> Expected:
        params, outputs = {"weight": w, "bias": b}, {"output.0": F.linear(x, w, b)}
        return column(Call("t", "Linear", {"input": x}, params=params, outputs=outputs))["output.0"]

    whole = expected()
    monkeypatch.setattr(quantised, "WIDE", 1)
    monkeypatch.setattr(quantised, "COLUMNS", 24 * 7)
    parts = expected()
    same(parts.value, whole.value)
    if dtype == torch.float32:
        assert torch.allclose(parts.noise, whole.noise, rtol=1e-5)
        assert torch.allclose(parts.bound, whole.bound, rtol=1e-5)
    else:  # an upper bound of what sums leave, which is far below what the last rounding does
        assert bool((parts.noise >= whole.noise * (1 - 1e-6)).all())
        assert bool((parts.bound >= whole.bound * (1 - 1e-6)).all())
        assert bool((parts.noise <= 2.0 * whole.noise).all())


def _same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for role in a:
        for name in ("value", "noise", "bound"):
            x, y = getattr(a[role], name), getattr(b[role], name)
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_of_a_shared_weight(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(130, 96, generator=generator).bfloat16()
    params = Params()
    shared = params.share("weight", lambda: weight.T)
    for _ in range(3):  # the second and the third from what is kept
        x = torch.randn(rows, 96, generator=generator).bfloat16()
        y = x @ weight.T
        made = Call("tap", "aten.mm.default", args=(x, shared), outputs={"output.0": y}, params=params)
        _same(evaluated(made), evaluated(Call("tap", "aten.mm.default", args=(x, weight.T), outputs={"output.0": y})))


def test_the_signs_follow_from_all_lengths_before() -> None:
    weight, params = torch.randn(64, 64), Params()
    shared = params.share("weight", lambda: weight)
    moved = []
    for rows in (2, 5, 2):
        widened = Widened(
            Call("tap", "aten.mm.default", args=(), params=params), aten.of("aten.mm.default"), torch.float64, None
        )
        widened.moved(torch.randn(rows, 64))
        moved.append(widened.moved(shared))
    assert moved[0] is moved[2]
    assert not torch.equal(moved[0], moved[1])
    assert (moved[0] / weight - 1.0).abs().max() <= 2.0**-23


def test_what_an_operator_writes_to_is_its_own() -> None:
    total, params = torch.ones(4, 4), Params()
    shared = params.share("total", lambda: total)
    for _ in range(2):
        call = Call("tap", "aten.add_.Tensor", args=(shared, torch.ones(4, 4)), params=params,
                    outputs={"output.0": torch.full((4, 4), 2.0)})  # fmt: skip
        assert torch.equal(evaluated(call)["output.0"].value, torch.full((4, 4), 2.0).double())
    assert torch.equal(total, torch.ones(4, 4))


def test_what_is_too_large_is_made_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_accprobe.opcheck.reference._KEPT", 12)  # bytes
    params, make = Params(), lambda: torch.zeros(2)
    small = params.once("b", make)
    assert params.once("b", make) is small
    assert params.once("a", make) is not params.once("a", make)
    assert params.share("a", make) is not params.share("a", make)
    assert not params.shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_of_a_table_before_they_are_made_wide(dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 8).to(dtype), torch.tensor([3, 49, 0, 60])
    wide = table.double()
    assert torch.equal(looked_up(ids, table), torch.cat((wide[ids[:3]], torch.zeros(1, 8, dtype=torch.float64))))
    assert torch.equal(looked_up(ids, table, 3)[0], wide[0])


_SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, as gpt-oss": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
_CLASSES = {
    "default": "RotaryEmbedding", "linear": "LinearScalingRotaryEmbedding", "yarn": "YaRNScalingRotaryEmbedding",
    "llama3": "Llama3RotaryEmbedding",
}  # fmt: skip


@pytest.mark.parametrize("kind", _SCALED)
def test_rotary_embeddings_by_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    name = kind.partition(",")[0]
    more = {"rope_type": name, "rope_theta": 500.0, **_SCALED[kind]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_theta=500.0)
    config.rope_parameters = config.rope_scaling = more
    q, k, at = draw(6, 4, 16), draw(6, 2, 16), torch.tensor([0, 1, 7, 63, 100, 255])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), at[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos.double(), sin.double())
    attrs = {"head_size": 16, "rotary_dim": 16, "base": 500.0, "is_neox_style": True, "max_position_embeddings": 64}
    inputs = {"positions": at, "query": q.reshape(6, -1), "key": k.reshape(6, -1)}
    found = evaluated(Call("r", _CLASSES[name], inputs, attrs=attrs, config={"rope_scaling": more}))
    for role, expected in zip(("output.0", "output.1"), theirs, strict=True):
        got = found[role].value.reshape(6, -1, 16)
        # theirs has float32 angles: 255 * 2**-24 and some roundings
        torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=2e-4)
    assert found["inplace.query"].value is found["output.0"].value


@pytest.mark.parametrize("long", [True, False])
def test_long_rope_by_hand(long: bool) -> None:
    attrs = {"base": 100.0, "use_long_rope": long, "long_factor": [1.0, 4.0], "short_factor": [1.0, 2.0],
             "long_mscale": 1.5, "short_mscale": 1.25}  # fmt: skip
    frequencies, size = rotary.angles_of(Call("r", "Phi3LongRoPEScaledRotaryEmbedding", attrs=attrs), 4)
    assert (frequencies.tolist(), size) == (([1.0, 0.025], 1.5) if long else ([1.0, 0.05], 1.25))


def test_proportional_by_hand() -> None:
    """The exponents are of the whole head, a part of which turns."""
    attrs = {"base": 16.0, "rope_angles": 3}
    frequencies, size = rotary.angles_of(Call("r", "Gemma4RotaryEmbedding", attrs=attrs), 8)
    assert (frequencies.tolist(), size) == ([1.0, 0.5, 0.25, 0.0], 1.0)


def test_dynamic_scaling_by_hand() -> None:
    got = rotary.dynamic_frequencies(4, 100.0, 2.0)
    assert got.tolist() == pytest.approx([1.0, (100.0 * 3.0**2) ** -0.5])  # factor² - (factor - 1) = 3, exponent 4 / 2


def test_positions_of_pictures_are_dealt_out_by_sections() -> None:
    angle = torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 6) * 100 + torch.arange(6.0)
    assert rotary.sections(angle, [1, 2, 3], False)[0].tolist() == [0.0, 101.0, 102.0, 203.0, 204.0, 205.0]
    assert rotary.sections(angle, [2, 2, 2], True)[0].tolist() == [0.0, 101.0, 202.0, 3.0, 104.0, 205.0]


G = torch.Generator().manual_seed(0)
X, A, B = (torch.randn(*s, generator=G).bfloat16() for s in ((8, 64), (8, 32), (32, 64)))
INDEX = torch.arange(8) % 2
START = torch.zeros(2, 64).bfloat16()


def scan(x: torch.Tensor) -> torch.Tensor:
    """Each partial sum rounded, as PyTorch's CUDA scan of bfloat16."""
    total, sums = torch.zeros_like(x[:, 0]), []
    for part in x.unbind(1):
        total = total + part
        sums.append(total)
    return torch.stack(sums, 1)


def atomics(x: torch.Tensor) -> torch.Tensor:
    total = START.clone()
    for k, row in zip(INDEX.tolist(), x, strict=True):
        total[k] = total[k] + row
    return total


CASES: dict[str, tuple[tuple[Any, ...], Callable[[], torch.Tensor], torch.Tensor]] = {
    "aten.addmm.default": ((X, A, B), lambda: X + (A @ B), X.float() + A.float() @ B.float()),
    "aten.cumsum.default": ((X, 1), lambda: scan(X), X.float().cumsum(1)),
    "aten.index_add.default": ((START, 0, INDEX, X), lambda: atomics(X), atomics(X).float()),
}
"""By operator: its arguments, what a device gives, and what is right."""


@pytest.mark.parametrize("name", CASES)
def test_roundings_on_the_way_pass_and_a_wrong_number_does_not(name: str) -> None:
    args, device, right = CASES[name]
    mine = device()
    passed = []
    for captured in (mine, (1.02 * right).bfloat16()):
        y = itself(Call("t", name, args=args, outputs={"output.0": captured}))["output.0"]
        passed.append(judge(y.value, captured.double(), "bfloat16", noise=y.noise, common=y.common).passed)
    assert passed == [True, False]


@pytest.mark.parametrize("alpha", [-1, 100])
def test_a_factor_of_what_is_added_is_no_count(alpha: int) -> None:
    noise = [itself(Call("t", "aten.index_add.default", args=(START, 0, INDEX, X), kwargs={"alpha": a},
                         outputs={"output.0": START}))["output.0"].noise for a in (1, alpha)]  # fmt: skip
    torch.testing.assert_close(noise[1], abs(alpha) * noise[0])


def test_memory_that_beta_leaves_out_is_no_noise() -> None:
    call = Call("t", "aten.addmm.default", args=(torch.full_like(X, torch.nan), A, B), kwargs={"beta": 0, "alpha": 1},
                outputs={"output.0": A @ B})  # fmt: skip
    y = itself(call)["output.0"]
    assert judge(y.value, (A @ B).double(), "bfloat16", noise=y.noise, common=y.common).passed


@pytest.mark.parametrize(
    ("captured", "right"),
    [([1, 0, 2, 3], True), ([0, 1, 3, 2], True), ([0, 0, 2, 3], False), ([2, 1, 0, 3], False), ([0, 1, 2, 9], False)],
)
def test_equal_values_may_stand_in_any_order_once(captured: list[int], right: bool) -> None:
    x = torch.tensor([[1.0, 1.0, 2.0, 2.0]])
    mine = torch.tensor([captured])
    call = Call("t", "aten.sort.default", args=(x,), outputs={"output.0": x, "output.1": mine})
    assert torch.equal(itself(call)["output.1"].value, mine) is right


def test_eight_bits_are_on_a_grid() -> None:
    assert lies_on(X.to(torch.float8_e4m3fn)) == "float8_e4m3fn"
