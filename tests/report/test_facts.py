"""The verdict in one sentence, whatever it rests on."""

from dataclasses import replace

import pytest
from report_examples import DIVERGENCE, ORIGIN, comparison, pair

from vllm_accprobe.report import facts, terminal

SENTENCE = (
    "FAIL: model.layers.3.mlp.down_proj (RowParallelLinear) introduces the error: output.0, request 'a', "
    "position 17 (decode), row relative L2 0.21, limit 0.016 (13x)"
)


def test_failure_names_the_culprit_in_one_sentence():
    assert facts.headline(comparison(verdict="fail", origins=[ORIGIN])) == SENTENCE


def test_an_infinite_error_is_said_in_words():
    result = comparison(
        verdict="fail",
        origins=[ORIGIN | {"created": float("inf")}],
        first_divergence=DIVERGENCE | {"metric": "nonfinite", "value": float("inf"), "limit": 0.0},
    )
    assert facts.headline(result).endswith(
        "position 17 (decode), NaN or Inf on one side only, or values that differ and must be equal"
    )
    assert terminal.first_divergence(result)[0].endswith("position 17 (decode), where origin 1 is")
    result = replace(result, first_divergence=result.first_divergence | {"module": "upstream"})
    assert terminal.first_divergence(result)[0].endswith("position 17 (decode), NaN or Inf on one side only")


def test_pass_says_what_it_rests_on():
    result = comparison(
        pairs=[pair(identical=True), pair(), pair(status="skip")],
        coverage={"pairs": 2, "rows_compared": 12345},
    )
    assert facts.headline(result) == (
        "PASS: 2 pairs and 12,345 rows agree within the standard 'accprobe' (1 identical, 1 more skipped)"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"first_divergence": DIVERGENCE | {"rank": None, "request": None}},
            "FAIL: no single operator stands out as the origin; the error is first seen at "
            "model.layers.3.mlp.down_proj/output.0, step 4, position 17 (decode), "
            "row relative L2 0.21, limit 0.016 (13x)",
        ),
        (
            {"pairs": [pair(status="fail"), pair()]},
            "FAIL: 1 pair of 2 differ beyond the standard",
        ),
        (
            {"tokens": {"compared": 9, "flipped": [{}, {}]}},
            "FAIL: 2 sampled tokens flipped without a near tie, and no captured tensor explains it",
        ),
        ({}, "FAIL: the comparison failed; see the notes"),
    ],
)
def test_failure_without_an_origin(changes, expected):
    assert facts.headline(comparison(verdict="fail", **changes)) == expected


def test_a_token_that_passes_as_a_near_tie_is_not_endlessly_beyond_its_limit():
    other = {"measure": "exact", "limit": 0.0, "worst_row_rel_l2": 0.9}
    assert facts.severity(pair(tap="sampler", role="output.token", status="pass", **other)) == 1.0
    assert facts.severity(pair(tap="sampler", role="output.token", status="fail", **other)) == float("inf")
    assert facts.severity(pair(status="pass", nonfinite_mismatch=1)) == float("inf")
