"""Single files and folders: every kind and dtype against torch and numpy, files that lie, the reference values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from make_torch_files import DTYPES, bits, some
from safetensors.torch import save_file
from support.peer_dumps import FIELDS, expected, unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("g_single", tmp_path_factory.mktemp("single"))


def test_metrics_of_a_folder(pair: Path) -> None:
    found = compare(pair / "golden", pair / "mine")
    by_name = {p.golden: p for p in found.pairs}
    checked = 0
    for t in expected("g_single", "expected_plain.json")["tensors"]:
        if t["name"].startswith("cross") or not t["numel"]:
            continue
        row = by_name[t["golden_file"].removeprefix("g_single/golden/")]
        assert (row.dtype_golden, row.dtype_mine) == (t["golden_dtype"], t["mine_dtype"])
        for f in FIELDS:
            value = None if t[f] is None else pytest.approx(t[f], rel=1e-6, abs=1e-15)
            assert getattr(row, f) == value, (t["name"], f)
        checked += 1
    assert checked == 77
    assert found.coverage["skipped"] == {}
    # Each file is judged by its own dtype's limits: float32 is not excused by the bfloat16 beside it.
    assert {by_name[f"pt/{d}.pt"].status for d in ("fp32", "int8", "int32", "int64", "bool", "special")} == {"fail"}
    assert {by_name[f"pt/{d}.pt"].status for d in ("scalar0d_int", "empty")} == {"pass"}


@pytest.mark.parametrize(
    ("name", "golden", "mine"),
    [("cross: pt bf16 <-> bin bf16", "pt/bf16.pt", "bin/bf16.bin"),
     ("cross: npy fp32 <-> safetensors fp16", "npy/fp32.npy", "safetensors/fp16.safetensors")],
)  # fmt: skip
def test_two_files_of_two_kinds(pair: Path, name: str, golden: str, mine: str) -> None:
    wanted = next(t for t in expected("g_single", "expected_plain.json")["tensors"] if t["name"] == name)
    (row,) = compare(pair / "golden" / golden, pair / "mine" / mine).pairs
    assert (row.golden, row.mine) == (golden.partition("/")[2], mine.partition("/")[2])
    for f in FIELDS:
        assert getattr(row, f) == pytest.approx(wanted[f], rel=1e-6, abs=1e-15)


def test_safetensors_and_a_folder(tmp_path: Path) -> None:
    tensors = {str(i): some(d) for i, d in enumerate(DTYPES[:10] + DTYPES[12:14])}
    (tmp_path / "d" / "deep").mkdir(parents=True)
    save_file(tensors, tmp_path / "d" / "deep" / "all.safetensors")
    torch.save(some(torch.float32), tmp_path / "d" / "model.layers.0.mlp.pt")
    (tmp_path / "d" / "broken.npy").write_bytes(b"no")
    (tmp_path / "d" / "notes.txt").write_text("no tensor")
    (tmp_path / "d" / "link.pt").symlink_to(tmp_path / "elsewhere.pt")
    dump = open_dump(tmp_path / "d")
    found = {r.name: dump.read(r).tobytes() for r in dump.records}
    assert found.pop("model.layers.0.mlp.pt") == bits(some(torch.float32))
    assert found == {f"deep/all.safetensors:{k}": bits(t) for k, t in tensors.items()}
    assert [s.tap for s in dump.skips] == ["broken"]
    assert any("link.pt" in p and "not followed" in p for p in dump.problems)


def test_files_that_are_named_differently_meet(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1.0, 2.0], "f4"))
    torch.save(torch.tensor([[1.0, 2.5]]), tmp_path / "b.pth")
    (row,) = compare(tmp_path / "a.npy", tmp_path / "b.pth").pairs
    assert (row.status, row.max_abs_err, row.golden, row.mine) == ("fail", 0.5, "a.npy", "b.pth")
    torch.save(torch.tensor([1.0, 2.0, 3.0]), tmp_path / "c.pth")
    from vllm_accprobe.comparison.result import NothingCompared

    with pytest.raises(NothingCompared, match="shapes differ"):
        compare(tmp_path / "a.npy", tmp_path / "c.pth")
