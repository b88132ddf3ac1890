"""What right kernels of a device do that a CPU's do not: roundings on the way, the order of equal values, 8 bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_accprobe.opcheck.calls.grid import lies_on
from vllm_accprobe.opcheck.floors.verdict import judge
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.aten import itself

G = torch.Generator().manual_seed(0)
X, A, B = (torch.randn(*s, generator=G).bfloat16() for s in ((8, 64), (8, 32), (32, 64)))
INDEX = torch.arange(8) % 2
START = torch.zeros(2, 64).bfloat16()


def scan(x: torch.Tensor) -> torch.Tensor:
    """Each partial sum rounded, as PyTorch's CUDA scan of bfloat16."""
    total, sums = torch.zeros_like(x[:, 0]), []
    for column in x.unbind(1):
        total = total + column
        sums.append(total)
    return torch.stack(sums, 1)


def atomics(x: torch.Tensor) -> torch.Tensor:
    total = START.clone()
    for k, row in zip(INDEX.tolist(), x, strict=True):
        total[k] = total[k] + row
    return total


CASES: dict[str, tuple[tuple[Any, ...], Callable[[], torch.Tensor], torch.Tensor]] = {
    "aten.addmm.default": ((X, A, B), lambda: X + (A @ B), X.float() + A.float() @ B.float()),
    "aten.cumsum.default": ((X, 1), lambda: scan(X), X.float().cumsum(1)),
    "aten.index_add.default": ((START, 0, INDEX, X), lambda: atomics(X), atomics(X).float()),
}
"""By operator: its arguments, what a device gives, and what is right."""


@pytest.mark.parametrize("name", CASES)
def test_roundings_on_the_way_pass_and_a_wrong_number_does_not(name: str) -> None:
    args, device, right = CASES[name]
    mine = device()
    passed = []
    for captured in (mine, (1.02 * right).bfloat16()):
        y = itself(Call("t", name, args=args, outputs={"output.0": captured}))["output.0"]
        passed.append(judge(y.value, captured.double(), "bfloat16", noise=y.noise, common=y.common).passed)
    assert passed == [True, False]


@pytest.mark.parametrize("alpha", [-1, 100])
def test_a_factor_of_what_is_added_is_no_count(alpha: int) -> None:
    noise = [itself(Call("t", "aten.index_add.default", args=(START, 0, INDEX, X), kwargs={"alpha": a},
                         outputs={"output.0": START}))["output.0"].noise for a in (1, alpha)]  # fmt: skip
    torch.testing.assert_close(noise[1], abs(alpha) * noise[0])


def test_memory_that_beta_leaves_out_is_no_noise() -> None:
    call = Call("t", "aten.addmm.default", args=(torch.full_like(X, torch.nan), A, B), kwargs={"beta": 0, "alpha": 1},
                outputs={"output.0": A @ B})  # fmt: skip
    y = itself(call)["output.0"]
    assert judge(y.value, (A @ B).double(), "bfloat16", noise=y.noise, common=y.common).passed


@pytest.mark.parametrize(
    ("captured", "right"),
    [([1, 0, 2, 3], True), ([0, 1, 3, 2], True), ([0, 0, 2, 3], False), ([2, 1, 0, 3], False), ([0, 1, 2, 9], False)],
)
def test_equal_values_may_stand_in_any_order_once(captured: list[int], right: bool) -> None:
    x = torch.tensor([[1.0, 1.0, 2.0, 2.0]])
    mine = torch.tensor([captured])
    call = Call("t", "aten.sort.default", args=(x,), outputs={"output.0": x, "output.1": mine})
    assert torch.equal(itself(call)["output.1"].value, mine) is right


def test_eight_bits_are_on_a_grid() -> None:
    assert lies_on(X.to(torch.float8_e4m3fn)) == "float8_e4m3fn"
