"""Pairs are counted once, and things in words."""

from vllm_accprobe.comparison.pair import COLUMNS, Counts, Pair, count_pairs, counted


def pair(status, **more):
    return Pair("g", "m", 0, 0, "float32", "float32", (1,), status=status, **more)


def test_each_kind():
    pairs = [pair("pass"), pair("pass", identical=True, bit_identical=True), pair("fail", identical=True),
             pair("skip", message="why", identical=True), pair("skip", message="why")]  # fmt: skip
    found = count_pairs(pairs)
    assert found == Counts(2, 1, 2, 2, 1, {"why": 2})
    assert (found.compared, found.total) == (3, 5)


def test_columns_are_the_fields_but_for_what_serves_other_standards():
    assert COLUMNS[:3] == ("golden", "mine", "step")
    assert not {"elements", "kl"} & set(COLUMNS)


def test_words():
    assert [counted(n, "row") for n in (0, 1, 2, 1234)] == ["0 rows", "1 row", "2 rows", "1,234 rows"]
