"""``accprobe gate TRAINER.jsonl MINE`` as typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_paths import FakePaths

from vllm_accprobe.cli import main

OFF = 0.3


def trainer(path: Path, fake: FakePaths, off: float = 0.0) -> Path:
    """What the fake server says of the tokens, and ``off`` added for the last half of each answer."""
    lines = []
    for k in range(4):
        ids = [(7 * i + k) % 500 for i in range(30)]
        logprobs = []
        for i in range(10, 30):
            top = dict(fake.top(ids[:i], "False False True", False, ids[i]))
            logprobs.append(top[ids[i]] - (off if i >= 20 else 0.0))
        lines.append({"id": f"s{k}", "prompt_token_ids": ids[:10], "token_ids": ids[10:], "logprobs": logprobs})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_server_scores_the_trainers_tokens(here: Path, capsys: Any) -> None:
    fake = FakePaths(forced=False)
    trainer(Path("t.jsonl"), fake)
    trainer(Path("off.jsonl"), fake, OFF)
    with fake.serve() as (url, seen):
        assert main(["eval-diff", "t.jsonl", url, "--out", "out"]) == 0
        said = capsys.readouterr().out
        assert said.startswith("PASS: mean exp|dlogp| 1, within 1.05 (80 tokens of 4 sequences; server: scored as")
        asked = len(seen)
        assert main(["eval-diff", "t.jsonl", url, "--out", "out"]) == 0
        assert len(seen) - asked <= 3  # how it can be asked
    capsys.readouterr()
    assert main(["eval-diff", "off.jsonl", "out", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["spans"][0]["mean"] == pytest.approx(OFF / 2)
    by = {s["where"]: s for s in found["spans"]}
    assert by["answer's token 0"]["worst"] == pytest.approx(0, abs=1e-9)
    assert by["answer's tokens 16-31"]["k1"] == pytest.approx(OFF)
    assert found["worst"][0]["token"] >= 10
    assert main(["eval-diff", "off.jsonl", "out"]) == 1
    said = capsys.readouterr().out
    assert "above 1.05" in said
    assert "effective sample size" in said


def test_a_server_decodes_the_trainers_tokens(here: Path, capsys: Any) -> None:
    trainer(Path("t.jsonl"), FakePaths())
    with FakePaths().serve() as (url, _):
        assert main(["eval-diff", "t.jsonl", url, "--out", "out"]) == 0
    assert "server: decoded, forced along the trainer's tokens)" in capsys.readouterr().out


def test_one_file_has_both_sides(here: Path, capsys: Any) -> None:
    line = {"input_ids": list(range(9)), "log_probs": [-1.0] * 4, "rollout_log_probs": [-1.01] * 4}
    Path("dump.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["eval-diff", "dump.jsonl", "dump.jsonl"]) == 0
    assert "as the trainer wrote them down" in capsys.readouterr().out
