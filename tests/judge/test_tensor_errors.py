"""Sums per column, and which of a row's measures decides, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, PARAM, kind_of
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.judge.tensor_errors import (
    ELEMENT,
    NONFINITE,
    RATIO,
    ROW,
    Columns,
    TensorErrors,
    column_offsets,
    column_signs,
    kind_of_place,
    operator_of,
    row_errors,
    spread,
)
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards.limits import Standard

# kernels.structure's sums of two columns over four rows: the second is all zero in the golden
SUMS = np.array([[0.04, 1.0], [4.0, 0.0], [0.4, 0.0], [0.01, 0.0], [4.0, 4.0], [0.2, 2.0]])


def test_errors_slopes_and_offsets():
    err, slope, sure = column_signs(SUMS)
    # half the typical column's power, a quarter of the median 2, stands for the column that is 0
    assert err.tolist() == pytest.approx([0.1, 1.0 / 0.5**0.5])
    assert slope.tolist() == pytest.approx([0.1, 0.0])
    assert sure.tolist() == pytest.approx([4.0, 0.0])
    offset, sure = column_offsets(SUMS)
    assert offset.tolist() == pytest.approx([0.05, 0.5 / 0.125**0.5])
    assert sure.tolist() == pytest.approx([1.0, 2.0])


def test_what_is_worked_out_once():
    columns = Columns(SUMS)
    assert (columns.width, columns.rows) == (2, 4.0)
    assert columns.worst_err == pytest.approx(2.0**0.5)
    assert columns.most_sure == pytest.approx(4.0)
    assert columns.uneven(2.0**-8) == pytest.approx((columns.worst_err / columns.usual_err, 4.0))


def test_rows_that_broke():
    keys = np.array([3, 5, 9])
    trace = TensorErrors("m", "output.0", 0, OUTPUT, 0, 1.0, RowSet(keys), keys, np.ones(3))
    assert trace.broken_keys.tolist() == []  # nobody looked
    assert replace(trace, broken=np.array([True, False, True])).broken_keys.tolist() == [3, 9]


def test_spread():
    keys, values = np.array([2, 5]), np.array([0.5, 0.25])
    assert spread(np.array([1, 2, 5, 6]), keys, values).tolist() == [0.0, 0.5, 0.25, 0.0]
    assert spread(keys, keys, values).tolist() == [0.5, 0.25]
    assert spread(keys, np.zeros(0, np.int64), np.zeros(0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("tap", "operator"), [
    ("model.layers.3.mlp.down_proj", "model.layers.*.mlp.down_proj"), ("h.10", "h.*"), ("fc1.x2", "fc1.x2"),
    ("experts.0.1", "experts.*.*"),
])  # fmt: skip
def test_operators_are_named_without_numbers(tap, operator):
    assert operator_of(tap) == operator
    assert kind_of_place(tap, "output.0") == f"{operator}|output.0"


def test_kinds_of_roles():
    kinds = {"input.x": INPUT, "output.0": OUTPUT, "inplace.x": OUTPUT, "value": OUTPUT, "param.weight": PARAM}
    assert {role: kind_of(role) for role in kinds} == kinds


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
