"""Two folders against how far golden is from itself, and against servers that are known to be right."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_folders import Fault, folder

from vllm_accprobe.gate.measure import conditions, token_gaps
from vllm_accprobe.gate.measure.gating import Gate, GateError, compare, has_numbers
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.replies import Reply, Sent
from vllm_accprobe.report import servers


def gate(
    tmp_path: Path, seed: int = 1, rate: float = 0.05, golden: dict | None = None, right: dict | None = None,
    power: bool = True, **mine: Any,
) -> Gate:  # fmt: skip
    left = folder(tmp_path / f"g{seed}", 3 * seed, **(golden or {}))
    other = folder(tmp_path / f"m{seed}", 3 * seed + 1, **mine)
    floors = [] if right is None else [replies.read(folder(tmp_path / f"f{seed}", 3 * seed + 2, **right))]
    return compare(replies.read(left), replies.read(other), floors, rate, power=power)


ROUNDED: dict[str, Any] = {"noise": 0.0, "own": 0.02}
"""A server like the CPU's: batches change nothing, and it rounds in its own way."""


def rounded(
    tmp_path: Path, seed: int, fault: Fault | None = None, right: float | None = 0.02, power: bool = True, **more: Any
) -> Gate:
    """right: the rounding of a floor; None: without one."""
    floor_of = None if right is None else {"noise": 0.0, "own": right, "forced": "accprobe"} | more
    mine = ROUNDED | {"fault": fault, "forced": "accprobe"} | more
    return gate(tmp_path, seed, golden=ROUNDED | more, right=floor_of, power=power, **mine)


def test_equal_servers_are_as_often_alarmed_as_the_rate_says(tmp_path: Path) -> None:
    """40 pairs of one server with the noise of its batches at a rate of 0.1: more than 9 alarms have a chance below
    0.01 [binomial]."""
    same = {"rate": 0.1, "prompts": 8, "tokens": 3, "power": False}
    failed = [gate(tmp_path, seed, **same).verdict == "fail" for seed in range(40)]  # type: ignore[arg-type]
    assert sum(failed) <= 9


@pytest.mark.parametrize("right", [0.02, 0.0025])
def test_honest_rounding_passes_whichever_is_the_exact_one(right: float, tmp_path: Path) -> None:
    """6 pairs that each round in their own way; the floor as coarse as both, or eight times as fine. Without a floor
    all of them fail, and the verdict says why that means little."""
    with_floor = (rounded(tmp_path / "with", seed, right=right, power=False) for seed in range(6))
    assert [gate.verdict for gate in with_floor] == ["pass"] * 6
    without = rounded(tmp_path / "without", 1, right=None)
    assert without.verdict == "fail"
    assert servers.NO_FLOOR in servers.gap_lines(without)
    passed = rounded(tmp_path / "again", 1, right=right)
    assert passed.verdict == "pass"
    assert passed.p_batching is not None
    assert passed.p_batching <= 0.05
    assert "though further than golden's own batches" in servers.headline(passed)


def test_a_golden_that_is_finer_than_mine_and_the_floor(tmp_path: Path) -> None:
    """As float32 against two in bfloat16; and mine finer than golden."""
    for i, (fine, coarse) in enumerate(((0.0, 0.02), (0.02, 0.001))):
        made = [
            folder(tmp_path / f"{i}-{k}", 10 * i + k, noise=0.0, own=own, forced="accprobe")
            for k, own in enumerate((fine, coarse, coarse))
        ]
        g, m, f = map(replies.read, made)
        assert compare(g, m, [f]).verdict == "pass"


@pytest.mark.parametrize(
    ("fault", "sentence", "right"),
    [
        (lambda length, k, index: 0.06, None, 0.02),
        (lambda length, k, index: 0.06 if k else 0.0, "only decode", 0.02),
        (lambda length, k, index: 0.06 if k else 0.0, "only decode", 0.0025),
        (lambda length, k, index: 0.06 if length + k - 1 >= 150 else 0.0, "from position 150 on", 0.02),
        (lambda length, k, index: 0.06 if index else 0.0, "only in batches over 1", 0.02),
    ],
)
def test_faults_fail_and_their_condition_is_named(fault, sentence, right, tmp_path):
    """A fault three times as large as rounding."""
    g = rounded(tmp_path, 1, fault, right, tokens=16)
    assert g.verdict == "fail"
    if sentence == "only in batches over 1":  # no steps, and times that say each was alone
        assert g.condition is None or g.condition.axis != "batch"
        return
    if sentence is None:
        assert g.condition is None
        return
    assert g.condition is not None
    assert g.condition.sentence.startswith(sentence[:15])  # a token beyond a threshold may round well by chance
    assert g.condition.at is None or abs(g.condition.at - 150) < 5
    assert f", {g.condition.sentence} (12 prompts" in servers.headline(g)
    assert all(w.gap > w.floor for w in g.worst)
    assert {w.name for w in g.worst[:3]} <= {f"p{i}" for i in range(12)}


def test_the_condition_from_the_engine_s_steps(tmp_path: Path) -> None:
    """Faults in batches over 4, in second chunks, in prefix hits, each with steps that tell it from the others."""

    def steps(index: int, i: int, length: int) -> list[Any]:
        hit = 16 if i % 3 == 1 else 0
        first = 60 if i % 2 else 90  # where the second chunk begins depends on what else is in the step
        many = 1 + (i * 5 + index * 3) % 8
        rows = [(1, hit, min(first, length) - hit, many)]
        rows += [(2, first, length - first, 2)] if length > first else []
        return [*rows, *((3 + k, length + k, 1, 2) for k in range(10))]

    def batch(i: int, index: int) -> int:
        return max(1 + (i * 5 + index * 3) % 8, 2)

    cases: list[tuple[Fault, str, str]] = [
        (lambda n, k, index: 0.08 if batch(n // 20 - 1, index) > 4 else 0, "batch", "only in batches over 4"),
        (
            lambda n, k, index: 0.08 if n > (60 if (n // 20 - 1) % 2 else 90) else 0,
            "chunk", "only rows of the second chunk (they begin at positions 60 to 90)",
        ),
        (lambda n, k, index: 0.08 if (n // 20 - 1) % 3 == 1 else 0, "hit", "only prompts with a prefix hit"),
    ]  # fmt: skip
    for seed, (fault, axis, sentence) in enumerate(cases):
        g = rounded(tmp_path, seed, fault, prompts=18, steps=steps)
        assert g.verdict == "fail"
        assert g.condition is not None, axis
        assert (g.condition.axis, g.condition.sentence) == (axis, sentence)


def test_a_fault_in_a_few_prompts(tmp_path: Path) -> None:
    """Three of 24, which no pattern of signs can show: just those with the longest prompts."""
    g = rounded(tmp_path, 3, lambda length, k, index: 0.1 if length > 420 else 0.0, prompts=24)
    assert g.verdict == "fail"
    assert g.condition is not None
    assert g.condition.axis == "position"


def test_servers_without_noise(tmp_path: Path) -> None:
    same = gate(tmp_path, golden={"noise": 0.0}, noise=0.0)
    assert (same.verdict, same.p, same.times) == ("pass", 1.0, 1.0)
    assert servers.gap_lines(same)[0] == "PASS: the same numbers in every compared token (12 prompts)"
    other = gate(
        tmp_path, seed=2, golden={"noise": 0.0}, noise=0.0,
        change=lambda i, r: replace(r, top=[(ids, [v - 1e-3 for v in values]) for ids, values in r.top or ()]),
    )  # fmt: skip
    assert (other.verdict, other.times) == ("fail", None)


def test_what_is_no_number_never_passes(tmp_path: Path) -> None:
    """Mine gives none in decode of one prompt in two; a floor that gives none is no floor."""

    def nothing(i: int, r: Reply) -> Reply:
        top = [(ids, [token_gaps.CLIPPED] * 5 if k and i % 2 else v) for k, (ids, v) in enumerate(r.top or ())]
        return replace(r, top=top)

    g = rounded(tmp_path, 1, change=lambda i, r: r)
    assert g.verdict == "pass"
    left = replies.read(folder(tmp_path / "g", 1, noise=0.0, own=0.02, prompts=16))
    right = replies.read(folder(tmp_path / "f", 2, noise=0.0, own=0.02, prompts=16))
    bad = replies.read(folder(tmp_path / "m", 3, noise=0.0, own=0.02, change=nothing, prompts=16))
    assert compare(left, bad, [right]).verdict == "fail"
    assert not has_numbers(left, bad)
    said = compare(left, right, [bad])
    assert said.floors == ()
    assert "floor 0 is left out: it has no numbers for some tokens" in said.notes


def test_a_floor_that_rounding_does_not_explain_excuses_nothing(tmp_path: Path) -> None:
    """Mine is 1 nat off in all, the floor 5. Beyond it, within golden's own batching, and with another floor, there is
    a verdict."""

    def side(name: str, seed: int, off: float = 0.0, **more: Any) -> Sent:
        fault = (lambda length, k, index: off) if off else None
        made = folder(tmp_path / name, seed, noise=0.0, prompts=24, forced="accprobe", fault=fault, **more)
        return replies.read(made)

    judged = partial(compare, power=False)  # what a pass would have shown: test_power.py
    golden, wrong, right = side("g", 1, own=0.02), side("w", 2, 5.0), side("r", 3, own=0.02)
    doubted = judged(golden, side("off", 4, 1.0), [wrong], names=["plain in float16"])
    assert (doubted.verdict, doubted.p, doubted.times) == (None, None, None)
    assert "golden and plain in float16 differ by 4." in (doubted.why or "")
    assert "enlarges rounding; what differs by less cannot be judged" in servers.gap_lines(doubted)[0]
    assert servers.gap_json(doubted)["floors"][0]["distance"] > 4
    assert judged(golden, side("far", 5, 40.0), [wrong]).verdict == "fail"
    assert judged(golden, golden, [wrong]).verdict == "pass"
    both = judged(golden, side("off2", 6, 1.0), [wrong, right])
    assert (both.verdict, both.kept) == ("fail", (1,))
    gone = [token_gaps.CLIPPED] * 5
    none = side("none", 8, change=lambda i, r: replace(r, top=[(ids, gone) for ids, _ in r.top or ()]))
    alone = judged(golden, side("off3", 9, 1.0), [wrong, none], names=["a", "b"])
    assert (alone.verdict, alone.kept) == (None, (0,))
    assert "b is left out: it has no numbers for some tokens" in alone.notes
    fine = judged(golden, side("fine", 7, own=0.02), [wrong, right])
    assert fine.verdict == "pass"
    assert any(note.startswith("left out: golden and floor 0 differ by") for note in fine.notes)


def test_without_a_floor_there_is_no_verdict(tmp_path: Path) -> None:
    one = {"arrive": ("one",)}
    g = gate(tmp_path, golden=one, **one)  # type: ignore[arg-type]
    assert (g.verdict, g.p) == (None, None)
    assert "two passes" in (g.why or "")
    assert g.cells[0].golden_self is None
    few = gate(tmp_path, seed=2, golden={"prompts": 4}, prompts=4)
    assert few.verdict is None
    assert f"needs {conditions.LEAST} prompts" in (few.why or "")


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    def change(i: int, r: Reply) -> Reply | None:
        return {0: None, 1: replace(r, refused="HTTP 400"), 2: replace(r, prompt_token_ids=[7])}.get(i, r)

    g = gate(tmp_path, change=change)
    assert g.across.skipped == {
        token_gaps.ONLY.format("golden"): 2, token_gaps.REFUSED: 2, token_gaps.OTHER_IDS: 2
    }  # fmt: skip
    assert g.prompts == 9
    with pytest.raises(GateError, match="not the same on both sides"):
        gate(tmp_path, seed=3, change=lambda i, r: replace(r, prompt_token_ids=[7]))
