"""Rotary embeddings against transformers' and by hand."""

import pytest
import torch
from reference_calls import drawer, evaluated

from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references import rotary

draw = drawer(9)
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
