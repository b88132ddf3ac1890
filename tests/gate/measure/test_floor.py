"""Two folders against how far each server is from itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_folders import folder

from vllm_accprobe.gate.measure import floor, token_gaps
from vllm_accprobe.gate.measure.floor import Gate, GateError, compare
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.report import gap_lines


def gate(tmp_path: Path, seed: int = 1, rate: float = 0.05, golden: dict | None = None, **mine: object) -> Gate:
    left = folder(tmp_path / f"g{seed}", 2 * seed, **(golden or {}))
    right = folder(tmp_path / f"m{seed}", 2 * seed + 1, **mine)  # type: ignore[arg-type]
    return compare(replies.read(left), replies.read(right), rate)


def test_equal_servers_are_as_often_alarmed_as_the_rate_says(tmp_path: Path) -> None:
    """80 pairs of one server with the noise of its batches: at a rate of 0.1, about 4 are above and fail (two-sided),
    and more than 11 have a chance below 0.002 [binomial, n = 80, p = 0.05]."""
    failed = [gate(tmp_path, seed, rate=0.1, prompts=8, tokens=4).verdict == "fail" for seed in range(80)]
    assert sum(failed) <= 11


def test_a_fault_in_decode_is_seen_where_it_is(tmp_path: Path) -> None:
    g = gate(tmp_path, fault=lambda length, k: 0.05 if k else 0.0)
    assert (g.verdict, g.prompts, g.only) == ("fail", 12, "decode")
    assert "in decode alone (12 prompts" in gap_lines.lines(g)[0]
    assert gate(tmp_path, seed=2, fault=lambda length, k: 0.05).only is None
    assert g.p is not None
    assert g.p < 0.01
    cells = {c.condition: c for c in g.cells}
    for phase, least, most in (("prefill", 0.5, 1.6), ("decode", 2.5, 6)):
        themselves = (cells[phase].golden_self, cells[phase].mine_self)
        assert all(least < cells[phase].mean / (one or 0) < most for one in themselves)
    assert cells["all tokens"].n == len(g.across.tokens)


def test_servers_without_noise(tmp_path: Path) -> None:
    same = gate(tmp_path, golden={"noise": 0.0}, noise=0.0)
    assert (same.verdict, same.p, same.times) == ("pass", 1.0, 1.0)
    assert gap_lines.lines(same)[0] == "pass: the same numbers in every compared token (12 prompts)"
    other = gate(
        tmp_path, seed=2, golden={"noise": 0.0}, noise=0.0,
        change=lambda i, r: replace(r, top=[(ids, [v - 1e-3 for v in values]) for ids, values in r.top or ()]),
    )  # fmt: skip
    assert (other.verdict, other.times) == ("fail", None)


def test_without_a_floor_there_is_no_verdict(tmp_path: Path) -> None:
    one = {"arrive": ("one",)}
    g = gate(tmp_path, golden=one, **one)
    assert (g.verdict, g.p) == (None, None)
    assert "two passes" in (g.why or "")
    assert g.cells[0].golden_self is None
    few = gate(tmp_path, seed=2, golden={"prompts": 4}, prompts=4)
    assert few.verdict is None
    assert f"needs {floor.LEAST} prompts" in (few.why or "")


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    def change(i: int, r: replies.Reply) -> replies.Reply | None:
        return {0: None, 1: replace(r, refused="HTTP 400"), 2: replace(r, prompt_token_ids=[7])}.get(i, r)

    g = gate(tmp_path, change=change)
    assert g.across.skipped == {
        floor.ONLY.format("golden"): 2, token_gaps.REFUSED: 2, token_gaps.OTHER_IDS: 2
    }  # fmt: skip
    assert g.prompts == 9
    with pytest.raises(GateError, match="not the same on both sides"):
        gate(tmp_path, seed=3, change=lambda i, r: replace(r, prompt_token_ids=[7]))
