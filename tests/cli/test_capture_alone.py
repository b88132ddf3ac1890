"""Where only vllm-accprobe-capture is installed: capture and compare work; what needs more says in one line what it
lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"h5py", "llvmlite", "numba", "pandas", "plotly", "scipy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""
_CAPTURE = """
import torch
from vllm_accprobe import Probe
torch.manual_seed(int(sys.argv[2]))
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
with torch.no_grad(), Probe(model, dir=sys.argv[1]):
    model(torch.randn(4, 16))
"""
_MAIN = "from vllm_accprobe.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def alone(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", _WITHOUT + program, *argv], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("alone") / "dump"
    done = alone(_CAPTURE, str(at), "0")
    assert done.returncode == 0, done.stderr
    return at


def test_a_capture_has_statistics(dump: Path) -> None:
    from vllm_accprobe import open_dump

    records = open_dump(dump).records
    assert {r.tap for r in records} >= {"0", "1", "2"}
    assert all(r.stats is not None and r.stats.count for r in records)
    assert open_dump(dump).errors == []


@pytest.mark.parametrize("line", ["inspect {} 2", "inspect --repair {}", "convert {} --to npz {}.npz"])
def test_what_looks_at_a_dump_works(dump: Path, line: str) -> None:
    done = alone(_MAIN, *(word.format(dump) for word in line.split()))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_comparison_needs_no_more(dump: Path, tmp_path: Path) -> None:
    """numpy's definition of the metrics stands in for the compiled loops."""
    mine = tmp_path / "mine"
    assert alone(_CAPTURE, str(mine), "1").returncode == 0
    done = alone(_MAIN, "compare", str(dump), str(mine), "--no-replay", "--out", str(tmp_path / "out"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL" in done.stdout


def test_what_needs_more_says_what_is_missing(dump: Path) -> None:
    done = alone(_MAIN, "convert", str(dump), "--to", "h5", f"{dump}.h5")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not installed, which this needs: pip install vllm-accprobe" in done.stderr
