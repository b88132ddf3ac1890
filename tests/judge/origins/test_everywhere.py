"""Faults of every layer."""

from vllm_accprobe.judge.origins.everywhere import in_all_layers


def test_all_layers_or_not():
    ran = [f"model.layers.{i}.{what}" for i in range(3) for what in ("mlp", "attn")] + ["model.norm"]
    named = ["model.layers.0.mlp", "model.norm", "model.layers.2.mlp", "model.layers.0.attn"]
    assert in_all_layers(named, ran) == {}
    assert in_all_layers([*named, "model.layers.1.mlp"], ran) == {
        f"model.layers.{i}.mlp": {"in": 3, "of": 3} for i in (0, 2, 1)
    }
