"""Strings, numbers and places, as all reports spell them."""

from __future__ import annotations

import math

import pytest

from vllm_accprobe.report.text import MISSING, against, capital, count, more, num, place, ratio, safe, times


def test_names_are_one_printable_line() -> None:
    assert safe("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
    assert safe("0123456789", 5) == "01…89"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, MISSING), (True, "True"), (1200, "1,200"), (math.nan, "NaN"), (-math.inf, "-Inf"), (0.012345, "0.0123")],
)
def test_numbers(value: object, text: str) -> None:
    assert num(value) == text


def test_counts() -> None:
    assert (count(1, "pair"), count(1200, "pair")) == ("1 pair", "1,200 pairs")
    assert (count(1, "entry", "entries"), count(2, "entry", "entries")) == ("1 entry", "2 entries")
    assert (more(7, 5, "a.json"), more(5, 5, "a.json")) == (["… 2 more: a.json"], [])
    assert (capital("how it is"), capital("")) == ("How it is", "")


def test_a_value_against_its_limit() -> None:
    assert (ratio(0.2, 0.1), ratio(0.2, 0.0), ratio(0.0, 0.0), ratio(None, 1.0)) == (2.0, math.inf, None, None)
    assert (times(0.21, 0.016), times(1.04, 1.0), times(3e7, 1.0), times(1.0, 0.0)) == ("13x", "1.04x", "3e+07x", "")
    assert (against(0.21, 0.016), against(0.21, None)) == ("0.21, limit 0.016 (13x)", "0.21")


def test_places() -> None:
    assert place("a", 17, "decode") == "request 'a', position 17 (decode)"
    assert (place(phase="prefill"), place()) == ("prefill", "")
