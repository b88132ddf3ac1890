"""Files of torch.save: every dtype, both containers, and what lies, is torn or wants to run something."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_torch_files import DTYPES, bits, some

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.io import torchfile


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_of_every_dtype(tmp_path: Path, dtype: torch.dtype, legacy: bool) -> None:
    path = tmp_path / "x.pt"
    t = some(dtype)
    torch.save(t, path, _use_new_zipfile_serialization=not legacy)
    ((key, found),) = torchfile.items(path)
    assert (key, f"torch.{found.dtype}") == ("", str(dtype))
    assert (found.shape, found.read().tobytes()) == ((3, 4), bits(t))


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_files_hold(tmp_path: Path, legacy: bool) -> None:
    base = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    tree: dict[str, Any] = {
        "view": base[3:20:2, 1:5], "turned": base.t(), "expanded": base[0].expand(5, 6),
        "parameter": torch.nn.Parameter(base[:2].clone()), "nested": [{"a": (base[0, 0], 3, "text", None, True, 2.5)}],
        "empty": torch.zeros(0, 4), "state": torch.nn.Linear(4, 3).state_dict(), "set": {1, 2},
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "bytes": b"ab",
        "big": 1 << 70,
    }  # fmt: skip
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
    ((_, found),) = torchfile.items(good)
    assert (found.dtype, found.read().tolist()) == ("float32", [[1, 2, 3], [9, 10, 11]])


@pytest.mark.parametrize(("made", "says"), [
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
])  # fmt: skip
def test_files_that_lie_or_want_to_run_something(tmp_path: Path, made: bytes, says: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpError, match=says):
        open_dump(archive(tmp_path / "x.pt", made))
    assert not (tmp_path / "ran").exists()


def test_deeply_shared_containers_end(tmp_path: Path) -> None:
    """A list of twice a list of twice a list ... has 2**60 leaves; hashing such a tuple takes as long."""
    twice = [b"h" + bytes([i]) + b"h" + bytes([i]) for i in range(60)]
    lists = b"\x80\x02]q\x00" + b"".join(b"](" + t + b"eq" + bytes([i + 1]) for i, t in enumerate(twice))
    with pytest.raises(DumpError, match="more than"):
        open_dump(archive(tmp_path / "x.pt", lists + b"."))
    tuples = b")q\x000" + b"".join(t + b"\x86q" + bytes([i + 1]) + b"0" for i, t in enumerate(twice))
    with pytest.raises(DumpError, match="no plain value"):
        open_dump(archive(tmp_path / "y.pt", b"\x80\x02}" + tuples + b"h\x3cNs."))


def test_a_small_file_does_not_become_a_large_tensor(tmp_path: Path) -> None:
    """Strides of 0 repeat one number without end."""
    path = archive(tmp_path / "x.pt", tensor_pickle("(I1099511627776\nt", "(I0\nt"))
    dump = open_dump(path)
    with pytest.raises(DumpError, match="too often"):
        dump.read(dump.records[0])
