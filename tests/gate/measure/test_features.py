"""What a token and its context were computed in."""

from __future__ import annotations

from made_folders import reply

from vllm_accprobe.gate.measure.token_gaps import Features, TokenGap, courses, gaps


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
