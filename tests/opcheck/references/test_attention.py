"""Attention, rotary embeddings and latent attention against torch's and transformers' own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.opcheck.calls.history import INCOMPLETE, Past
from vllm_accprobe.opcheck.floors.verdict import judge
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references import rotary
from vllm_accprobe.opcheck.references.attention import alibi_slopes, attend
from vllm_accprobe.opcheck.registry import default_references

G = torch.Generator().manual_seed(9)
TABLE = default_references()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def run(call: Call) -> dict[str, Expected]:
    found = TABLE.evaluate(call)
    if isinstance(found, Declined):
        raise found
    return found


def sdpa(q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    """torch's own, on [rows, heads, d]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **more).transpose(0, 1)


# --- attend ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (4, 1)])
def test_causal_heads_and_windows_by_torch(heads: int, kv: int, window: int | None) -> None:
    q, k, v = draw(3, heads, 8), draw(10, kv, 8), draw(10, kv, 5)
    positions = torch.tensor([2, 7, 9])
    mask = torch.arange(10)[None] <= positions[:, None]
    if window:
        mask &= torch.arange(10)[None] > positions[:, None] - window
    got, *_ = attend(q, k, v, 0.3, positions, window=window)
    torch.testing.assert_close(got, sdpa(q, k, v, mask, scale=0.3), rtol=1e-12, atol=1e-12)


def test_alibi_by_torch_and_slopes_by_hand() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    q, k, v = draw(4, 2, 8), draw(4, 2, 8), draw(4, 2, 8)
    slopes, at = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.arange(4)
    bias = slopes[:, None, None] * (at[None] - at[:, None]) + torch.where(at[None] <= at[:, None], 0.0, -math.inf)
    got, *_ = attend(q, k, v, 1.0, at, slopes=slopes)
    torch.testing.assert_close(got, sdpa(q, k, v, bias, scale=1.0), rtol=1e-12, atol=1e-12)


def test_soft_cap_and_sinks_by_hand() -> None:
    q, k = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64)
    a, b = (2 * math.tanh(x / 2) for x in (1.0, 3.0))
    got, *_ = attend(q, k, v, 1.0, cap=2.0)
    assert got.item() == pytest.approx(math.exp(a) / (math.exp(a) + math.exp(b)), rel=1e-12)
    got, *_ = attend(q, k, v, 1.0, sinks=torch.tensor([2.0], dtype=torch.float64))
    assert got.item() == pytest.approx(math.e / (math.e + math.exp(3) + math.exp(2)), rel=1e-12)


def test_noise_is_what_rounded_probabilities_do() -> None:
    """200 draws of probabilities off by up to step, evenly, and divided by their own sum or by that of the exact ones:
    the larger spread is what attend says."""
    q, k, v = draw(2, 1, 8), draw(12, 1, 8), draw(12, 1, 4)
    exact, noise, _ = attend(q, k, v, 1.0, step=1e-3)
    p = torch.softmax((q[:, 0] @ k[:, 0].T), -1)
    errors: tuple[list[torch.Tensor], ...] = ([], [])
    for _ in range(200):
        w = p * (1 + 1e-3 * (2 * torch.rand(p.shape, dtype=torch.float64) - 1))
        errors[0].append((w / w.sum(-1, keepdim=True)) @ v[:, 0] - exact[:, 0])
        errors[1].append(w @ v[:, 0] - exact[:, 0])
    ratio = torch.maximum(*(torch.stack(e).std(0) for e in errors)) / noise[:, 0]
    assert 0.8 < float(ratio.min()) < float(ratio.max()) < 1.25


# --- rows of several requests ---------------------------------------------------------------------------------------


def space(*spans: tuple[int, int, int]) -> RowSpace:
    return RowSpace(0, "tokens", 0, tuple(Segment(r, p, n, 0) for r, p, n in spans))


def test_a_cache_is_put_together_and_gaps_are_said() -> None:
    past, x = Past(("key",)), torch.arange(12.0).reshape(12, 1)
    past.write(space((0, 0, 3), (1, 0, 2)), {"key": x[:5]})
    past.write(space((0, 3, 1), (1, 4, 1)), {"key": x[5:7]})
    view = past.view(space((0, 3, 1), (1, 4, 1)))
    found = list(view.requests())
    assert [(at.tolist(), pos.tolist(), held["key"].flatten().tolist()) for at, pos, held in found] == [
        ([0], [3], [0.0, 1.0, 2.0, 5.0])
    ]
    assert view.why == INCOMPLETE
    past.write(space((0, 2, 2)), {"key": x[8:10]})  # computed again
    (_, _, held), *_ = past.view(space((0, 3, 1))).requests()
    assert held["key"].flatten().tolist() == [0.0, 1.0, 8.0, 9.0]


def attention_call(**attrs: Any) -> tuple[Call, torch.Tensor]:
    """Request 0: positions 4 and 5 of 6; request 1: all 3. Two heads of 4, one key head; and what torch makes of it."""
    k, v, q = {0: draw(6, 1, 4), 1: draw(3, 1, 4)}, {0: draw(6, 1, 4), 1: draw(3, 1, 4)}, draw(5, 2, 4)
    past = Past(("key", "value"))
    past.write(space((0, 0, 4)), {"key": k[0][:4], "value": v[0][:4]})
    here = space((0, 4, 2), (1, 0, 3))
    inputs = {"key": torch.cat((k[0][4:], k[1])), "value": torch.cat((v[0][4:], v[1])), "query": q}
    past.write(here, inputs)
    window = attrs.get("sliding_window", 99)
    out = []
    for r, rows, positions in ((0, q[:2], [4, 5]), (1, q[2:], [0, 1, 2])):
        at, keys = torch.tensor(positions)[:, None], torch.arange(len(k[r]))[None]
        out.append(sdpa(rows, k[r], v[r], (keys <= at) & (keys > at - window), scale=0.7))
    theirs = torch.cat(out).reshape(5, 8)
    attrs = {"num_heads": 2, "num_kv_heads": 1, "head_size": 4, **attrs}
    inputs = {n: t.reshape(5, -1) for n, t in inputs.items()}
    call = Call("t.attn", "Attention", inputs, attrs=attrs, parent={"scaling": 0.7}, outputs={"output.0": theirs},
                extra={"cache": past.view(here)})  # fmt: skip
    return call, theirs


@pytest.mark.parametrize("attrs", [{}, {"sliding_window": 3}, {"sliding_window": [2, -1]}])
def test_requests_in_one_batch_do_not_see_each_other(attrs: dict[str, Any]) -> None:
    call, _ = attention_call(**({} if not attrs else {"sliding_window": 3}))
    call = Call(**{**call.__dict__, "attrs": {**call.attrs, **attrs}})
    found = run(call)["output.0"]
    torch.testing.assert_close(found.value, call.outputs["output.0"], rtol=1e-12, atol=1e-12)
    assert bool(found.rows.all())


def test_encoders_keep_to_their_runs() -> None:
    q, k, v = draw(1, 7, 2, 4), draw(1, 7, 2, 4), draw(1, 7, 2, 4)
    theirs = torch.cat([sdpa(q[0, a:b], k[0, a:b], v[0, a:b], None) for a, b in ((0, 3), (3, 7))])[None]
    inputs = {"query": q, "key": k, "value": v, "cu_seqlens": torch.tensor([0, 3, 7])}
    attrs = {"num_heads": 2, "num_kv_heads": 2, "head_size": 4, "scale": 0.5}
    call = Call("t", "MMEncoderAttention", inputs, attrs=attrs, outputs={"output.0": theirs})
    torch.testing.assert_close(run(call)["output.0"].value, theirs, rtol=1e-12, atol=1e-12)
    short = Call("t", "MMEncoderAttention", {**inputs, "cu_seqlens": torch.tensor([0, 3])}, attrs=attrs,
                 outputs={"output.0": theirs})  # fmt: skip
    with pytest.raises(Declined, match="not all rows"):
        run(short)


@pytest.mark.parametrize("absorbed", [True, False])
def test_latent_attention_by_torch(absorbed: bool) -> None:
    """Explicit keys and values from kv_b_proj, handed to torch's attention."""
    heads, nope, rope, latent, width, n = 2, 6, 4, 10, 5, 8
    w = draw(heads * (nope + width), latent)
    q, c, pe = draw(n, heads, nope + rope), draw(n, latent), draw(n, 1, rope)
    kv = (c @ w.T).reshape(n, heads, nope + width)
    k = torch.cat((kv[..., :nope], pe.expand(-1, heads, -1)), -1)
    theirs = sdpa(q, k, kv[..., nope:], torch.ones(n, n, dtype=torch.bool).tril(), scale=0.2).reshape(n, -1)
    past, here = Past(("kv_c_normed", "k_pe")), space((0, 0, n))
    inputs = {"q": q, "kv_c_normed": c, "k_pe": pe}
    past.write(here, inputs)
    parts = w.reshape(heads, nope + width, latent)
    params = {"W_UK_T": parts[:, :nope], "W_UV": parts[:, nope:].transpose(1, 2)} if absorbed else {}
    call = Call("t", "MLAAttention", inputs, params=params, attrs={"num_heads": heads, "scale": 0.2},
                outputs={"output.0": theirs}, extra={"cache": past.view(here), "kv_b_proj": w})  # fmt: skip
    torch.testing.assert_close(run(call)["output.0"].value, theirs, rtol=1e-12, atol=1e-12)


# --- rotary ---------------------------------------------------------------------------------------------------------

_SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
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

    more = {"rope_type": kind, "rope_theta": 500.0, **_SCALED[kind]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_theta=500.0)
    config.rope_parameters = config.rope_scaling = more
    q, k, at = draw(6, 4, 16), draw(6, 2, 16), torch.tensor([0, 1, 7, 63, 100, 255])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), at[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos.double(), sin.double())
    attrs = {"head_size": 16, "rotary_dim": 16, "base": 500.0, "is_neox_style": True, "max_position_embeddings": 64}
    inputs = {"positions": at, "query": q.reshape(6, -1), "key": k.reshape(6, -1)}
    found = run(Call("r", _CLASSES[kind], inputs, attrs=attrs, config={"rope_scaling": more}))
    for role, expected in zip(("output.0", "output.1"), theirs, strict=True):
        got = found[role].value.reshape(6, -1, 16)
        # theirs has float32 angles: 255 * 2**-24 and some roundings
        torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=2e-4)
    assert found["inplace.query"].value is found["output.0"].value


def test_dynamic_scaling_by_hand() -> None:
    got = rotary.dynamic_frequencies(4, 100.0, 2.0)
    assert got.tolist() == pytest.approx([1.0, (100.0 * 3.0**2) ** -0.5])  # factor² - (factor - 1) = 3, exponent 4 / 2


def test_pairs_of_neighbours_and_what_lies_past_rotary_dim() -> None:
    """GPT-J: (x0, x1) by p, (x2, x3) by p / 10; channels 4 and 5 stay."""
    x, p = torch.tensor([[1.0, 0.0, 0.0, 1.0, 7.0, 8.0]]), 2
    attrs = {"head_size": 6, "rotary_dim": 4, "base": 100.0, "is_neox_style": False, "max_position_embeddings": 9}
    found = run(Call("r", "RotaryEmbedding", {"positions": torch.tensor([p]), "query": x}, attrs=attrs))
    expected = [math.cos(2), math.sin(2), -math.sin(0.2), math.cos(0.2), 7.0, 8.0]
    assert found["output.0"].value[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert found["output.0"].noise[0, 4:].tolist() == [0.0, 0.0]


def test_positions_of_pictures_are_dealt_out_by_sections() -> None:
    angle = torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 6) * 100 + torch.arange(6.0)
    assert rotary.sections(angle, [1, 2, 3], False)[0].tolist() == [0.0, 101.0, 102.0, 203.0, 204.0, 205.0]
    assert rotary.sections(angle, [2, 2, 2], True)[0].tolist() == [0.0, 101.0, 202.0, 3.0, 104.0, 205.0]


def test_unknown_scaling_is_declined() -> None:
    attrs = {"head_size": 4, "rotary_dim": 4, "base": 10.0}
    inputs = {"positions": torch.tensor([1]), "query": draw(1, 4)}
    for cls, why in (("Llama3RotaryEmbedding", "neither recorded"), ("DualChunkRotaryEmbedding", "not known")):
        with pytest.raises(Declined, match=why):
            run(Call("r", cls, inputs, attrs=attrs))


def test_given_cosines_by_transformers() -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    x, angle = draw(5, 2, 8), draw(5, 4)
    cos, sin = angle.cos(), angle.sin()
    theirs, _ = apply_rotary_pos_emb_vision(x[None], x[None], torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    found = run(Call("r", "ApplyRotaryEmb", {"x": x[None], "cos": cos, "sin": sin}, attrs={"is_neox_style": True}))
    torch.testing.assert_close(found["output.0"].value, theirs.double(), rtol=0, atol=1e-6)


# --- torch's own operators ------------------------------------------------------------------------------------------

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def flash(seed: int, n: int = 300, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Call:
    """A call of torch's kernel, two thirds of whose rows lie beyond the first block of keys."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 4, n, 64, generator=g).to(dtype) for _ in range(3))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, **how)
    return Call("a", _FLASH, args=(q, k, v, 0.0, True), kwargs=how, outputs={"output.0": out, "output.1": lse})


def worst(call: Call) -> list[float]:
    """Of both outputs, the worst measure over what it may be."""
    found = run(call)
    verdicts = []
    for role, width in (("output.0", 64), ("output.1", 300)):
        e, mine = found[role], call.outputs[role]
        assert e.noise is not None
        verdicts.append(judge(e.value.reshape(-1, width), mine.double().reshape(-1, width),
                              str(mine.dtype).removeprefix("torch."), noise=e.noise.reshape(-1, width)))  # fmt: skip
    return [v.value / v.limit for v in verdicts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_torchs_own_kernels_are_within_their_roundings(seed: int, dtype: torch.dtype) -> None:
    assert max(worst(flash(seed, dtype=dtype))) < 0.9


@pytest.mark.parametrize(("factor", "least"), [(1.02, 1.5), (0.98, 1.5), (1.1, 8.0)])
def test_a_scale_that_is_off_shows(factor: float, least: float) -> None:
    wrong = flash(1, scale=factor / 8)
    call = Call("a", _FLASH, args=wrong.args, outputs=wrong.outputs)
    assert min(worst(call)) > least


def test_masks_shared_heads_and_overloads_of_torchs_operators() -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 6)
    seen = torch.rand(2, 1, 5, 9, generator=G) < 0.7
    seen[..., 0] = True
    added = torch.where(seen, 0.25, -math.inf).double()
    for mask in (seen, added, None):
        exact = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
        call = Call("a", "aten.scaled_dot_product_attention.default", args=(q, k, v, mask),
                    kwargs={"scale": 0.3, "enable_gqa": True}, outputs={"output.0": exact})  # fmt: skip
        torch.testing.assert_close(run(call)["output.0"].value, exact, rtol=1e-12, atol=1e-12)
    dropped = Call("a", "aten.scaled_dot_product_attention", args=(q, k, v, None, 0.1), outputs={"output.0": exact})
    with pytest.raises(Declined, match="random"):
        run(dropped)
