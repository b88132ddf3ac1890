"""A blamed row's pair is held to the replay's limit, and nothing else is touched."""

import math

from report_examples import pair

from vllm_accprobe.opcheck.proof.decide import with_replayed

AT = {"tap": "m", "status": "fail", "measure": "row_rel_l2", "allowed": 0.1}
ORIGIN = {"module": "m", "role": "output.0", "created": 0.3, "floor": 0.01, "request": "a", "position": 7}


def pairs():
    return [
        pair(
            **AT,
            measured=0.5,
            worst_request="b",
            worst_position=1,
            worst_row_rel_l2=0.2,
            message="row norm is 1.5 times the golden's (allowed 1 ± 0.1); first seen",
        ),
        pair(**AT, measured=0.3, worst_request="a", worst_position=7, worst_row_rel_l2=0.3),
        pair(tap="m", measured=0.01, allowed=0.1),
        pair(tap="n", status="fail", measured=0.5, allowed=0.1, worst_request="a", worst_position=7),
    ]


def changed(origin):
    before = pairs()
    return {i: (p.measure, p.measured, p.allowed) for i, p in enumerate(with_replayed(before, [origin]))
            if p != before[i]}  # fmt: skip


def test_all_failed_pairs_of_the_output_and_none_above_the_blamed_row():
    # the first pair's worst row is 0.2 off, and was not replayed
    assert changed(ORIGIN) == {0: ("created", 0.2, 0.01), 1: ("created", 0.3, 0.01)}
    assert changed(ORIGIN | {"created": 0.1, "position": 8}) == {0: ("created", 0.1, 0.01), 1: ("created", 0.1, 0.01)}
    said = with_replayed(pairs(), [ORIGIN])[0].message
    assert said == "introduces an error of 0.2 (limit 0.01, by replay); first seen"


def test_where_none_failed_the_worst_that_is_not_identical_does():
    passed = [
        pair(tap="m", measured=0.01, allowed=0.1, worst_row_rel_l2=0.01),
        pair(tap="m", measured=0.02, allowed=0.1, worst_row_rel_l2=0.02),
        pair(tap="m", measured=0.0, allowed=0.1, identical=True),
    ]
    found = with_replayed(passed, [ORIGIN])
    assert [(p.status, p.measured) for p in found] == [("pass", 0.01), ("fail", 0.3), ("pass", 0.0)]


def test_what_has_no_limit_or_no_failed_pair_changes_nothing():
    before = pairs()
    for other in ({"floor": 0.0}, {"created": math.inf}, {"created": None}, {"module": "elsewhere"}, {"role": "x"}):
        assert with_replayed(before, [ORIGIN | other]) is before
