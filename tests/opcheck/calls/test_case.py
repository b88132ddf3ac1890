"""A call written to JSON and tensors is the same call again, whatever its reference needs."""

import json
from pathlib import Path

import pytest
import torch
from opcheck.layer_dumps import build

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.case import StoredCache, closed, decode, encode, load, save
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.registry import default_references

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]  # fmt: skip


def test_every_dtype_comes_back_bit_for_bit_and_others_can_read_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    g = torch.Generator().manual_seed(1)
    tensors = {str(d): (torch.randn(3, 5, generator=g) * 3).to(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.zeros(0, 4), "turned": torch.arange(6).reshape(2, 3).T}
    save(tensors, tmp_path / "t.safetensors")
    ours, theirs = load(tmp_path / "t.safetensors"), load_file(tmp_path / "t.safetensors")
    for name, t in tensors.items():
        for back in (ours[name], theirs[name]):
            assert (back.dtype, back.shape) == (t.dtype, t.shape)
            assert torch.equal(back.double() if not t.is_complex() else back, t.double() if not t.is_complex() else t)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\xff" * 400])
def test_a_damaged_file_is_one_error(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x").write_bytes(damage)
    with pytest.raises(ValueError, match="no safetensors file"):
        load(tmp_path / "x")


def test_scalars_dtypes_devices_and_lists_come_back() -> None:
    args = (torch.ones(2), [torch.zeros(1), 3], 2.5, float("-inf"), None, True, "text", torch.bfloat16,
            torch.device("cpu"), torch.strided, torch.channels_last, 1 + 2j)  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(encode(Call("t", "aten.x", args=args), tensors)))
    back = decode(tree, tensors).args
    assert back[2:] == args[2:]
    assert torch.equal(back[0], args[0])
    assert back[1][1] == 3


def test_equal_tensors_are_kept_once() -> None:
    x = torch.ones(4)
    tensors: dict[str, torch.Tensor] = {}
    encode(Call("t", "X", inputs={"a": x, "b": x}, params={"w": x.clone()}), tensors)
    assert len(tensors) == 2


def test_a_call_of_attention_needs_no_dump_any_more(tmp_path: Path) -> None:
    """Every call of a small dump, chunked prefill and decode among them: the same reference from the files alone."""
    references = default_references()
    calls = Calls(open_dump(build(tmp_path / "d")), None)
    seen = 0
    for rank, tap, _ in calls.taps():
        for captured in calls.of(rank, tap):
            whole = closed(captured.what, references)
            tensors: dict[str, torch.Tensor] = {}
            tree = json.loads(json.dumps(encode(whole, tensors)))
            save(tensors, tmp_path / "c.safetensors")
            here = references.evaluate(captured.what)
            there = references.evaluate(decode(tree, load(tmp_path / "c.safetensors")))
            if isinstance(here, Declined):
                assert isinstance(there, Declined)
                assert here.reason == there.reason
                continue
            seen += 1
            assert here.keys() == there.keys()
            assert all(torch.equal(here[k].value, there[k].value) for k in here)
            if "cache" in whole.extra:
                assert isinstance(whole.extra["cache"], StoredCache)
    assert seen == 12
