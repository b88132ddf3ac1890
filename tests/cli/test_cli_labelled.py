"""``accprobe labels --exec``: a program that labels tensors, and the table of its pairs, in one command."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import open_dump

ROOT = Path(__file__).resolve().parents[2]
ACCPROBE = Path(sys.executable).parent / "accprobe"
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


def labels(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "ATB_", "ACL"))}
    (cwd / "script.py").write_text(SCRIPT)
    (cwd / "run.sh").write_text(f'exec {sys.executable} script.py "$@"\n')
    return subprocess.run(
        [ACCPROBE, "labels", *words], cwd=cwd, env=kept | {"PYTHONPATH": str(ROOT / "tests")} | env, text=True,
        capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def rows(where: Path) -> list[dict[str, str]]:
    with (where / "labels.csv").open(newline="") as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("tasks", ["", " --tasks"])
def test_one_command(tmp_path: Path, tasks: str) -> None:
    """Also where the program begins no task: each of its labels counts."""
    done = labels("--exec", f"bash run.sh{tasks}", "-d", "dump", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "out")
    assert [r["cmp_flag"] for r in found] == ["True", "True"]
    assert {r["cosine_similarity"] for r in found} == {"1.0"}
    assert f"accprobe: dump: {tmp_path / 'dump'}" in done.stderr
    steps = {r.step for r in open_dump(tmp_path / "dump").records}
    assert steps == ({0, 1} if tasks else {0})


def test_a_difference_and_a_failing_command(tmp_path: Path) -> None:
    done = labels("--exec", "bash run.sh --wrong --fails", "-d", "d1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the command ended with exit code 7" in done.stderr
    assert labels("--exec", "bash run.sh --fails", "-d", "d2", "-o", "o2", cwd=tmp_path).returncode == 7
    assert (tmp_path / "o2/labels.csv").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "name a DUMP, or with --exec a command"),
        (["dump", "--exec", "true"], 2, "one of the two"),
        (["dump", "--type", "tensor"], 2, "--dir and --type are for --exec"),
        (["--exec", "true"], 3, "no label was captured"),
        (["--exec", "true", "--type", "onnx"], 2, "draws what model or layer writes"),
        (["--exec", "nosuchprogram"], 2, "nosuchprogram: no such command"),
    ],
)
def test_refused_in_a_line(words, code, said, tmp_path, monkeypatch, capfd):
    for name in [n for n in os.environ if n.startswith(("VLLM_ACCPROBE", "ATB_", "ACL"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert main(["labels", *words]) == code
    assert said in capfd.readouterr().err
    assert not list(tmp_path.glob("accprobe-labels"))
