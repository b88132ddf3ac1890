"""The lines of document 000, torch_xray's guide: a capture, its tables, and operators as unit tests."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.forked_children import Command
from support.seeds.columns import COMPARED, SUMMARY, UNIT_TESTS
from support.seeds.line import Line

from vllm_accprobe.formats import open_dump

CAPTURE = """
import sys, torch
from vllm_accprobe import PrecisionDebugger
torch.manual_seed(0)
visual = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).bfloat16()
def execute_model(x):
    debugger = PrecisionDebugger(
        dump_path=sys.argv[1], hook_name="dump", rank=[0], step=[1], model=visual, dump_torch_api=False)
    debugger.start()
    return visual(x)
with torch.no_grad():
    for k in range(2):
        execute_model(torch.randn(4, 8).bfloat16())
"""
OPERATORS = """
import torch
from vllm_accprobe import begin_dump, end_dump
torch.manual_seed(0)
weight = torch.randn(16, 8).bfloat16()
def forward(x, **words):
    begin_dump(*PATH, **words)
    y = torch.nn.functional.gelu(x @ weight.T) + 1.0
    end_dump(clear_context=True)
    return y
forward(torch.randn(4, 8).bfloat16(), **WORDS)
"""
H5 = "globalrank-0_localrank-0.h5"


def prepare(home: Path) -> None:
    """Nothing: each line reads what those before it left."""


def _script(home: Path, text: str, *words: str, **env: str) -> None:
    run = Command("-c", text, *words, cwd=home, env={**os.environ, **env}, stderr=subprocess.PIPE)
    try:
        _, said = run.communicate(timeout=300)
    finally:
        run.end()
    assert run.returncode == 0, said[-2000:]


def _capture(home: Path) -> None:
    _script(home, CAPTURE, "dump-vision")
    assert (home / "dump-vision" / H5).is_file()
    with (home / "dump-vision" / H5.replace(".h5", "_summary.csv")).open(newline="") as f:
        assert tuple(next(csv.reader(f))) == SUMMARY
    for name in ("xxx.h5", "xpu.h5", "gpu.h5"):
        shutil.copyfile(home / "dump-vision" / H5, home / name)


def _begin_dump(home: Path) -> None:
    """As it stands there, without a path: a new folder below ./accprobe, with the tensors of the calls."""
    words = "dict(X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=5)"
    _script(home, OPERATORS.replace("WORDS", words).replace("PATH", "()"))
    (dump,) = (home / "accprobe").iterdir()
    assert {r.cls for r in open_dump(dump).records if r.payload is not None} >= {"aten.gelu.default"}


def _in_the_environment(home: Path) -> None:
    """Names, shapes, dtypes and ranges, and no tensors: X_DUMP_NUM is 0 where it is not given."""
    script = OPERATORS.replace("WORDS", "{}").replace("PATH", '("xray_debug",)')
    _script(home, script, X_DEBUG="0x102", X_DEDUP="True")
    assert all(r.payload is None for r in open_dump(home / "xray_debug").records if r.step is not None)


def _tensors_of_some(home: Path) -> None:
    script = OPERATORS.replace("WORDS", "{}").replace("PATH", '("xray_some",)')
    _script(home, script, X_DEBUG="0x102", X_DUMP_NUM="1")
    assert any(r.payload is not None for r in open_dump(home / "xray_some").records)


def _pytest(home: Path) -> None:
    """On one machine: the other's file is the same, as tests/opcheck/kit/test_testgen.py shows of one seed."""
    words = ["--detail_compare_path=./xpu.csv", "pytests/", "--seed", "42", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    shutil.copyfile(home / "xpu.csv", home / "gpu.csv")


def _joined(home: Path, said: str) -> None:
    with (home / "diff.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    gelu = next(r for r in rows if r["op_name"] == "aten.gelu.default")
    assert tuple(gelu)[:9] == UNIT_TESTS
    assert tuple(gelu)[9:] == tuple(f"{side}_1e-{n}" for side in ("xpu", "gpu") for n in range(1, 7))
    assert (gelu["shape"], gelu["is_pass"]) == ("[4, 16]", "pass")
    assert float(gelu["min-val"]) < float(gelu["max-val"])


def _table(home: Path, said: str) -> None:
    text = (home / "sum.txt").read_text()
    assert "param.weight" in text
    assert "output.0" in text


def _compared(home: Path, said: str) -> None:
    with (home / "result.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == COMPARED
    assert "0.Linear.0.forward_params.weight" in {r["Module (Bench/Target)"] for r in rows}
    assert {r["Status"] for r in rows} == {""}


_SAME = "one package on every machine"
LINES: list[Line] = [
    *(Line(at, "pip install torch_xray-2.0.3-....whl", ("--version",), prints=("accprobe",), ends_at=_SAME)
      for at in (20, 24, 28)),
    Line(49, 'PrecisionDebugger(dump_path="dump-vision", hook_name="dump", rank=[0], step=[1], model=...)', _capture,
         also=(38, 50)),
    Line(60, "summary xxx.h5 sum.txt", ("summary", "xxx.h5", "sum.txt"), check=_table),
    Line(98, "compare xpu.h5 gpu.h5 result.csv", ("compare", "gpu.h5", "xpu.h5", "result.csv"),
         prints=("gpu.h5 was taken for golden",), check=_compared),
    Line(146, "X_DEBUG=0x102 X_DEDUP=True X_DUMP_NUM, as arguments of begin_dump (line 177)", _begin_dump,
         also=(147, 148, 152, 177, 184)),
    Line(174, "X_DEBUG=0x102 X_DEDUP=True in the environment", _in_the_environment),
    Line(176, "X_DUMP_NUM=1 in the environment", _tensors_of_some),
    Line(196, "jprof --cpu_init --blacklist --factory=load dump.json",
         ("gentest", "xray_debug", "--cpu_init", "--blacklist", "--factory=load"),
         prints=("wrote pytests", "drawn from their statistics")),
    Line(207, "pytest --detail_compare_path=./xxx.csv proc_xxx/pytests/ --seed 42", _pytest),
    Line(212, "summary_diff_check ./xpu.csv ./gpu.csv ./result.csv", ("opdiff", "gpu.csv", "xpu.csv", "diff.csv"),
         prints=("PASS:",), check=_joined),
]  # fmt: skip
