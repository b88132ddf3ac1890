"""``convert --to onnx`` and ``summary --tree``: what they say, and what they refuse in one line."""

import shutil
from pathlib import Path

import onnx
import pytest
from topology.test_data_flow import capture
from topology.test_model_graph import write

from vllm_accprobe.cli import main


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("drawing") / "d")


def test_a_dump_as_onnx(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.onnx"
    assert main(["convert", str(dump), "--to", "onnx", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Layered: ")
    assert said[0].endswith("nodes, step 0 of rank 0")
    assert said[-1].startswith(f"wrote {out} (")
    model = onnx.load(out)
    onnx.checker.check_model(model)
    assert {"Linear", "Add", "Mul", "Slice"} <= {n.op_type for n in model.graph.node}
    assert main(["convert", str(dump), str(out)]) == 2
    assert "exists: nothing is overwritten" in capsys.readouterr().err


def test_nothing_is_written_into_a_dump(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "d"
    shutil.copytree(dump, own)
    before = sorted(own.rglob("*"))
    assert main(["convert", str(own)]) == 0
    assert sorted(p.suffix for p in (tmp_path / "d-h5").iterdir()) == [".csv", ".h5"]
    assert main(["convert", str(own), "--out", str(own / "x.h5")]) == 2
    assert "never written into" in capsys.readouterr().err
    assert main(["convert", str(own), "*mixer*", "--out", str(tmp_path / "x.npz")]) == 0
    assert main(["convert", str(own), str(tmp_path / "y.npz"), "*mixer*"]) == 0
    assert (tmp_path / "x.npz").stat().st_size == (tmp_path / "y.npz").stat().st_size
    assert sorted(own.rglob("*")) == before


def test_atb_s_json_as_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "ait_dump")
    assert main(["convert", str(path), str(tmp_path / "m.onnx"), "--level", "1"]) == 0
    assert capsys.readouterr().out.startswith("Llama_model: 5 nodes\n")
    assert len(onnx.load(tmp_path / "m.onnx").graph.node) == 5
    assert main(["convert", str(path), str(tmp_path / "x.onnx"), "--rank", "1"]) == 2
    assert "is a topology: it has no steps" in capsys.readouterr().err
    assert main(["inspect", str(path), "--tree", "--level", "1"]) == 0
    assert "3 x Llama_layer" in capsys.readouterr().out


def test_a_dump_as_a_tree(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dump), "--tree", "--level", "1"]) == 0
    assert "├─ layers.0 … layers.1  2 x Layer  [8, 32] → [8, 32] bfloat16" in capsys.readouterr().out
