"""Sentences that were wrong once, and paths that miss their dump by a folder and find it. What is typed by mistake:
test_mistakes.py. Dumps that cannot be read or are of another kind, and trouble while writing: test_bad_input_table.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_bad_input_table import (
    one_line,
    there as there,  # a fixture
)
from support.peer_dumps import unpack
from synthetic_model import capture, write

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import open_dump


@pytest.fixture
def here(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(there)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def refused(capsys: Any, words: list[str]) -> tuple[int, str]:
    """(exit code, the line) of a command that says one thing."""
    capsys.readouterr()
    code = main(words)
    return code, one_line(capsys.readouterr().err)


LOCALES = {
    "ISO-8859-1": {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("locale", LOCALES)
def test_no_locale_ends_a_process(locale: str, here: Path) -> None:
    """The files that it opens, too, which only a process of its own shows."""
    words = ["compare", "golden", "mine", "--no-replay", "--out", str(here / "out")]
    line = [sys.executable, "-m", "vllm_accprobe.cli", *words]
    done = subprocess.run(line, capture_output=True, check=False, env=os.environ | LOCALES[locale])
    assert (done.returncode, b"internal error" in done.stderr) == (1, False), done.stderr
    assert done.stdout


# --- paths that miss their dump by a folder -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "opened"),
    [
        ("one", "one/deep/run1"),
        ("one/deep", "one/deep/run1"),
        ("golden/rank0000", "golden"),
        ("golden/run.json", "golden"),
        ("golden/rank0000/journal.jsonl", "golden"),
        ("a_msprobe_tensor/golden/step0/*/dump_tensor_data", "a_msprobe_tensor/golden/step0/*"),
        ("a_msprobe_tensor/golden/step0/*/construct.json", "a_msprobe_tensor/golden/step0/*"),
    ],
)
def test_a_path_beside_a_dump_finds_it_and_says_so(given: str, opened: str, here: Path) -> None:
    path, wanted = (next(Path.cwd().glob(p)) for p in (given, opened))
    dump = open_dump(path)
    assert (dump.path, str(wanted) in dump.problems[0]) == (wanted, True)
    assert [r.name for r in dump.records] == [r.name for r in open_dump(wanted).records]


def test_from_within_a_dump_the_dot_is_the_dump(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = len(open_dump("golden").records)
    monkeypatch.chdir("golden/rank0000")
    assert len(open_dump(".").records) == n
    monkeypatch.chdir("..")
    assert len(open_dump(".").records) == n
    assert not open_dump(".").problems


@pytest.mark.parametrize("given", ["two", "a_msprobe_tensor"])
def test_of_several_dumps_the_names_are_told(given: str, here: Path) -> None:
    with pytest.raises(DumpError, match=f"{given} is no dump but holds 2 of them \\({given}/\\w+, {given}/\\w+\\)"):
        open_dump(given)


def test_a_link_is_no_dump_below(tmp_path: Path, there: Path) -> None:
    (tmp_path / "run1").symlink_to(there / "golden")
    with pytest.raises(DumpError, match="no dump of a format that is known"):
        open_dump(tmp_path)


@pytest.mark.parametrize("again", ["golden/rank0000", "golden/run.json", "golden/rank0000/journal.jsonl", "around"])
def test_the_same_dump_by_way_of_its_parts_is_refused(again: str, here: Path, capsys: Any) -> None:
    if again == "around":
        write(capture(prompts={"a": [3, 14, 15]}, tokens=2), here / "around" / "run1")
    golden, mine = (here / "around", here / "around" / "run1") if again == "around" else ("golden", again)
    code, line = refused(capsys, ["compare", str(golden), str(mine), "--out", str(here / "out")])
    assert (code, "are the same dump" in line) == (2, True)


# --- sentences that were wrong --------------------------------------------------------------------------------------


def test_nothing_compared_says_what_each_side_has(here: Path, capsys: Any) -> None:
    code, line = refused(capsys, ["compare", "golden", "x.npy", "--out", str(here / "out")])
    assert code == 3
    assert "golden has <root>, mine x" in line or "mine x, for example" in line
    assert line.endswith("(golden golden, mine x.npy)")


def test_a_golden_of_zeros_is_not_said_to_be_nan(here: Path, capsys: Any) -> None:
    for name, value in (("zeros", 0.0), ("tiny", 1e-6), ("nan", np.nan)):
        np.save(here / f"{name}.npy", np.full((2, 3), value, np.float32))

    def first(golden: str, mine: str) -> str:
        out = str(here / "out")
        assert main(["compare", str(here / f"{golden}.npy"), str(here / f"{mine}.npy"), "--out", out]) == 1
        page = (here / "out" / "compare.html").read_text()
        line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("FAIL"))
        assert line.partition(": ")[2].partition(": ")[2] in page
        return line

    assert first("zeros", "tiny") == "FAIL: tiny differs: golden is 0 there and mine is not"
    # NaN stays what it is.
    assert first("zeros", "nan") == "FAIL: nan differs: NaN or Inf on one side only"


def test_kl_divergences_that_are_there_are_not_said_to_be_missing(tmp_path: Path, capsys: Any) -> None:
    root = unpack("e_atb_vs_torch", tmp_path)
    words = ["compare", str(root / "golden"), str(root / "mine"), "--out", str(tmp_path / "out")]
    assert main([*words, "--standard", "ait"]) == 1
    assert "76 of 77 pairs have a KL divergence, parameters that differ have none" in capsys.readouterr().out
    assert main(words) == 1  # measured for our own standard, and judged again by ait
    capsys.readouterr()
    assert main(["compare", "--rejudge", str(tmp_path / "out"), "--standard", "ait"]) == 1
    assert "the KL divergence was not measured: compare the dumps again" in capsys.readouterr().out


def test_gentest_draws_of_statistics_and_knows_nothing_that_failed(here: Path, capsys: Any) -> None:
    for dump in ("stats", "a_msprobe_stat/golden"):
        code, line = refused(capsys, ["gentest", dump, "--failed", "--out", str(here / "out")])
        assert (code, line.startswith(f"{dump}: it holds statistics: what failed is not known")) == (3, True)
    words = ["gentest", "a_msprobe_stat/golden", "--ops", "Functional.silu", "--out", str(here / "out")]
    assert main(words) == 0
    assert "inputs of 2 calls were drawn from their statistics" in capsys.readouterr().err


def test_run_says_that_the_machine_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose engine the kernel killed ends with 1 itself: the kernel's own count tells."""
    from vllm_accprobe.cli import run

    assert run._killed_for_memory() >= 0
    assert run._ending(1, 0) == "exit code 1"
    assert run._ending(1, 1) == "exit code 1; this machine ran out of memory meanwhile and killed 1 process"
    assert run._ending(143, 2).endswith("SIGTERM; this machine ran out of memory meanwhile and killed 2 processes")


def test_formats_finds_a_dump_below(here: Path, capsys: Any) -> None:
    assert main(["inspect", "--formats", "one"]) == 0
    said = capsys.readouterr()
    assert (said.out, "one/deep/run1" in said.err) == ("accprobe\n", True)
