"""Limits of our own standards, by depth and by dtype."""

import math

import numpy as np
import pytest
from simulate_experts import Shape, over, two_kernels

from vllm_accprobe.judge.tensor_errors import row_errors
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards import PAIRS, find
from vllm_accprobe.standards.limits import TRUNCATED, Standard, narrowest


def test_limits_grow_with_the_root_of_the_depth():
    s = Standard()
    assert s.created_limits(2.0**-8, 4096).row == 4 / 256
    assert s.total_limits(2.0**-8, 4096, 3).row == 8 / 256 * 2
    # Two truncations take 1 / ln 2 units off a norm, and noise of mean zero moves it as well: the two are added.
    noise = math.hypot(4.0, 5.0 * math.sqrt(3.0 * (TRUNCATED - TRUNCATED**2)) * math.sqrt(2.0) / 4.0)
    assert s.created_limits(2.0**-8, 256).ratio == pytest.approx(4 / 256 * (1 / math.log(2.0) / 4 + noise / 16))
    assert find("strict", PAIRS).limits.created_limits(2.0**-8, 4096).ratio == 1 / 256 * (0.25 + 4 / 64)
    assert s.created_limits(2.0**-8, 4).ratio == 4 / 256


def test_a_wide_row_may_be_truncated_twice_but_not_by_the_strict_standard():
    """As vLLM's AVX2 attention does it: its probabilities, and what it gives out."""
    random = np.random.default_rng(0)
    unit, width = 2.0**-8, 8192
    g = random.standard_normal((50, width)).astype(np.float32)
    mine = g
    for _ in range(2):
        other = random.uniform(1.0, 2.0, g.shape).astype(np.float32)  # so that what is truncated twice changes twice
        mine = ((mine * other).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) / other
    table = definition.row_table(g, mine)
    for name, allowed in (("accprobe", True), ("strict", False)):
        rules = find(name, PAIRS).limits
        errors = row_errors(table, 0.0, width, rules)
        assert (errors.ratio < 1.0).all()
        assert (errors.err <= rules.created_limits(unit, width).row).all() == allowed, name


@pytest.mark.parametrize(("width", "inside"), [(96, 48), (320, 96), (640, 224)])
def test_two_honest_kernels_of_experts_are_within_the_limits_and_a_scaled_row_is_not(width, inside):
    """vLLM 0.32's, which truncates, and 0.26's, which rounds each projection; shapes that nothing was made with."""
    golden, mine = two_kernels(Shape(width, inside, 6, 2), seed=17)
    assert not over(Shape(width, inside, 6, 2), golden, mine, Standard()).any()
    scaled = mine.copy()
    scaled[5] *= 1.03
    assert over(Shape(width, inside, 6, 2), golden, scaled, Standard()).nonzero()[0].tolist() == [5]


def test_only_what_experts_give_out_was_narrower_inside():
    assert narrowest("model.layers.0.mlp.experts", "", 128) == narrowest("a.b", "AscendFusedMoE", 128) == 32.0
    assert narrowest("model.experts.act", "SiluAndMul", 128) == 128.0
