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
for side in golden mine; do mkdir "$side"; echo "{}" >"$side/run.json"; done
accprobe compare golden mine; echo "exit $?"
accprobe --version
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    case = tmp_path / "cases" / "07-made-up"
    case.mkdir(parents=True)
    (case / "README.md").write_text(_README)
    (case / "make.sh").write_text(_MAKE)
    return case.parent


def test_a_case_runs_with_this_checkout_and_its_pair_is_judged_later(
    cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = tmp_path / "keep"
    assert field_cases.main(["07", "--cases", str(cases), "--keep", str(keep)]) == 0
    log = (keep / "07-made-up" / "make.log").read_text()
    assert f"/plant:{ROOT}\n" in log
    assert "compared later\nexit 0" in log
    assert "accprobe" in log.splitlines()[-1]  # its version: other commands run
    printed = capsys.readouterr().out
    assert "should   FAIL: the sampler." in printed
    assert "default  no result, exit 2" in printed  # these dumps are empty
    assert "plain    no result, exit 2" in printed


def test_verdict_and_first_origins_are_read(tmp_path: Path) -> None:
    origin = {"module": "sampler", "role": "output", "position": 3, "evidence": "values", "cause": {"kind": "greedy"}}
    (tmp_path / "compare.json").write_text(json.dumps({"verdict": "fail", "origins": [origin] * 3}))
    lines = field_cases.summary("default", 1, tmp_path / "compare.json", 2.0)
    assert lines[0] == "default  FAIL, exit 1, 2 s"
    assert lines[1].strip() == 'sampler (role output, position 3; values) {"kind": "greedy"}'
    assert len(lines) == 3


def test_a_case_that_is_not_there(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field_cases.main(["99", "--cases", str(cases)]) == 2
    assert "has no field case 99" in capsys.readouterr().err


def test_a_case_that_leaves_nothing_fails(cases: Path, tmp_path: Path) -> None:
    (cases / "07-made-up" / "make.sh").write_text("exit 4\n")
    assert field_cases.main(["07", "--cases", str(cases), "--keep", str(tmp_path)]) == 1
