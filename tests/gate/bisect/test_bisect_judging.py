"""A trial fails where it shows the command's difference; honest batching does not, nor a much smaller one."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_folders import folder

from vllm_accprobe.gate.bisect.trials import TrialGate, judge, rate_each
from vllm_accprobe.gate.sending.replies import read


@pytest.mark.parametrize("seed", range(10))
def test_the_same_server_passes(tmp_path: Path, seed: int) -> None:
    found = judge(read(folder(tmp_path / "g", 2 * seed)), read(folder(tmp_path / "m", 2 * seed + 1)))
    assert found.why is None
    assert not found.fails(rate_each(11, found.n), 0.0)


def test_a_fault_fails_and_a_small_one_is_not_it(tmp_path: Path) -> None:
    golden = read(folder(tmp_path / "g", 1, noise=0.0))
    large = judge(golden, read(folder(tmp_path / "l", 2, noise=0.0, fault=lambda length, k, index: 0.3)))
    small = judge(golden, read(folder(tmp_path / "s", 3, noise=0.0, fault=lambda length, k, index: 0.03)))
    rate = rate_each(11, 12)
    assert large.fails(rate, 0.0)
    assert small.fails(rate, 0.0)
    assert large.size > 5 * small.size
    assert large.fails(rate, 0.5 * large.size)
    assert not small.fails(rate, 0.5 * large.size)


def test_nothing_to_judge(tmp_path: Path) -> None:
    golden = read(folder(tmp_path / "g", 1))
    one = judge(golden, read(folder(tmp_path / "m", 2, prompts=0)))
    assert one.why
    assert not one.fails(1.0, 0.0)
    few = judge(read(folder(tmp_path / "g2", 1, prompts=3)), read(folder(tmp_path / "m2", 2, prompts=3)))
    assert few.why
    assert not TrialGate(1.0, 0.0, 12, "why").fails(1.0, 0.0)


def test_a_rate_that_can_be_reached() -> None:
    assert rate_each(10, 24) == 0.005
    assert rate_each(1, 24) == 0.05
    assert rate_each(10**6, 8) == 2 * 0.5**8
    assert rate_each(10**6, 2) == 0.05
