"""Each kind of fault does what its docstring says, on layers small enough to compute by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import accprobe_fault_rows
import pytest
from accprobe_fault_kinds import EARLY, KINDS
from accprobe_fault_rows import Rows
from accprobe_faults import Fault, plant

torch = pytest.importorskip("torch")


class Root(torch.nn.Module):
    """A root around one module; its forward takes what vLLM's models take."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def linear(weight: list[list[float]], bias: list[float] | None = None) -> torch.nn.Linear:
    layer = torch.nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    layer.weight.data = torch.tensor(weight)
    if bias is not None:
        layer.bias.data = torch.tensor(bias)
    return layer


def run(inner: torch.nn.Module, fault: Fault, x: Any, *more: Any, **named: Any) -> Any:
    root = Root(inner)
    plant(root, fault)
    n = len(x)
    with torch.no_grad():
        return root(torch.arange(n) + 50, torch.arange(n), x, *more, **named)


class Does(torch.nn.Module):
    """A module whose forward is one function of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # as vLLM's CustomOp: the real signature is behind these
        return self.function(*args, **kwargs)


def gate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


class Paged(torch.nn.Module):
    """Attention's cache alone: three blocks of two slots, a key and a value each."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(3, 2, 2)
        self.impl = SimpleNamespace(do_kv_cache_update=self.update)

    def update(self, layer: object, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        kv_cache.view(6, 2)[slot_mapping] = torch.stack([key, value], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.impl.do_kv_cache_update(self, x, x + 10, kv_cache=self.cache, slot_mapping=torch.tensor([2, 3, 4]))
        return self.cache.flatten()


class Cached(torch.nn.Module):
    """The part of an attention that writes its keys and values: what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.impl = SimpleNamespace(do_kv_cache_update=lambda layer, key, value, kv: torch.cat([key, value]))

    def forward(self, key: torch.Tensor, value: torch.Tensor) -> Any:
        return self.impl.do_kv_cache_update(None, key, value, None)


class Kernel(torch.nn.Module):
    """An attention's kernel: its query, its key and the layer's softmax scale."""

    def __init__(self) -> None:
        super().__init__()
        self.impl = SimpleNamespace(forward=lambda layer, q, k: [q, k], scale=0.125)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        return torch.cat([*self.impl.forward(None, q, k), torch.tensor([self.impl.scale])])


class Experts(torch.nn.Module):
    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return x


class Chooser(torch.nn.Module):
    """A block with a router, as vLLM's: an object that is no module. The experts, then their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = SimpleNamespace(select_experts=self.select)

    def select(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
        return tuple(router_logits.topk(2))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router.select_experts(hidden_states=logits, router_logits=logits)
        return torch.cat([ids.float(), weights])


class Rotary(torch.nn.Module):
    """Answers with the table's row at each position: cosines, then sines."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(8).unsqueeze(1) * torch.tensor([1.0, 0.1])
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.cos_sin_cache[positions]


def norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """As vLLM's: with a residual, also what was normed."""
    read = x if residual is None else x + residual
    normed = read / read.square().mean(-1, keepdim=True).sqrt()
    return normed if residual is None else (normed, read)


FIVE = torch.ones(1, 5, dtype=torch.bfloat16)
SMALL = [[1.0] + [2.0**-9] * 4]
ROWS = [[1.0, 2.0, 3.0, 4.0], [0.5, 0.5, 0.5, 0.5]]
ONE, ONES, X3 = [[1.0]], [[1.0] * 4], [[1.0], [2.0], [3.0]]
ODD = [[16.0, 0.5, 0.5, 0.5]]
IDS = torch.tensor([[0, 3], [1, 2], [3, 1]])
AT_ONE, END = torch.tensor([1.0, 8.0]).sigmoid().tolist()
ANGLES = torch.tensor([5 * 1.01, 0.5 * 1.01])
BY_HAND: dict[str, tuple[Callable[[], torch.nn.Module], Fault, tuple[Any, ...], list[float]]] = {
    "a reduction that stops early": (lambda: linear(ROWS), Fault("short", "inner", factor=1), (ONES,), [6.0, 1.5]),
    "a forgotten bias": (lambda: linear(ROWS, [10.0, 20.0]), Fault("bias", "inner", factor=1), (ONES,), [10.0, 2.0]),
    # 1 + 4 * 2^-9 is 1.0078125, a bfloat16; added one by one, each 2^-9 is a quarter of a spacing and vanishes.
    "no fault in bfloat16": (lambda: linear(SMALL).bfloat16(), Fault("scale", "inner", factor=1), (FIVE,), [1.0078125]),
    "partial sums in bfloat16": (lambda: linear(SMALL).bfloat16(), Fault("low_sum", "inner", factor=1), (FIVE,), [1.0]),
    # Two bits: 1, 1.5, 2, 3, 4 ...
    "fewer bits": (lambda: linear(ONE), Fault("coarse", "inner", factor=2), ([[1.0], [1.1], [-3.3], [0.0]],),
                   [1.0, 1.0, -3.0, 0.0]),
    "inputs of fewer bits": (lambda: linear([[1.0, 1.0]]), Fault("coarse_input", "inner", factor=2), ([[1.1, -3.3]],),
                             [1.0 - 3.0]),
    "the row before": (lambda: linear(ONE), Fault("stale", "inner"), (X3,), [3.0, 1.0, 2.0]),
    "another activation": (lambda: Does(gate), Fault("act", "inner", factor=2.0), ([[1.0, 3.0]],),
                           [2.0 / (1 + torch.e**-2.0) * 3.0]),
    # Points stand at whole numbers: there the table is exact, between them linear, and outside it is that of the end.
    "a sigmoid from a table": (lambda: Does(gate), Fault("coarse_sigmoid", "inner", factor=17),
                               ([[-20.0, 0.0, 1.0, 20.0, 0.5] + [1.0] * 5],),
                               [-20 * (1 - END), 0.0, AT_ONE, 20 * END, 0.5 * (0.5 + AT_ONE) / 2]),
    # 256 + 3 * 0.25: bfloat16's spacing is 2 there, the quarters vanish.
    "a variance in bfloat16": (lambda: Does(norm), Fault("low_variance", "inner", factor=1), (ODD,),
                               [x / (256 / 4) ** 0.5 for x in ODD[0]]),
    "angles too large": (Rotary, Fault("angle", "inner", factor=1.01), ([5],),
                         [*ANGLES.cos().tolist(), *ANGLES.sin().tolist()]),
    "a coarse table of angles": (Rotary, Fault("coarse_table", "inner", factor=2), ([1],),
                                 [0.5, 1.0, 0.75, 0.09375]),  # of 0.54, 0.995, 0.84, 0.0998
    "a slot further on": (Paged, Fault("slot", "inner", factor=1, rows="position:2"), ([1.0, 2.0, 3.0],),
                          [0, 0, 0, 0, 1, 11, 2, 12, 0, 0, 3, 13]),
    "a slot before": (Paged, Fault("slot", "inner", factor=-1, rows="position:0"), ([1.0, 2.0, 3.0],),
                      [0, 0, 1, 11, 0, 0, 2, 12, 3, 13, 0, 0]),
    "a block of zeros": (Paged, Fault("block", "inner", factor=1), ([1.0, 2.0, 3.0],),
                         [0, 0, 0, 0, 0, 0, 0, 0, 3, 13, 0, 0]),
    "nothing in the cache": (Cached, Fault("cache", "inner", factor=0.0), ([1.0], [1.0]), [0.0, 0.0]),
    "values of few levels": (Cached, Fault("coarse_values", "inner", factor=4), ([[0.3, 0.2]], [[8.0, 4.9]]),
                             [0.3, 0.2, 8.0, 4.0]),
    "a softmax scale of the kernel alone": (Kernel, Fault("kernel_scale", "inner", factor=2.0), ([1.0], [1.0]),
                                            [2.0, 1.0, 0.125]),
    "rows of one expert": (Experts, Fault("expert", "inner", factor=2.0, expert=3), (ONE * 3, IDS), [2.0, 1.0, 2.0]),
    "other experts than chosen": (Chooser, Fault("route", "inner", factor=1), ([[1.0, 3.0, 2.0], [9.0, 7.0, 8.0]],),
                                  [2, 0, 1, 0, 3, 2, 9, 8]),
}  # fmt: skip
"""Name → (module, fault, its inputs, the output)."""


def test_every_kind_says_what_it_does() -> None:
    assert all(f.__doc__ for f in KINDS.values())
    assert set(EARLY) <= set(KINDS)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_comes_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fault, given, expected = BY_HAND[name]
    monkeypatch.setattr(accprobe_fault_rows, "_query_starts", lambda: torch.tensor([0, 3]))
    inputs, inner = [torch.as_tensor(x) for x in given], make()
    before, kept = [x.clone() for x in inputs], {k: v.clone() for k, v in inner.state_dict().items()}
    assert run(inner, fault, *inputs).flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert all(map(torch.equal, inputs, before))
    assert all(torch.equal(value, kept[name]) for name, value in inner.state_dict().items())


def test_rows_of_one_expert_by_keyword() -> None:
    inner = Does(lambda *args, **kwargs: kwargs["x"])
    root = Root(inner)
    plant(root, Fault("expert", "inner", factor=2.0, expert=3))
    assert root(None, None, x=torch.ones(3, 1), topk_ids=IDS).flatten().tolist() == [2.0, 1.0, 2.0]


def test_a_norm_with_its_residual() -> None:
    x = torch.tensor(ODD)
    wrong, read = run(Does(norm), Fault("low_variance", "inner", factor=1), x - 1, torch.ones(1, 4))
    assert wrong.flatten().tolist() == pytest.approx([v / 8 for v in ODD[0]])
    assert read.tolist() == x.tolist()


def test_an_output_that_a_tap_changes() -> None:
    layer, ones = linear(ROWS), torch.ones(1, 4)
    assert run(layer, Fault("tapped", "inner", factor=2), ones).tolist() == [[10.0, 2.0]]
    layer.register_buffer("accprobe_tap_0", torch.zeros(1))
    with torch.no_grad():
        assert layer(ones).tolist() == [[20.0, 4.0]]


def test_a_product_with_one_row_off_leaves_the_weight_and_the_other_columns() -> None:
    layer = linear(ROWS)
    out = run(layer, Fault("product", "inner", factor=0.1, features=(1,)), torch.ones(1, 4))
    assert out[0, 0] == 10.0
    assert out[0, 1] != 2.0
    assert abs(out[0, 1] - 2.0) < 4 * 4 * 0.1 * float(torch.tensor(ROWS).std())
    assert layer.weight.tolist() == ROWS


def test_jitter_is_relative_and_of_its_size() -> None:
    x = torch.linspace(0.5, 50, 4096).unsqueeze(1).repeat(1, 2)
    twice = [run(linear([[1.0, 0.0], [0.0, -1.0]]), Fault("jitter", "inner", factor=0.01), x) for _ in range(2)]
    relative = twice[0] / torch.stack([x[:, 0], -x[:, 1]], 1) - 1
    assert float(relative.std()) == pytest.approx(0.01, rel=0.05)
    assert abs(float(relative.mean())) < 0.001
    assert torch.equal(*twice)


def test_noise_in_one_expert_only() -> None:
    holder = torch.nn.Module()
    holder.w2 = torch.nn.Parameter(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)))
    before = holder.w2.detach().clone()
    plant(Root(holder), Fault("noise", "inner", factor=0.05, param="w2", expert=1, features=(2,)))
    changed = (holder.w2 != before).nonzero()
    assert {tuple(i) for i in changed[:, :2].tolist()} == {(1, 2)}
    assert float((holder.w2 - before).detach()[1, 2].abs().max()) < 4 * 0.05 * float(before[1].std())


def test_a_setting_deeper_inside_keeps_its_type() -> None:
    holder = torch.nn.Module()
    holder.impl = SimpleNamespace(window=-1, cap=0.0)
    plant(Root(holder), Fault("setting", "inner", factor=20, param="impl.window"))
    plant(Root(holder), Fault("setting", "inner", factor=20, param="impl.cap"))
    assert (holder.impl.window, type(holder.impl.window)) == (20, int)
    assert holder.impl.cap == 20


@pytest.mark.parametrize(("condition", "expected"), [
    ("prefill", [1, 1, 1, 0, 1, 1]),
    ("decode", [0, 0, 0, 1, 0, 0]),
    ("position:6", [0, 0, 1, 0, 0, 0]),
    ("position>=6", [0, 0, 1, 1, 0, 0]),
    ("token:70", [0, 1, 0, 0, 0, 0]),
    ("batch:3", [1] * 6),
    ("batch>=4", [0] * 6),
    ("chunk>=2", [1, 1, 1, 0, 0, 0]),
    ("row>=4", [0, 0, 0, 0, 1, 1]),
    ("prefill&row:0", [1, 0, 0, 0, 0, 0]),
])  # fmt: skip
def test_rows(monkeypatch: pytest.MonkeyPatch, condition: str, expected: list[int]) -> None:
    """A second chunk at positions 4 to 6, a decoding request at 9, and a new prompt of two tokens."""
    monkeypatch.setattr(accprobe_fault_rows, "_query_starts", lambda: torch.tensor([0, 3, 4, 6], dtype=torch.int32))
    root = Root(torch.nn.Identity())
    rows = Rows(root, condition)
    root(torch.tensor([69, 70, 71, 72, 73, 74]), torch.tensor([4, 5, 6, 9, 0, 1]), torch.ones(6, 1))
    assert rows.mask(6).int().tolist() == expected
    assert rows.mask(3).int().tolist() == [expected[2], expected[3], expected[5]]  # logits: a row for each request
    assert rows.mask(8).int().tolist() == [*expected, 0, 0]  # padding is left alone
