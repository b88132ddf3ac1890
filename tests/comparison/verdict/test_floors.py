"""Measured floors, and rows behind a near tie, in the verdict."""

import json

import numpy as np
import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.engine import calibrate, compare, rejudge
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.notes import unseen_routing
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.verdict.judging import add_undecided, settle, unrouted
from vllm_accprobe.judge.calibration import FLOAT32, SECOND_RUN, Calibration, load
from vllm_accprobe.judge.near_ties import Routing
from vllm_accprobe.judge.tensor_errors import NONFINITE, RowErrors

ONE = {"prompts": {"a": [3, 14, 15, 9, 2, 6], "b": [5, 3, 5]}, "tokens": 3}
DOWN = "model.layers.1.mlp.down_proj"


def loud(values, positions, decode):
    """An operator that two honest runs disagree about by a tenth."""
    return values * (1 + 0.1 * np.cos(np.arange(values.size)).reshape(values.shape))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("floors")
    made = {
        "golden": capture(**ONE),
        "again": capture(noise=0.002, **ONE),
        "loud": capture(faults={DOWN: loud}, **ONE),
        "wrong": capture(faults={DOWN: scaled(1.2)}, **ONE),
        "very": capture(faults={DOWN: scaled(4.0)}, **ONE),
        "float32": capture(dtype="float32", **ONE),
    }
    return {name: write(dump, root / name) for name, dump in made.items()}


def test_errors_are_told_in_units_of_the_best_floor(runs):
    plain = compare(runs["golden"], runs["wrong"])
    assert {p.floor_source for p in plain.pairs if p.floor} == {"rounding model"}
    told = compare(runs["golden"], runs["wrong"], floors=[runs["again"]])
    second = compare(runs["golden"], runs["again"])
    worst = {}
    for p in second.pairs:
        for phase, value in (("prefill", p.prefill_rel_l2), ("decode", p.decode_rel_l2), ("mixed", p.worst_row_rel_l2)):
            key = p.tap, p.role, phase
            worst[key] = max(worst.get(key, 0.0), value or 0.0)
    measured = [p for p in told.pairs if p.floor_source == SECOND_RUN]
    assert measured
    for p in measured:
        assert p.floor == pytest.approx(worst[p.tap, p.role, p.phase] or worst[p.tap, p.role, "mixed"])
        assert p.x_floor == pytest.approx(p.worst_row_rel_l2 / p.floor)
    assert told.origins[0]["module"] == plain.origins[0]["module"] == DOWN
    assert any("floor measured by 1 run (golden against other runs" in note for note in told.notes)


def test_a_run_that_fails_is_no_floor_unless_it_is_taken_on_purpose(runs):
    """A faulty run as a floor would make every later comparison pass."""
    for floor in (lambda: calibrate(runs["golden"], [runs["again"], runs["wrong"]]),
                  lambda: compare(runs["golden"], runs["wrong"], floors=[runs["wrong"]])):  # fmt: skip
        with pytest.raises(CompareError, match=rf"fails against golden, first at {DOWN}.*--accept-failing") as e:
            floor()
        assert "\n" not in str(e.value)
    assert calibrate(runs["golden"], [runs["wrong"]], failing=True).origins


def test_what_golden_shows_itself_is_no_origin_and_more_of_it_is(runs, tmp_path):
    assert compare(runs["golden"], runs["loud"]).verdict == "fail"
    calibrate(runs["golden"], [runs["loud"]], failing=True).save(tmp_path)
    quiet = compare(runs["golden"], runs["loud"], floors=[tmp_path])
    assert (quiet.verdict, quiet.origins) == ("pass", [])
    assert any("golden's own runs show as well" in note for note in quiet.notes)
    found = compare(runs["golden"], runs["very"], floors=[tmp_path])
    assert (found.verdict, found.origins[0]["module"]) == ("fail", DOWN)


def test_a_float32_golden_is_a_floor_of_its_own(runs):
    made = calibrate(runs["float32"], [runs["golden"]])
    assert made.source == FLOAT32
    assert compare(runs["float32"], runs["golden"], floors=[runs["golden"]]).verdict == "pass"


def test_a_calibration_travels_as_a_file(runs, tmp_path):
    made = calibrate(runs["golden"], [runs["again"], runs["loud"]], failing=True)
    made.save(tmp_path)
    assert load(tmp_path) == made
    quiet = calibrate(runs["golden"], [runs["again"]])
    direct = compare(runs["golden"], runs["wrong"], floors=[runs["again"]])
    quiet.save(tmp_path / "quiet")
    stored = compare(runs["golden"], runs["wrong"], floors=[tmp_path / "quiet"])
    assert [p.x_floor for p in stored.pairs] == [p.x_floor for p in direct.pairs]
    direct = compare(runs["golden"], runs["wrong"], floors=[tmp_path])
    store.save(compare(runs["golden"], runs["wrong"]).measured, tmp_path)
    again = rejudge(store.load(tmp_path), floors=[tmp_path])
    assert [p.x_floor for p in again.pairs] == [p.x_floor for p in direct.pairs]
    with pytest.raises(CompareError, match="no calibration: --rejudge has no dumps"):
        rejudge(store.load(tmp_path), floors=[runs["again"]])


FORM = {"kind": "accprobe calibration", "version": 1, "phases": ["prefill", "decode", "any"], "model": "", "dtype": "",
        "runs": [], "origins": {}, "floors": []}  # fmt: skip


@pytest.mark.parametrize(
    "text", ["[" * 100_000, *(json.dumps(FORM | bad) for bad in ({"floors": [["a", "b", [1, 2, -1]]]},
                                                                 {"origins": {"x": "1e9"}}))],
)  # fmt: skip
def test_hostile_calibrations_are_one_line(runs, tmp_path, text):
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(CompareError, match="cannot be read as a calibration") as e:
        compare(runs["golden"], runs["wrong"], floors=[tmp_path])
    assert "\n" not in str(e.value)


def test_floors_that_do_not_belong_are_refused(runs, tmp_path):
    def other(weights):
        weights["lm_head"][:] *= 1.5

    stranger = write(capture(weights=other, **ONE), tmp_path / "stranger")
    with pytest.raises(CompareError, match="other weights than golden"):
        compare(runs["golden"], runs["wrong"], floors=[stranger])
    Calibration({("elsewhere", "output.0"): {"any": 0.1}}).save(tmp_path)
    with pytest.raises(CompareError, match="fits none of the tensors"):
        compare(runs["golden"], runs["wrong"], floors=[tmp_path])
    with pytest.raises(CompareError, match="does not exist"):
        compare(runs["golden"], runs["wrong"], floors=[tmp_path / "none"])


KEYS = np.array([(1 << 32) | i for i in range(4)])
UNIT = MeasuredUnit(("mlp", "output.0", 0), "", "", 1, 0, False, False)


def settled(rerouted, *, whole=False, measure=0):
    n = 1 if whole else 4
    errors = RowErrors(np.ones(n), np.full(n, 2.0), np.ones(n), np.ones(n), np.full(n, measure, np.int8), np.ones(n))
    part = Part("g", "m", 0, 0, (0, 0), None, "float32", 0, (8,), whole=whole)
    return settle(UNIT, part, RowSet(KEYS), errors, rerouted, 2.0**-8, []), errors


AFTER, UNSEEN = "rows after a router's near tie are not judged", "rows whose experts were not compared are not judged"
BOTH_ENDS = [True, False, False, True]


@pytest.mark.parametrize(("how", "unrouted_rows", "note", "left"), [
    ({"rerouted": Routing()}, None, "", None),
    ({"rerouted": Routing(first={1: 2})}, None, f"2 {AFTER}", [False, False, True, True]),
    ({"rerouted": Routing(first={1: 3}), "whole": True}, None, "not judged: its step has rows after", [True] * 4),
    ({"rerouted": Routing(first={9: 0}), "whole": True}, None, "", None),  # of another request
    # NaN is judged behind a near tie too.
    *(({"rerouted": Routing(first={1: 0}), "whole": whole, "measure": NONFINITE}, None, "", None)
      for whole in (False, True)),
    ({"rerouted": Routing()}, [False] * 4, "", None),
    ({"rerouted": Routing()}, BOTH_ENDS, f"2 {UNSEEN}", BOTH_ENDS),
    ({"rerouted": Routing(first={1: 2})}, BOTH_ENDS, f"2 {AFTER}; 2 {UNSEEN}", [True, False, True, True]),
])  # fmt: skip
def test_rows_that_are_not_judged(how, unrouted_rows, note, left):
    found, errors = settled(**how)
    if unrouted_rows is not None:
        found = unrouted(found, errors, np.array(unrouted_rows))
    assert found.note.startswith(note)
    assert bool(found.note) == bool(note)
    assert (None if found.left is None else found.left.tolist()) == left
    out = (left or [False] * 4)[: len(errors.err)]
    assert errors.err.tolist() == [float(not x) for x in out]
    if unrouted_rows is None:
        assert errors.ratio.tolist() == [1.0 if x else 2.0 for x in out]


def test_logits_alone_tell_which_rows_are_left_out():
    """Row 0 has no margin; 1 lies within its limit, 2 beyond it; 3 is another request's, within."""
    keys = np.array([*KEYS[:3], 2 << 32])
    err = np.array([0.01, 0.01, 0.5, 0.03])
    errors = RowErrors(err, np.ones(4), err, err, np.zeros(4, np.int8), np.zeros(4))
    part = Part("g", "m", 0, 0, (0, 0), None, "float32", 0, (8,))
    rerouted = Routing()
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
