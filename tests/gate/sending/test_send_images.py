"""Pictures that `send` takes from files reach a real vision model, which answers each with tokens of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make
from vllm_server import Server

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import replies

pytestmark = pytest.mark.engine
ONCE = ("--arrive", "one", "--no-score")


def picture(path: Path, seed: int, size: tuple[int, int] = (112, 84)) -> str:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


def test_pictures_of_files(tmp_path: Path, preloaded_vllm: Path, capsys: Any) -> None:
    text = {"prompt": "What is in the picture?", "max_tokens": 4}
    asked: list[dict[str, Any]] = [
        {"id": "none"} | text,
        {"id": "one", "images": [picture(tmp_path / "one.png", 1)]} | text,
        {"id": "other", "images": [picture(tmp_path / "other.jpg", 2)]} | text,
        {"id": "two", "images": ["one.png", picture(tmp_path / "small.png", 3, (56, 56))]} | text,
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    out = tmp_path / "out"
    model = make("qwen2.5-vl", tmp_path / "model")
    args = ["--enforce-eager", "--limit-mm-per-prompt", '{"image": 2}']
    env, vllm = {"OMP_NUM_THREADS": "1"}, preloaded_vllm / "vllm"
    with Server(model, log=tmp_path / "server.log", env=env, args=args, vllm=vllm) as server:
        assert main(["send", str(tmp_path / "p.jsonl"), "--url", server.url, "--out", str(out), *ONCE]) == 0
    assert capsys.readouterr().out.startswith("4 of 4 answered")
    found = replies.read(out).passes[0]
    lengths = {name: len(r.prompt_token_ids or ()) for name, r in found.items()}
    assert lengths["none"] < lengths["one"] == lengths["other"] < lengths["two"]
    assert found["one"].top != found["other"].top  # the same token ids, and other pixels
    assert (out / "prompts.jsonl").read_text().count("data:image/") == 4
    assert (out / "prompts.jsonl").stat().st_mode & 0o777 == 0o600
