"""The same dump given twice is a slip of the hand, and is said; a copy of it is compared."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.cli_dumps import make
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.cli.common.same import is_same


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    code = main(list(words))
    said = capsys.readouterr()
    assert (code, said.err.count("\n")) == (2, 1), (code, said.err, said.out)
    return said.err


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    golden = make(tmp_path / "golden")
    (tmp_path / "link").symlink_to(golden)
    (tmp_path / "above").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for again in ("golden", "./golden/", "link", "above/link", str(golden), "golden/rank0000"):
        said = refused(capsys, "compare", "golden", again, "--no-replay", "--out", "out")
        assert "GOLDEN and MINE are the same dump" in said, again
    assert not (tmp_path / "out").exists()
    shutil.copytree(golden, tmp_path / "copy")
    assert main(["compare", "golden", "copy", "--no-replay", "--out", "out"]) == 0


def test_one_file_by_two_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", np.ones(4))
    os.link(tmp_path / "a.npy", tmp_path / "b.npy")
    assert "same dump" in refused(capsys, "compare", str(tmp_path / "a.npy"), str(tmp_path / "b.npy"))
    assert "same dump" in refused(capsys, "compare", str(tmp_path), str(tmp_path / "b.npy"))


def test_a_part_of_it(tmp_path: Path) -> None:
    root = unpack("a_msprobe_tensor", tmp_path) / "golden"
    step = root / "step0"
    (process,) = step.iterdir()
    for inner in (step, process, process / "dump.json", process / "dump_tensor_data"):
        assert is_same(root, inner), inner
        assert is_same(inner, root), inner
    shutil.copytree(step, root / "step1")
    assert not is_same(step, root / "step1")
    assert not is_same(root, unpack("a_msprobe_tensor", tmp_path) / "mine")
    # ATB's dump in one of ours, and a folder in a folder, are dumps of their own.
    own = make(tmp_path / "own")
    shutil.copytree(unpack("e_atb", tmp_path) / "golden", own / "atb")
    assert not is_same(own, own / "atb")
    (tmp_path / "folder/mine").mkdir(parents=True)
    for place in ("folder", "folder/mine"):
        np.save(tmp_path / place / "x.npy", np.ones(4))
    assert not is_same(tmp_path / "folder", tmp_path / "folder/mine")
    assert not is_same(tmp_path / "nowhere", tmp_path / "nowhere")


def test_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A floor from golden itself is zero, one from what is judged excuses everything that is wrong with it."""
    golden, mine, second = (str(make(tmp_path / n)) for n in ("golden", "mine", "second"))
    out = str(tmp_path / "out")
    for floor, other in ((golden, "GOLDEN"), (mine, "MINE")):
        said = refused(capsys, "compare", golden, mine, "--floor", second, "--floor", floor, "--out", out)
        assert f"--floor and {other} are the same dump" in said
        assert main(["compare", golden, mine, "--floor", second, "--no-replay", "--out", out]) == 0
    assert "GOLDEN and OTHER are" in refused(capsys, "calibrate", golden, second, golden, "--out", out + "2")
    assert "OTHER and OTHER are" in refused(capsys, "calibrate", golden, second, second, "--out", out + "2")
    assert main(["calibrate", golden, second, "--out", out + "2"]) == 0


def test_opcheck_and_opdiff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = str(make(tmp_path / "golden"))
    (tmp_path / "link").symlink_to(dump)
    said = refused(capsys, "opcheck", dump, "--against", str(tmp_path / "link"), "--out", str(tmp_path / "o"))
    assert "DUMP and --against are the same dump" in said
    row = "matmul,Tensor.matmul,a,0,output.0,0,0,float32,[2],0.0\n"
    (tmp_path / "one").mkdir()
    (tmp_path / "one/opcheck.csv").write_text("op,class,tap,call,role,step,rank,dtype,shape,max_abs_err\n" + row)
    one, file = str(tmp_path / "one"), str(tmp_path / "one/opcheck.csv")
    for words in ((one, one), (file, one), (one, file)):
        assert "same" in refused(capsys, "opdiff", *words, "--out", str(tmp_path / "d"))
