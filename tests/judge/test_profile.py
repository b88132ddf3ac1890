"""A profile of a machine goes to a file and back, and nobody else's file becomes one."""

import json
from pathlib import Path

import pytest

from vllm_accprobe.judge.profile import Habit, Profile, host_of, lines

ZERO = Habit("rounding", "Attention", "bfloat16", "rounds toward zero", 1.0, 52, 52, 4)
WIDE = Habit("accumulator", "Attention", "bfloat16", "adds up in float32 or wider", 0.0, 50, 52, 4)
PROFILE = Profile((ZERO, WIDE), {"device.type": "cpu"}, {"RMSNorm float32 rsqrt": 2.0**-22})


def test_it_is_the_same_after_a_journey(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json(), encoding="utf-8")
    assert Profile.read(path) == PROFILE


def test_an_operator_has_one_line_with_what_costs_first() -> None:
    assert lines([WIDE, ZERO, Habit("rounding", "RMSNorm", "float16", "rounds to nearest", 0.0, 1, 1, 1)]) == [
        "Attention, bfloat16: rounds toward zero (up to 1 rounding of bfloat16); adds up in float32 or wider",
        "RMSNorm, float16: rounds to nearest",
    ]


def test_the_host_is_what_a_run_says_of_itself_and_nothing_else() -> None:
    run = {"platform": {"system": "Linux", "machine": 3}, "device": "cpu", "model": {"dtype": "bfloat16", "path": "/x"},
           "versions": {"vllm": "0.32.0", "torch": "a\nb"}}  # fmt: skip
    assert host_of(run) == {"platform.system": "Linux", "model.dtype": "bfloat16", "versions.vllm": "0.32.0"}
    assert host_of(None) == host_of([]) == {}


def _changed(**changes: object) -> str:
    return json.dumps(json.loads(PROFILE.to_json()) | changes)


def _habit(**changes: object) -> str:
    return _changed(habits=[ZERO.plain() | changes])


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", "[" * 100_000, " " * (2 << 20), _changed(schema=2), _changed(kind="x"),
        _changed(habits={}), _changed(habits=[3]), _changed(habits=[{}]), _changed(host={"a": 1}),
        _changed(host={"a": "\x1b[2J"}), _changed(units={"a": "b"}), _changed(units={"a": -1.0}),
        _changed(units={"a": True}), _changed(units={"a": float("nan")}), _changed(host={"a": "b" * 1000}),
        _habit(kind="scale"), _habit(price="1"), _habit(price=float("inf")), _habit(price=-1.0), _habit(outputs=1.5),
        _habit(layers=True), _habit(words="a\nb"), _habit(words="x" * 1000), _habit(more=1), _habit(of=-1),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Profile.from_json(text)


def test_a_large_file_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with path.open("wb") as f:
        f.truncate(1 << 34)
    with pytest.raises(ValueError, match="too large"):
        Profile.read(path)
