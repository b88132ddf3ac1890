"""Field cases run as they are, against this checkout, and what they left is judged in both settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import ROOT, field_cases

_README = "# A case\n\n**Should be said.** FAIL: the sampler.\n"
_MAKE = """
cd "$OUT"
PYTHONPATH=/plant python -c 'import os; print(os.environ["PYTHONPATH"])'
accprobe compare golden mine; echo "exit $?"
accprobe compare golden mine --no-replay --out plain
accprobe inspect --formats "a b"
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    case = tmp_path / "cases" / "07-made-up"
    case.mkdir(parents=True)
    (case / "README.md").write_text(_README)
    (case / "make.sh").write_text(_MAKE)
    return case.parent


def test_a_case_runs_with_this_checkout_and_its_commands_run_afterwards(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[list[str]] = []

    def noted(at: Path, words: list[str], log: Path) -> list[str]:
        run.append(words)
        return []

    monkeypatch.setattr(field_cases, "_command", noted)
    keep = tmp_path / "keep"
    assert field_cases.main(["07", "--cases", str(cases), "--keep", str(keep)]) == 0
    assert "should: FAIL: the sampler." in capsys.readouterr().out
    assert (keep / "07-made-up" / "make.log").read_text() == f"/plant:{ROOT}\nexit 0\n"
    expected = [
        ["compare", "golden", "mine", "--out", "default-1"],
        ["compare", "golden", "mine", "--out", "plain-1", "--no-replay"],
        ["inspect", "--formats", "a b"],
    ]
    assert run == expected
    assert field_cases.main(["07", "--cases", str(cases), "--judge-only", str(keep)]) == 0
    assert run == [*expected, *expected]


def test_a_command_is_this_checkouts(tmp_path: Path) -> None:
    lines = list(field_cases._command(tmp_path, ["compare", "absent", "mine"], tmp_path / "log.txt"))
    assert lines[0].startswith("accprobe compare absent mine: exit 2")
    assert "absent does not exist" in lines[1]
    assert "absent does not exist" in (tmp_path / "log.txt").read_text()


def test_the_first_origins_are_read(tmp_path: Path) -> None:
    origin = {"module": "sampler", "role": "output", "position": 3, "evidence": "values", "cause": {"kind": "greedy"}}
    (tmp_path / "compare.json").write_text(json.dumps({"origins": [origin] * 3}))
    lines = field_cases.origins(tmp_path / "compare.json")
    assert lines == ['    origin sampler (role output, position 3; values) {"kind": "greedy"}'] * 2
    assert field_cases.origins(tmp_path / "absent.json") == []


def test_a_case_that_is_not_there(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field_cases.main(["99", "--cases", str(cases)]) == 2
    assert "has no field case 99" in capsys.readouterr().err


def test_a_case_that_leaves_nothing_fails(cases: Path, tmp_path: Path) -> None:
    (cases / "07-made-up" / "make.sh").write_text("exit 4\n")
    assert field_cases.main(["07", "--cases", str(cases), "--keep", str(tmp_path / "keep")]) == 1
