"""Row arithmetic: chunks, decodes, drafts, selections and pictures, computed by hand."""

from collections.abc import Sized
from typing import Any

import pytest

from vllm_accprobe.capture.core import rows
from vllm_accprobe.capture.core.rows import (
    EncoderItem,
    Requests,
    Scheduled,
    external_ids,
    kept,
    logits_space,
    token_space,
    vision_space,
    wanted_at_all,
)
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import Segment


def requests(config: ProbeConfig, **prompts: int) -> Requests:
    found = Requests(config)
    for name, length in prompts.items():
        found.add(name, list(range(length)), length)
    return found


@pytest.mark.parametrize(
    ("internal", "best"),
    [
        ("cmpl-my-req-42-0-0123abcd", "my-req-42"),
        ("cmpl-my-req-42-1-0123abcd", "my-req-42-1"),
        ("chatcmpl-my-req-42-0123abcd", "my-req-42"),
        ("generate-tokens-my-req-0-0123abcd", "my-req-0"),
        ("7-0123abcd", "7"),
        ("7", "7"),
        ("plain", "plain"),
    ],
)
def test_external_ids(internal: str, best: str) -> None:
    names = external_ids(internal)
    assert names[0] == internal
    assert names[-1] == best


def test_rows_of_a_mixed_batch() -> None:
    """A chunk of a's prompt, b's last chunk running into decode positions after a preemption, a decode of c."""
    config = ProbeConfig()
    known = requests(config, a=10, b=4, c=3)
    space = token_space(config, known, [Scheduled("a", 4, 3), Scheduled("b", 2, 4), Scheduled("c", 5, 1)], padded=8)
    assert space.segments == [
        Segment(0, 4, 3, 0, "prefill"), Segment(1, 2, 2, 3, "prefill"), Segment(1, 4, 2, 5, "decode"),
        Segment(2, 5, 1, 7, "decode"),
    ]  # fmt: skip
    assert (space.src, space.padded, space.n, space.whole) == (8, 8, 8, True)
    assert space.ranges == [(0, 8)]


def test_only_selected_tokens_and_requests_are_kept() -> None:
    config = ProbeConfig(tokens=((0, 0), (2, 2)), requests=("b*",))
    known = requests(config, a=4, b1=4)
    space = token_space(config, known, [Scheduled("a", 0, 4), Scheduled("b1", 2, 5)], padded=16)
    # b1: positions 2, 3 are prompt (ordinal 0), 4 is ordinal 1, 5 is ordinal 2, 6 is ordinal 3
    assert space.ranges == [(4, 6), (7, 8)]
    assert [(s.pos, s.n, s.row) for s in space.segments] == [(2, 2, 4), (5, 1, 7)]
    assert not space.whole
    assert [r.id for r in known.unsent] == ["b1"]  # a leaves no trace


@pytest.mark.parametrize(("start", "n", "parts"), [
    (0, 4, [(0, 1, "prefill"), (2, 4, "prefill")]),  # of chunk 0..3 the positions 0, 2 and 3
    (1, 1, []),
    (3, 6, [(0, 1, "prefill"), (3, 4, "decode")]),  # a chunk that runs from the prompt into the answer
    (6, 1, [(0, 1, "decode")]),
    (7, 2, []),
])  # fmt: skip
def test_of_a_request_only_the_named_positions_are_kept(start: int, n: int, parts: list[Any]) -> None:
    config = ProbeConfig()
    known = requests(config, a=5, b=5)
    known.aim(config, {"a": ((0, 0), (2, 3), (6, 6))})
    assert kept(config, start, n, 5, known.positions("a")) == parts
    batch = [Scheduled("b", 0, 2), Scheduled("a", start, n)]
    assert token_space(config, known, batch, 0).ranges[1:] == [(2 + a, 2 + b) for a, b, _ in parts] or (
        parts and parts[0][0] == 0  # it joins b's rows, which are all kept
    )
    assert wanted_at_all(config, known, [("a", start, n)]) == bool(parts)
    answers = ProbeConfig(tokens=((1, 9),))
    assert kept(answers, start, n, 5, known.positions("a")) == [p for p in parts if p[2] != "prefill"]
    known.aim(config)
    assert known.positions("a") == ()


def test_a_step_without_selected_rows_is_not_armed() -> None:
    config = ProbeConfig(tokens=((1, 1),))
    known = requests(config, a=4)
    assert not wanted_at_all(config, known, [("a", 0, 4)])
    assert wanted_at_all(config, known, [("a", 0, 5)])
    assert not wanted_at_all(config, known, [("a", 5, 1)])
    assert kept(config, 5, 1, 4) == []


def test_logits_rows_skip_unfinished_prompts_and_include_drafts() -> None:
    config = ProbeConfig()
    known = requests(config, a=10, b=6, c=3)
    batch = [Scheduled("a", 0, 4, 0, 10), Scheduled("b", 3, 3, 0, 6), Scheduled("c", 5, 3, drafts=2, known=6)]
    space = logits_space(config, known, batch)
    assert space.src == 1 + 1 + 3
    assert space.ranges == [(1, 5)]
    assert [(s.req, s.pos, s.n, s.row) for s in space.segments] == [(1, 5, 1, 1), (2, 5, 3, 2)]
    assert space.token_rows == [6, 7, 8, 9]
    assert [s.drafts for s in space.segments] == [None, 2]
    assert [s.drafts for s in token_space(config, known, batch, 0).segments] == [None, None, 2]
    few = ProbeConfig(tokens=((3, 3), (5, 5)))  # c's rows are its third to fifth token; the last two are drafts
    assert [(s.pos, s.drafts) for s in token_space(few, known, batch, 0).segments] == [(5, None), (7, 1)]


def test_vision_rows_before_and_after_merging() -> None:
    config = ProbeConfig()
    known = requests(config, a=30, b=30)
    items = [EncoderItem("a", 0, "image", 16), EncoderItem("b", 1, "image", 15)]
    patches = vision_space(config, known, items, 124)
    assert patches is not None
    assert patches.name == "vision/4"
    assert [(s.req, s.image, s.pos, s.n, s.row) for s in patches.segments] == [(0, 0, 0, 64, 0), (1, 1, 0, 60, 64)]
    merged = vision_space(config, known, items, 31)
    assert merged is not None
    assert (merged.name, merged.n) == ("vision/1", 31)
    images = vision_space(config, known, items, 2)
    assert images is not None
    assert images.name == "vision/image"
    assert vision_space(config, known, items, 33).name == "vision/class"  # type: ignore[union-attr]
    assert vision_space(config, known, items, 50) is None
    assert vision_space(config, known, [], 50) is None


def test_same_prompts_are_told_apart_by_ordinal_and_numbers_are_never_reused() -> None:
    known = Requests(ProbeConfig())
    first = known.add("x", [1, 2], 2)
    again = known.add("x", [1, 2], 2)
    second = known.add("y", [1, 2], 2)
    assert again is first
    assert (first.prompt, first.ordinal, second.ordinal) == (second.prompt, 0, 1)
    known.forget("x")
    assert known.add("z", [1, 2], 2).req == 2


def test_what_stays_of_finished_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is chosen, so none is named; a prompt that came lately is still known to have come."""
    monkeypatch.setattr(rows, "PROMPTS", 4)
    known = Requests(ProbeConfig())
    for n in range(100):
        known.add(f"r{n}", [n], 1)
        known.forget(f"r{n}")
    assert sum(len(kept) for kept in vars(known).values() if isinstance(kept, Sized)) <= 8
    assert [known.add(f"again {n}", [n], 1).ordinal for n in (99, 0)] == [1, 0]
    assert [r.id for r in known.unsent] == ["again 99", "again 0"]


def test_the_same_prompt_to_another_adapter_is_another_request() -> None:
    known = Requests(ProbeConfig())
    made = [known.add(name, [1, 2], 2, (), adapter) for name, adapter in (("a", ""), ("b", "sql"), ("c", "sql"))]
    assert [(r.adapter, r.ordinal) for r in made] == [("", 0), ("sql", 0), ("sql", 1)]
    assert known.add("d", None, 2, (), "", lambda: "hash").prompt == "hash"
