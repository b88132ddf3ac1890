"""``accprobe gate --self URL`` as typed, of a server that is made up."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_paths import FakePaths

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import replies

SECRET = "a prompt that nobody may see, "


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"{SECRET} {i}" * 6, "max_tokens": 12}) + "\n" for i in range(12))
    )
    return file


@pytest.mark.parametrize("fault", ["", "hit", "batch", "scoring", "decode"])
def test_the_path_is_named(fault: str, prompts: Path, capsys: Any) -> None:
    with FakePaths(fault).serve() as (url, _):
        code = main(["self-check", "--prompts", str(prompts), "--out", "out", url])
    said = capsys.readouterr()
    odd = json.loads(Path("out/self.json").read_text())["odd"]
    assert said.err == ""
    assert SECRET not in said.out
    if fault:
        # Pieces are found in the cache, too; a decode that is wrong shows in scoring alone.
        want = {"hit": ["hit", "pieces"], "decode": ["scoring"]}.get(fault, [fault])
        assert (code, odd) == (1, want), said.out
        assert said.out.startswith("FAIL: ")
    else:
        assert (code, odd) == (0, []), said.out
        assert said.out.startswith("PASS: what must be the same to the bit is")
    assert {p.name for p in Path("out").iterdir()} == {
        "alone",
        "again",
        "batch",
        "hit",
        "pieces",
        "scoring",
        "self.json",
    }


@pytest.mark.parametrize("fault", ["", "decode"])
def test_a_server_that_cannot_be_forced(fault: str, prompts: Path, capsys: Any) -> None:
    """Free answers, up to the first other token, and scores."""
    with FakePaths(fault, forced=False).serve() as (url, _):
        code = main(["self-check", "--prompts", str(prompts), "--out", "out", url])
    said = capsys.readouterr().out
    assert code == bool(fault), said
    assert json.loads(Path("out/self.json").read_text())["odd"] == {"decode": ["scoring"], "": []}[fault]
    assert "answers are compared up to the first other token" in said


def test_it_goes_on_and_says_what_is_not_known(prompts: Path, capsys: Any) -> None:
    words = ["self-check", "--prompts", str(prompts), "--out", "out", "--json"]
    fake = FakePaths(details=False)
    with fake.serve() as (url, _):
        assert main([*words, url]) == 0
        asked = fake.asked
        assert main([*words, url]) == 0
        assert fake.asked - asked <= 2  # whether it can be forced
    said = json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")
    assert any("does not tell its prefix hits" in note for note in said["notes"])
    assert replies.read_about(Path("out/hit"))["complete"]
