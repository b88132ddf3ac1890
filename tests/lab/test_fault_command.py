"""The laboratory's command: what it chooses, what it shows, how it ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab import faults
from lab import judging as fault_lab
from lab.cases import HELD_OUT, TUNED, half
from lab.generated import GENERATED
from lab.judging import Pair


def _command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["faults.py", *words])
    return faults.main()


def _one(part: str) -> str:
    return next(c.name for c in GENERATED if c.group == "near" and half(c.name, c.group) == part)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of one near case of each half and of nothing else, judged as found but for what a test says."""
    cases = [case for case in GENERATED if case.name in (_one(TUNED), _one(HELD_OUT))]
    for case in cases:
        for run in (tmp_path / "_runs" / f"{case.model}-float32", tmp_path / case.name / "mine"):
            run.mkdir(parents=True, exist_ok=True)
            (run / "run.json").write_text("{}")
    monkeypatch.setattr(fault_lab, "judge", _found)
    return tmp_path


def _found(pair: Pair) -> fault_lab.Outcome:
    return replace(fault_lab._blank(pair), verdict="fail", culprit=pair.expected[0], rank=1, found=True)


def test_cases_held_out_are_counted_but_not_told(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(monkeypatch, "--judge-only", str(kept), "--group", "near", "--results", str(kept / "r")) == 0
    said = capsys.readouterr().out
    assert _one(TUNED) in said
    assert _one(HELD_OUT) not in said
    assert "near/float32  held out  yes     1 of 1" in said
    assert _one(HELD_OUT) not in (kept / "r" / "results.md").read_text()
    assert len(json.loads((kept / "r" / "results.json").read_text())) == 2
    assert not (kept / "results.json").exists()
    _command(monkeypatch, "--judge-only", str(kept), "--group", "near", "--show-held-out")
    assert _one(HELD_OUT) in capsys.readouterr().out


@pytest.mark.parametrize(("part", "name"), [("tuned", TUNED), ("held-out", HELD_OUT)])
def test_a_half_is_chosen(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, name: str
) -> None:
    assert _command(monkeypatch, "--judge-only", str(kept), "--half", part) == 0
    table = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("near/float32")]
    assert [[cell.strip() for cell in row if cell][1] for row in table] == [name]
    assert len(json.loads((kept / "results.json").read_text())) == 1


def test_it_ends_1_when_a_group_has_not_what_it_needs(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fault_lab, "judge", lambda pair: replace(_found(pair), verdict="pass", rank=0))
    assert _command(monkeypatch, "--judge-only", str(kept)) == 1
    assert "fail 0 of 1, needed 0.6" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["--only", "no such case"], "nothing matches --only 'no such case'"),
    (["--judge-only", "no/such/folder"], "--judge-only no/such/folder is no directory"),
    (["--capture-only"], "--capture-only needs --keep DIR"),
    (["--across", "no/such/folder"], "--across no/such/folder is no directory"),
])  # fmt: skip
def test_bad_usage_is_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert _command(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_list_names_pairs_of_both_halves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(monkeypatch, "--list", "--group", "kind/float32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(case.group == "kind" for case in GENERATED)
    assert {line[:8].strip() for line in lines} == {TUNED, HELD_OUT}
    assert all(" float32 " in line for line in lines)
