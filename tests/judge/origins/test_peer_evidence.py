"""What places of several layers have in common, and what one look is to the others."""

import numpy as np
import pytest

from vllm_accprobe.judge.origins.peer_evidence import Known, Look, kind_of_place, operator_of


@pytest.mark.parametrize(
    ("tap", "operator"),
    [
        ("model.layers.3.mlp.down_proj", "model.layers.*.mlp.down_proj"),
        ("h.10", "h.*"),
        ("fc1.x2", "fc1.x2"),
        ("experts.0.1", "experts.*.*"),
    ],
)
def test_operators_are_told_without_numbers(tap, operator):
    assert operator_of(tap) == operator
    assert kind_of_place(tap, "output.0") == f"{operator}|output.0"


def test_what_was_made_is_what_did_not_come_in():
    err, before = np.full(9, 0.05), np.full(9, 0.03)
    known = Known(Look("m", "output.0", "", 2.0**-8, np.arange(9), err, np.full(9, 0.5), before, np.zeros(9)))
    assert known.made == pytest.approx(0.04)
    assert (known.gain, known.gain_error) == (0.5, 0.0)
