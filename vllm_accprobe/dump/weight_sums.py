"""The sums of a weight's rows, in numpy: what capture's sums on any device must agree with.

The problem: a sum of elements' bits would not see two changes that cancel, and a cryptographic hash cannot be taken in
pieces, in another order, or of a row alone. The idea: the bits of each element, as a signed integer, are mixed by two
odd multiplications and shifts [D. Stafford's variant 13 of the 64-bit finaliser of MurmurHash3], 0 stays 0, and sums
modulo 2**64 of mixed bits are taken: of all elements (without order), and of each row with one odd factor for each
column (with order). A sum over rows of mixed row sums and row numbers has the order of the rows. Two tensors that
differ have the same 64 bits with a probability of about 2**-64, unless it is made on purpose. Not here: how a device
computes it, compiled loops for the host (capture/weights/).
"""

from __future__ import annotations

import functools

import numpy as np

A, B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The two multipliers of variant 13."""
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, which spreads consecutive numbers."""


def mix(x: np.ndarray) -> np.ndarray:
    """uint64 to uint64, elementwise, one to one, 0 to 0."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(A)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(B)
        return np.asarray(x ^ (x >> np.uint64(31)))


@functools.lru_cache(maxsize=64)
def factors(width: int) -> np.ndarray:
    """uint64 [width]: an odd factor for each column."""
    with np.errstate(over="ignore"):
        return mix(np.arange(1, width + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)


def in_order(rows: np.ndarray) -> int:
    """The sum with order of uint64 row sums [n]."""
    with np.errstate(over="ignore"):
        place = np.arange(1, len(rows) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return int(mix(rows + place).sum(dtype=np.uint64))


def short(rows: np.ndarray) -> np.ndarray:
    """uint32 [n] of uint64 row sums [n]: the upper halves of the mixed sums."""
    return (mix(rows) >> np.uint64(32)).astype(np.uint32)


_PIECE = 1 << 20


def row_keys(bits: np.ndarray) -> np.ndarray:
    """The uint32 [n] that a print has for the rows of ``bits``, unsigned or signed integers [n, width] of 1 to 8 bytes;
    a piece at a time, so that no temporary is larger than some tens of megabytes."""
    signed = bits.view(f"<i{bits.dtype.itemsize}")
    count, width = signed.shape
    out = np.zeros(count, np.uint32)
    step, by = max(_PIECE // max(width, 1), 1), factors(width)
    for first in range(0, count, step):
        mixed = mix(signed[first : first + step].astype(np.int64).view(np.uint64))
        with np.errstate(over="ignore"):
            out[first : first + step] = short((mixed * by).sum(1, dtype=np.uint64))
    return out
