"""Blocks of caches by definition: their bytes, and the sum of their words."""

import ctypes

import numpy as np

from vllm_accprobe.capture.states.ledger import Pages, odd_weights


def bytes_of(pages: Pages, block: int) -> bytes:
    """A block's bytes, region after region; in host memory."""
    return b"".join(ctypes.string_at(r.address + block * r.stride, r.nbytes) for r in pages.regions)


def word_sums(words: np.ndarray, begin: int = 0) -> np.ndarray:
    """Sum over j of words[i, j] * odd_weights[begin + j] modulo 2^64; int [n, m] to uint64 [n]."""
    wide = words.astype(np.int64).view(np.uint64)
    return np.asarray(np.sum(wide * odd_weights(begin, words.shape[1]), axis=1, dtype=np.uint64))
