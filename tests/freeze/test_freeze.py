"""Every command says and writes today what it said and wrote when tests/freeze/expected was made.

The problem: code is moved, renamed and merged by the thousand lines, and what users and their scripts read must stay
as it is. The idea: one test per case of freeze_cases.py and freeze_commands.py, on dumps made anew (freeze_corpus.py);
words, order, columns, whole numbers and exit codes must be the same, floating-point numbers within 1e-6 (machines sum
in different orders). What changes an output on purpose mends expected/ with ``scripts/freeze.sh --write``, in a commit
that says what and why; nothing else may. To the byte, against another commit on one machine: ``scripts/freeze.sh REF``.
"""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import freeze_corpus
import freeze_run
import one_number
from freeze_commands import CASES


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("freeze")
    freeze_corpus.build(where)
    return where


@pytest.mark.parametrize("name", CASES)
def test_said_and_written_as_before(home: Path, name: str) -> None:
    out = freeze_run.run(name, home)
    found = freeze_run.kept(out, CASES[name])
    assert not (wrong := one_number.problems(out, found["said.txt"])), "\n".join(wrong)
    folder = freeze_run.EXPECTED / name
    expected = {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir()} if folder.exists() else {}
    assert sorted(found) == sorted(expected), "files that are kept of this case"
    for file, text in expected.items():
        assert not (said := freeze_run.differences(text, found[file])), f"{name}/{file}\n" + "\n".join(said)


def test_nothing_is_expected_of_a_case_that_is_gone() -> None:
    assert sorted(os.listdir(freeze_run.EXPECTED)) == sorted(CASES)
    assert sum(p.stat().st_size for p in freeze_run.EXPECTED.rglob("*") if p.is_file()) < 2_000_000


@pytest.mark.parametrize(("expected", "found", "same"), [
    ("norm 0.12345678", "norm 0.12345679", True),
    ("norm 0.12345678", "norm 0.12346678", False),
    ("1e-17 apart", "2.5e-16 apart", True),
    ("1.0", "0.9999999999999999", True),
    ("0.5", "0.50", False),
    ("1.0", "1", False),
    ("12 pairs", "13 pairs", False),
    ("pairs 1.5", "pair 1.5", False),
    ("a,b\n", "a,b", False),
    ("layers.1.mlp 2.00000001", "layers.2.mlp 2.00000001", False),
    ("3 | nan", "3 | 1.0", False),
    ("release 1.0.4", "release 1.0.5", False),
])  # fmt: skip
def test_what_counts_as_the_same(expected: str, found: str, same: bool) -> None:
    assert (not freeze_run.differences(expected, found)) == same


def test_bytes_are_compared_as_bytes(tmp_path: Path) -> None:
    for side, text in (("a", "one\n1.0\n"), ("b", "one\n1.00000001\n")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "x.csv").write_text(text)
        (tmp_path / side / "same").write_bytes(bytes(range(256)))
        (tmp_path / side / "said.txt").write_text(f"made t_202611282125{len(text):02}.csv")
    (tmp_path / "b" / "more").write_text("")
    a, b = tmp_path / "a", tmp_path / "b"
    assert freeze_run.bytes_differ(a, a) == []
    assert freeze_run.bytes_differ(a, b) == [f"more: only in {b}", "x.csv: line 2\n  - 1.0\n  + 1.00000001"]


def test_two_factors_of_one_fault_and_two_sentences_that_deny_each_other_are_found(tmp_path: Path) -> None:
    origin = {"module": "m", "role": "output.0", "created": 0.3, "floor": 0.1, "times": 3.0}
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "compare.json").write_text(json.dumps({"origins": [origin]}))
    row = "m,output.0,fail,False,created,{},0.1"
    said = "$ accprobe compare a b -o {out}/o\nFAIL: m (Linear) introduces the error: x 0.3, limit 0.1 (3x)\n"
    for measured, factor in ((0.3, "3"), (0.28, "2.8")):
        lines = "tap,role,status,identical,measure,measured,allowed", row.format(measured)
        (tmp_path / "o" / "compare.csv").write_text("\n".join(lines) + "\n")
        wrong = [] if factor == "3" else ["o: origin 1: json 3, csv 2.8"]
        assert one_number.problems(tmp_path, said) == wrong
    denied = said.replace("(3x)", "(4x)") + "compared, not checked\nreplay: 12 outputs of mine checked, "
    found = one_number.problems(tmp_path, denied)
    assert found[0].startswith("contradiction: 'compared, not checked'")
    assert any("terminal FAIL: m" in line for line in found)
