"""Rows after a near tie are not judged, and neither is a tensor that does not say which rows are theirs."""

import numpy as np

from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.notes import unseen_routing
from vllm_accprobe.comparison.verdict.judging import add_undecided, settle
from vllm_accprobe.judge.near_ties import Rerouted
from vllm_accprobe.judge.tensor_errors import RowErrors

KEYS = np.array([(1 << 32) | i for i in range(4)])
UNIT = MeasuredUnit(("mlp", "output.0", 0), "", "", 1, 0, False, False)


def settled(rerouted, *, whole=False):
    n = 1 if whole else 4
    errors = RowErrors(np.ones(n), np.full(n, 2.0), np.ones(n), np.ones(n), np.zeros(n, np.int8), np.ones(n))
    part = Part("g", "m", 0, 0, (0, 0), None, "float32", 0, (8,), whole=whole)
    return settle(UNIT, part, RowSet(KEYS), errors, rerouted, 2.0**-8, []), errors


def test_nothing_was_sent_elsewhere():
    found, errors = settled(Rerouted())
    assert (found.note, found.left, found.own.tolist()) == ("", None, [])
    assert errors.err.tolist() == [1.0] * 4


def test_rows_from_the_near_tie_on():
    found, errors = settled(Rerouted(first={1: 2}))
    assert found.note == "2 rows after a router's near tie are not judged"
    assert found.left.tolist() == [False, False, True, True]
    assert (errors.err.tolist(), errors.ratio.tolist()) == ([1, 1, 0, 0], [2, 2, 1, 1])


def test_a_tensor_without_rows_is_left_out_whole():
    found, errors = settled(Rerouted(first={1: 3}), whole=True)
    assert found.note.startswith("not judged: its step has rows after a router's near tie")
    assert (found.left.all(), errors.err.tolist()) == (True, [0.0])
    assert settled(Rerouted(first={9: 0}), whole=True)[0].left is None


def test_logits_alone_tell_which_rows_are_left_out():
    """Row 0 has no margin; 1 lies within its limit, 2 beyond it; 3 is another request's, within."""
    keys = np.array([*KEYS[:3], 2 << 32])
    err = np.array([0.01, 0.01, 0.5, 0.03])
    errors = RowErrors(err, np.ones(4), err, err, np.zeros(4, np.int8), np.zeros(4))
    part = Part("g", "m", 0, 0, (0, 0), None, "float32", 0, (8,))
    rerouted = Rerouted()
    add_undecided(part, RowSet(keys), errors, rerouted, 2.0**-8, 0.04)
    assert not rerouted.first
    part.margins = np.array([[np.nan] * 3, [0.1, 0.1, 1.0], [1.0, 1.0, 2.0], [0.2, 0.0, 1.0]])
    add_undecided(part, RowSet(keys), errors, rerouted, 2.0**-8, 0.04)
    assert rerouted.first == {1: 1, 2: 0}
    assert errors.err.tolist() == err.tolist()  # the logits themselves are judged


def test_what_is_said_where_nobody_saw_the_routing():
    assert unseen_routing(["m.0.experts"], 0) == unseen_routing([], 2) == []
    (said,) = unseen_routing(["m.0.experts", "m.1.experts"], 1)
    assert said.startswith("an origin is no proof: which experts rows went to is not known (m.0.experts and 1 more)")
    assert "capture the router's logits (gate) in both" in said
