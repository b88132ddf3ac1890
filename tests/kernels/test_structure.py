"""Sums per column by hand; the sample of rows."""

import numpy as np

from vllm_accprobe.kernels.structure import chosen, structure


def test_sums_by_hand():
    # row 0: |g| = 5, d = (0, 5), so g/|g| = (0.6, 0.8) and d/|g| = (0, 1); a zero row and a NaN row are left out
    g = np.array([[3, 4], [0, 0], [1, 1]], np.float32)
    m = np.array([[3, 9], [1, 1], [np.nan, 1]], np.float32)
    found = structure(g, m)
    want = [[0, 1], [0.36, 0.64], [0, 0.8], [0, 0.64], [1, 1], [0, 1]]
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_rows_are_chosen_evenly():
    assert chosen(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert chosen(0, 10).tolist() == []
    some = chosen(1000, 1 << 18)  # never fewer than 16
    assert (len(some), some[0], some[-1]) == (16, 0, 999)
    assert not some.flags.writeable
