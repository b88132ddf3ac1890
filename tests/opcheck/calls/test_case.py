"""A call written to JSON and tensors is the same call again, whatever its reference needs; its inputs lie in memory as
they did."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.layer_dumps import build
from opcheck.opcheck_dumps import Maker
from opcheck.operator_dumps import OpMaker

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.case import StoredCache, closed, decode, encode, load, save
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.calls.views import contiguous, in_memory, laid_out, read_at, some_rows, view_of
from vllm_accprobe.opcheck.reference import Call, Declined, MemoryLayout, device_kernel
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.repeat.machine_kernels import MachineKernels

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


MEMORY = torch.randn(40, 12, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
LAYOUTS = {
    "heads": MEMORY[:, 8:10], "columns": MEMORY.flatten(1)[:, 5:9], "every second row": MEMORY[1::2],
    "turned": MEMORY[0].t(), "expanded": MEMORY[:1, 0].expand(5, 16),
    "integers": torch.arange(60).reshape(6, 10)[:, 3:7], "booleans": (torch.arange(60).reshape(6, 10) > 20)[:, ::3],
}  # fmt: skip


def test_places_of_a_huge_tensor_are_not_found() -> None:
    """A dump may claim any size: 40 bytes an element are not taken without a limit."""
    with pytest.raises(Declined, match="more than"):
        read_at(torch.zeros(1).expand(1 << 40, 2, 2), MemoryLayout((8, 4, 1), 0), (4, 2, 1), 0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_lies_as_it_did_and_no_gap_is_nan(name: str, known: bool) -> None:
    t = LAYOUTS[name]
    memory = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0) if known else None
    view = view_of(t.shape, t.stride(), t.storage_offset(), memory)
    assert view is not None
    found = in_memory(t.contiguous(), view)
    assert torch.equal(found, t)
    assert (found.stride(), found.storage_offset()) == (t.stride(), t.storage_offset())
    whole = torch.as_strided(found, (found.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    assert bool(torch.isfinite(whole.double()).all())
    assert len(whole) >= t.storage_offset() + t.numel()
    for first in (0,) if known else (0, 2):  # of rows further down as of all
        read, seen = read_at(t[first:].contiguous(), view, contiguous(t.shape), t.storage_offset(), first)
        right = whole[t.storage_offset() + first * (t.numel() // len(t)) :][: read.numel()].reshape(read.shape)
        assert torch.equal(read[: len(right)][seen[: len(right)]], right[seen[: len(right)]])
        assert bool(seen.any()) or first
        assert bool(seen.all()) == (known or (name == "turned" and not first))
    rows = torch.tensor([1, 3])
    cut = some_rows(view, t.shape, rows)
    part = in_memory(t[rows].contiguous(), cut)
    assert torch.equal(part, t[rows])
    assert not part.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "stride", "same"),
    [((4, 3), (3, 1), None), ((1, 3), (9, 1), None), ((0, 3), (9, 1), None), ((4, 3), (3,), None), ((), (), None),
     ((4, 3), (9, 1), False), ((4, 3), (1 << 50, 1), True), ((3, 3), (2, 1), True)],
)  # fmt: skip
def test_what_is_no_view_or_cannot_be_made_stays_contiguous(shape: Any, stride: Any, same: bool | None) -> None:
    view = view_of(shape, stride, 1 << 40)
    assert (view is None) == (same is None)
    if view is not None:
        t = torch.arange(12.0)[: shape[0] * shape[1]].reshape(shape)
        found = in_memory(t, view)
        assert torch.equal(found, t)
        assert found.is_contiguous() == same


def norm_dump(root: Path, spans: list[tuple[int, int, int]] | None = None, before: Any = None) -> Calls:
    m = Maker(root)
    m.module("n", "RMSNorm", variance_epsilon=1e-5)
    m.param("n", "RMSNorm", weight=torch.ones(16))
    m.step(0, spans or [(0, 0, 40)])
    m.call("qkv", "NobodyKnows", {}, MEMORY.flatten(1) if before is None else before)
    m.call("n", "RMSNorm", {"x": MEMORY[:, 8:10]}, MEMORY[:, 8:10].contiguous())
    return Calls(open_dump(m.close()), None)


def test_memory_is_that_of_an_earlier_output_and_a_case_keeps_it(tmp_path: Path) -> None:
    found = closed(next(norm_dump(tmp_path / "d").of(0, "n")).what, default_references())
    view = found.views["inputs.x"]
    assert torch.equal(view.memory, MEMORY.flatten())
    assert found.inputs["x"].is_contiguous()
    tensors: dict[str, Any] = {}
    back = decode(json.loads(json.dumps(encode(found, tensors))), tensors)
    x = laid_out(back).inputs["x"]
    assert (x.stride(), x.storage_offset()) == ((192, 16, 1), 128)
    assert torch.equal(torch.as_strided(x, (7680,), (1,), 0), MEMORY.flatten())


def test_memory_that_is_not_the_views_is_not_taken(tmp_path: Path) -> None:
    other = MEMORY.flatten(1) + 1
    found = next(norm_dump(tmp_path / "d", before=other).of(0, "n")).what.views["inputs.x"]
    assert found.read() is None
    assert (found.stride, found.offset) == ((192, 16, 1), 128)


def test_arguments_of_operators_have_their_strides(tmp_path: Path) -> None:
    m = OpMaker(tmp_path / "d")
    m.step(0, [(0, 0, 3)])
    x, w = torch.randn(3, 4), torch.randn(5, 4).t()
    m.op("aten.mm.default", [x, w], {"output.0": x @ w})
    found = next(Calls(open_dump(m.close()), None).of(0, "::aten.mm.default")).what
    assert found.views == {"args.1": MemoryLayout((1, 4))}
    assert laid_out(found).args[1].stride() == (1, 4)
    assert isinstance(found, Call)


def test_a_kernel_that_runs_again_gets_its_inputs_as_they_lay() -> None:
    seen = []

    @device_kernel("Strided")
    def strided(call: Call) -> Any:
        seen.append((call.tensor("x").stride(), call.tensor("x").storage_offset()))
        return call.tensor("x") + 1

    t = LAYOUTS["heads"]
    call = Call("n", "Strided", {"x": t.contiguous()}, outputs={"output.0": t + 1},
                views={"inputs.x": MemoryLayout(t.stride(), t.storage_offset())})  # fmt: skip
    references = References([strided])
    for found in (references.run(call), MachineKernels(references, "cpu").run(call)):
        assert isinstance(found, Mapping)
        assert torch.equal(found["output.0"], t + 1)
    assert seen == [((192, 16, 1), 128)] * 2
