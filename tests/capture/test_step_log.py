"""The file of steps: whole lines, its owner's only, there when the process is killed a little later."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_accprobe.capture.teacher_forcing import StepLog, log_name


def test_lines_are_added_to_those_of_an_earlier_engine(tmp_path: Path) -> None:
    path = tmp_path / "steps" / log_name(0)
    for first in (0, 2):
        log = StepLog(path)
        log.add(first, [("p0", 0, 64), ("p1.pass1", 64, 1)])
        log.add(first + 1, [])
        log.close()
        log.close()
        log.add(99, [])  # what comes after is not written, and no error
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["requests"] == [["p0", 0, 64], ["p1.pass1", 64, 1]]
    assert (path.name, path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (
        "steps-rank0.jsonl", 0o600, 0o700,
    )  # fmt: skip


def test_a_killed_process_has_written_all_but_the_last_moment(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "from vllm_accprobe.capture.teacher_forcing import StepLog\n"
        "log = StepLog(Path(sys.argv[1]))\nfor i in range(1000): log.add(i, [('p', i, 1)])\n"
        "time.sleep(1)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "steps-rank0.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=120)
    assert done.returncode == -9
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1000))


def test_a_disk_that_is_full_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"))
    for i in range(3):
        log.add(i, [])
        time.sleep(0.15)
    log.close()
    said = "accprobe: /dev/full: No space left on device: no steps are written any more; serving goes on"
    assert caplog.messages == [said]
