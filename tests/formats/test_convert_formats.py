"""Our dumps in other tools' layouts: read back by their own libraries, by msprobe and by ourselves."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.cli_dumps import make
from safetensors.torch import load_file

from vllm_accprobe import cli
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("own") / "dump", ranks=2)


def test_msprobe_layout(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "msprobe"
    assert cli.main(["convert", str(dump), str(out), "--to", "msprobe"]) == 0
    own, theirs = open_dump(dump), open_dump(out)
    stored = [r for r in own.records if r.payload is not None and not r.role.startswith("inplace.")]
    assert len(theirs.records) == len([r for r in own.records if not r.role.startswith("inplace.")])
    assert theirs.ranks == (0, 1)
    assert f"{len(theirs.records):,} tensors of 2 ranks" in capsys.readouterr().out
    by_place = {(r.rank, r.step, r.tap, r.role, r.call): r for r in theirs.records}
    for r in stored:
        other = by_place[r.rank, r.step, r.tap, r.role, r.call]
        assert (other.cls, other.dtype, other.shape) == (r.cls, r.dtype, r.shape)
        assert theirs.read(other).tobytes() == own.read(r).tobytes()
    (first, *_) = sorted(out.glob("step*/rank0/dump.json"))
    head = json.loads(first.read_text())
    assert head["dump_data_dir"] == str(first.parent / "dump_tensor_data")  # not where it was while being written
    assert (head["framework"], head["level"], head["task"]) == ("pytorch", "L0", "tensor")
    parents = json.loads(first.with_name("construct.json").read_text())
    assert parents.keys() == head["data"].keys()
    for name, up in parents.items():
        assert up is None or up in parents, name
    for path in first.parent.glob("dump_tensor_data/*.pt"):
        assert isinstance(torch.load(path, weights_only=True), torch.Tensor)


@pytest.mark.parametrize("kind", ["h5", "npz", "safetensors", "msprobe"])
def test_a_converted_dump_compares_with_the_original(dump: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / kind
    assert cli.main(["convert", str(dump), str(out), "--to", kind, "--rank", "0"]) == 0
    for sides in ((dump, out), (out, dump)):
        found = compare(*sides)
        assert found.verdict == "pass"
        assert "tensors are compared as wholes, step by step" in " ".join(found.plan)
        compared = [p for p in found.pairs if p.status == "pass"]
        assert all((p.max_abs_err or 0.0) == 0.0 for p in compared)
        assert {p.tap for p in compared} == {r.tap for r in open_dump(dump).records}


def test_safetensors_keep_their_dtypes(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert cli.main(["convert", str(dump), str(out), "--rank", "1"]) == 0
    own = open_dump(dump)
    stored = [r for r in own.records if r.rank == 1 and r.payload is not None]
    found = {k: v for k, v in load_file(out).items() if not k.startswith("__pad")}
    assert len(found) == len(stored)
    for r in stored:
        step = "param" if r.step is None else r.step
        t = found[f"{step}/{r.tap}/{r.role}" + (f"#{r.call}" if r.call else "")]
        assert (str(t.dtype), tuple(t.shape)) == (f"torch.{r.dtype}", r.shape)
        assert t.reshape(-1).view(torch.uint8).numpy().tobytes() == own.read(r).tobytes()


def test_nothing_is_overwritten_and_nothing_half_made_stays(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "there"
    out.mkdir()
    assert cli.main(["convert", str(dump), str(out), "--to", "msprobe"]) == 2
    assert list(out.iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_foreign_dump_converts_too(dump: Path, tmp_path: Path) -> None:
    h5, back = tmp_path / "a.h5", tmp_path / "back"
    assert cli.main(["convert", str(dump), str(h5), "--rank", "0"]) == 0
    assert cli.main(["convert", str(h5), str(back), "--to", "msprobe"]) == 0
    assert compare(h5, back).verdict == "pass"


@pytest.mark.skipif(importlib.util.find_spec("msprobe") is None, reason="mindstudio-probe is not installed")
def test_msprobe_itself_compares_our_export(dump: Path, tmp_path: Path) -> None:
    out, result = tmp_path / "msprobe", tmp_path / "result"
    assert cli.main(["convert", str(dump), str(out), "--to", "msprobe", "--rank", "0"]) == 0
    step = sorted(out.glob("step*"))[0]
    command = [sys.executable, "-c", "from msprobe.msprobe import main; main()", "compare", "-tp", str(step), "-gp",
               str(step), "-o", str(result)]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True)
    tables = list(result.glob("**/*.csv"))
    assert tables, made.stdout[-1500:] + made.stderr[-1500:]
    with open(tables[0], encoding="utf-8-sig", newline="") as f:
        rows = list(csv.DictReader(f))
    head = json.loads((step / "rank0" / "dump.json").read_text())
    assert len(rows) >= len(head["data"])
    cosines = {r["Cosine"] for r in rows}
    assert any(c.startswith("1.0") or c == "1" for c in cosines), cosines
    assert {r["Result"] for r in rows} <= {"pass", ""}
