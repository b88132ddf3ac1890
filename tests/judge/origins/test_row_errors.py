"""Errors of one tensor, row by row."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.judge.origins.row_errors import INPUT, OUTPUT, PARAM, Trace, kind_of


@pytest.mark.parametrize(
    ("role", "kind"),
    [("input.x", INPUT), ("output.0", OUTPUT), ("inplace.x", OUTPUT), ("value", OUTPUT), ("param.weight", PARAM)],
)
def test_kinds_of_roles(role, kind):
    assert kind_of(role) == kind


def test_rows_that_broke():
    keys = np.array([3, 5, 9])
    trace = Trace("m", "output.0", 0, OUTPUT, 0, 1.0, RowSet(keys), keys, np.ones(3))
    assert trace.broken_keys.tolist() == []  # nobody looked
    assert replace(trace, broken=np.array([True, False, True])).broken_keys.tolist() == [3, 9]
