"""Which blocks of a cache a call touches, where its cache is blocks of bytes and its slots are counted by a number."""

from __future__ import annotations

import torch

from vllm_accprobe.capture.ops.op_tensors import touched
from vllm_accprobe.opcheck.calls.operator_calls import Renumbered

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
