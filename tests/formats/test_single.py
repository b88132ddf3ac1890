"""Single files and folders: every kind and dtype against torch and numpy, several together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from make_torch_files import DTYPES, bits, some
from safetensors.torch import save_file
from support.peer_dumps import check_row, expected, unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump, single


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("g_single", tmp_path_factory.mktemp("single"))


def test_each_file_is_judged_by_its_own_dtype(pair: Path) -> None:
    """float32 is not excused by the bfloat16 beside it."""
    by_name = {p.golden: p for p in compare(pair / "golden", pair / "mine").pairs}
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
    check_row(row, wanted)


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


def test_npy_and_npz_of_every_kind(tmp_path: Path) -> None:
    kinds = ("f8", ">f4", "f2", "i8", ">i2", "u1", "?", "c16", ">c8")
    arrays = {d: np.arange(24).reshape(2, 3, 4).astype(d) for d in kinds}
    arrays["fortran"] = np.asfortranarray(arrays["f8"])
    arrays["scalar"] = np.array(3.5)
    arrays["none"] = np.zeros((0, 3))
    for name, a in arrays.items():
        np.save(tmp_path / "x.npy", a)
        (item,) = single.items(tmp_path / "x.npy")
        assert np.array_equal(item.read(), a), name
        assert item.shape == a.shape
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **{f"k{i}": a for i, a in enumerate(arrays.values())})
        found = {i.key: i.read() for i in single.items(tmp_path / "x.npz")}
        assert list(found) == [f"k{i}" for i in range(len(arrays))]
        assert all(np.array_equal(f, a) for f, a in zip(found.values(), arrays.values(), strict=True))
