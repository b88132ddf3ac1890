"""What two tensors' statistics say of their distance: lower bounds, from the figures that both sides have."""

import math

import pytest

from vllm_accprobe.comparison.measure.read import common, figures, said, statistics_error
from vllm_accprobe.dump.schema import Stats

BASE = Stats(4, -2.0, 2.0, 0.5, 4.0, 0, 0)  # rms 2
INFINITE = (math.inf, 0.0)


@pytest.mark.parametrize(
    ("mine", "error"),
    [
        (BASE, (0.0, 0.0)),
        (Stats(4, -2.0, 2.0, 0.5, 5.0, 0, 0), (0.25, 0.0)),  # |5 - 4| / 4
        (Stats(4, -2.0, 2.0, 1.5, 4.0, 0, 0), (0.5, 0.0)),  # |1.5 - 0.5| / 2
        (Stats(4, -2.0, 3.0, 0.5, 4.0, 0, 0), (0.0, 0.5)),  # |3 - 2| / max(2, 2)
        (Stats(4, None, None, None, 4.0, 0, 0), (0.0, 0.0)),  # a figure that one side lacks says nothing
        (Stats(5, -2.0, 2.0, 0.5, 4.0, 0, 0), INFINITE),
        (Stats(4, -2.0, 2.0, 0.5, 4.0, 1, 0), INFINITE),
    ],
)
def test_lower_bounds(mine, error):
    assert statistics_error(BASE, mine) == error


def test_counts_of_tools_that_only_say_whether_there_is_any():
    many = Stats(4, -2.0, 2.0, 0.5, 4.0, 3, 0)
    assert statistics_error(many, Stats(4, -2.0, 2.0, 0.5, 4.0, 1, 0)) == (0.0, 0.0)
    assert statistics_error(many, Stats(4, -2.0, 2.0, 0.5, 4.0, 2, 0)) == INFINITE


def test_zeros():
    zero = Stats(4, 0.0, 0.0, 0.0, 0.0, 0, 0)
    assert statistics_error(zero, zero) == (0.0, 0.0)
    assert statistics_error(zero, BASE) == INFINITE


def test_words():
    part = Stats(4, None, 2.0, None, None, 0, 0)
    assert said((figures(BASE), figures(part))) == "golden | mine: max 2 | 2, min -2 | -, mean 0.5 | -, norm 4 | -"
    none = Stats(4, None, None, None, None, 0, 0)
    assert said((figures(none), figures(none))) == ""
    assert (common(BASE, part), common(BASE, none)) == (True, False)
