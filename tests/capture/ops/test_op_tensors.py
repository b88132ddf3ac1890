"""Tensors of a device take a detour over another thread: what is written is the same, word for word."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Toy

from vllm_accprobe.capture.core import recording
from vllm_accprobe.capture.core.session import Sink
from vllm_accprobe.capture.ops.op_tensors import touched
from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.opcheck.calls.operator_calls import Renumbered


def made(out: Path, mode: str) -> Dump:
    model = Toy(layers=2)
    model.big = torch.nn.Parameter(torch.arange(1 << 17, dtype=torch.float32).reshape(8, -1), requires_grad=False)
    original = model.forward

    def forward(input_ids: torch.Tensor) -> Any:
        x = torch.ones(2, 8) @ model.big
        x.mul_(input_ids.sum())
        y = torch.empty(2)
        torch.sum(x, 1, out=y)
        return original(input_ids)

    model.forward = forward  # type: ignore[method-assign]
    with Probe(model, dir=out, ops=True, ops_mode=mode) as probe, torch.inference_mode():
        for k in range(3):
            probe.model(torch.tensor([[1, 2, 3 + k]]))
    dump = open_dump(out)
    assert dump.problems == []
    assert dump.errors == []
    return dump


@pytest.mark.parametrize("mode", ["full", "trace"])
def test_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    direct = made(tmp_path / "direct", mode)
    monkeypatch.setattr(recording, "Sink", functools.partial(Sink, staged=True))
    staged = made(tmp_path / "staged", mode)
    # (numbers of the sequence may have gaps where a written argument turned out to be unchanged)
    assert [(c.tap, c.call, c.args, c.kwargs, c.outputs, sorted(c.mutates)) for c in staged.ops] == [
        (c.tap, c.call, c.args, c.kwargs, c.outputs, sorted(c.mutates)) for c in direct.ops
    ]

    def tensors(dump: Dump) -> list[Any]:
        return [(r.step, r.tap, r.call, r.role, r.dtype, r.shape, r.hash, r.mutated, r.payload is None)
                for r in dump.records if "::" in r.tap]  # fmt: skip

    assert sorted(tensors(staged), key=str) == sorted(tensors(direct), key=str)
    assert (len(tensors(direct)) > 100) == (mode == "full")
    changed = [c for c in direct.ops if c.op == "aten.mul_.Tensor" and c.module == "<root>"]
    assert [c.mutates for c in changed] == [("input.0",)] * 3


def test_a_large_weight_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(300, 300), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model = Model()
    with Probe(model, dir=tmp_path / "d", ops=True), torch.inference_mode():
        for k in range(3):
            model(torch.ones(1, 300))
            if k == 1:
                model.weight.fill_(2.0)  # weights were loaded anew
    dump = open_dump(tmp_path / "d")
    calls = [c for c in dump.ops if "mm" in c.op or "matmul" in c.op]
    assert [c.args[1]["tensor"]["max"] for c in calls] == [1.0, 1.0, 2.0]
    assert [c.outputs[0]["tensor"]["max"] for c in calls] == [300.0, 300.0, 600.0]
    weights = [r for r in dump.records if r.role == "input.1" and r.tap == calls[0].tap]
    assert [dump.read(r).max() for r in weights] == [1.0, 1.0, 2.0]
    assert weights[0].payload == weights[1].payload != weights[2].payload


_MQA = "_C.fp8_paged_mqa_logits_cpu.default"
_MLA = "_C.flash_mla_with_kvcache_cpu.default"


def test_a_table_of_blocks_of_bytes_is_taken_to_its_end() -> None:
    """Its second dimension is bytes: as slots they would reach the first block of each sequence alone."""
    cache, table, lengths = torch.zeros(9, 640), torch.tensor([[3, 5], [7, 2]]), torch.tensor([70, 4])
    tensors = [("input.1", cache), ("input.3", lengths), ("input.4", table)]
    named = {"input.1": "kvcache_fp8", "input.3": "seq_lens", "input.4": "page_table"}
    found = touched(_MQA, named, tensors, tensors[:1], 1 << 20)["input.1"]
    assert found is not None
    assert found.ids.tolist() == [0, 2, 3, 5, 7]
    assert found.by == [["input.4", 1]]


def test_two_caches_with_slots_of_their_own() -> None:
    window, short = torch.arange(5.0).repeat(8, 1).T.contiguous(), torch.arange(9.0).repeat(6, 1).T.contiguous()
    slots, less = torch.tensor([[70, 129, -1]]), torch.tensor([[33, 142]])
    tensors = [("input.2", window), ("input.3", slots), ("input.5", short), ("input.6", less)]
    named = {"input.2": "window_cache_2d", "input.3": "window_slots", "input.5": "compressed_cache_2d",
             "input.6": "compressed_slots"}  # fmt: skip
    sizes = {"window_block_size": 64, "compressed_block_size": 16}
    found = touched(_MLA, named, tensors, [tensors[0], tensors[2]], 1 << 20, sizes)
    first, second = found["input.2"], found["input.5"]
    assert first is not None
    assert second is not None
    assert (first.ids.tolist(), first.by) == ([0, 1, 2], [["input.3", 64]])
    assert (second.ids.tolist(), second.by) == ([0, 2, 8], [["input.6", 16]])
    # the same rows, by their new numbers among the blocks that were kept
    for kept, cache, numbers, unit in ((first, window, slots, 64), (second, short, less, 16)):
        again = Renumbered(kept.ids, unit)(numbers)
        assert torch.equal(again < 0, numbers < 0)
        there = numbers >= 0
        assert torch.equal(kept.now()[again[there] // unit], cache[numbers[there] // unit])
        assert torch.equal(again[there] % unit, numbers[there] % unit)


def test_without_the_size_of_a_block_nothing_is_told() -> None:
    tensors = [("input.2", torch.zeros(5, 8)), ("input.3", torch.tensor([[70]]))]
    named = {"input.2": "window_cache_2d", "input.3": "window_slots"}
    assert touched(_MLA, named, tensors, tensors[:1], 1 << 20) == {}


def test_a_small_weight_of_a_call_that_is_not_kept_is_stored_with_one_that_is(tmp_path: Path) -> None:
    """In mode sample the first call may keep no tensors: its weight's bytes, transposed, are not in the dump then."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(30)))
    with Probe(model, dir=tmp_path / "d", ops=True, ops_mode="sample", ops_calls=6, seed=0), torch.no_grad():
        for _ in range(4):
            model(torch.randn(2, 8))
    dump = open_dump(tmp_path / "d")
    records = [r for r in dump.records if "::" in r.tap and r.role == "input.1"]
    assert len({r.tap for r in records}) > 2
    assert all(r.payload is not None for r in records)
