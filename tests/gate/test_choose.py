"""What a dig captures: of which requests, in which pass, and what a disk budget leaves of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_folders import folder

from vllm_accprobe.gate.localize import LocalizePlan, LocalizeTarget, RowSizes, Window, choose, narrowed
from vllm_accprobe.gate.measure.gating import WorstToken
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.replies import Reply, Sent


def sent(
    path: Path, arrive: tuple[str, ...] = ("one", "all"), cached: dict[str, int] | None = None, **how: Any
) -> Sent:
    """Prompts p0, p1, ... of 20, 40, ... tokens, each the beginning of the next; those that came from the cache."""
    known = cached or {}

    def change(i: int, reply: Reply) -> Reply:
        return replace(reply, cached=known.get(reply.name, 0) if cached is not None else None)

    return replies.read(folder(path, 1, arrive=arrive, change=change, prompts=4, **how))


def worst(name: str, ordinal: int, pass_index: int, gap: float = 0.5) -> WorstToken:
    return WorstToken(name, ordinal, 19 + ordinal, gap, 0.01, pass_index)


@pytest.fixture
def golden(tmp_path: Path) -> Sent:
    return sent(tmp_path / "golden", cached={})


def test_the_request_whole_up_to_the_token(golden: Sent) -> None:
    plan = choose(golden, golden, [worst("p1", 4, 0)])
    assert plan.target == LocalizeTarget("p1", 4, 23, 0.5, 0)
    assert plan.windows == (Window(0, ("p1",), 0, 4, (40,)),)
    assert plan.words == ("one",)  # what comes after it need not be sent
    own = plan.windows[0]
    assert (own.rows, own.sampled, own.requests) == (44, 5, ("p1",))
    assert LocalizePlan.from_json(plan.to_json()) == plan


def test_three_requests_of_the_same_pass(golden: Sent) -> None:
    """As far as the furthest of their own worst tokens; what is in another pass is another story."""
    found = [
        worst("p1", 2, 1),
        worst("p1", 9, 1),
        worst("p0", 1, 0),
        worst("p2", 5, 1),
        worst("p3", 0, 1),
        worst("p0", 8, 1),
    ]
    plan = choose(golden, golden, found)
    assert [(w.pass_index, w.names, w.first, w.last) for w in plan.windows] == [(1, ("p1", "p2", "p3"), 0, 5)]
    assert plan.windows[0].requests == ("p1.pass1", "p2.pass1", "p3.pass1")
    assert plan.words == ("one", "all")


def test_who_filled_the_prefix_cache(tmp_path: Path, golden: Sent) -> None:
    """Of p2's 60 tokens 32 came from the cache: the first that had them is p1 of the first pass."""
    mine = sent(tmp_path / "mine", cached={"p2": 32})
    assert [(w.pass_index, w.names, w.first, w.last) for w in choose(golden, mine, [worst("p2", 3, 1)]).windows] == [
        (0, ("p1",), 0, 0), (1, ("p2",), 0, 3),
    ]  # fmt: skip
    # In the pass in which one came after the other, it is an earlier prompt of that pass.
    assert choose(golden, mine, [worst("p2", 3, 0)]).windows == (Window(0, ("p2", "p1"), 0, 3, (60, 40)),)


def test_a_server_that_does_not_tell(tmp_path: Path) -> None:
    """In a second pass a prompt is taken to be in the cache, since its first pass; in the first pass it is not."""
    silent = sent(tmp_path / "silent")
    assert [w.names for w in choose(silent, silent, [worst("p2", 3, 1)]).windows] == [("p2",), ("p2",)]
    assert len(choose(silent, silent, [worst("p2", 3, 0)]).windows) == 1


def test_the_engines_own_steps_tell_better(tmp_path: Path) -> None:
    silent = sent(tmp_path / "silent")
    told = sent(tmp_path / "told", steps=lambda index, i, length: [(i, 16 * index, length - 16 * index, 1)])
    source, own = choose(silent, told, [worst("p3", 1, 1)]).windows
    assert (source.names, own.names) == (("p0",), ("p3",))  # 16 tokens: p0 is the first that begins with them
    assert len(choose(silent, told, [worst("p3", 1, 0)]).windows) == 1


def test_a_scored_pass_only_where_nothing_else_is_wrong(tmp_path: Path) -> None:
    golden = sent(tmp_path / "golden", ("one", "all", "score"), cached={})
    scored = WorstToken("p1", 0, 30, 0.9, 0.01, 2)
    assert choose(golden, golden, [scored, worst("p2", 3, 0)]).words == ("one",)
    plan = choose(golden, golden, [scored])
    assert plan.words == ("one", "all", "score")
    assert [(w.pass_index, w.names) for w in plan.windows] == [(2, ("p1",))]


PLAN = LocalizePlan(
    LocalizeTarget("a", 6, 70, 0.5, 1),
    (Window(0, ("s",), 0, 0, (50,)), Window(1, ("a", "b", "c"), 0, 6, (100, 100, 100))),
    ("one", "all"),
)


@pytest.mark.parametrize(("left", "windows", "says"), [
    (10_000, [("s", 0, 0), ("abc", 0, 6)], []),
    (3700, [("s", 0, 0), ("abc", 0, 6)], []),  # 50 + 300 + 18 rows of 10 bytes, 22 sampled ones of 0.5
    (3690, [("s", 0, 0), ("ab", 0, 6)], ["1 of 3 requests"]),
    (1600, [("s", 0, 0), ("a", 0, 6)], ["2 of 3 requests"]),
    (1100, [("a", 0, 6)], ["2 of 3", "filled the prefix cache"]),
    (100, [("a", 1, 6)], ["2 of 3", "filled the prefix cache", "the 100 rows of the prompt"]),
    (25, [("a", 5, 6)], ["2 of 3", "filled", "100 rows of the prompt", "the tokens before token 5"]),
    (1, [("a", 6, 6)], ["2 of 3", "filled", "rows of the prompt", "before token 6",
                         "GB a rank are needed (--localize-gb)"]),
])  # fmt: skip
def test_what_a_budget_leaves(left: float, windows: list[Any], says: list[str]) -> None:
    plan = narrowed(PLAN, RowSizes(10.0, 0.5, left))
    assert [("".join(w.names), w.first, w.last) for w in plan.windows] == windows
    assert len(plan.left) == len(says)
    for said, wanted in zip(plan.left, says, strict=True):
        assert wanted in said
    assert (RowSizes(10.0, 0.5, left).of(plan) <= left) == (not any("--localize-gb" in s for s in plan.left))
    assert plan.target == PLAN.target


def test_a_prompts_last_row_is_kept_whatever_it_takes() -> None:
    plan = LocalizePlan(LocalizeTarget("a", 0, 99, 0.5, 0), (Window(0, ("a",), 0, 0, (100,)),), ("one",))
    found = narrowed(plan, RowSizes(1e6, 0, 1e6))
    assert found.windows == plan.windows
    assert found.left == ("what the budget ends before: 0.1 GB a rank are needed (--localize-gb)",)
