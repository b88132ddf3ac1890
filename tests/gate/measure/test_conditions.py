"""Axes, thresholds and sentences; which condition is found in whole folders is in test_gating.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_folders import reply

from vllm_accprobe.gate.measure import conditions
from vllm_accprobe.gate.measure.token_gaps import Features, Table, TokenGap, courses, gaps

LENGTHS = [10, 30, 50, 70, 90, 110, 130, 150]


def table(batch: int = 9) -> Table:
    """Eight prompts, each alone and then in batches of 2 to ``batch``; longer than 60 has a second chunk there."""
    tokens, features, prompt, passes = [], [], [], []
    for j in (0, 1):
        for i, n in enumerate(LENGTHS):
            for k in range(6):
                tokens.append(TokenGap(k, n + k - 1, n, False, 0.0, 0.0, 0.0, False, None, None))
                many = 1 if j == 0 else 2 + i % (batch - 1)
                features.append(Features(1 + (n > 60), many, many, bool(j and i % 3), 60 if n > 60 else 0))
                prompt.append(i)
                passes.append(j)
    n = len(tokens)
    one, none = np.full(n, 1.0), np.zeros((0, n))
    names = tuple(f"p{i}" for i in range(8))
    return Table(names, np.array(prompt), np.array(passes), tuple(tokens), tuple(features), one, one, none, none, False)


def found(made: Table, wrong: np.ndarray, noise: float = 0.1) -> conditions.GateCondition | None:
    """mine is three times its limit where ``wrong`` holds, and within it elsewhere."""
    random = np.random.default_rng(1)
    mine = np.where(wrong, 3.0, 0.9) * np.exp(random.normal(0, noise, len(wrong)))
    said = conditions.explain(made, replace(conditions.batching(made), mine=mine), 0.05)
    return None if said is None else said[0]


def where(made: Table, rule: object) -> np.ndarray:
    return np.array([rule(t, f) for t, f in zip(made.tokens, made.features, strict=True)])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("rule", "axis", "at", "sentence"),
    [
        (lambda t, f: t.ordinal > 0, "phase", None, "only decode"),
        (lambda t, f: t.ordinal == 0, "phase", None, "only prefill"),
        (lambda t, f: t.position >= 92, "position", 92, "from position 92 on"),
        (lambda t, f: f.batch > 5, "batch", 5, "only in batches over 5"),
        (lambda t, f: f.least <= 2, "batch", 2, "only in batches of up to 2"),
        (lambda t, f: f.hit, "hit", None, "only prompts with a prefix hit"),
        (lambda t, f: f.least == 1, "batch", 1, "only in batches of 1"),
    ],
)
def test_each_axis(rule: object, axis: str, at: int | None, sentence: str) -> None:
    made = table()
    said = found(made, where(made, rule))
    assert said is not None
    assert (said.axis, said.at, said.sentence, said.also) == (axis, at, sentence, ())


def test_two_conditions_that_hold_for_the_same_tokens_are_both_said() -> None:
    """What has a second chunk here has more than 50 tokens, and a position from 69 on."""
    made = table()
    said = found(made, where(made, lambda t, f: f.chunk == 2))
    assert said is not None
    every = (said, *said.also)
    assert [(c.axis, c.at, c.sentence) for c in every] == [
        ("chunk", 2, "only rows of the second chunk (from position 60 on)"),
        ("position", 69, "from position 69 on"),
        ("length", 50, "only prompts over 50 tokens"),
    ]


def test_no_condition_where_all_is_wrong_or_nothing_parts_it() -> None:
    made = table()
    n = len(made.tokens)
    assert found(made, np.ones(n, bool)) is None
    assert found(made, np.random.default_rng(2).random(n) < 0.5) is None


def test_only_is_said_where_the_rest_is_within_the_limit() -> None:
    """Decode four times the limit, and prefill one and a half times."""
    made = table()
    mine = np.where(where(made, lambda t, f: t.ordinal > 0), 4.0, 1.5)
    assert conditions.explain(made, replace(conditions.batching(made), mine=mine), 0.05) is None


def test_cells_are_at_powers_of_two_and_never_all_or_nothing() -> None:
    made = table()
    masks = conditions.cells(made)
    assert all(0 < mask.sum() < len(mask) for mask in masks)
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    for rule in (lambda t, f: t.position >= 64, lambda t, f: f.chunk >= 2, lambda t, f: f.batch > 4):
        assert any((mask == where(made, rule)).all() for mask in masks)
    unknown = replace(made, features=tuple(Features(None, None, None, None) for _ in made.features))
    names = {axis.name for axis in conditions.axes(unknown)}
    assert names == {"phase", "position", "length"}
    assert not any(math.isnan(v) for axis in conditions.axes(unknown) for v in axis.values)


# --- what a token and its context were computed in ---


def tokens(length: int, n: int) -> list[TokenGap]:
    one = reply("a", length, n, lambda k: 0.0)
    return gaps(one, one)[0]


def test_from_steps() -> None:
    """A prompt of 20: 8 from the cache, chunks of 6 in batches of 1 and 9, then two tokens in batches of 3 and 12."""
    rows = [(4, 8, 6, 1), (5, 14, 6, 9), (6, 20, 1, 3), (7, 21, 1, 12)]
    course = courses({"a": reply("a", 20, 3, lambda k: 0.0)}, 0, lambda index, name: rows)["a"]
    assert [course.at(t) for t in tokens(20, 3)] == [
        Features(2, 9, 1, True, 14), Features(2, 9, 1, True, 14), Features(2, 12, 1, True, 14)
    ]  # fmt: skip


def test_a_scored_row_has_the_chunk_that_it_is_in() -> None:
    rows = [(4, 0, 8, 1), (5, 8, 12, 1)]
    course = courses({"a": reply("a", 1, 3, lambda k: 0.0)}, 2, lambda index, name: rows)["a"]
    at = {p: course.at(TokenGap(p, p, 20, False, 0.0, 0.0, 0.0, False, None, None, True)) for p in (7, 8)}
    assert [(at[p].chunk, at[p].start) for p in (7, 8)] == [(1, 0), (2, 8)]


def test_without_steps_batches_are_those_that_overlap() -> None:
    times = {"a": (0.0, 1.0), "b": (0.5, 1.0), "c": (0.9, 3.0), "d": (2.0, 0.5)}
    made = {}
    for name, (began, seconds) in times.items():
        one = reply(name, 20, 2, lambda k: 0.0, cached=16 if name == "d" else 0)
        made[name] = type(one)(**{**vars(one), "began": began, "seconds": seconds})
    found = courses(made, 0, lambda index, name: [])
    first = tokens(20, 1)[0]
    assert {name: found[name].at(first).batch for name in times} == {"a": 3, "b": 3, "c": 3, "d": 2}
    assert {name: found[name].at(first).hit for name in times} == {"a": False, "b": False, "c": False, "d": True}
    assert found["a"].at(first).chunk is None
