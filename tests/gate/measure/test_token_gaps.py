"""Two replies side by side: gaps, KL, flips, and what is not compared."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_folders import reply

from vllm_accprobe.gate.measure import token_gaps
from vllm_accprobe.gate.measure.token_gaps import divergence, gaps


def test_equal_replies() -> None:
    one = reply("a", 20, 4, lambda k: 0.0)
    found, after, why = gaps(one, one)
    assert (after, why) == (0, None)
    assert [(t.gap, t.kl, t.flipped, t.phase, t.position) for t in found] == [
        (0.0, 0.0, False, "decode" if k else "prefill", 19 + k) for k in range(4)
    ]


def test_up_to_the_first_flip() -> None:
    """At token 2 mine's second becomes its best."""
    golden = reply("a", 20, 6, lambda k: 0.0)
    mine = reply("a", 20, 6, lambda k: np.array([-1.0, 1.0, 0, 0, 0]) if k == 2 else np.array([-0.1, 0, 0, 0, 0]))
    for first, second in ((golden, mine), (mine, golden)):
        found, after, why = gaps(first, second)
        assert ([t.gap for t in found], after, why) == ([pytest.approx(g) for g in (0.1, 0.1, 1.0)], 3, None)
        assert [t.flipped for t in found] == [False, False, True]
    assert (found[2].golden_margin, found[2].mine_margin) == (pytest.approx(0.8), pytest.approx(1.2))


def test_kl_is_that_of_the_classes() -> None:
    p, q = np.array([0.5, 0.2, 0.1]), np.array([0.4, 0.3, 0.05])
    ours, theirs = dict(enumerate(np.log(p))), {**dict(enumerate(np.log(q))), 9: math.log(0.15)}
    full_p, full_q = np.append(p, 0.2), np.append(q, 0.25)
    assert divergence(ours, theirs) == pytest.approx(float((full_p * np.log(full_p / full_q)).sum()))
    assert divergence(ours, {8: -1.0}) is None


def test_minus_infinity_is_no_number() -> None:
    one = reply("a", 20, 1, lambda k: 0.0)
    assert one.top is not None
    ids, values = one.top[0]
    found, _, _ = gaps(one, replace(one, top=[(ids, [token_gaps.CLIPPED, *values[1:]])]))
    assert found[0].gap is None
    assert found[0].kl is not None


def test_what_is_no_pair() -> None:
    one = reply("a", 20, 3, lambda k: 0.0)
    assert gaps(one, replace(one, refused="HTTP 400"))[2] == token_gaps.REFUSED
    assert gaps(one, replace(one, token_ids=None))[2] == token_gaps.NO_IDS
    assert gaps(one, replace(one, top=[]))[2] == token_gaps.NO_IDS
    assert gaps(one, replace(one, prompt_token_ids=[1]))[2] == token_gaps.OTHER_IDS
