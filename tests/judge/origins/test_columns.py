"""What sums per column say, by hand."""

import numpy as np
import pytest

from vllm_accprobe.judge.origins.columns import Columns, column_offsets, column_signs

# kernels.structure's sums of two columns over four rows: the second is all zero in the golden
SUMS = np.array([[0.04, 1.0], [4.0, 0.0], [0.4, 0.0], [0.01, 0.0], [4.0, 4.0], [0.2, 2.0]])


def test_errors_and_slopes():
    err, slope, sure = column_signs(SUMS)
    # half the typical column's power, a quarter of the median 2, stands for the column that is 0
    assert err.tolist() == pytest.approx([0.1, 1.0 / 0.5**0.5])
    assert slope.tolist() == pytest.approx([0.1, 0.0])
    assert sure.tolist() == pytest.approx([4.0, 0.0])


def test_offsets():
    offset, sure = column_offsets(SUMS)
    assert offset.tolist() == pytest.approx([0.05, 0.5 / 0.125**0.5])
    assert sure.tolist() == pytest.approx([1.0, 2.0])


def test_what_is_worked_out_once():
    columns = Columns(SUMS)
    assert (columns.width, columns.rows) == (2, 4.0)
    assert columns.worst_err == pytest.approx(2.0**0.5)
    assert columns.most_sure == pytest.approx(4.0)
    assert columns.uneven(2.0**-8) == pytest.approx((columns.worst_err / columns.usual_err, 4.0))
