"""In which dtype golden's command is started once more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_accprobe.gate.sides import candidates, command, of_command


@pytest.mark.parametrize(
    ("golden", "mine", "expected"),
    [
        ("vllm serve M", None, ["float16", "float32"]),
        ("vllm serve M --dtype bfloat16", "vllm serve M --dtype=bfloat16", ["float16", "float32"]),
        ("vllm serve M --dtype bfloat16", "vllm serve M --dtype=float32", ["float32", "float16"]),
        ("vllm serve M --dtype float32", "vllm serve M --dtype=bfloat16", ["bfloat16", "float16"]),
        ("vllm serve M --dtype float32", "vllm serve M --dtype=float32", ["bfloat16", "float16"]),
        ("vllm serve M --dtype half", "vllm serve M --dtype=float16", ["float32", "bfloat16"]),
    ],
)
def test_the_first_that_is_mine_s_or_finer(golden: str, mine: str | None, expected: list[str]) -> None:
    assert candidates(golden, mine) == expected


def test_a_dtype_is_also_the_checkpoint_s(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float16"}))
    assert of_command(f"vllm serve {tmp_path} --dtype auto") == "float16"
    assert of_command(f"python -m vllm.entrypoints.openai.api_server --model {tmp_path}") == "float16"
    assert of_command(f"vllm serve {tmp_path} --dtype=float32") == "float32"
    assert of_command("vllm serve no/such/model") is None
    (tmp_path / "config.json").write_text("[]")
    assert of_command(f"vllm serve {tmp_path}") is None


def test_all_other_words_stay() -> None:
    said = "vllm serve 'a b' --dtype bfloat16 --port=1 --dtype=float16 -tp 2"
    assert command(said, "float32") == "vllm serve 'a b' --port=1 -tp 2 --dtype=float32"
