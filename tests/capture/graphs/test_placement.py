"""Which taps are placed: what a forward shows, the two sets, the budget, the key."""

from __future__ import annotations

import torch

from vllm_accprobe.capture.graphs.placement import NOT_DEFAULT, TOO_LARGE, Placed, plan, unwritten
from vllm_accprobe.capture.graphs.sightings import NO_ROWS, SEVERAL, Sightings, watching
from vllm_accprobe.capture.graphs.tap_op import choose

CPU = torch.device("cpu")


class RowParallelLinear(torch.nn.Linear):
    """Named as vLLM's, whose outputs are (out, bias or None)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class VendorRow(RowParallelLinear):
    pass


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :2].half(), x + 1


class Constant(torch.nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.ones(2, 4)


class Inside(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.nn.ReLU()
        self.down = VendorRow(4, 4, bias=False)
        self.norm = Pair()
        self.table = Constant()
        self.never = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.down(self.act(x))[0])
        return self.norm(x)[1] + self.table()[0]


class Root(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inside()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))


def look(model: torch.nn.Module, regions: list[str]) -> Sightings:
    with torch.no_grad(), watching(model, regions) as seen:
        model(torch.zeros(5, 4))
    return seen


def nobody(path: str, cls: str) -> bool:
    return False


def everybody(path: str, cls: str) -> bool:
    return True


def test_what_a_forward_shows() -> None:
    model = Root()
    seen = look(model, ["model"])
    assert [(s.path, s.cls, s.role, s.shape, s.dtype) for s in seen.found] == [
        ("model.down", "VendorRow", "output.0", (4,), torch.float32),
        ("model.norm", "Pair", "output.0", (2,), torch.float16),
        ("model.norm", "Pair", "output.1", (4,), torch.float32),
    ]
    assert seen.unfit == {"model.act": SEVERAL, "model.table": NO_ROWS}
    assert all(not module._forward_hooks for module in model.modules())
    assert [s.path for s in look(model, [""]).found] == ["model.down", "model.norm", "model.norm", "model", "head"]


def test_the_default_set_and_the_full_one() -> None:
    seen = look(Root(), ["model"])
    default = plan(seen, nobody, 32, 10**6)
    assert (default.kind, default.rows, default.nbytes) == ("default", 32, 32 * 16)
    assert [s.path for s in default.placed] == ["model.down"]
    assert default.unfit == {"model.act": SEVERAL, "model.table": NO_ROWS, "model.norm": NOT_DEFAULT}
    full = plan(seen, everybody, 32, 10**6)
    assert (full.kind, [s.path for s in full.placed]) == ("full", ["model.down", "model.norm", "model.norm"])
    assert plan(seen, lambda path, cls: cls == "VendorRow", 32, 10**6).kind == "default"


def test_memory_holds_fewer_rows_and_then_fewer_taps() -> None:
    seen = look(Root(), ["model"])  # 16, 4 and 16 bytes a row
    assert plan(seen, everybody, 32, 36 * 20).rows == 20
    small = plan(seen, everybody, 32, 20 * 8)
    assert ([s.path for s in small.placed], small.rows) == (["model.down", "model.norm"], 8)
    assert small.unfit["model.norm"] == TOO_LARGE
    none = plan(seen, everybody, 32, 10)
    assert (none.placed, none.rows, none.key, none.facts()["set"]) == ((), 0, "", None)


def test_the_key_is_of_what_a_graph_contains() -> None:
    seen = look(Root(), ["model"])
    keys = [
        plan(seen, nobody, 32, 10**6).key,
        plan(seen, nobody, 16, 10**6).key,
        plan(seen, everybody, 32, 10**6).key,
    ]
    assert len({*keys}) == 3
    # which of them are chosen, and the model's instance, are no matter of the graph
    assert plan(look(Root(), ["model"]), lambda path, cls: path == "model.norm", 32, 10**6).key == keys[2]


def test_placed_taps_write_and_are_no_part_of_the_checkpoint() -> None:
    model = Root()
    placed = Placed(plan(look(model, ["model"]), everybody, 8, 10**6), lambda path, cls: cls == "Pair", CPU)
    assert [one.role for one, _ in placed.chosen] == ["output.0", "output.1"]
    assert set(model.state_dict()) == {
        "model.down.weight", "model.never.weight", "model.never.bias", "head.weight", "head.bias",
    }  # fmt: skip
    x = torch.randn(5, 4)
    choose(placed.select, [3])
    assert all(unwritten(buffer) for _, buffer in placed.chosen)
    with torch.no_grad():
        model(x)
        relu = torch.relu
        want = relu(model.model.down.weight @ relu(x[3]))
    (_, narrow), (_, wide) = placed.chosen
    assert torch.equal(wide[0], want + 1)
    assert torch.equal(narrow[0], want[:2].half())
    assert unwritten(model.model.down.accprobe_tap_0), "not chosen"
    placed.remove()
    choose(placed.select, [4])
    model(x)
    assert torch.equal(wide[0], want + 1)
