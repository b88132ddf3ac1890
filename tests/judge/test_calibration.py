"""Measured floors: the file and what several of them say together."""

from pathlib import Path

import pytest

from vllm_accprobe.judge.calibration import (
    FLOAT32,
    SECOND_RUN,
    Calibration,
    CalibrationError,
    is_calibration,
    joined,
    load,
)

ONE = Calibration({("a", "output.0"): {"prefill": 0.1, "any": 0.2}}, {"a": 0.01}, "m", "bfloat16", ("r1",))
TWO = Calibration({("a", "output.0"): {"prefill": 0.3}, ("b", "output.0"): {"any": 0.0}}, {"a": 0.02}, runs=("r2",),
                  source=FLOAT32)  # fmt: skip


def test_it_is_the_same_after_a_journey(tmp_path: Path) -> None:
    path = ONE.save(tmp_path / "new")
    assert load(path) == load(path.parent) == ONE
    assert (is_calibration(path), is_calibration(path.parent), is_calibration(tmp_path)) == (True, True, False)


def test_floors_and_excuses() -> None:
    assert (ONE.floor("a", "output.0", "prefill"), ONE.floor("a", "output.0", "decode")) == (0.1, 0.2)
    assert (ONE.floor("b", "output.0", None), TWO.floor("b", "output.0", None)) == (None, None)  # 0: equal to the bit
    assert (ONE.excuses("a", 0.03), ONE.excuses("a", 0.031), ONE.excuses("b", 0.0)) == (True, False, False)


def test_of_several_the_larger_counts() -> None:
    both = joined([ONE, TWO])
    assert both == Calibration(
        {("a", "output.0"): {"prefill": 0.3, "any": 0.2}, ("b", "output.0"): {"any": 0.0}},
        {"a": 0.02}, "m", "bfloat16", ("r1", "r2"), SECOND_RUN,
    )  # fmt: skip
    assert (joined([]), joined([TWO])) == (None, TWO)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "accprobe calibration", "version": 0}', '{"kind": "other"}'])
def test_what_is_none_is_refused_with_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(CalibrationError, match="make it anew"):
        load(tmp_path)
