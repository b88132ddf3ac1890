"""Sets of rows: sorted once, and the same array wherever the same rows are meant."""

import numpy as np

from vllm_accprobe.comparison.plan.rowsets import RowSets


def test_keys_in_any_order_and_repeated():
    sets = RowSets()
    a, b = np.array([5, 3]), np.array([3, 9])
    found = sets.of([a, b])
    assert found.seen.tolist() == [3, 5, 9]
    assert found.seen[found.place].tolist() == [5, 3, 3, 9]
    assert not found.distinct
    assert sets.of([a, b]) is found
    assert sets.of([a]).distinct


def test_equal_sets_are_one_array():
    sets = RowSets()
    one = sets.of([np.array([1, 2]), np.array([3])])
    other = sets.of([np.array([3, 2, 1])])
    assert other.seen is one.seen
    assert other.place.tolist() == [2, 1, 0]


def test_nothing_and_many():
    sets = RowSets()
    assert sets.of([]).seen.tolist() == []
    kept = [np.array([i]) for i in range(200)]  # more than are remembered
    assert [sets.of([k]).seen.tolist() for k in kept] == [[i] for i in range(200)]
    assert sets.of([kept[0]]).place.tolist() == [0]
