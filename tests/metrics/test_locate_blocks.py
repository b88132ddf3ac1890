"""The worst element of a tensor that is one row: found piece by piece, the first of equals, without a copy of it."""

from __future__ import annotations

import tracemalloc

import numpy as np

from vllm_accprobe.metrics import oracle

SIZE = 5 << 18


def test_the_first_largest_error_wherever_it_lies() -> None:
    golden = np.zeros(SIZE, np.float32)
    for places in ([0], [SIZE - 1], [1 << 18, (1 << 18) + 1], [(1 << 18) - 1, 3 << 18], [700_000, 3, 1_300_000]):
        mine = golden.copy()
        mine[places] = 2.0
        assert oracle.locate(golden, mine) == (min(places), 0.0, 2.0)


def test_what_is_not_finite_is_passed_over() -> None:
    golden, mine = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32)
    mine[:900_000] = np.nan
    golden[900_000:1_000_000] = np.inf
    mine[1_200_000] = 1.5
    assert oracle.locate(golden, mine) == (1_200_000, 1.0, 1.5)
    at, _, value = oracle.locate(golden[:4], mine[:4])
    assert at == 0
    assert np.isnan(value)


def test_it_takes_no_memory_of_the_tensors_size() -> None:
    golden, mine = np.zeros(8 << 20, np.float32), np.ones(8 << 20, np.float32)
    tracemalloc.start()
    oracle.locate(golden, mine)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < golden.nbytes // 2
