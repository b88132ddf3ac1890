"""``accprobe labels --exec``: a program that labels tensors, and the table of its pairs, in one command."""

import sys
from pathlib import Path

import pytest
from cli.conftest import Typed
from support.csv_rows import csv_rows

from vllm_accprobe.dump.reader import open_dump

SCRIPT = """
import os, sys
import numpy as np
from labels.atb_file import FLOAT, write
from vllm_accprobe import gen_id, set_label, set_task_id

x = np.arange(32, dtype="f4").reshape(4, 8) + 1
for turn in range(2):
    if "--tasks" in sys.argv:
        set_task_id()
    data_id = gen_id()
    set_label("pta", data_id, x)                       # high level: two values
    set_label("acl", data_id, x * (1.5 if "--wrong" in sys.argv else 1))
if os.environ.get("ATB_OUTPUT_DIR"):                   # low level: a file that the library writes
    data_id = gen_id()
    set_label("pta", data_id, data_val=x)
    set_label("acl", data_id, tensor_path="0_Model/3_Runner/after/outTensor0.bin")
    write(__import__("pathlib").Path(os.environ["ATB_OUTPUT_DIR"], "tensors/0_1/0/0_Model/3_Runner/after/outTensor0.bin"), x, FLOAT)
    print("types", os.environ["ATB_DUMP_TYPE"], os.environ["ATB_SAVE_TENSOR_RANGE"], os.environ.get("ATB_SAVE_TENSOR_RUNNER"))
sys.exit(int("--fails" in sys.argv) * 7)
"""  # noqa: E501


@pytest.fixture
def script(tmp_path: Path, typed: Typed) -> Typed:
    """`accprobe labels` where run.sh is a program that labels."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run.sh").write_text(f'exec {sys.executable} script.py "$@"\n')
    return lambda *words: typed("labels", *words)


@pytest.mark.parametrize("tasks", ["", " --tasks"])
def test_one_command(tmp_path: Path, script: Typed, tasks: str) -> None:
    """Also where the program begins no task: each of its labels counts."""
    done = script("--exec", f"bash run.sh{tasks}", "-d", "dump", "-o", "out")
    assert done.returncode == 0, done.stderr
    found = csv_rows(tmp_path / "out/labels.csv")
    assert [r["cmp_flag"] for r in found] == ["True", "True"]
    assert {r["cosine_similarity"] for r in found} == {"1.0"}
    assert f"accprobe: dump: {tmp_path / 'dump'}" in done.stderr
    steps = {r.step for r in open_dump(tmp_path / "dump").records}
    assert steps == ({0, 1} if tasks else {0})


def test_a_difference_and_a_failing_command(tmp_path: Path, script: Typed) -> None:
    done = script("--exec", "bash run.sh --wrong --fails", "-d", "d1")
    assert done.returncode == 1, done.stderr
    assert "the command ended with exit code 7" in done.stderr
    assert script("--exec", "bash run.sh --fails", "-d", "d2", "-o", "o2").returncode == 7
    assert (tmp_path / "o2/labels.csv").exists()
