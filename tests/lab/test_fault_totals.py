"""The laboratory's sums are what they say, and what is held out stays out of sight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.cases import HELD_OUT, TUNED
from lab.judging import Outcome
from lab.totals import NEEDED, Total, page, row, save, share, text, totals, wilson

FOUND = Outcome("a", "qwen2", "serial", "mixed", ("x",), "fail", "x", rank=1, found=True, factor=3.0, worded=True)
MISSED = replace(FOUND, name="b", culprit="y", rank=2, worded=False)
PASSED = replace(FOUND, name="c", verdict="pass", culprit="", rank=0, worded=None, seen="output.0 1.2")
CLEAN_PAIR = Outcome("clean qwen2", "qwen2", "serial", "tp2", (), "pass", group="clean")


def test_right_and_wrong() -> None:
    assert FOUND.right
    assert not MISSED.right
    assert not PASSED.right
    assert not replace(FOUND, found=False).right  # the second of two faults is missing
    assert CLEAN_PAIR.right
    assert not replace(CLEAN_PAIR, verdict="fail").right
    assert not replace(CLEAN_PAIR, verdict="error: DumpError: gone").right


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilsons_interval(hits: int, of: int, low: float, high: float) -> None:
    assert wilson(hits, of) == pytest.approx((low, high), abs=5e-5)


def test_nothing_of_nothing_can_be_anything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert share(0, 0) == ""
    assert share(81, 263) == "81 of 263 (0.26 to 0.37)"


def test_groups_goldens_halves_and_ways_of_judging_are_counted_apart() -> None:
    kind = replace(FOUND, group="kind")
    outcomes = [
        kind,
        replace(kind, half=HELD_OUT),
        replace(kind, golden="float32", verdict="pass"),
        replace(kind, replay=False),
        CLEAN_PAIR,
        FOUND,
    ]
    assert [(t.group, t.half, t.replay, t.fail, t.faults) for t in totals(outcomes)] == [
        ("handwritten", TUNED, True, 1, 1),
        ("kind/serial", TUNED, False, 1, 1),
        ("kind/serial", TUNED, True, 1, 1),
        ("kind/serial", HELD_OUT, True, 1, 1),
        ("kind/float32", TUNED, True, 0, 1),
        ("clean", TUNED, True, 0, 0),
    ]


def test_totals_of_one_group() -> None:
    broken = replace(FOUND, verdict="error: DumpError: gone")
    (faults, clean) = totals([FOUND, MISSED, PASSED, broken, CLEAN_PAIR, replace(CLEAN_PAIR, verdict="fail")])
    assert (faults.faults, faults.fail, faults.first, faults.errors) == (4, 2, 1, 1)
    assert (clean.clean, clean.alarms, clean.missed) == (2, 1, ("1 alarms",))


def test_of_two_faults_the_first_and_both_are_counted_apart() -> None:
    two = replace(FOUND, group="two", golden="float32")
    (total,) = totals([two, replace(two, found=False), replace(two, rank=2)])
    assert (total.first, total.twos, total.both) == (2, 3, 2)
    assert total.missed == ("first 2 of 3, needed 0.95", "both named 2 of 3, needed 0.8")


@pytest.mark.parametrize(("group", "first", "fail", "of", "good"), [
    ("handwritten", 38, 39, 40, True),
    ("handwritten", 37, 39, 40, False),
    ("handwritten", 38, 38, 40, False),
    ("kind/serial", 97, 98, 100, True),
    ("kind/serial", 96, 98, 100, False),
    ("kind/serial", 97, 97, 100, False),
    ("trained/float32", 88, 92, 100, True),
    ("near/float32", 0, 18, 30, True),
    ("near/float32", 0, 17, 30, False),
    ("trained/tp2", 0, 0, 10, True),
])  # fmt: skip
def test_what_is_good_enough(group: str, first: int, fail: int, of: int, good: bool) -> None:
    assert (not Total(group, TUNED, True, of, fail, first).missed) is good


def test_every_needed_group_is_one_that_outcomes_can_have() -> None:
    for name in NEEDED:
        group, _, golden = name.partition("/")
        assert replace(FOUND, group=group, golden=golden or "serial").kind == name


def test_the_table_and_what_is_said_about_a_miss() -> None:
    assert row(MISSED) == ("BAD", "b", "qwen2", "serial → mixed", "fail", "y (true: x)", "2 of 0", "3", "")
    told = page([FOUND, replace(PASSED, at="12:00:00")])
    assert "| ok | a | qwen2 | serial → mixed | fail | x | 1 of 0 | 3 |  |" in told
    last = "- **BAD** c (serial → mixed): expected x; output.0 1.2; run 0 s, judged in 0.0 s at 12:00:00"
    assert told.splitlines()[-1] == last
    assert "expected x" not in page([FOUND, PASSED], details=False)


def test_cases_held_out_are_counted_and_not_listed() -> None:
    hidden = replace(FOUND, name="hidden", half=HELD_OUT)
    assert "hidden" not in page([FOUND, hidden])
    assert "| handwritten | held out | yes | 1 of 1" in page([FOUND, hidden])
    assert "hidden" in page([FOUND, hidden], held_out=True)
    assert "held out" in text(totals([hidden]))


def test_saved_outcomes_replace_older_ones_of_the_same_pair_judged_the_same_way(tmp_path: Path) -> None:
    order = ["b", "a"]
    save(tmp_path, [FOUND, MISSED, CLEAN_PAIR, replace(FOUND, name="no longer declared")], order)
    save(tmp_path, [replace(FOUND, replay=False), replace(FOUND, golden="float32")], order)
    every = save(tmp_path, [replace(FOUND, factor=9.0)], order)
    assert [(o.name, o.golden, o.replay, o.factor) for o in every] == [
        ("b", "serial", True, 3.0),
        ("a", "serial", True, 9.0),
        ("a", "serial", False, 3.0),
        ("a", "float32", True, 3.0),
        ("clean qwen2", "serial", True, 0.0),
    ]
