"""What a tap created at most, of rows whose inputs are known."""

import numpy as np
import pytest

from vllm_accprobe.judge.origins.created_over import created_over
from vllm_accprobe.judge.origins.peer_evidence import Look
from vllm_accprobe.standards.limits import Standard

RULES = Standard()
LIMIT = 0.01


def over(err, before):
    rows = [np.asarray(x, float) for x in (err, np.zeros(len(err)), before, np.zeros(len(err)))]
    return created_over(Look("t", "output.0", "C", 2**-8, np.arange(len(err)), *rows), LIMIT, RULES)


def test_what_came_in_is_taken_off_in_squares():
    assert over([0.005, 0.001], [0.003, 0.0]) == pytest.approx(0.4)
    assert over([0.003], [0.005]) == 0.0


def test_what_is_beyond_the_limit_is_so_by_the_judges_rule():
    assert over([0.2], [0.0]) == pytest.approx(20.0)
    assert over([0.2], [0.002]) == pytest.approx((0.2 - RULES.amplification * 0.002) / LIMIT)
    behind_a_fault = over([0.25], [0.2])  # what it passes on may grow by so much
    assert behind_a_fault == pytest.approx(max(0.25 - RULES.wild * 0.2, 0.0) / LIMIT)
    assert behind_a_fault < 1


def test_rows_without_a_number_and_exact_places_tell_nothing():
    assert over([np.inf, 0.004, np.nan], [0.0, 0.0, 0.0]) == pytest.approx(0.4)
    assert over([0.1], [np.inf]) == 0.0
    assert over([], []) == 0.0
    assert created_over(Look("t", "o", "C", 0.0, np.arange(1), *[np.ones(1)] * 4), 0.0, RULES) == 0.0
