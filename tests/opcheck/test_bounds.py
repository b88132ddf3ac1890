"""Error bounds and limits against kernels that are right: a quick search over all references that
scripts/search_bounds.py has (8 s of CPU), and inputs that it found."""

import math

import pytest
import search_bounds
import torch
from reference_calls import drawer, run
from rounding_kernels import Case, cache, cases, on_grid, single

from vllm_accprobe.opcheck.floors import verdict
from vllm_accprobe.opcheck.reference import Expected
from vllm_accprobe.opcheck.references import norms
from vllm_accprobe.opcheck.references.activations import alone, gated, gelu, quick_gelu, silu
from vllm_accprobe.opcheck.references.attention import moved_scores

U, HALF = 2.0**-8, 2.0**-11


def bf(x: torch.Tensor) -> torch.Tensor:
    return on_grid(x, "bfloat16")


def fp(x: torch.Tensor) -> torch.Tensor:
    return on_grid(x, "float16")


def within(e: Expected, mine: torch.Tensor) -> bool:
    """Whether what was not rounded at last is within the bound."""
    assert e.bound is not None
    return bool(((mine - e.value).abs() <= 1.001 * e.bound).all())


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_no_kernel_that_is_right_breaks_a_bound(case: Case) -> None:
    """Eight kinds of inputs in three dtypes, four kernels each; no alarm but for inputs of few values or bits."""
    found = search_bounds.Found()
    search_bounds.search(case, 6, 1, found)
    assert found.errors >= 6
    assert found.ratio <= 1.0, found.worst
    assert not found.alarms[False], found.samples


def test_the_search_finds_a_bound_that_forgets_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (c for c in cases() if c.name == "QuickGELU")
    assert search_bounds.main(["--only", "QuickGELU", "--trials", "16", "--climb", "4"]) == 0
    monkeypatch.setattr("vllm_accprobe.opcheck.references.activations._of_argument", lambda f, x: (0.0, 0.0))
    assert search_bounds.run(case, 16, 4).ratio > 1.5
    assert search_bounds.main(["--only", "QuickGELU", "--trials", "16", "--climb", "4"]) == 1


def test_a_bfloat16_sum_and_its_norm_leave_three_units_before_the_last_rounding() -> None:
    """All sums of a row are rounded down but one, which is rounded up: the root mean square hands that on."""
    n = 4096
    grid = torch.ones(n, dtype=torch.float64)
    grid[1:1500] = 1.0 + 2.0**-7
    total = grid + 2.0**-8 * (1.0 - 2.0**-7)
    total[0] = 1.0 + 2.0**-7 - 2.0**-8 * (1.0 - 2.0**-7)
    x = bf(total)
    residual = total - x
    assert torch.equal(bf(residual), residual)
    summed = bf(x + residual)
    normal = summed / summed.square().mean().sqrt()
    kernel = bf(bf(normal) * (1.0 + U))  # x / rms rounded, and once more when it is weighed
    e, _ = norms.fused(x, residual, torch.full((n,), 1.0 + U, dtype=torch.float64), 0.0, U)
    assert float((normal[0] - e.value[0] / (1.0 + U)).abs()) > 1.9 * U
    assert float((bf(normal)[0] * (1.0 + U) - e.value[0]).abs()) > 2.25 * U * float(e.value[0])
    assert within(e, bf(normal) * (1.0 + U))
    assert verdict.judge(e.value[None], kernel[None], "bfloat16", noise=e.noise, bound=e.bound).tier != verdict.PROVED


def test_roundings_before_a_norm_count_twice_and_those_behind_it_once() -> None:
    y = torch.ones(1, 4, dtype=torch.float64)

    def units(**more: int) -> float:
        bound = norms.rms_normed(y, None, 0.0, U, **more).bound
        return float(bound[0, 0]) / U

    assert round(units(before=1) - units(), 6) == 2.0
    assert round(units(behind=3) - units(), 6) == 2.0


def test_quick_gelu_in_operators_of_the_dtype() -> None:
    """The argument of the sigmoid is rounded: 17 units at -10."""
    x = bf(torch.linspace(-12.0, 4.0, 400, dtype=torch.float64))
    e = alone(x, quick_gelu, U)
    mine = x * bf(torch.sigmoid(bf(1.702 * x)))
    assert float(((mine - e.value).abs() / e.value.abs().clamp(min=1e-30)).max()) > 8.0 * U
    assert within(e, mine)


def test_float16_counts_its_subnormal_numbers() -> None:
    """silu(-15) = -4.6e-6 has 6e-8 to its neighbours, and 8 times as much behind the product."""
    x = torch.cat((torch.full((64,), -14.6), torch.full((64,), 60.0))).double()
    x[:64] = fp(x[:64] + torch.linspace(0.0, 1.0, 64, dtype=torch.float64))
    e = gated(x, silu, HALF)
    mine = fp(silu(x[:64])) * x[64:]
    assert float(((mine - e.value).abs() / e.value.abs()).max()) > 4.0 * HALF
    assert within(e, mine)


def test_one_and_an_erf_that_cancel_in_float32_are_no_alarm() -> None:
    x = torch.cat((torch.linspace(-8.0, -5.0, 64), torch.linspace(3.0, 9.0, 64))).double()[None]
    e = gated(x, gelu, U)
    gate, up = x.chunk(2, -1)
    mine = bf(single(single(1.0 + single(torch.erf(gate / math.sqrt(2.0)))) * 0.5 * gate) * up)
    assert verdict.judge(e.value, mine, "bfloat16", noise=e.noise, bound=e.bound).passed


def test_scores_that_are_off_move_an_output_by_no_more_than_is_said() -> None:
    draw = drawer(4)
    s, v = draw(2, 3, 6), draw(2, 6, 4)
    p = torch.softmax(s, -1)
    out = (p @ v).transpose(0, 1)
    for size in (0.01, 0.5, 3.0):
        by = size * draw(2, 3, 6).abs()
        most = moved_scores(p, v.abs(), out, by)
        for signs in (draw(2, 3, 6).sign() for _ in range(50)):
            other = (torch.softmax(s + by * signs, -1) @ v).transpose(0, 1)
            assert bool(((other - out).abs() <= most).all())


def test_a_capped_score_may_have_an_approximate_tanh() -> None:
    x = torch.full((1, 1, 4), 30.0).bfloat16()
    attrs = {"num_heads": 1, "num_kv_heads": 1, "head_size": 4, "scale": 1.0}

    def bound(cap: float) -> float:
        t = {"k": x, "v": x}
        e = run("Attention", {"query": x, "key": x, "value": x}, torch.zeros(1, 4, dtype=torch.bfloat16),
                attrs=attrs | {"logits_soft_cap": cap},
                extra={"cache": cache(t, "k", "key", "v", "value")})  # fmt: skip
        found = e["output.0"].bound
        assert found is not None
        return float(found.max())

    assert bound(50.0) > 2.0 * bound(5.0)


def test_equal_numbers_have_equal_errors_and_count_once() -> None:
    """A row of 3 values, all rounded down, is a gain by chance; of 600 different numbers it is none."""
    values = torch.tensor([1.0 + 0.45 * 2.0**-7, 1.5 + 0.46 * 2.0**-7, 1.25 + 0.44 * 2.0**-7], dtype=torch.float64)
    few = values.repeat(200)[None]
    assert verdict.judge(few, bf(few), "bfloat16").passed
    many = few + torch.linspace(-0.02, 0.02, 600, dtype=torch.float64) * 2.0**-7
    assert not verdict.judge(many, bf(many), "bfloat16").passed
