"""Models are trained on the spot: deterministically, once, and into what a checkpoint should be."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import train_tiny  # noqa: E402
from train_tiny import CONFIGS, FIRST_BYTE, library_prompt, make  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_tiny, "BATCH", 2)
    monkeypatch.setattr(train_tiny, "LENGTH", 32)


def test_two_steps_make_a_checkpoint_that_is_the_same_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = [
        load_file(make("trained-qwen2", tmp_path / folder, steps=steps, **SMALL) / "model.safetensors")
        for folder, steps in (("a", 2), ("b", 2), ("c", 1))
    ]
    first, again, fewer = weights
    assert {t.dtype for t in first.values()} == {torch.bfloat16}
    assert "model.layers.1.self_attn.q_proj.bias" in first
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], fewer[name]) for name in first)
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_what_is_trained_already_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("trained-llama", tmp_path, steps=1, **SMALL)
    monkeypatch.setattr(train_tiny, "_train", lambda *_: pytest.fail("trained again"))
    assert make("trained-llama", tmp_path, steps=1, **SMALL) == tmp_path
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        make("trained-llama", tmp_path, steps=2, **SMALL)


def test_experts_are_saved_as_checkpoints_have_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    path = make("trained-qwen2-moe", tmp_path, steps=1, **SMALL, **experts)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in load_file(path / "model.safetensors")


def test_prompts_are_bytes_of_the_library() -> None:
    ids = library_prompt(40, 3)
    assert ids == library_prompt(40, 3) != library_prompt(40, 4)
    assert bytes(i - FIRST_BYTE for i in ids) in train_tiny.library_bytes(train_tiny.ASKED)
    assert max(ids) < min(config["vocab_size"] for config in CONFIGS.values())
