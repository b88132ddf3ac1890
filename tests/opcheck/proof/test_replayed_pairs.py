"""A blamed row's pair is held to the replay's limit, and nothing else is touched."""

import math

from report_examples import pair

from vllm_accprobe.opcheck.proof.replayed_pairs import with_replayed

AT = {"tap": "m", "status": "fail", "measure": "row_rel_l2", "allowed": 0.1}
ORIGIN = {"module": "m", "role": "output.0", "created": 0.3, "floor": 0.01, "request": "a", "position": 7}


def pairs():
    return [
        pair(**AT, measured=0.5, worst_request="b", worst_position=1),
        pair(**AT, measured=0.3, worst_request="a", worst_position=7),
        pair(tap="m", measured=0.01, allowed=0.1),
        pair(tap="n", status="fail", measured=0.5, allowed=0.1, worst_request="a", worst_position=7),
    ]


def changed(origin):
    before = pairs()
    return {i: (p.measure, p.measured, p.allowed) for i, p in enumerate(with_replayed(before, [origin]))
            if p != before[i]}  # fmt: skip


def test_the_pair_of_the_row_and_else_the_worst():
    assert changed(ORIGIN) == {1: ("created", 0.3, 0.01)}
    assert changed(ORIGIN | {"position": 8}) == {0: ("created", 0.3, 0.01)}


def test_what_has_no_limit_or_no_failed_pair_changes_nothing():
    before = pairs()
    for other in ({"floor": 0.0}, {"created": math.inf}, {"created": None}, {"module": "elsewhere"}, {"role": "x"}):
        assert with_replayed(before, [ORIGIN | other]) is before
