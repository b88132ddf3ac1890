"""From which step on a call's weights are no longer those of the dump."""

from __future__ import annotations

import pytest

from vllm_accprobe.dump.journal import LOADED, LORA, PACKED, Lives, WeightEvent, WeightPrint
from vllm_accprobe.opcheck.calls.parameters import WeightsSince

DOWN, NORM = "model.layers.0.mlp.down_proj", "model.norm"


def life(*events, rank=0):
    """events: (kind, step, {(tap, form): order})."""
    lives = Lives()
    for number, (kind, step, prints) in enumerate(events):
        for (tap, form), order in prints.items():
            lives.prints.append(WeightPrint(rank, number, tap, "", "weight", form, "bfloat16", (4, 4), order, order))
        lives.events.append(WeightEvent(rank, number, kind, step))
    return WeightsSince(lives)


def told(since, tap, steps=range(10), rank=0):
    return "".join("x" if since.why_not(rank, (tap,), step) else "." for step in steps)


def test_a_change_lasts_until_the_first_values_are_back():
    a, b = {(DOWN, LOADED): "a", (NORM, LOADED): "n"}, {(DOWN, LOADED): "b", (NORM, LOADED): "n"}
    since = life(("load", 0, a), ("reload", 3, b), ("sync", 5, a), ("sync", 7, b))
    assert told(since, DOWN) == "...xx..xxx"
    assert told(since, NORM) == ".........."
    assert told(since, DOWN, rank=1) == ".........."
    assert since.why_not(0, (NORM, DOWN), 4) == (
        "a reload before step 3 changed its weights; the dump holds those before"
    )
    assert since.why_not(0, (DOWN,), None) == ""


def test_what_an_event_does_not_mention_stays_as_it_was():
    a, b, n = {(DOWN, LOADED): "a"}, {(DOWN, LOADED): "b"}, {(NORM, LOADED): "n"}
    since = life(("load", 0, a), ("sync", 2, b), ("sync", 4, n))
    assert told(since, DOWN) == "..xxxxxxxx"


@pytest.mark.parametrize(("forms", "expected"), [
    ({(DOWN, PACKED): "p"}, ".........."),
    ({(DOWN, PACKED): "other"}, "..xxxxxxxx"),
    ({(DOWN, PACKED): "other", (DOWN, LOADED): "a"}, ".........."),
])  # fmt: skip
def test_as_given_decides_and_as_packed_where_nobody_saw_it_given(forms, expected):
    since = life(("load", 0, {(DOWN, LOADED): "a", (DOWN, PACKED): "p"}), ("wake", 2, forms))
    assert told(since, DOWN) == expected


def test_an_adapter_changes_no_weight_of_the_model():
    since = life(("load", 0, {(DOWN, LOADED): "a"}), (LORA, 2, {(DOWN, LOADED): "b"}))
    assert told(since, DOWN) == ".........."


def test_two_events_before_one_step_count_as_the_last():
    a, b = {(DOWN, LOADED): "a"}, {(DOWN, LOADED): "b"}
    assert told(life(("load", 0, a), ("sync", 3, b), ("sync", 3, a)), DOWN) == ".........."


def test_a_print_without_its_event_is_left_out():
    lives = Lives()
    lives.prints.append(WeightPrint(0, 1, DOWN, "", "weight", LOADED, "bfloat16", (4, 4), "b", "b"))
    assert told(WeightsSince(lives), DOWN) == ".........."
