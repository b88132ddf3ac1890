"""Processes, crashes, interruptions: whatever happens, every call has its row, and the csv is the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from opcheck.layer_dumps import build
from support.csv_rows import csv_rows

from vllm_accprobe.cli import main

VENDOR = '''
import os
import signal
import time
from pathlib import Path

from vllm_accprobe.opcheck.reference import Call, Expected, reference


@reference("NobodyKnows")
def odd(call: Call) -> Expected:
    """Passes, dies or is slow, as the environment says."""
    where = os.environ.get("ODD_DIES_AT")
    if where and call.outputs["output.0"].shape[0] == int(where):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("ODD_WAITS"):
        Path(os.environ["ODD_WAITS"]).touch()
        time.sleep(60)
    return Expected(call.wide("x"))
'''


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a reference, found by its entry point: also in the processes that opcheck starts."""
    site = tmp_path / "site"
    info = site / "odd_checks-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "odd_checks.py").write_text(VENDOR)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-checks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_accprobe.references]\nodd = odd_checks\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


def test_any_number_of_processes_gives_the_same_csv(tmp_path: Path) -> None:
    dump = build(tmp_path / "d", "layers.0.norm")
    for n in (1, 2):
        assert main(["opcheck", str(dump), "-j", str(n), "--out", str(tmp_path / f"o{n}")]) == 1
    for name in ("opcheck.csv", "result.csv"):
        assert (tmp_path / "o1" / name).read_bytes() == (tmp_path / "o2" / name).read_bytes()
    assert not (tmp_path / "o1/opcheck.csv.part").exists()


def test_an_operator_that_kills_its_process_is_a_row(tmp_path, vendor, monkeypatch, capsys):
    dump = build(tmp_path / "d")
    monkeypatch.setenv("ODD_DIES_AT", "6")  # rows of the second step
    assert main(["opcheck", str(dump), "-j", "2", "--out", str(tmp_path / "o")]) == 1
    rows = csv_rows(tmp_path / "o/opcheck.csv")
    assert len(rows) == 15
    odd = [(r["status"], r["message"]) for r in rows if r["op"] == "NobodyKnows"]
    assert [s for s, _ in odd] == ["pass", "error", "pass"]
    assert odd[1][1] == "the process was killed by SIGKILL (out of memory?) while it was checked"
    assert [r["status"] for r in rows].count("pass") == 14
    assert "1 references failed" not in capsys.readouterr().err


def test_calls_that_die_only_together_are_checked_one_by_one(tmp_path, vendor, monkeypatch):
    """Nobody is blamed for a crash in which several were evaluated as one."""
    dump = build(tmp_path / "d")
    (vendor / "odd_checks.py").write_text(VENDOR.replace('"NobodyKnows"', '"RMSNorm", by_rows=True'))
    monkeypatch.setenv("ODD_DIES_AT", "23")  # rows of all three steps
    assert main(["opcheck", str(dump), "-j", "1", "--out", str(tmp_path / "o")]) == 1
    rows = csv_rows(tmp_path / "o/opcheck.csv")
    assert [r["status"] for r in rows if r["op"] == "RMSNorm"] == ["fail"] * 3  # it gives its input
    assert [r["status"] for r in rows].count("error") == 0


def test_killed_at_half_resume_ends_with_the_same_csv(tmp_path, vendor, monkeypatch):
    dump, whole, half = build(tmp_path / "d", "layers.0.norm"), tmp_path / "whole", tmp_path / "half"
    assert main(["opcheck", str(dump), "--out", str(whole)]) == 1
    mark = tmp_path / "reached"
    command = [sys.executable, "-m", "vllm_accprobe.cli", "opcheck", str(dump), "--out", str(half)]
    process = subprocess.Popen(command, env={**os.environ, "ODD_WAITS": str(mark)}, start_new_session=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    for _ in range(600):
        if mark.exists():
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    part = (half / "opcheck.csv.part").read_bytes()
    assert whole.joinpath("opcheck.csv").read_bytes().startswith(part)
    (half / "opcheck.csv.part").write_bytes(part[:-40])  # the last line, torn
    assert main(["opcheck", str(dump), "--out", str(half), "--resume"]) == 1
    assert (half / "opcheck.csv").read_bytes() == (whole / "opcheck.csv").read_bytes()
    assert (half / "result.csv").read_bytes() == (whole / "result.csv").read_bytes()
    assert main(["opcheck", str(dump), "--out", str(half), "--resume"]) == 1  # finished: nothing is lost
    assert (half / "opcheck.csv").read_bytes() == (whole / "opcheck.csv").read_bytes()


def test_resume_refuses_what_was_begun_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, out = build(tmp_path / "d"), tmp_path / "o"
    assert main(["opcheck", str(dump), "-j", "0", "--out", str(out)]) == 0
    done = (out / "opcheck.csv").read_bytes()
    again = ["opcheck", str(dump), "-j", "0", "--out", str(out), "--resume"]
    assert main([*again, "--standard", "msprobe"]) == 2
    assert "other options (standard)" in capsys.readouterr().err
    with (dump / "rank0000/journal.jsonl").open("a") as f:
        f.write("\n")
    assert main(again) == 2
    assert "a dump that has changed since" in capsys.readouterr().err
    for text, said in (('{"job": 3}', "cannot be read"), ('{"job": {', "cannot be read"), ('{"job": {}}', "options")):
        (out / "opcheck.json").write_text(text)
        assert main(again) == 2
        assert said in capsys.readouterr().err
    assert (out / "opcheck.csv").read_bytes() == done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rerun", "--against", "device"], "choose one"),
        (["--against", "device"], "torch sees no accelerator"),
    ],
)
def test_bad_usage_is_one_line(tmp_path, capsys, arguments, said):
    import torch

    if "device" in arguments and torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    dump = build(tmp_path / "d")
    assert main(["opcheck", str(dump), "-j", "0", *arguments, "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "o").exists()
