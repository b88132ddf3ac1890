"""What a series keeps of a comparison."""

import math

import pytest
from report_examples import ORIGIN, comparison, pair

from vllm_accprobe.report.series.dump_entry import entry_of, exit_code, failing_taps, not_compared, over_limit


def test_an_entry_holds_the_worst_factor_of_each_tap():
    found = comparison(
        pairs=[
            pair(tap="a", order=1, worst_row_rel_l2=0.008, limit=0.016),
            pair(tap="a", order=1, step=1, worst_row_rel_l2=0.032, limit=0.016, status="fail"),
            pair(tap="a", order=0, role="input.0", worst_row_rel_l2=0.9, limit=0.016),
            pair(tap="b", order=2, nonfinite_mismatch=1, status="fail"),
            pair(tap="c", order=3, status="skip"),
        ],
        verdict="fail",
        origins=[ORIGIN | {"module": "a", "secret": "x"}],
    )
    entry = entry_of(found, "day1", "runs/day1", "day1/compare.html")
    assert {t: (s.over, s.failed) for t, s in entry.taps.items()} == {"a": (2.0, 1), "b": (math.inf, 1)}
    assert (entry.code, entry.status, entry.over) == (1, "fail", math.inf)
    assert (entry.passed, entry.failed, entry.skipped) == (2, 2, 1)
    assert entry.culprit["module"] == "a"
    assert "secret" not in entry.culprit


def test_taps_that_failed_in_any_dump_are_in_the_order_of_the_data():
    first = entry_of(
        comparison(pairs=[pair(tap="late", order=9), pair(tap="early", order=1, status="fail")]), "1", "", ""
    )
    second = entry_of(comparison(pairs=[pair(tap="late", order=9, status="fail"), pair(tap="never")]), "2", "", "")
    assert failing_taps([first, second]) == ["early", "late"]


@pytest.mark.parametrize(
    ("codes", "worst"), [([], 0), ([0, 0], 0), ([0, 1, 0], 1), ([1, 3, 0], 3), ([3, 2, 1], 2), ([0, 3], 3)]
)
def test_the_worst_exit_code_counts(codes, worst):
    assert exit_code([not_compared("x", "x", code, "") for code in codes]) == worst


@pytest.mark.parametrize(
    ("value", "said"), [(None, ""), (math.inf, "∞"), (0.25, "0.25x"), (13.2, "13.2x"), (0.0, "0"), (3e9, "3e+09x")]
)
def test_a_factor_in_words(value, said):
    assert over_limit(value) == said
