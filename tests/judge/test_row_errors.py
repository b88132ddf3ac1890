"""Which of a row's measures decides, on rows written by hand."""

import numpy as np
import pytest

from vllm_accprobe.judge.tensor_errors import ELEMENT, NONFINITE, RATIO, ROW, row_errors
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import Standard


def test_a_row_fails_by_the_measure_that_shows_the_fault():
    g = np.random.default_rng(0).standard_normal((4, 512))
    m = g * 1.02
    m[1] = g[1] + 0.02 * np.random.default_rng(1).standard_normal(512)
    m[2] = g[2]
    m[2, 5] += 1.0
    m[3, 0] = np.nan
    errors = row_errors(definition.row_table(g, m), 0.0, 512, Standard())
    assert errors.measure.tolist() == [RATIO, ROW, ELEMENT, NONFINITE]
    assert errors.err[0] == pytest.approx(0.02 / Standard().ratio_factor(512))
    assert np.isinf(errors.err[3])


def test_a_tiny_row_is_measured_against_its_neighbours():
    g = np.ones((2, 64)) * [[1.0], [1e-6]]
    errors = row_errors(definition.row_table(g, g + 1e-6), 0.8, 64, Standard())
    # |d| = 8e-6 against the floor 0.8 is 1e-5; the norm ratio's limit is 0.89 of the row's at this width
    assert errors.err[1] == pytest.approx(1e-5 / Standard().ratio_factor(64))
    assert row_errors(definition.row_table(g, g + 1e-6), 0.0, 64, Standard()).err[1] >= 1.0
