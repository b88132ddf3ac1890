"""What a replay leaves of gaps, on origins written by hand."""

from types import SimpleNamespace

import pytest

from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.opcheck.proof.decide import narrowed

GAP = {"after": "m.0.up", "before": "m.0.down", "contains": ["m.0.act", "m.0", "m.0.down"]}


def result(*origins):
    plain = {"golden_path": "", "mine_path": "", "golden_run": {}, "mine_run": {}}
    more = {"pairs": [], "coverage": {}, "first_divergence": None, "tokens": {}, "verdict": "fail", "notes": []}
    return Comparison(**plain, **more, origins=list(origins), plan=[], standard={})


def gaps_of(comparison):
    return [o["gap"] and o["gap"]["contains"] for o in comparison.origins]


@pytest.mark.parametrize(
    ("wrong", "right", "left"),
    [
        ((), (), [["m.0.act", "m.0", "m.0.down"], None]),
        ((), ("m.0.down", "m.0"), [["m.0.act", "m.0"], None]),
        (("m.0.act",), (), [None]),
        (("m.0.down",), (), [None]),
        (("m.1",), (), [["m.0.act", "m.0", "m.0.down"], None]),
    ],
    ids=["nothing", "its end is right", "one inside is wrong", "its end is wrong", "another is wrong"],
)
def test_a_gap_is_narrowed(wrong, right, left):
    found = narrowed(result({"module": "m.0", "gap": GAP}, {"module": "m.1", "gap": None}), wrong, right)
    assert gaps_of(found) == left


def test_nothing_changes_without_a_gap():
    plain = SimpleNamespace(origins=[{"module": "m.1"}])
    assert narrowed(plain, {"m.1"}, set()) is plain
