"""Sets of rows: sorted once, and one set wherever the same rows are meant."""

import numpy as np

from vllm_accprobe.align.tokens import NO_ROWS, RowSet, Unions


def rows(*keys):
    return RowSet(np.array(keys, np.int64))


def test_keys_in_any_order_and_repeated():
    unions = Unions()
    a, b = rows(5, 3), rows(3, 9)
    found = unions.of([a, b])
    assert found.seen.keys.tolist() == [3, 5, 9]
    assert found.seen.keys[found.place].tolist() == [5, 3, 3, 9]
    assert not found.distinct
    assert unions.of([a, b]) is found
    assert unions.of([a]).distinct


def test_equal_sets_are_one():
    unions = Unions()
    one = unions.of([rows(1, 2), rows(3)])
    other = unions.of([rows(3, 2, 1)])
    assert other.seen is one.seen
    assert other.place.tolist() == [2, 1, 0]


def test_nothing_and_many():
    unions = Unions()
    assert unions.of([]).seen.keys.tolist() == []
    kept = [rows(i) for i in range(200)]  # more than are remembered
    assert [unions.of([k]).seen.keys.tolist() for k in kept] == [[i] for i in range(200)]
    assert unions.of([kept[0]]).place.tolist() == [0]


def test_phases():
    def phase(*decode):
        return RowSet(np.arange(len(decode)), np.array(decode, bool)).phase

    assert (phase(True, True), phase(False), phase(True, False)) == ("decode", "prefill", "mixed")
    assert NO_ROWS.phase is None
    assert RowSet(np.arange(3)).phase is None


def test_a_part_of_a_set_is_another_set():
    whole = rows(4, 2, 7)
    assert whole.only(np.array([True, False, True])).keys.tolist() == [4, 7]
    assert len(whole) == 3
    assert {whole: 1}[whole] == 1
    assert rows(4, 2, 7) != whole
