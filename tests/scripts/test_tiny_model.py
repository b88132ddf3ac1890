"""The tiny models: the same bytes each time, a tokenizer that loses nothing, and names that say what is missing."""

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
import tiny_model


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
