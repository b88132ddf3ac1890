"""The row sums of a matrix in host memory, compiled: one pass, no temporary.

The problem: torch makes six passes of 8 bytes per element for what is one multiply-add in registers. The idea: a loop
over the elements' bits, which LLVM keeps in registers; importing this module needs numba. Not here: the definition
(dump/weight_sums.py), devices (fingerprint.py).
"""

from __future__ import annotations

import numpy as np

from vllm_accprobe.dump.weight_sums import A, B
from vllm_accprobe.user_cache import numba_kept

_A, _B = np.uint64(A), np.uint64(B)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@numba_kept(nogil=True)
def row_sums(bits: np.ndarray, factors: np.ndarray, order: np.ndarray, bag: np.ndarray) -> int:
    """Fills ``order`` and ``bag`` (uint64 [n]) of signed integers ``bits`` [n, width]; returns how many are 0."""
    zeros = 0
    for r in range(bits.shape[0]):
        o = np.uint64(0)
        b = np.uint64(0)
        for c in range(bits.shape[1]):
            v = bits[r, c]
            zeros += v == 0
            x = np.uint64(np.int64(v))
            x = (x ^ (x >> _S30)) * _A
            x = (x ^ (x >> _S27)) * _B
            x ^= x >> _S31
            o += x * factors[c]
            b += x
        order[r] = o
        bag[r] = b
    return zeros
