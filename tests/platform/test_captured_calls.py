"""Recorded calls: what replays, what does not, and on which memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from captured_calls import CallGraph, CaptureError, capture, memory  # noqa: E402


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


def test_memory_that_nobody_writes_keeps_what_stood_there() -> None:
    """As on a card: the rows of padding in an attention's output are what an earlier replay left."""
    x, graph = torch.zeros(2, 3), CallGraph()
    with capture(graph, fill=7):
        room = torch.empty(4, 3)
        room[:2].copy_(x)
    graph.replay()
    assert room.tolist() == [[0.0] * 3] * 2 + [[7.0] * 3] * 2


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


def test_rows_chosen_by_number_can_be_captured() -> None:
    x, which, graph = torch.arange(3.0), torch.tensor([2, 0]), CallGraph()
    with capture(graph):
        chosen = x[which]
    which.copy_(torch.tensor([1, 1]))
    graph.replay()
    assert chosen.tolist() == [1.0, 1.0]


def test_an_operator_that_only_writes_into_its_arguments() -> None:
    """As a tap does, and most kernels of vLLM."""

    @torch.library.custom_op("accprobe_captured_test::tap", mutates_args=["buffer"])
    def tap(x: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer.copy_(x.sum(0))

    x, buffer, graph = torch.ones(2, 3), torch.zeros(3), CallGraph()
    with torch.inference_mode(), capture(graph):
        torch.ops.accprobe_captured_test.tap(x * 2, buffer)
    x.fill_(10)
    buffer.zero_()
    graph.replay()
    assert buffer.tolist() == [40.0, 40.0, 40.0]
    assert names(graph) == ["aten::mul", "accprobe_captured_test::tap"]


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
