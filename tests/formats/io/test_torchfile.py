"""Files of torch.save: every dtype, both containers. What lies or wants to run something: test_hostile_formats.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from make_torch_files import DTYPES, bits, some

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
