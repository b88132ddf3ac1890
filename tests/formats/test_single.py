"""Single files and folders: every kind and dtype against torch and numpy, files that lie, the reference values."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.peer_dumps import FIELDS, expected, unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import open_dump, single
from vllm_accprobe.formats.io import torchfile

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def bits(t: torch.Tensor) -> bytes:
    flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def some(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.from_numpy(np.random.default_rng(3).integers(0, 2, 12 * 16).astype(np.uint8))
    return raw.view(torch.uint8)[: 12 * dtype.itemsize].contiguous().view(dtype).reshape(3, 4)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_of_every_dtype(tmp_path: Path, dtype: torch.dtype, legacy: bool) -> None:
    path = tmp_path / "x.pt"
    t = some(dtype)
    torch.save(t, path, _use_new_zipfile_serialization=not legacy)
    found, name = torchfile.read_tensor(path)
    assert f"torch.{name}" == str(dtype)
    assert (found.shape, found.tobytes()) == ((3, 4), bits(t))


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_files_hold(tmp_path: Path, legacy: bool) -> None:
    base = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    tree: dict[str, Any] = {
        "view": base[3:20:2, 1:5],
        "turned": base.t(),
        "expanded": base[0].expand(5, 6),
        "parameter": torch.nn.Parameter(base[:2].clone()),
        "nested": [{"a": (base[0, 0], 3, "text", None, True, 2.5)}],
        "empty": torch.zeros(0, 4),
        "state": torch.nn.Linear(4, 3).state_dict(),
        "set": {1, 2},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "bytes": b"ab",
        "big": 1 << 70,
    }
    path = tmp_path / "x.pth"
    torch.save(tree, path, _use_new_zipfile_serialization=not legacy)
    found = torchfile.load(path)
    wanted = {"view": tree["view"], "turned": tree["turned"], "expanded": tree["expanded"],
              "parameter": tree["parameter"], "nested.0.a.0": base[0, 0], "empty": tree["empty"],
              "state.weight": tree["state"]["weight"], "state.bias": tree["state"]["bias"]}  # fmt: skip
    tensors = dict(torchfile.tensors(found))
    assert tensors.keys() == wanted.keys()
    for key, t in wanted.items():
        assert tensors[key].read().tobytes() == bits(t), key
        assert tensors[key].shape == tuple(t.shape)
    assert (found["nested"][0]["a"][1:], found["set"], found["size"]) == ((3, "text", None, True, 2.5), {1, 2}, (2, 3))
    assert (found["dtype"], found["device"], found["bytes"], found["big"]) == ("bfloat16", "cpu", b"ab", 1 << 70)
    dump = open_dump(path)
    assert {r.name for r in dump.records} == {f"x.pth:{k}" for k in wanted}


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("import pathlib; pathlib.Path('ran').touch()",))


def archive(path: Path, pickled: bytes, data: bytes = b"\0" * 64) -> Path:
    with zipfile.ZipFile(path, "w") as f:
        f.writestr("archive/data.pkl", pickled)
        f.writestr("archive/data/0", data)
    return path


def tensor_pickle(shape: str, stride: str, numel: int = 16, offset: int = 0) -> bytes:
    """A pickle as torch writes it, of a float32 tensor: protocol 0 for the numbers, which is easy to write by hand."""
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    head += b"X\x01\0\0\x000X\x03\0\0\0cpu"
    return head + f"I{numel}\ntQI{offset}\n{shape}{stride}".encode() + b"\x89ccollections\nOrderedDict\n)RtR."


def test_a_hand_made_pickle_is_read(tmp_path: Path) -> None:
    values = np.arange(16, dtype="f4")
    good = archive(tmp_path / "good.pt", tensor_pickle("(I2\nI3\nt", "(I8\nI1\nt", offset=1), values.tobytes())
    found, dtype = torchfile.read_tensor(good)
    assert (dtype, found.tolist()) == ("float32", [[1, 2, 3], [9, 10, 11]])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (pickle.dumps(Evil(), 2), "which is no plain tensor"),
        (pickle.dumps({"a": [Evil()]}, 4), "which is no plain tensor"),
        (tensor_pickle("(I2\nI3\nt", "(I8\nI9\nt"), "beyond its storage"),
        (tensor_pickle("(I1099511627776\nt", "(I1\nt"), "beyond its storage"),
        (tensor_pickle("(I2\nt", "(I1\nt", numel=1 << 40), "were announced"),
        (tensor_pickle("(I-2\nt", "(I1\nt"), "impossible shape"),
        (tensor_pickle("(I2\nt", "(I1\nI1\nt"), "impossible shape"),
        (tensor_pickle("(I2\nt", "(I1\nt")[:-3], "too early or is damaged"),
        (b"\x80\x02X\xff\xff\xff\x7fab.", "too early or is damaged"),
        (b"\x80\x02(((.", "damaged"),
        (b"\x80\x02ctorch.jit\nload\n.", "torch.jit.load"),
        (b"\x80\x02i__builtin__\neval\n.", "opcode"),
        (b"", "too early or is damaged"),
    ],
)
def test_files_that_lie_or_want_to_run_something(tmp_path: Path, made: bytes, says: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpError, match=says):
        open_dump(archive(tmp_path / "x.pt", made))
    assert not (tmp_path / "ran").exists()


def test_a_small_file_does_not_become_a_large_tensor(tmp_path: Path) -> None:
    """Strides of 0 repeat one number without end."""
    path = archive(tmp_path / "x.pt", tensor_pickle("(I1099511627776\nt", "(I0\nt"))
    dump = open_dump(path)
    with pytest.raises(DumpError, match="too often"):
        dump.read(dump.records[0])


def test_deeply_shared_containers_end(tmp_path: Path) -> None:
    """A list of twice a list of twice a list ... has 2**60 leaves; hashing such a tuple takes as long."""
    twice = [b"h" + bytes([i]) + b"h" + bytes([i]) for i in range(60)]
    lists = b"\x80\x02]q\x00" + b"".join(b"](" + t + b"eq" + bytes([i + 1]) for i, t in enumerate(twice))
    with pytest.raises(DumpError, match="more than"):
        open_dump(archive(tmp_path / "x.pt", lists + b"."))
    tuples = b")q\x000" + b"".join(t + b"\x86q" + bytes([i + 1]) + b"0" for i, t in enumerate(twice))
    with pytest.raises(DumpError, match="no plain value"):
        open_dump(archive(tmp_path / "y.pt", b"\x80\x02}" + tuples + b"h\x3cNs."))


@pytest.mark.parametrize("cut", [0, 10, 100, 700])
def test_torn_files(tmp_path: Path, pair: Path, cut: int) -> None:
    for kind in ("pt", "pth", "npy", "npz", "safetensors", "bin"):
        whole = (pair / "golden" / kind / f"fp32.{kind}").read_bytes()
        path = tmp_path / f"x.{kind}"
        path.write_bytes(whole[: min(cut, len(whole) - 1)])
        with pytest.raises(DumpError, match=str(path)):
            open_dump(path)


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


def test_headers_that_announce_too_much(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "shape": (10**18,), "fortran_order": False})
    (tmp_path / "x.npy").write_bytes(header.getvalue() + b"\0" * 64)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1 << 20))
    whole = bytearray((tmp_path / "bomb.npz").read_bytes())
    at = whole.rfind(b"PK\x01\x02")
    whole[at + 24 : at + 28] = struct.pack("<I", 3 << 30)  # the size that it says to have, unpacked
    (tmp_path / "bomb.npz").write_bytes(bytes(whole))
    for name in ("x.npy", "x.safetensors", "bomb.npz"):
        with pytest.raises(DumpError):
            open_dump(tmp_path / name)


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
