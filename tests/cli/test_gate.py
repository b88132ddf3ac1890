"""``accprobe gate --samples`` as typed: sentences, files, exit codes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from made_evaluations import right, write_opencompass, write_samples
from made_folders import folder

from vllm_accprobe.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "golden.jsonl", right(50, range(26, 50), way="strict-match"))
    write_samples(tmp_path / "mine.jsonl", right(50, [0, 1, 2, 3, *range(28, 50)], way="strict-match"))
    write_samples(tmp_path / "bad.jsonl", right(50, range(50), way="strict-match"))
    write_opencompass(tmp_path / "oc", "gsm8k", [True, False])
    return tmp_path


def gate(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["eval-diff", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_drop_is_exit_code_1(here: Path, capsys: Any) -> None:
    code, out, _ = gate(capsys, "golden.jsonl", "bad.jsonl")
    assert code == 1
    assert out.splitlines()[0].startswith("FAIL: 1 beyond chance in 1 comparison")
    assert "golden 26 of 50, mine 0: a drop beyond chance (p = 3e-08" in out
    assert "  … 16 more: --json; --prompts-out writes their prompts" in out


def test_json_csv_and_prompts(here: Path, capsys: Any) -> None:
    code, out, err = gate(capsys, "golden.jsonl", "mine.jsonl", "--json", "--csv", "m.csv", "--prompts-out", "p.jsonl")
    said = json.loads(out)
    assert (code, said["verdict"], said["pairs"], len(said["flipped"])) == (0, "pass", 50, 6)
    (contrast,) = said["contrasts"]
    assert (contrast["needed"], contrast["p"], contrast["golden"] * 50) == (587, pytest.approx(0.6875), 26)
    assert [(f["lost"], f["won"]) for f in said["flipped"]][3:5] == [
        (["exact_match (strict-match)"], []), ([], ["exact_match (strict-match)"])
    ]  # fmt: skip
    assert said["read"]["golden"]["tool"] == "lm-evaluation-harness"
    with open("m.csv", newline="") as f:
        (row,) = csv.DictReader(f)
    assert (row["metric"], row["kind"], row["lost"], row["questions_needed"]) == (
        "exact_match",
        "right or wrong",
        "4",
        "587",
    )
    asked = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [line["id"] for line in asked] == ["0", "1", "2", "3", "26", "27"]
    assert Path("p.jsonl").stat().st_mode & 0o777 == 0o600
    assert "wrote p.jsonl (6 prompts" in err


def test_answers_of_an_evaluation_are_no_servers(here: Path, capsys: Any) -> None:
    """`eval-diff` is named; the older spellings do what it does."""
    for words in (["golden.jsonl", "mine.jsonl"], ["oc", "mine.jsonl"], ["a", "b", "--csv", "x"]):
        assert main(["gate", *words]) == 2
        err = capsys.readouterr().err
        assert "accprobe eval-diff" in err
    code = main(["eval-diff", "golden.jsonl", "mine.jsonl"])
    new = capsys.readouterr().out
    assert main(["gate", "--samples", "golden.jsonl", "mine.jsonl"]) == code
    old = capsys.readouterr()
    assert (old.out, old.err) == (new, "note: `accprobe gate --samples` is now `accprobe eval-diff A B`\n")


def test_servers_without_a_verdict_are_exit_code_3(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("golden", "mine")):
        folder(Path(name), seed, arrive=("one",))
    assert main(["gate", "golden", "mine"]) == 3
    assert capsys.readouterr().out.startswith("no verdict: golden needs two passes")
    assert main(["gate", "golden", "mine", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] is None
