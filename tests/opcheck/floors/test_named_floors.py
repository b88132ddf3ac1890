"""Floors are what their names claim: a bound that no order breaks, limits that chance breaks as rarely as is said."""

import math
from statistics import NormalDist

import pytest
import torch

from vllm_accprobe.judge import statistic
from vllm_accprobe.opcheck.floors import verdict
from vllm_accprobe.opcheck.floors.pooled import COLUMN, COLUMN_SCALE, SCALE, TOGETHER, Pool, Pooled, moderated_t, unlike
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.roundings import gamma

U = 2.0**-8
BUDGET = statistic.Budget()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(y: torch.Tensor) -> torch.Tensor:
    return y.bfloat16().double()


def test_a_bfloat16_accumulator_is_proved_wrong() -> None:
    """A float32 one in any order keeps within the bound: test_bounds.py."""
    x, w = draw(3, 512).bfloat16(), draw(8, 512, seed=1).bfloat16()
    total = torch.zeros(3, 8, dtype=torch.bfloat16)
    for term in (x[:, None, :] * w[None]).unbind(2):
        total = total + term
    found = default_references().evaluate(Call("l", "ColumnParallelLinear", {"x": x}, params={"weight": w},
                                               attrs={"tp_size": 1}, outputs={"output.0": total}))  # fmt: skip
    assert isinstance(found, dict), found
    e = found["output.0"]
    coarse = verdict.judge(e.value, total.double(), "bfloat16", noise=e.noise, bound=e.bound)
    assert (coarse.passed, coarse.tier, coarse.chance) == (False, verdict.PROVED, 0.0)


def test_gamma_is_highams() -> None:
    assert gamma(1000) == pytest.approx(1000 * 2**-24 / (1 - 1000 * 2**-24))
    assert gamma(2**25) == math.inf


def test_limits_are_broken_as_rarely_as_is_said() -> None:
    """At a chance of 1 in 50 for an output, 2,000 of them: no more than that fail, for any dtype's shape."""
    for shape in ((1, 64), (16, 32), (9, 200)):
        failed = 0
        for seed in range(2000 // 3):
            y = draw(*shape, seed=seed)
            failed += not verdict.judge(y, rounded(y), "bfloat16", 0.02).passed
        assert failed <= 0.02 * 2000 / 3


def test_the_quantiles_by_simulation_and_by_known_values() -> None:
    assert statistic.normal(0.05) == pytest.approx(1.959964, rel=1e-6)
    assert statistic.normal(0.05, 10) == pytest.approx(-NormalDist().inv_cdf(0.0025))
    # chi-square's 99.9 % quantiles, from tables: 29.588 with 10 degrees, 149.449 with 100
    for freedom, known in ((10, 29.588), (100, 149.449)):
        assert freedom * statistic.chi_square(freedom, statistic.normal(0.001, 1, 1)) == pytest.approx(known, rel=0.01)
    assert statistic.deviations_of(statistic.chi_square(12.0, 4.5), 12.0) == pytest.approx(4.5)
    # Student's t: P(T > 2.776) = 0.025 with 4 degrees, P(T > 3.169) = 0.005 with 10
    t, freedom = moderated_t(1.0, 4, 3.0 * 0.25, 1.0, 2.0)
    assert (t, freedom) == (pytest.approx((5 / 2.75 / 1.25) ** 0.5), 5.0)


def pooled(wrong, calls: int = 60, rows: int = 8, width: int = 256, noise: float = 0.0, **more) -> Pool:
    pool = Pool()
    for n in range(calls):
        y = draw(rows, width, seed=n)
        e = None if not noise else noise * y.abs()
        v = verdict.judge(y, rounded(wrong(y, n)), "bfloat16", BUDGET.output, noise=e, **more)
        assert v.passed, v  # nothing is seen in a single call
        pool.add([v.sums])
    return pool


def test_honest_rows_pass_together() -> None:
    pool = pooled(lambda y, n: y)
    assert pool.breach(BUDGET.tap) is None
    ratio, freedom, scale, error = pool.pooled()
    assert ratio == pytest.approx(1.0, abs=0.03)
    assert abs(scale) < 4 * error
    assert pool.rows == 480
    assert freedom > 1e4


def test_what_no_row_shows_all_rows_show() -> None:
    """Faults of a third of a rounding: a scale, a column's scale, errors half as large again as they should be."""
    b = pooled(lambda y, n: y * (1 + 0.3 * U)).breach(BUDGET.tap)
    assert b.measure == SCALE
    assert b.words.startswith("all 480 rows together: a scale of 1.001")
    assert b.chance < 1e-6
    column = torch.ones(256)
    column[17] = 1 + 1.4 * U
    b = pooled(lambda y, n: y * column, noise=0.577 * U).breach(BUDGET.tap)
    assert b.column == 17
    assert b.measure in (COLUMN_SCALE, COLUMN)
    b = pooled(lambda y, n: y * (1 + 0.5 * U * torch.tanh(3 * draw(8, 256, seed=1000 + n)))).breach(BUDGET.tap)
    assert b.measure == TOGETHER


def test_faults_at_twice_the_floor_are_seen_in_one_call_or_in_all() -> None:
    """A scale of 1.0032, noise of twice the rounding, one column 1.0032 * sqrt(width), whatever noise a kernel has."""
    column = torch.ones(256)
    column[9] = 1 + 0.0032 * 16
    for noise in (0.0, 0.577 * U):
        for wrong in (
            lambda y, n: y * 1.0032, lambda y, n: y * (1 + U * draw(8, 256, seed=n + 1)), lambda y, n: y * column,
        ):  # fmt: skip
            pool, seen = Pool(), False
            for n in range(60):
                y = draw(8, 256, seed=n)
                mine = rounded(wrong(y, n))
                v = verdict.judge(y, mine, "bfloat16", BUDGET.output, noise=noise * y.abs())
                seen |= not v.passed
                pool.add([v.sums])
            assert seen or pool.breach(BUDGET.tap) is not None


def test_a_column_of_nearly_equal_values_has_one_rounding_error() -> None:
    """A trained bias or an outlier channel: 3.008 in every row is 3.0 in bfloat16 in every row, and no fault."""

    def steady(n: int) -> torch.Tensor:
        y = draw(8, 256, seed=n)
        y[:, 5] = 3.0 + 0.98 * 0.5 * 2.0**-6 + 1e-4 * y[:, 5]
        return y

    pool = Pool()
    for n in range(60):
        y = steady(n)
        v = verdict.judge(y, rounded(y), "bfloat16", BUDGET.output)
        assert v.passed
        pool.add([v.sums])
    assert pool.breach(BUDGET.tap) is None
    y = torch.cat([steady(n) for n in range(60)])
    assert verdict.judge(y, rounded(y), "bfloat16", BUDGET.output).passed


def test_the_same_rows_again_say_nothing_new() -> None:
    pool = Pool()
    y = draw(8, 64)
    for _ in range(500):
        pool.add([verdict.judge(y, rounded(y), "bfloat16", BUDGET.output).sums])
    assert (pool.rows, pool.seen) == (8, 4000)
    assert pool.breach(BUDGET.tap) is None


def test_two_hundred_equal_rows_in_one_call_are_one() -> None:
    for seed in range(20):
        y = draw(1, 256, seed=seed).expand(200, 256).contiguous()
        assert verdict.judge(y, rounded(y), "bfloat16", BUDGET.output).passed


def test_an_error_that_a_row_shares_is_not_averaged_away_within_it() -> None:
    """Half a unit of each row, either way: rounding 1 / rms. Ten thousand elements do not make it a fault."""

    def shared(y: torch.Tensor, n: int) -> torch.Tensor:
        return y * (1 + 0.5 * U * (2 * torch.rand(len(y), 1, generator=torch.Generator().manual_seed(n)) - 1))

    assert pooled(shared, width=2048, common=0.5 * U).breach(BUDGET.tap) is None


def layer(n: int, ratio: float, freedom: float = 1e4) -> Pooled:
    return Pooled(f"layers.{n}.mlp", "C", "output.0", 0, "bfloat16", ratio, freedom, 0.0, 0.0, 400, n, 0.0)


def test_a_layer_whose_errors_are_twice_its_kins_stands_out_and_few_layers_say_little() -> None:
    def found(n: int, factor: float) -> list[str]:
        ratios = [0.40 + 0.01 * (k % 3) for k in range(n)]
        ratios[n // 2] *= factor
        return [o.pooled.tap for o in unlike([], [layer(k, r) for k, r in enumerate(ratios)], BUDGET.siblings)]

    assert found(24, 6.0) == ["layers.12.mlp"]
    assert found(24, 1.2) == []
    assert found(3, 50.0) == []
    assert found(24, 1 / 6) == []  # fewer errors than its kin have are no fault


def test_layers_that_honestly_differ_raise_no_alarm() -> None:
    g = torch.Generator().manual_seed(7)
    alarms = 0
    for _ in range(400):
        ratios = torch.exp(0.25 * torch.randn(12, generator=g, dtype=torch.float64)).tolist()
        alarms += bool(unlike([], [layer(k, r) for k, r in enumerate(ratios)], BUDGET.siblings))
    assert alarms <= 1


def test_what_golden_does_in_the_same_layer_is_taken_off() -> None:
    ratios = [0.4, 0.4, 2.4, 0.4, 0.4, 0.4, 0.4, 0.4]
    mine = [layer(k, r) for k, r in enumerate(ratios)]
    assert [o.pooled.tap for o in unlike([], mine, BUDGET.siblings)] in ([], ["layers.2.mlp"])
    assert unlike([layer(k, r) for k, r in enumerate(ratios)], mine, BUDGET.siblings) == []


def test_what_chance_can_do_is_never_exactly_nothing() -> None:
    assert 0 < statistic.tail(12.0) < 1e-30  # 0 is the word for proved
    assert statistic.tail(3.0) == pytest.approx(2 * 0.0013498980316301035)
