"""Sums per column, by hand."""

import numpy as np

from vllm_accprobe.kernels.structure import chosen, structure


def test_structure_by_hand():
    g = np.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0], [1.0, np.inf]])
    m = np.array([[3.0, 5.0], [1.0, 2.0], [1.0, 0.0], [1.0, 1.0]])
    # rows 2 (a zero norm) and 3 (not finite) are left out; weights 1/25 and 1/4
    expected = [[1 / 4, 1 / 25], [9 / 25, 16 / 25 + 1], [0, 4 / 25], [0, (4 / 25) ** 2], [2, 2], [1 / 2, 1 / 5]]
    np.testing.assert_allclose(structure(g, m), expected, rtol=1e-6)


def test_rows_are_chosen_evenly():
    assert chosen(3, 10).tolist() == [0, 1, 2]
    assert len(chosen(1000, 1 << 18)) == 16
    assert chosen(1000, 4096)[[0, -1]].tolist() == [0, 999]
    assert len(chosen(0, 8)) == 0
