"""A pass names the smallest distance that its prompts could have shown; too few prompts are no pass."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_folders import Fault, folder

from vllm_accprobe.gate.measure import conditions
from vllm_accprobe.gate.measure.gating import Gate, compare
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.report import servers

ROUNDED: dict[str, Any] = {"noise": 0.003, "own": 0.02, "forced": "accprobe"}


def gate(root: Path, prompts: int, fault: Fault | None = None, seed: int = 1, **how: Any) -> Gate:
    """Three servers that round in their own ways, the third one the floor; mine with ``fault``."""
    given = ROUNDED | {"prompts": prompts} | how
    made = [folder(root / f"{prompts}-{k}", 10 * seed + k, fault=fault if k == 1 else None, **given) for k in range(3)]
    golden, mine, right = map(replies.read, made)
    return compare(golden, mine, [right])


def decode(found: Gate) -> float:
    """How many times the floor mine is away there."""
    cell = next(c for c in found.cells if c.condition == "decode")
    assert cell.away is not None
    assert cell.floor
    return cell.away / cell.floor


def test_a_fault_of_twice_that_size_fails_and_one_of_half_does_not(tmp_path: Path) -> None:
    honest = gate(tmp_path / "honest", 10)
    assert honest.verdict == "pass"
    assert honest.power is not None
    least = next(one.times for one in honest.power.shown if one.condition == "decode")
    assert least is not None
    assert 1.2 < least < 4.0
    said = servers.gap_lines(honest)[1]
    assert said.startswith("these 10 prompts would have shown ")
    assert f"{least:.2g} times the floor in decode" in said
    seen: set[str] = set()
    for size in (0.01, 0.02, 0.05, 0.08):

        def only_decode(length: int, k: int, index: int, size: float = size) -> float:
            return size if k else 0.0

        found = gate(tmp_path / str(size), 10, only_decode)
        far = decode(found) / least
        if far >= 1.7:
            assert found.verdict == "fail", far
        elif far <= 0.75:
            assert found.verdict == "pass", far
        seen.add("above" if far >= 1.7 else "below" if far <= 0.75 else "near")
    assert {"above", "below"} <= seen


def test_too_few_prompts_are_no_pass(tmp_path: Path) -> None:
    """Six prompts, of which each has one token of prefill."""
    found = gate(tmp_path, 6, seed=3)
    assert found.p is not None
    blind = [one for one in found.power.shown if not one.enough] if found.power else []
    assert blind, found.power
    assert found.verdict is None
    head = servers.headline(found)
    assert head.startswith("UNDECIDED: no difference is seen (p = ")
    assert "these prompts would not have shown a difference of 4 times the floor in " in head
    assert servers.gap_json(found)["verdict"] is None
    assert found.why is not None
    needed = found.power.needed if found.power else None
    assert needed is None or f"send {needed} such prompts" in found.why


def test_of_servers_that_never_differ_any_difference_shows(tmp_path: Path) -> None:
    same = compare(*(replies.read(folder(tmp_path / str(k), k, noise=0.0)) for k in range(2)))
    assert same.verdict == "pass"
    assert "any difference in all tokens" in (servers.shown(same) or "")


def test_a_server_that_is_equal_to_the_bit_in_most_prompts_passes(tmp_path: Path) -> None:
    """As where the operator that was wrong is healed: what is left differs in few prompts, and by less than rounding;
    enlarged alone, it could never fail in the others."""

    def rare(length: int, k: int, index: int) -> float:
        return 0.003 if length == 40 else 0.0

    given = ROUNDED | {"prompts": 10}
    golden, mine, right = (
        replies.read(folder(tmp_path / str(k), 20 if k < 2 else 21, fault=rare if k == 1 else None, **given))
        for k in range(3)
    )
    found = compare(golden, mine, [right])
    assert found.across.tokens
    assert sum(t.distance == 0 for t in found.across.tokens) > 0.8 * len(found.across.tokens)
    assert found.power is not None
    assert all(one.enough for one in found.power.shown), found.power
    assert found.verdict == "pass"


# --- signs, few prompts, and the contrast of two sizes, against their definitions written out ---


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
