"""Limits of our own standards, by depth and by dtype."""

import numpy as np

from vllm_accprobe.judge.verdict import row_errors
from vllm_accprobe.kernels import definition
from vllm_accprobe.standards import PAIRS, find
from vllm_accprobe.standards.limits import Standard


def test_limits_grow_with_the_root_of_the_depth():
    s = Standard()
    assert s.created_limits(2.0**-8, 4096).row == 4 / 256
    assert s.total_limits(2.0**-8, 4096, 3).row == 8 / 256 * 2
    assert s.created_limits(2.0**-8, 256).ratio == 4 / 256 * (0.25 + 4 / 16)
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
