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
    write_samples(tmp_path / "other.jsonl", [{**line, "doc_hash": "x"} for line in right(5, [])])
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
    assert said["contrasts"][0]["needed"] == 587
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


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["golden.jsonl", "other.jsonl"], 3, "no question is on both sides"),
        (["golden.jsonl", "mine.jsonl", "--metric", "bleu"], 3, "--metrics choose nothing"),
        (["golden.jsonl", "nowhere"], 2, "nowhere does not exist"),
        (["golden.jsonl", "oc"], 2, "no common name"),
        (["golden.jsonl", "golden.jsonl"], 2, "the same"),
        (["golden.jsonl", "mine.jsonl", "--false-alarm-rate", "2"], 2, "--false-alarm-rate"),
        (["golden.jsonl", "mine.jsonl", "--prompts-out", "mine.jsonl"], 2, "what is read"),
        (["golden.jsonl", "mine.jsonl", "--csv", "/proc/accprobe/x.csv"], 2, "nothing can be written"),
    ],
)
def test_what_cannot_be_compared_is_one_line(words: list[str], code: int, says: str, here: Path, capsys: Any) -> None:
    before = Path("mine.jsonl").read_bytes()
    got, out, err = gate(capsys, *words)
    assert (got, out, len(err.splitlines())) == (code, "", 1), err
    assert says in err
    assert "internal error" not in err
    assert Path("mine.jsonl").read_bytes() == before


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


def test_two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder(Path("golden"), 1)
    folder(Path("same"), 2)
    folder(Path("worse"), 3, fault=lambda length, k, index: 0.8)
    folder(Path("once"), 4, arrive=("one",))
    folder(Path("golden-once"), 5, arrive=("one",))
    for golden, mine, code, says in (
        ("golden", "same", 0, "PASS: no further away"),
        ("golden", "worse", 1, "FAIL: further away"),
        ("golden-once", "once", 3, "no verdict: golden needs two passes"),
    ):
        assert main(["gate", golden, mine]) == code
        out = capsys.readouterr().out
        assert out.startswith(says)
        assert main(["gate", golden, mine, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["verdict"] == {0: "pass", 1: "fail", 3: None}[code]
    assert "flipped, those with the largest margins first" in main_out(capsys, "gate", "golden", "worse")
    assert main(["gate", "golden", "golden"]) == 2


def main_out(capsys: Any, *words: str) -> str:
    main(list(words))
    return str(capsys.readouterr().out)
