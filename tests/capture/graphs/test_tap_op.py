"""The tap operator: what it copies, and that choosing makes no new graph, with both of torch's ways to compile."""

from collections.abc import Sequence

import pytest
import torch

from vllm_accprobe.capture.graphs.graph_ops import _each_device, _tap_device, choose, selection, tap, tap_each

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("operator", [tap, _tap_device], ids=["host", "device"])
def test_the_chosen_rows_in_their_order(operator) -> None:  # type: ignore[no-untyped-def]
    x = torch.arange(12, dtype=torch.bfloat16).view(6, 2).t().contiguous().t()  # rows of any stride
    buffer, select = torch.full((4, 2), -1, dtype=torch.bfloat16), selection(4, CPU)
    choose(select, [5, 0, 2])
    assert operator(x, buffer, select) is None
    assert buffer[:3].tolist() == [[10, 11], [0, 1], [4, 5]]


def test_nothing_is_copied_while_it_is_off_or_does_not_fit() -> None:
    buffer, select = torch.full((4, 2), -1.0), selection(4, CPU)
    tap(torch.ones(6, 2), buffer, select)
    choose(select, [0])
    choose(select, ())
    tap(torch.ones(6, 2), buffer, select)
    choose(select, [7])  # no such row
    tap(torch.ones(6, 2), buffer, select)
    choose(select, [0])
    tap(torch.ones(6, 3), buffer, select)  # another width
    tap(torch.ones(6, 2, dtype=torch.float16), buffer, select)  # another dtype
    assert (buffer == -1).all()


@pytest.mark.parametrize("operator", [tap_each, _each_device], ids=["host", "device"])
def test_each_call_has_its_own_rows(operator) -> None:  # type: ignore[no-untyped-def]
    buffer, cursor, select = torch.full((2, 3, 2), -1.0), torch.zeros(1, dtype=torch.int64), selection(3, CPU)
    calls = [torch.arange(10.0).view(5, 2) + 100 * i for i in range(3)]
    if operator is tap_each:
        operator(calls[0], buffer, cursor, select)  # off: nothing is counted
    choose(select, [4, 1])
    for x in calls[:2]:
        assert operator(x, buffer, cursor, select) is None
    want = torch.stack([x[[4, 1]] for x in calls[:2]])
    assert torch.equal(buffer[:, :2], want)
    operator(calls[2], buffer, cursor, select)  # beyond the last: counted, not copied
    assert cursor.tolist() == [3]
    assert torch.equal(buffer[:, :2], want)
    cursor.zero_()
    operator(calls[2], buffer, cursor, select)
    assert torch.equal(buffer[0, :2], calls[2][[4, 1]])
    operator(torch.zeros(5, 3), buffer, cursor, select)  # another width
    assert torch.equal(buffer[1, :2], want[1])
    assert cursor.tolist() == [2]


class Shared(torch.nn.Module):
    """Three calls of one module, as vLLM's rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("held", torch.zeros(3, 4, 8), persistent=False)
        self.register_buffer("cursor", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("select", selection(4, CPU), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.inner(x)
            tap_each(x, self.held, self.cursor, self.select)
        return x


def test_calls_keep_their_order_when_compiled() -> None:
    model = Shared()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        for rows, chosen in ((5, [4, 1]), (9, [8]), (3, [])):
            model.cursor.zero_()
            choose(model.select, chosen)
            before, x = model.held.clone(), torch.randn(rows, 8)
            got = compiled(x)
            for held, old in zip(model.held, before, strict=True):
                x = model.inner(x)
                assert torch.equal(held[: len(chosen)], x[chosen])
                assert torch.equal(held[len(chosen) :], old[len(chosen) :])
            assert torch.equal(got, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("held", torch.zeros(4, 8), persistent=False)
        self.register_buffer("select", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        tap(out, self.held, self.select)
        return torch.relu(out)


def stack(select: torch.Tensor, layers: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(layers)))
    for layer in model:
        layer.select = select[:]
    return model


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_graph_for_all_rows_and_all_choices(backend: str) -> None:
    select = selection(4, CPU)
    model = stack(select)
    plain = [layer.inner for layer in model]
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        choices: list[tuple[int, Sequence[int]]] = [(5, [4, 1]), (3, []), (17, [16, 0, 3, 9]), (2, [1]), (64, [63])]
        for rows, chosen in choices:
            x = torch.randn(rows, 8)
            choose(select, chosen)
            before = [layer.held.clone() for layer in model]
            got = compiled(x)
            for layer, linear, old in zip(model, plain, before, strict=True):
                out = linear(x)
                assert torch.equal(layer.held[: len(chosen)], out[list(chosen)])
                assert torch.equal(layer.held[len(chosen) :], old[len(chosen) :])
                x = torch.relu(out)
            assert torch.equal(got, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
