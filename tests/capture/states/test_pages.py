"""Bytes of blocks in caches of several layouts, and the two kinds of numbers."""

import numpy as np
import pytest
import torch
import xxhash
from support.blocks import bytes_of, word_sums

from vllm_accprobe.capture.states.ledger import Pages, UnknownLayout, odd_weights, tensors_of

BLOCKS = 6


def kv(seed: int = 0) -> torch.Tensor:
    """[blocks, heads, tokens, 2 * size], bfloat16, as vLLM's CPU backend has it."""
    return torch.randn(BLOCKS, 2, 4, 16, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def two(seed: int = 1) -> torch.Tensor:
    """[2, blocks, tokens, heads, size]: keys and values apart."""
    return torch.randn(2, BLOCKS, 4, 2, 8, generator=torch.Generator().manual_seed(seed))


def states() -> list[torch.Tensor]:
    """Convolution and state of a recurrent layer as views of one page per block, as hybrid models have them."""
    pages = torch.arange(BLOCKS * 64, dtype=torch.float32)
    conv = pages.as_strided((BLOCKS, 3, 4), (64, 4, 1))
    ssm = pages.as_strided((BLOCKS, 2, 8), (64, 8, 1), 12)
    return [conv, ssm]


@pytest.mark.parametrize("caches", [[kv()], [two()], states()])
def test_a_blocks_number_is_that_of_its_own_bytes(caches: list[torch.Tensor]) -> None:
    pages = Pages(caches, BLOCKS)
    blocks = np.array([3, 0, 5])
    assert pages.hashes(blocks).tolist() == [xxhash.xxh3_64_intdigest(bytes_of(pages, int(b))) for b in blocks]


@pytest.mark.parametrize("caches", [[kv()], [two()], states()])
def test_each_byte_of_a_block_counts_and_no_other_one(caches: list[torch.Tensor]) -> None:
    pages, before = Pages(caches, BLOCKS), None
    before = pages.hashes(np.arange(BLOCKS))
    sums = torch.zeros(BLOCKS, dtype=torch.int64)
    pages.sums(torch.arange(BLOCKS), sums)
    for cache in caches:
        dim = 1 if cache.dim() == 5 else 0
        block = cache.select(dim, 4)
        last = tuple(n - 1 for n in block.shape)
        kept = block[last].clone()
        block[last] = kept + 1
        assert np.flatnonzero(pages.hashes(np.arange(BLOCKS)) != before).tolist() == [4]
        again = torch.zeros_like(sums)
        pages.sums(torch.arange(BLOCKS), again)
        assert torch.nonzero(again != sums).flatten().tolist() == [4]
        block[last] = kept


@pytest.mark.parametrize("caches", [[kv(3)], states()], ids=["one region", "two, which go on where the last one ended"])
def test_torchs_sums_are_numpys_definition(caches: list[torch.Tensor]) -> None:
    pages = Pages(caches, BLOCKS)
    out = torch.zeros(BLOCKS, dtype=torch.int64)
    pages.sums(torch.arange(BLOCKS), out)
    words = np.stack([np.frombuffer(bytes_of(pages, b), np.int32) for b in range(BLOCKS)])
    assert out.numpy().view(np.uint64).tolist() == word_sums(words).tolist()


def test_words_that_change_places_change_the_sum() -> None:
    words = np.arange(1, 9, dtype=np.int32)[None]
    assert word_sums(words) != word_sums(words[:, ::-1])
    assert (odd_weights(0, 1000) & np.uint64(1)).all()  # so that any one changed word changes it, whatever its bits


def test_kernel_blocks_are_parts_of_the_schedulers() -> None:
    cache = kv().reshape(BLOCKS * 2, 2, 2, 16)
    pages = Pages([cache], BLOCKS)
    assert pages.split == 2
    assert bytes_of(pages, 3) == cache[6:8].contiguous().view(torch.uint8).numpy().tobytes()


def test_a_cache_that_counts_no_blocks_is_refused() -> None:
    with pytest.raises(UnknownLayout, match="counts 7 blocks"):
        Pages([kv()], 7)
    with pytest.raises(UnknownLayout, match="in 0 places"):
        Pages([], 7)


def test_caches_are_found_in_what_releases_call_so() -> None:
    cache = kv()
    assert tensors_of(cache) == [cache]
    assert len(tensors_of((cache, two()))) == 2
    assert tensors_of(torch.tensor([])) == []
    assert tensors_of(None) == []
