"""Measured floors: they silence what golden's own runs show, hide no fault, and refuse what does not belong."""

import json

import numpy as np
import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.engine import calibrate, compare, rejudge
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.judge.calibration import FLOAT32, MARGIN, SECOND_RUN, Calibration, load

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
