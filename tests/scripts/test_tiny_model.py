"""The tiny models: the same bytes each time, a tokenizer that loses nothing, and names that say what is missing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
import tiny_model  # noqa: E402


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_two_makings_are_equal(tmp_path: Path) -> None:
    a, b = tiny_model.make("qwen2", tmp_path / "a"), tiny_model.make("qwen2", tmp_path / "b")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert digest(a / name) == digest(b / name), name
    other = tiny_model.make("qwen2", tmp_path / "c", seed=1)
    assert digest(other / "model.safetensors") != digest(a / "model.safetensors")


def test_a_made_model_is_left_alone_and_a_changed_config_is_not(tmp_path: Path) -> None:
    path = tiny_model.make("qwen2", tmp_path / "m")
    before = (path / "model.safetensors").stat().st_mtime_ns
    tiny_model.make("qwen2", path)
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    tiny_model.make("qwen2", path, num_hidden_layers=2)
    assert (path / "model.safetensors").stat().st_mtime_ns != before


@pytest.mark.parametrize("text", ["The quick brown fox", "naïve — 数字 🙂\n\ttabs", " word3 word17"])
def test_tokenizer_gives_text_back(tmp_path: Path, text: str) -> None:
    path = tiny_model.make("llama", tmp_path / "m")
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tiny_model.VOCAB == tokenizer.get_vocab_size()


def test_special_tokens_have_the_ids_of_the_config(tmp_path: Path) -> None:
    path = tiny_model.make("qwen2.5-vl", tmp_path / "m")
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"]
    assert tokenizer.token_to_id("<|image_pad|>") == config["image_token_id"]
    assert tokenizer.token_to_id("<|vision_start|>") == config["vision_start_token_id"]
