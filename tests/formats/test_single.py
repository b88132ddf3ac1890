"""Single files and folders: every kind and dtype against torch and numpy, files that lie, the reference values."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from make_torch_files import DTYPES, bits, some
from safetensors.torch import save_file
from support.peer_dumps import check_row, expected, unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import open_dump, single


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
        check_row(row, t)
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


@pytest.mark.parametrize(
    "array", [np.array([object()], dtype=object), np.array(["text"]), np.zeros(2, [("a", "f4")]), np.zeros(1, "M8[s]")]
)
def test_npy_that_holds_no_numbers(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(DumpError, match="not numbers"):
        open_dump(tmp_path / "x.npy")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(("header", "said"), [
    ("[1]", r"header: it is \[1\], not an object"), ("{", "header: it is not JSON"),
    ("[" * 9000, "header: it is nested too deep"), ({"a": 3}, "header: a is 3, not an object"),
    *(({"a": ENTRY | change}, f"header: {why}") for change, why in (
        ({"dtype": 3}, "a.dtype is 3"), ({"shape": [-2]}, r"a.shape\[0\] is -2"), ({"shape": [1] * 65}, "a.shape is"),
        ({"shape": [True, 2]}, r"a.shape\[0\] is True"), ({"shape": [1 << 62]}, r"a.shape\[0\] is"),
        ({"data_offsets": [0]}, "a.data_offsets is"), ({"data_offsets": [0, 8.0]}, r"a.data_offsets\[1\] is 8.0"))),
    ({"a": {"dtype": "F32", "shape": [2]}}, "header: a has no data_offsets"),
    ({"\x1b[2J": ENTRY | {"shape": 1}}, r"header: '\\x1b\[2J'.shape is 1"),
    ({"__metadata__": {"accprobe.dtypes": 3}, "a": ENTRY}, "header: __metadata__.accprobe.dtypes is 3"),
    *(({"a": ENTRY | change}, "does not lie where its header says") for change in (
        {"data_offsets": [8, 0]}, {"data_offsets": [4, 12]}, {"shape": [1 << 61]}, {"data_offsets": [0, 1 << 60]})),
    ({"a": ENTRY, "b": ENTRY}, "does not lie where its header says"),
])  # fmt: skip
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, header: object, said: str) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(DumpError, match=said):
        open_dump(tmp_path / "x.safetensors")
