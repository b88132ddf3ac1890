"""Every metric against numbers worked out by hand; the worst element found piece by piece, the first of equals."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from vllm_accprobe.kernels import definition
from vllm_accprobe.kernels.float_formats import FORMATS, LOW, half_step, smallest
from vllm_accprobe.kernels.formulas import eps_of
from vllm_accprobe.kernels.structure import chosen, structure

NAN, INF = float("nan"), float("inf")
SIZE = 5 << 18
"""Elements of a tensor that is one row."""


def a(*values):
    return np.array(values, dtype=np.float32)


def tensor(golden, mine):
    """Of a whole tensor as one row."""
    return definition.tensor_metrics(definition.row_table(golden[None], mine[None]))


def test_all_metrics_of_a_small_tensor():
    # g = (3, 4, 0), m = (3, 2, 1): d = (0, -2, 1), sum d*d = 5, |g| = 5, |m| = sqrt(14), g.m = 17
    found = tensor(a(3, 4, 0), a(3, 2, 1))
    assert found.cosine == pytest.approx(17 / (5 * math.sqrt(14)), rel=1e-15)
    assert found.max_abs_err == 2.0
    assert found.mean_abs_err == 1.0
    assert found.rmse == pytest.approx(math.sqrt(5 / 3), rel=1e-15)
    assert found.rel_l2 == pytest.approx(math.sqrt(5) / 5, rel=1e-15)
    assert found.max_rel_err == 0.5  # 2/4; the third position does not count, its golden value is 0
    assert definition.locate(a(3, 4, 0), a(3, 2, 1)) == (1, 4.0, 2.0)
    assert (found.nonfinite, found.nonfinite_mismatch) == (0, 0)


def test_nonfinite_positions_are_left_out_and_counted():
    # position 0 equal NaN, 1 equal inf, 2 inf against -inf, 3 NaN on one side; only the last one is compared
    found = tensor(a(NAN, INF, INF, 1, 2), a(NAN, INF, -INF, NAN, 3))
    assert (found.nonfinite, found.nonfinite_mismatch) == (4, 2)
    assert (found.max_abs_err, found.mean_abs_err, found.rmse, found.rel_l2, found.max_rel_err) == (1, 1, 1, 0.5, 0.5)
    assert definition.locate(a(NAN, INF, INF, 1, 2), a(NAN, INF, -INF, NAN, 3)) == (4, 2.0, 3.0)


def test_zero_norms_have_no_relative_metric():
    zero_golden = tensor(a(0, 0), a(0, 1))
    assert (zero_golden.cosine, zero_golden.rel_l2, zero_golden.max_rel_err) == (None, None, None)
    assert zero_golden.max_abs_err == 1.0
    zero_mine = tensor(a(1, 0), a(0, 0))
    assert (zero_mine.cosine, zero_mine.rel_l2) == (None, 1.0)


@pytest.mark.parametrize(("g", "m"), [((), ()), ((NAN,), (NAN,)), ((INF, NAN), (1, 2))])
def test_without_a_finite_position_there_is_no_number(g, m):
    found = tensor(a(*g), a(*m))
    assert (found.cosine, found.max_abs_err, found.rmse, found.rel_l2, found.max_rel_err) == (None,) * 5


def test_integers_and_bools_are_compared_as_float64():
    found = tensor(np.array([1, 2**40]), np.array([1, 2**40 + 1]))
    assert found.max_abs_err == 1.0
    assert tensor(np.array([True, False]), np.array([True, True])).mean_abs_err == 0.5


def test_rows():
    g = np.array([[3, 4], [0, 0], [0, 0], [1, NAN]], dtype=np.float32)
    m = np.array([[3, 5], [0, 0], [1, 0], [1, 1]], dtype=np.float32)
    table = definition.row_table(g, m)
    assert definition.row_rel_l2(table).tolist() == [0.2, 0.0, INF, INF]  # a NaN on one side never passes
    assert definition.row_rel_l2(table, floor=10.0).tolist() == [0.1, 0.0, 0.1, INF]
    ratio = definition.row_norm_ratio(table)
    assert ratio[0] == pytest.approx(math.sqrt(34) / 5, rel=1e-15)
    assert ratio[1:].tolist() == [1.0, INF, 1.0]
    assert definition.row_norm_ratio(table, floor=10.0)[2] == pytest.approx(1.1)
    # row 0: rms(g) = 5/sqrt(2) = 3.54 < 4, d = 1 at the element of value 4
    assert table[:, definition.PEAK].tolist() == [0.25, 0.0, INF, 0.0]


def test_a_different_shape_is_an_error_not_a_broadcast():
    with pytest.raises(ValueError, match="one shape"):
        tensor(a(1, 2), a(1))


def test_element_sums_by_hand():
    g = np.array([[1.0, 0.0, 100.0, np.nan, -2.0]])
    m = np.array([[1.005, 1e-9, 100.0, 1.0, -2.0005]])
    eps = 2.0**-8
    got = dict(zip(definition.ELEMENT_FIELDS, definition.element_sums(g, m, eps), strict=True))
    # relative to |g| + eps: 0.00498, 2.6e-7, 0, (left out), 0.00025
    assert (got["within_100"], got["within_1000"], got["within_10000"]) == (4, 3, 2)
    assert (got["close"], got["above"]) == (2, 1)  # 1e-9 is below 1e-8; only 0.005 is above 1e-3
    assert got["sum_rel"] == pytest.approx(0.005 + 0.00025)
    assert (got["max_rel"], got["max_abs"]) == (pytest.approx(0.005), pytest.approx(0.005))
    assert got["sum_abs"] == pytest.approx(0.0055)  # the golden's zero is left out
    total = definition.element_sums(g, m, eps)
    definition.add_elements(total, definition.element_sums(g, m, eps))
    assert total[definition.ABOVE] == 2
    assert total[definition.TOP_REL] == pytest.approx(0.005)


def test_the_first_largest_error_wherever_it_lies() -> None:
    golden = np.zeros(SIZE, np.float32)
    for places in ([0], [SIZE - 1], [1 << 18, (1 << 18) + 1], [(1 << 18) - 1, 3 << 18], [700_000, 3, 1_300_000]):
        mine = golden.copy()
        mine[places] = 2.0
        assert definition.locate(golden, mine) == (min(places), 0.0, 2.0)


def test_what_is_not_finite_is_passed_over() -> None:
    golden, mine = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32)
    mine[:900_000] = np.nan
    golden[900_000:1_000_000] = np.inf
    mine[1_200_000] = 1.5
    assert definition.locate(golden, mine) == (1_200_000, 1.0, 1.5)
    at, _, value = definition.locate(golden[:4], mine[:4])
    assert at == 0
    assert np.isnan(value)


def test_it_takes_no_memory_of_the_tensors_size() -> None:
    golden, mine = np.zeros(8 << 20, np.float32), np.ones(8 << 20, np.float32)
    tracemalloc.start()
    definition.locate(golden, mine)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < golden.nbytes // 2


# --- what sums make of a tensor's metrics, by hand ---


def test_eps_is_the_goldens():
    assert [eps_of(d) for d in ("bfloat16", "float16", "float32", "int8")] == [2.0**-8, 2.0**-10, 2.0**-23, 0.0]


# --- the table of floating-point formats is torch's own ---


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_torchs(name):
    kind = getattr(torch, name)
    assert 2.0 ** FORMATS[name][1] == torch.finfo(kind).smallest_normal
    step, least = 2 * half_step(name), smallest(name)
    given = torch.tensor([1 + step, 1 + step / 2, least, least / 4], dtype=torch.float64)
    assert given.to(kind).double().tolist() == [1 + step, 1.0, least, 0.0]


def test_what_is_no_float_has_no_step():
    assert (half_step("int8"), smallest("bool")) == (0.0, 0.0)
    assert sorted(set(FORMATS) - set(LOW)) == ["float32", "float64"]


# --- sums per column by hand; the sample of rows ---


def test_sums_by_hand():
    # row 0: |g| = 5, d = (0, 5), so g/|g| = (0.6, 0.8) and d/|g| = (0, 1); a zero row and a NaN row are left out
    g = np.array([[3, 4], [0, 0], [1, 1]], np.float32)
    m = np.array([[3, 9], [1, 1], [np.nan, 1]], np.float32)
    found = structure(g, m)
    want = [[0, 1], [0.36, 0.64], [0, 0.8], [0, 0.64], [1, 1], [0, 1]]
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_rows_are_chosen_evenly():
    assert chosen(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert chosen(0, 10).tolist() == []
    some = chosen(1000, 1 << 18)  # never fewer than 16
    assert (len(some), some[0], some[-1]) == (16, 0, 999)
    assert not some.flags.writeable
