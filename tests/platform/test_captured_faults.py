"""Faults of captured graphs, planted in a recording of a small piece: its outputs say when each one shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from captured_calls import CallGraph, capture  # noqa: E402
from captured_faults import ENV, Captured, Fault, Miscount, from_env, moved, plant  # noqa: E402


def piece(previous: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """previous: (4, 2), positions: (4,). As a decoder layer: a first result, and a residual."""
    projected = previous * 10
    return projected + positions[:, None], projected + previous


def captured(padding: int = 0) -> Captured:
    previous, positions = torch.ones(4, 2), torch.zeros(8)[:4]
    graph = CallGraph()
    with capture(graph):
        outputs = piece(previous, positions)
    is_padding = torch.arange(4) >= 4 - padding
    names = ("residual_1", "l_positions_")
    return Captured(graph, 1, 4, names, (previous, positions), outputs, (previous,), is_padding)


def replayed(made: Captured) -> list[list[float]]:
    """The first row of both outputs, and the last of the first one, after positions have become 0, 1, 2, 3."""
    made.inputs[1].copy_(torch.arange(4.0))
    made.graph.replay()
    first, second = made.outputs
    return [first[0].tolist(), first[3].tolist(), second[0].tolist()]


CLEAN = [[10.0, 10.0], [13.0, 13.0], [11.0, 11.0]]


@pytest.mark.parametrize(
    ("fault", "padding", "expected"),
    [
        (Fault("leak", 1, factor=0.5), 0, CLEAN),
        (Fault("leak", 1, factor=0.5), 1, [[16.5, 16.5], [19.5, 19.5], [11.0, 11.0]]),
        (Fault("stale", 1), 0, [[10.0, 10.0], [10.0, 10.0], [11.0, 11.0]]),
        (Fault("size", 1, size=4, factor=2), 0, [[20.0, 20.0], [26.0, 26.0], [11.0, 11.0]]),
        (Fault("share", 1), 0, [[10.0, 10.0], [13.0, 13.0], [20.0, 20.0]]),
        (Fault("size", 1, factor=2, at="mul#0"), 0, [[20.0, 20.0], [23.0, 23.0], [21.0, 21.0]]),
        (Fault("leak", 1, factor=1, at="mul"), 1, [[20.0, 20.0], [23.0, 23.0], [21.0, 21.0]]),
        (Fault("twice", 1, at="add#1"), 0, [[10.0, 10.0], [13.0, 13.0], [12.0, 12.0]]),
    ],
    ids=["leak-full", "leak-padded", "stale", "size", "share", "size-at", "leak-at", "twice"],
)
def test_a_fault(fault: Fault, padding: int, expected: list[list[float]]) -> None:
    made = captured(padding)
    assert plant(fault, made)
    assert replayed(made) == expected


@pytest.mark.parametrize("other", [{"piece": 2}, {"size": 8}])
def test_another_piece_or_size_is_left_alone(other: dict[str, int]) -> None:
    made = captured()
    assert not plant(replace(Fault("size", 1, size=4, factor=2), **other), made)
    assert replayed(made) == CLEAN


def test_an_input_at_another_address() -> None:
    made = captured()
    assert moved([Fault("move", 2), Fault("stale", 1)], 1, made.names, made.inputs) == made.inputs
    previous, positions = moved([Fault("move", 1)], 1, made.names, made.inputs)
    assert previous is made.inputs[0]
    assert positions.data_ptr() != made.inputs[1].data_ptr()


def test_a_request_too_few_leaves_what_an_earlier_step_wrote() -> None:
    rows, count = torch.zeros(4, 2), Miscount(Fault("count", 1, input="previous"))
    for step, (padding, seen) in enumerate([(0, 1.0), (1, 2.0), (2, 3.0), (0, 4.0)], start=1):
        rows.fill_(step)
        count.spoil(("previous", "positions"), (rows, torch.zeros(4)), torch.arange(4) >= 4 - padding)
        real = 4 - padding
        assert rows[: real - 1].tolist() == [[step] * 2] * (real - 1)
        assert rows[real - 1].tolist() == [seen - (padding > 0)] * 2


def test_what_cannot_be_planted_is_said() -> None:
    with pytest.raises(ValueError, match="has 2 calls of add, and add#2 is none of them"):
        plant(Fault("size", 1, at="add#2"), captured())
    with pytest.raises(ValueError, match="no input called mrope"):
        plant(Fault("stale", 1, input="mrope"), captured())
    with pytest.raises(ValueError, match="reads nothing of the piece before it"):
        plant(Fault("share", 1), replace(captured(), previous=()))


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "")
    assert from_env() == ()
    monkeypatch.setenv(ENV, json.dumps([{"kind": "size", "piece": 1, "size": 4, "factor": 1.25}]))
    assert from_env() == (Fault("size", 1, 4, 1.25),)
    monkeypatch.setenv(ENV, json.dumps([{"kind": "sise", "piece": 1}]))
    with pytest.raises(ValueError, match="kind is one of"):
        from_env()
