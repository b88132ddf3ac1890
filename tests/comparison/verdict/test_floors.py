"""Measured floors, other tools' standards, and rows behind a near tie, in the verdict."""

import csv
import json

import numpy as np
import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.cli import main
from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.engine import calibrate, compare, rejudge
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.notes import unseen_routing
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.verdict.judging import add_undecided, settle, unrouted
from vllm_accprobe.judge.calibration import FLOAT32, MARGIN, SECOND_RUN, Calibration, load
from vllm_accprobe.judge.near_ties import Routing
from vllm_accprobe.judge.tensor_errors import NONFINITE, RowErrors
from vllm_accprobe.standards import built_in

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


def test_the_larger_of_several_floors_counts():
    one = Calibration({("a", "output.0"): {"any": 0.1, "prefill": 0.1}}, {"a": 1.0})
    two = Calibration({("a", "output.0"): {"any": 0.3, "decode": 0.3}}, {"a": 0.5, "b": 2.0})
    from vllm_accprobe.judge.calibration import joined

    both = joined([one, two])
    assert both.floor("a", "output.0", "prefill") == 0.1
    assert both.floor("a", "output.0", "decode") == both.floor("a", "output.0", None) == 0.3
    assert both.excuses("a", MARGIN * 1.0)
    assert not both.excuses("a", MARGIN * 1.01)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"kind": "accprobe calibration"}', "[" * 100_000,
        json.dumps({"kind": "accprobe calibration", "version": 1, "phases": ["prefill", "decode", "any"], "model": "",
                    "dtype": "", "runs": [], "origins": {}, "floors": [["a", "b", [1, 2, -1]]]}),
        json.dumps({"kind": "accprobe calibration", "version": 1, "phases": ["prefill", "decode", "any"], "model": "",
                    "dtype": "", "runs": [], "origins": {"x": "1e9"}, "floors": []}),
    ],
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


def test_nothing_was_sent_elsewhere():
    found, errors = settled(Routing())
    assert (found.note, found.left, found.own.tolist()) == ("", None, [])
    assert errors.err.tolist() == [1.0] * 4


def test_rows_from_the_near_tie_on():
    found, errors = settled(Routing(first={1: 2}))
    assert found.note == "2 rows after a router's near tie are not judged"
    assert found.left.tolist() == [False, False, True, True]
    assert (errors.err.tolist(), errors.ratio.tolist()) == ([1, 1, 0, 0], [2, 2, 1, 1])


def test_a_tensor_without_rows_is_left_out_whole():
    found, errors = settled(Routing(first={1: 3}), whole=True)
    assert found.note.startswith("not judged: its step has rows after a router's near tie")
    assert (found.left.all(), errors.err.tolist()) == (True, [0.0])
    assert settled(Routing(first={9: 0}), whole=True)[0].left is None


@pytest.mark.parametrize("whole", [False, True])
def test_nan_is_judged_behind_a_near_tie_too(whole):
    found, errors = settled(Routing(first={1: 0}), whole=whole, measure=NONFINITE)
    assert (found.note, found.left, errors.err.min()) == ("", None, 1.0)


@pytest.mark.parametrize(
    ("first", "note", "left"),
    [({}, "2 rows whose experts were not compared are not judged", [True, False, False, True]),
     ({1: 2}, "2 rows after a router's near tie are not judged; 2 rows whose experts were not compared are not judged",
      [True, False, True, True])],
)  # fmt: skip
def test_rows_whose_experts_were_not_compared(first, note, left):
    found, errors = settled(Routing(first=first))
    assert unrouted(found, errors, np.zeros(4, bool)) is found
    found = unrouted(found, errors, np.array([True, False, False, True]))
    assert (found.note, found.left.tolist()) == (note, left)
    assert errors.err.tolist() == [float(not out) for out in left]


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


ONE_REQUEST = {"prompts": {"a": [3, 14, 15, 9, 2, 6]}, "tokens": 3}
FOREIGN = {name: s.pairs for name, s in built_in().items() if s.pairs is not None}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign")
    write(capture(**ONE_REQUEST), root / "golden")
    write(capture(chunk=2, **ONE_REQUEST), root / "same")
    write(capture(faults={DOWN: scaled(1.2)}, **ONE_REQUEST), root / "wrong")
    return root


def table(path):
    with open(path / "compare.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("name", FOREIGN)
def test_columns_status_and_verdict(dumps, tmp_path, name):
    standard = FOREIGN[name]
    assert main(["compare", str(dumps / "golden"), str(dumps / "same"), "--standard", name, "-o", str(tmp_path)]) == 0
    rows = table(tmp_path)
    assert tuple(rows[0])[-len(standard.columns) :] == standard.columns
    assert {r["status"] for r in rows} <= {"pass", "skip"}
    assert main(["compare", str(dumps / "golden"), str(dumps / "wrong"), "--standard", name, "-o", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "compare.json").read_text())
    assert data["origins"][0]["module"] == DOWN  # the search for the culprit stays ours
    assert (data["verdict"], data["standard"]["name"]) == ("fail", name)
    said = {(r["tap"], r["role"]): r for r in table(tmp_path) if r["step"] == "0"}
    assert said[DOWN, "output.0"]["status"] == "fail"
    assert said["model.layers.0.mlp.down_proj", "output.0"]["status"] == "pass"


@pytest.mark.parametrize("name", [n for n, s in FOREIGN.items() if not s.needs_kl])
def test_a_saved_comparison_gives_the_same(dumps, tmp_path, name):
    both = str(dumps / "golden"), str(dumps / "wrong")
    main(["compare", *both, "--standard", name, "-o", str(tmp_path / "direct")])
    main(["compare", *both, "-o", str(tmp_path / "own")])
    main(["compare", "--rejudge", str(tmp_path / "own"), "--standard", name, "-o", str(tmp_path / "again")])
    assert table(tmp_path / "again") == table(tmp_path / "direct")
