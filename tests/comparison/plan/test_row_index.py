"""Rows by their keys: several golden tensors, the last of equals, rows that are left out."""

import numpy as np

from vllm_accprobe.align.tokens import Rows, SideRows
from vllm_accprobe.comparison.plan.units import Indices


def side(**spaces):
    rows = {}
    for name, (keys, keep) in spaces.items():
        rows[0, int(name[1:]), "tokens"] = Rows(np.array(keys), np.array(keep, bool), np.zeros(len(keys), bool))
    return SideRows(rows, {})


A, B = (0, 0, "tokens"), (0, 1, "tokens")


def test_rows_lie_in_several_tensors_and_the_last_counts():
    golden = side(s0=([10, 11, 12], [1, 1, 1]), s1=([12, 13], [1, 1]))
    found = Indices((golden, side(s0=([13, 12, 99, 10], [1, 1, 1, 0])))).meet(A, (A, B))
    assert found.used == (1,)
    assert (found.row.tolist(), found.other.tolist(), found.rows.keys.tolist()) == ([0, 1], [1, 0], [13, 12])
    assert (found.aligned, found.complete, found.both) == (False, False, False)


def test_the_same_rows_are_aligned_and_those_left_out_are_known():
    same = side(s0=([5, 6], [1, 1]))
    found = Indices((same, same)).meet(A, (A,))
    assert (found.aligned, found.complete, found.both) == (True, True, True)
    indices = Indices((same, side(s0=([5, 6], [1, 0]), s1=([7], [0]))))
    assert (indices.left_out, indices.kept) == ({(0, 0), (0, 1)}, {A})
    part = indices.meet(A, (A,))
    assert (part.aligned, part.complete, part.both) == (True, False, False)
    assert Indices((same, side(s0=([8], [1])))).meet(A, (A,)) is None
