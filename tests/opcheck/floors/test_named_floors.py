"""Floors are what their names claim: a bound that no order breaks, limits that chance breaks as rarely as is said."""

import math
from statistics import NormalDist

import pytest
import torch

from vllm_accprobe.judge import statistic
from vllm_accprobe.opcheck.floors import verdict
from vllm_accprobe.opcheck.floors.pooled import COLUMN, COLUMN_SCALE, SCALE, TOGETHER, Pool, Pooled, moderated_t, unlike
from vllm_accprobe.opcheck.reference import Call, Expected
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.roundings import gamma

U = 2.0**-8
BUDGET = statistic.Budget()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(y: torch.Tensor) -> torch.Tensor:
    return y.bfloat16().double()


def expected(call: Call, role: str = "output.0") -> Expected:
    found = default_references().evaluate(call)
    assert isinstance(found, dict), found
    return found[role]


def linear(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Expected:
    attrs = {"tp_size": 1}
    return expected(Call("l", "ColumnParallelLinear", {"x": x}, params={"weight": w}, attrs=attrs,
                         outputs={"output.0": y}))  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "backward", "largest first", "pairs"])
def test_no_order_of_summation_breaks_the_bound_of_a_product_and_a_bfloat16_accumulator_does(order: str) -> None:
    x, w = draw(3, 512).bfloat16(), draw(8, 512, seed=1).bfloat16()
    terms = (x.double()[:, None, :] * w.double()[None]).float()
    if order == "largest first":
        terms = terms.gather(2, terms.abs().argsort(dim=2, descending=True))
    terms = terms.flip(2) if order == "backward" else terms

    def summed(dtype: torch.dtype) -> torch.Tensor:
        t = terms.to(dtype)
        if order == "pairs":
            while t.shape[2] > 1:
                t = t[:, :, ::2] + t[:, :, 1::2]
            return t[:, :, 0]
        total = torch.zeros(t.shape[:2], dtype=dtype)
        for k in range(t.shape[2]):
            total = total + t[:, :, k]
        return total

    e = linear(x, w, torch.zeros(3, 8, dtype=torch.bfloat16))
    honest = summed(torch.float32).double()
    assert bool(((honest - e.value).abs() <= e.bound).all())
    assert verdict.judge(e.value, rounded(honest), "bfloat16", noise=e.noise, bound=e.bound).passed
    coarse = verdict.judge(e.value, summed(torch.bfloat16).double(), "bfloat16", noise=e.noise, bound=e.bound)
    assert not coarse.passed
    assert (coarse.tier, coarse.chance) == (verdict.PROVED, 0.0)


def test_gamma_is_highams() -> None:
    assert gamma(1000) == pytest.approx(1000 * 2**-24 / (1 - 1000 * 2**-24))
    assert gamma(2**25) == math.inf


@pytest.mark.parametrize("cls", ["SiluAndMul", "RMSNorm", "LayerNorm", "GELU", "RotaryEmbedding", "Attention"])
def test_kernels_that_round_on_the_way_keep_within_the_bound(cls: str) -> None:
    """Each in bfloat16, every intermediate result rounded, and with each rounded toward zero instead."""
    x = (3 * draw(64, 128)).bfloat16()

    def cut(t: torch.Tensor) -> torch.Tensor:
        return (t.float().view(torch.int32) & -65536).view(torch.float32).double()

    for way in (rounded, cut):
        wide = x.double()
        out = torch.zeros(64, 128, dtype=torch.bfloat16)
        if cls == "SiluAndMul":
            a, b = wide.chunk(2, -1)
            e = expected(Call("m", cls, {"x": x}, outputs={"output.0": out[:, :64]}))
            mine = way(way(a * torch.sigmoid(a)) * b)
        elif cls == "RMSNorm":
            attrs = {"variance_epsilon": 1e-6}
            e = expected(Call("m", cls, {"x": x}, attrs=attrs, outputs={"output.0": out}))
            mine = way(way(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)))
        elif cls == "LayerNorm":
            e = expected(Call("m", cls, {"input": x}, attrs={"eps": 1e-6}, outputs={"output.0": out}))
            mine = way(way(torch.nn.functional.layer_norm(wide, (128,), eps=1e-6)))
        elif cls == "GELU":
            e = expected(Call("m", cls, {"x": x}, outputs={"output.0": out}))
            mine = way(0.5 * wide * (1 + way(torch.erf(wide / math.sqrt(2)))))
        elif cls == "RotaryEmbedding":
            attrs = {"base": 1e4, "head_size": 64, "rotary_dim": 64, "is_neox_style": True}
            positions = torch.arange(64)
            call = Call(
                "m", cls, {"positions": positions, "query": x}, attrs=attrs, outputs={"output.0": out}
            )  # fmt: skip
            e = expected(call)
            angle = positions[:, None] * 1e4 ** -(torch.arange(0, 64, 2).double() / 64)
            c, s = way(angle.cos())[:, None], way(angle.sin())[:, None]
            a, b = wide.reshape(64, 2, 64).chunk(2, -1)
            mine = way(torch.cat((way(a * c) - way(b * s), way(b * c) + way(a * s)), -1)).reshape(64, 128)
        else:
            from vllm_accprobe.opcheck.references.attention import attend

            q, k, v = (wide.reshape(64, 2, 64) + n for n in (0.0, 0.5, 1.0))
            value, noise, bound = attend(q, k, v, 0.125, torch.arange(64), step=U)
            e = Expected(value.reshape(64, 128), noise.reshape(64, 128), bound=bound.reshape(64, 128), groups=2)
            scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.125
            scores = scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -math.inf)
            mine = way(torch.einsum("hnm,mhd->nhd", way(torch.softmax(scores, -1)), v)).reshape(64, 128)
        power = e.value.square().sum(1)
        most = verdict.proved(e.value, U * e.value.abs(), e.bound, power)
        assert bool(((mine - e.value).abs() <= most).all())


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
