"""torch_xray's files, written by themselves when a capture ends: of a script, refused ones, and after a kill -9."""

import csv
import os
import signal
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.forked_children import Command

from vllm_accprobe import export_at_end
from vllm_accprobe.cli import main
from vllm_accprobe.cli.convert import SUMMARY
from vllm_accprobe.formats import open_dump

SCRIPT = """
import os, signal, sys, torch
from vllm_accprobe import PrecisionDebugger
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU()).bfloat16()
for _ in range(3):  # torch_xray's guide makes it anew in every step
    debugger = PrecisionDebugger(dump_path=sys.argv[1], hook_name="dump", rank=[0], step=[1], model=model)
    debugger.start()
    model(torch.ones(4, 8).bfloat16())
    debugger.stop()
"""
KILLED = """
import os, signal, sys, time, torch
from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.config import ProbeConfig
model = torch.nn.Sequential(torch.nn.Linear(8, 16)).bfloat16()
probe = Probe(model, ProbeConfig.from_kwargs(dir=sys.argv[1], export="h5"))
model(torch.ones(4, 8).bfloat16())
journal = os.path.join(sys.argv[1], "rank0000", "journal.jsonl")
while '"output.0"' not in open(journal).read():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
NAMES = ("globalrank-0_localrank-0.h5", "globalrank-0_localrank-0_summary.csv")


def run(script: str, dump: Path) -> subprocess.CompletedProcess[str]:
    child = Command("-c", script, str(dump), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said = child.communicate(timeout=300)
    return subprocess.CompletedProcess(child.args, child.returncode, *said)


def test_a_script_of_torch_xrays_leaves_its_files(tmp_path: Path) -> None:
    dump = tmp_path / "dump-vision"
    done = run(SCRIPT, dump)
    assert done.returncode == 0, done.stderr
    with h5py.File(dump / NAMES[0]) as f:
        names = list(f["1"])
        assert "0.Linear.0.forward_params.weight" in names
        assert f["1"]["1.GELU.0.forward_output.0"].shape == (4, 16)
    with (dump / NAMES[1]).open() as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == SUMMARY
    assert [r["Module"] for r in rows] == names
    assert {r["Step"] for r in rows} == {"1"}
    kept = {(r.tap, r.role): r for r in open_dump(dump).records}
    record = kept["1", "output.0"]
    given = next(r for r in rows if r["Module"] == "1.GELU.0.forward_output.0")
    assert record.stats is not None
    assert float(given["Max"]) == record.stats.max
    assert {p.stat().st_mode & 0o777 for p in (dump / n for n in NAMES)} == {0o600}
    # what lies beside it is no part of the dump, which is read, compared and exported as before
    assert not hasattr(open_dump(dump), "kind")
    assert main(["convert", str(dump), str(tmp_path / "again.h5")]) == 0


def test_after_a_kill_the_command_makes_them(tmp_path: Path) -> None:
    dump = tmp_path / "killed"
    assert run(KILLED, dump).returncode == -signal.SIGKILL
    assert not (dump / NAMES[0]).exists()
    assert main(["convert", str(dump)]) == 0
    assert not (dump / NAMES[0]).exists()  # nothing is written into a dump
    with h5py.File(tmp_path / "killed-h5" / NAMES[0]) as f:
        assert np.isfinite(f["0"]["0.Linear.0.forward_output.0"][:]).all()
    assert main(["convert", str(dump)]) == 2  # nothing is overwritten


def test_what_goes_wrong_is_recorded_and_does_not_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0000").mkdir()
    process = export_at_end.start(tmp_path, 0, "h5")
    assert process is not None
    log = tmp_path / "rank0000" / export_at_end.LOG
    export_at_end._wait(process, log)  # as the process's end does
    assert process.returncode == 3  # the dump is empty
    assert capsys.readouterr().err == f"accprobe: the export ended with 3, see {log}; the dump itself is there\n"
    assert (tmp_path / "rank0000" / export_at_end.LOG).read_text().startswith("accprobe: ")
    assert export_at_end.start(tmp_path / "nowhere", 0, "h5") is None
    assert export_at_end.start(tmp_path, 0, "") is None


def test_a_foreign_dump_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.ones(3), tmp_path / "x.pt")
    assert main(["convert", str(tmp_path)]) == 2
    assert "OUT" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.pt"]
