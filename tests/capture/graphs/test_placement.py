"""Which taps are placed: what a forward shows, the two sets, the budget, the key."""

import torch

from vllm_accprobe.capture.graphs.graph_ops import choose
from vllm_accprobe.capture.graphs.placement import (
    BETWEEN,
    NO_ROWS,
    NOT_DEFAULT,
    NOT_NAMED,
    STATS_BYTES,
    TOO_LARGE,
    UNCALLED,
    Placed,
    Sightings,
    plan,
    unwritten,
    watching,
)

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
    outputs = [one for one in seen.found if not one.goes_in]
    assert [(s.path, s.cls, s.role, s.call, s.shape, s.dtype) for s in outputs] == [
        ("model.act", "ReLU", "output.0", 0, (4,), torch.float32),
        ("model.down", "VendorRow", "output.0", 0, (4,), torch.float32),
        ("model.act", "ReLU", "output.0", 1, (4,), torch.float32),
        ("model.norm", "Pair", "output.0", 0, (2,), torch.float16),
        ("model.norm", "Pair", "output.1", 0, (4,), torch.float32),
    ]
    assert [(s.path, s.role, s.at, s.call) for s in seen.found if s.goes_in] == [
        ("model.act", "input.input", 0, 0), ("model.down", "input.x", 0, 0), ("model.act", "input.input", 0, 1),
        ("model.norm", "input.x", 0, 0),
    ]  # fmt: skip
    assert not any(one.boundary or one.bypassed for one in seen.found)
    assert seen.unfit == {"model.table": NO_ROWS, "model.never": UNCALLED}
    assert all(not module._forward_pre_hooks and "forward" not in module.__dict__ for module in model.modules())
    everything = [s.path for s in look(model, [""]).found if not s.goes_in]
    assert everything == ["model.act", "model.down", "model.act", "model.norm", "model.norm", "model", "head"]


def test_the_piece_that_a_module_stands_in() -> None:
    """Cut where ``norm`` calls ``aten::_to_copy`` (to half), behind which it adds; and at relu, before and behind down.
    The zeros belong to piece 0."""
    with torch.no_grad(), watching(model := Root(), [""], ["aten::_to_copy"]) as seen:
        model(torch.zeros(5, 4))
    assert seen.pieces == {
        "model.act": [0, 0], "model.down": [0], "model.norm": [BETWEEN], "model.table": [1], "model": [1], "head": [1],
    }  # fmt: skip
    with torch.no_grad(), watching(model, ["model"], ["aten::relu.default"]) as seen:
        model(torch.zeros(5, 4))
    assert seen.pieces == {
        "model.act": [BETWEEN, BETWEEN], "model.down": [1], "model.norm": [2], "model.table": [2],
    }  # fmt: skip


def test_the_default_set_and_the_full_one() -> None:
    seen = look(Root(), ["model"])
    default = plan(seen, nobody, 32, 10**6)
    assert (default.kind, default.rows, default.nbytes) == ("default", 32, 32 * 16)
    assert [s.path for s in default.placed] == ["model.down"]
    assert default.unfit == {
        "model.act": NOT_DEFAULT, "model.table": NO_ROWS, "model.norm": NOT_DEFAULT, "model.never": UNCALLED
    }  # fmt: skip
    full = plan(seen, everybody, 32, 10**6)
    all_ = ["model.act", "model.down", "model.act", "model.norm", "model.norm"]
    assert (full.kind, [s.path for s in full.placed]) == ("full", all_)
    assert plan(seen, everybody, 32, 10**6, outputs=False).placed == ()
    assert plan(seen, lambda path, cls: cls == "VendorRow", 32, 10**6).kind == "default"


def test_taps_stand_where_they_are_named_whatever_is_chosen() -> None:
    seen = look(Root(), ["model"])
    named = plan(seen, everybody, 32, 10**6, places=lambda path, cls: path == "model.norm")
    assert (named.kind, [(s.path, s.role) for s in named.placed]) == (
        "named", [("model.norm", "output.0"), ("model.norm", "output.1")],
    )  # fmt: skip
    assert named.unfit["model.down"] == NOT_NAMED
    # a graph is what stands in it, not why
    every = plan(seen, nobody, 32, 10**6, places=everybody)
    assert every.key == plan(seen, everybody, 32, 10**6).key != named.key


def test_memory_holds_fewer_rows_and_then_fewer_taps() -> None:
    seen = look(Root(), ["model"])  # 16, 16, 16, 8 and 16 bytes a row; act is called twice
    assert plan(seen, everybody, 32, 68 * 20).rows == 20
    small = plan(seen, everybody, 32, 52 * 8)
    assert ([(s.path, s.role) for s in small.placed], small.rows) == (
        [("model.act", "output.0"), ("model.down", "output.0"), ("model.act", "output.0"), ("model.norm", "output.0")],
        8,
    )
    assert small.unfit == {"model.table": NO_ROWS, "model.never": UNCALLED}
    assert small.partly == {("model.norm", "output.1"): TOO_LARGE}
    half = plan(seen, everybody, 32, 31 * 8)
    assert [(s.path, s.call, half.measures(s)) for s in half.placed] == [
        ("model.act", 0, True), ("model.act", 1, True), ("model.norm", 0, False),
    ], "no half taps: both calls are measured, which takes less than eight rows of each"  # fmt: skip
    assert (half.unfit["model.down"], half.nbytes) == (TOO_LARGE, 31 * 8)


def test_what_does_not_fit_is_measured_while_that_fits() -> None:
    seen = look(Root(), ["model"])
    every = 8 * 68  # eight rows of all of them
    for budget in (every, every - 1, 500, 450, 448):
        made = plan(seen, everybody, 64, budget)
        assert len(made.placed) == 5, budget
        assert made.nbytes <= budget
        assert (made.statistics == 0) == (budget >= every)
    numbers = plan(seen, everybody, 64, 10**6, only_stats=True)
    assert (numbers.statistics, numbers.rows, numbers.nbytes) == (5, 0, 5 * STATS_BYTES)
    assert (numbers.facts()["tensors"], numbers.facts()["statistics"]) == (0, 5)
    assert numbers.key != plan(seen, everybody, 64, 10**6).key
    none = plan(seen, everybody, 32, 10)
    assert (none.placed, none.rows, none.key, none.facts()["set"]) == ((), 0, "", None)


def test_the_key_is_of_what_a_graph_contains() -> None:
    seen = look(Root(), ["model"])
    keys = [
        plan(seen, nobody, 32, 10**6).key, plan(seen, nobody, 16, 10**6).key, plan(seen, everybody, 32, 10**6).key,
    ]  # fmt: skip
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
    choose(placed.select, [3])
    assert all(unwritten(buffer) for _, buffer in placed.chosen)
    with torch.no_grad():
        model(torch.randn(5, 4))
        written = [buffer.clone() for _, buffer in placed.chosen]
        assert not any(map(unwritten, written))
        assert unwritten(model.model.down.accprobe_tap_0), "not chosen"
        placed.remove()
        model(torch.randn(5, 4))
    assert all(torch.equal(buffer[0], was[0]) for (_, buffer), was in zip(placed.chosen, written, strict=True))


LIBRARY = torch.library.Library("placed", "DEF")
LIBRARY.define("moe(Tensor x, Tensor router) -> Tensor")
LIBRARY.impl("moe", lambda x, router: x * router[:, :1], "CompositeExplicitAutograd")


class Expert(torch.nn.Module):
    """As vLLM's methods of quantisation: a module that is called by ``apply``, past its hooks."""

    def apply_(self, x: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return self.forward(x=x, topk_ids=topk_ids)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return x[:, :2] + topk_ids


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.method = Expert()

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        out = torch.ops.placed.moe(hidden_states, router_logits)
        return self.method.apply_(out, router_logits.argsort(-1)[:, :2].int())


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 3)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, router_logits=self.gate(x))


def test_what_goes_into_an_operator_that_no_compiler_looks_into() -> None:
    """and what a router chose, also where the module's hooks are passed by; compiled as well as not."""
    model = Mixture()
    forward = model.experts.method.forward
    with torch.no_grad(), watching(model, [""], (), ["placed::moe"]) as seen:
        model(torch.zeros(5, 4))
    default = plan(seen, nobody, 8, 10**6)
    want = ["input.hidden_states", "input.router_logits"], ["input.topk_ids"]
    assert [(s.path, s.role) for s in default.placed] == [
        *(("experts", role) for role in want[0]), *(("experts.method", role) for role in want[1])
    ]  # fmt: skip
    assert default.partly == {("experts.method", "output.0"): NOT_DEFAULT, ("experts", "output.0"): NOT_DEFAULT}
    assert default.unfit == {"gate": NOT_DEFAULT}
    placed = Placed(default, everybody, CPU)
    x = torch.randn(5, 4)
    choose(placed.select, [4, 0])
    with torch.no_grad():
        router = model.gate(x)
        for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
            run(x)
            hidden, logits, ids = (buffer for _, buffer in placed.chosen)
            assert torch.equal(hidden[:2], x[[4, 0]])
            assert torch.equal(logits[:2], router[[4, 0]])
            assert torch.equal(ids[:2], router.argsort(-1)[[4, 0], :2].int())
            for _, buffer in placed.chosen:
                buffer.zero_()
    placed.remove()
    assert model.experts.method.forward == forward
