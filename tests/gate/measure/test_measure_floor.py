"""Signs, few prompts, and the contrast of two sizes, against their definitions written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vllm_accprobe.gate.measure import conditions


def test_contrast_changes_its_sign_where_two_change_places() -> None:
    a, b = np.array([1.0, 0.0, 2.0, 0.0, np.inf, np.inf]), np.array([3.0, 0.0, 0.0, 2.0, 1.0, np.inf])
    assert conditions.contrast(a, b).tolist() == [-0.5, 0.0, 1.0, -1.0, 1.0, 0.0]
    assert conditions.contrast(b, a).tolist() == [0.5, 0.0, -1.0, 1.0, -1.0, 0.0]
    assert np.isnan(conditions.contrast(np.array([np.nan]), np.array([1.0])))


def test_sign_flips_are_all_patterns_and_the_largest_column() -> None:
    x = np.random.default_rng(1).normal(0.2, 0.5, (7, 4))
    x[:, 3] = 0.0
    x[2:, 2] = 0.0
    scaled = x / np.where((x**2).sum(axis=0) > 0, np.sqrt((x**2).sum(axis=0)), 1.0)
    seen = scaled.sum(axis=0)
    hits = np.zeros(4)
    for signs in itertools.product((1, -1), repeat=7):
        hits += (np.array(signs) @ scaled).max() >= seen - 1e-9
    assert conditions.sign_flips(x, 0).tolist() == pytest.approx((hits / 2**7).tolist())


def test_drawn_signs_agree_with_all_of_them() -> None:
    x = np.random.default_rng(2).normal(0.25, 0.5, (conditions.EXACT, 5))
    more = np.vstack([x, np.zeros((1, 5))])  # one prompt more, which changes nothing, and signs are drawn
    assert conditions.sign_flips(more, 0) == pytest.approx(conditions.sign_flips(x, 0), abs=0.015)


def test_a_column_of_few_prompts() -> None:
    """The three highest of 12: one choice of 220. And the same three where none is beyond the limit."""
    whole = np.array([0.5, 0.6, 0.7, *np.linspace(-0.4, -0.1, 9)])
    column = np.full((12, 1), np.nan)
    column[:3, 0] = 0.6
    assert conditions.few_prompts(whole, column, 0)[0] == pytest.approx(1 / 220, abs=0.005)
    assert conditions.few_prompts(whole - 1.0, column - 1.0, 0)[0] == 1.0
    assert conditions.few_prompts(whole, np.where(np.isnan(column), 0.0, column), 0)[0] == 1.0  # holds for all: no few


def test_the_size_of_both_tests() -> None:
    """False alarms of columns that hang together, at a rate of 0.1: more than 60 of 400 have a chance of 0.001."""
    random, alarms = np.random.default_rng(3), 0
    for _ in range(400):
        base = random.normal(0, 0.3, (8, 1))
        x = np.hstack([base, base + random.normal(0, 0.1, (8, 3)), random.normal(0, 0.3, (8, 2))])
        alarms += conditions.sign_flips(x, 0).min() <= 0.1
    assert 10 < alarms < 60
