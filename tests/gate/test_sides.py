"""What a side is, by its text; whole gates are in tests/cli/test_gate_servers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_accprobe.gate.sides import SideError, side


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
