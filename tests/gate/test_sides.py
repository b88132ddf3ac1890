"""What a side is, by its text; whole gates are in tests/cli/test_gate_servers.py."""

import json
from pathlib import Path

import pytest

from vllm_accprobe.gate.sides import SideError, candidates, command, of_command, side


def test_a_folder_a_url_or_what_has_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a folder").mkdir()
    assert [side(text).kind for text in ("a folder", "http://h:1", "https://h/x", " vllm serve M ")] == [
        "folder", "url", "url", "command"
    ]  # fmt: skip
    with pytest.raises(SideError, match="no folder of accprobe send, no URL"):
        side("nowhere")


def test_what_a_command_says_of_itself_holds_no_key() -> None:
    one = side("vllm serve org/model --api-key secret --dtype=float16")
    assert (str(one), repr(one)) == ("vllm serve org/model", "ServerSide(command)")
    assert one.digest != side("vllm serve org/model").digest


def test_what_is_set_in_front_of_a_command_is_not_shown() -> None:
    """It may be a key."""
    assert str(side("VLLM_API_KEY=secret FAULT='{\"a\": 1}' vllm serve org/model --port 1")) == "vllm serve org/model"
    assert str(side("KEY='secret vllm serve")) == "a command"


# --- in which dtype golden's command is started once more ---


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
