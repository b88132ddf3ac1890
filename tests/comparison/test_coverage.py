"""Whose rows are counted together, and what judging adds to the counts."""

from vllm_accprobe.comparison.coverage import UNKNOWN, finished
from vllm_accprobe.comparison.plan.unit import family
from vllm_accprobe.judge.near_ties import ROWS_AFTER, Rerouted


def test_families():
    found = [family(s) for s in ("tokens", "logits", "vision/4", "vision/4#1", "")]
    assert found == ["text", "text", "vision/4", "vision/4", "text"]


def test_what_judging_adds():
    measured = {"rows_compared": 7, "skipped": {"why": 1}}
    assert finished(measured, Rerouted()) == measured
    found = finished(measured, Rerouted(unknown=2, _seen={5, 6, 7}))
    assert found == {"rows_compared": 7, "skipped": {"why": 1, ROWS_AFTER: 3, UNKNOWN: 2}}
    assert measured["skipped"] == {"why": 1}
