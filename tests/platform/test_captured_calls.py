"""Recorded calls: what replays, what does not, and on which memory."""

from dataclasses import replace

import pytest
from captured_calls import CallGraph, CaptureError, capture, memory
from captured_faults import Captured, Fault, plant

torch = pytest.importorskip("torch")


def names(graph: CallGraph) -> list[str]:
    return [call.name for call in graph.calls]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_replay_computes_the_same_into_the_same_memory(mode: type) -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    bodies = 0

    def piece(x: torch.Tensor) -> torch.Tensor:
        nonlocal bodies
        bodies += 1
        gate, up = torch.nn.functional.linear(x, weight).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)

    with mode():
        x, graph = torch.randn(4, 8), CallGraph()
        with capture(graph):
            output = piece(x)
        at = output.data_ptr()
        for seed in range(3):
            x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert bodies == 1 + seed
            assert torch.equal(output, piece(x))
    assert output.data_ptr() == at
    assert graph.replays == 3


def test_views_and_allocations_are_no_calls() -> None:
    x, graph = torch.arange(12.0).reshape(3, 4), CallGraph()
    with torch.inference_mode(), capture(graph):
        room = torch.empty(3, 2)
        ones = torch.ones(3, 2)
        left, _ = x.split([2, 2], dim=1)
        left.add_(ones)
        room.copy_(left.view(3, 2))
        torch.empty_like(room)
    assert names(graph) == ["aten::ones", "aten::add_", "aten::copy_"]
    with torch.inference_mode():
        ones.zero_()
    graph.replay()
    assert torch.equal(ones, torch.ones(3, 2)), "a constant is made anew"
    assert torch.equal(room, torch.tensor([[2.0, 3.0], [6.0, 7.0], [10.0, 11.0]]))


def test_a_replay_reads_the_memory_of_the_capture() -> None:
    x, graph = torch.ones(3), CallGraph()
    with capture(graph):
        y = x * 2
    x = torch.full((3,), 5.0)
    graph.replay()
    assert y.tolist() == [2.0, 2.0, 2.0], "another tensor of the same name is not seen"


def test_what_depends_on_data_cannot_be_captured() -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match="depends on data"), capture(CallGraph()):
        x.sum().item()
    with pytest.raises(CaptureError, match="depends on data"), capture(CallGraph()):
        x.nonzero()
    with pytest.raises(CaptureError, match="depends on data"), capture(CallGraph()):
        x[x > 0]


def test_shared_memory_is_overwritten() -> None:
    x, kept, graph = torch.ones(2), torch.ones(2), CallGraph()
    with capture(graph):
        doubled = x * 2
        y = doubled + kept
    graph.replay()
    assert y.tolist() == [3.0, 3.0]
    assert graph.share(doubled, kept) == 2
    graph.replay()
    assert y.tolist() == [4.0, 4.0], "kept was recycled for doubled before it was read"
    assert memory(graph.calls[0].outputs[0]) == memory(kept)
    with pytest.raises(ValueError, match="cannot stand for"):
        graph.share(y, torch.zeros(1))


# --- faults of captured graphs, planted in a recording of a small piece: its outputs say when each one shows ---


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


def test_what_cannot_be_planted_is_said() -> None:
    with pytest.raises(ValueError, match="has 2 calls of add, and add#2 is none of them"):
        plant(Fault("size", 1, at="add#2"), captured())
    with pytest.raises(ValueError, match="no input called mrope"):
        plant(Fault("stale", 1, input="mrope"), captured())
    with pytest.raises(ValueError, match="reads nothing of the piece before it"):
        plant(Fault("share", 1), replace(captured(), previous=()))


# --- the pass that makes a wrong fusion, on a small graph with norms as inductor hands it on ---
