"""Evidence is counts that add up, survives a csv, and is nothing where a stranger wrote it."""

import pytest

from vllm_accprobe.opcheck.habits.decided import AWAY, NEAREST, ZERO, Evidence, EvidencePool, candidates_of, hits

SOME = Evidence(
    ("once", "low 1"), {0b001001: 50, 0b001000: 30, 0b000010: 3}, ((4, 1),) * 8, 2, (3, 4),
    {"rsqrt": (3.0, 1.0, 0.5, 1.0, 0.25)}, {"low 1": 0.7}, 128,
)  # fmt: skip


def test_it_comes_back_from_its_line() -> None:
    assert Evidence.of_text(SOME.to_text()) == SOME
    assert "\n" not in SOME.to_text()
    assert Evidence().to_text() == ""


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", '{"masks":3}', '{"masks":{"a":1}}', '{"other":1}', '{"ups":[1]}', '{"subnormals":[1,2,3]}',
     '{"would":{"a":"b"}}', "[" * 5000, '{"ways":["' + "a" * 20_000 + '"]}'],
)  # fmt: skip
def test_what_is_none_says_nothing(text: str) -> None:
    assert Evidence.of_text(text) == Evidence()


def test_hits_are_of_the_bits() -> None:
    assert candidates_of(SOME.ways)[3] == ("low 1", NEAREST)
    assert hits(SOME) == {
        ("once", NEAREST): 50, ("once", ZERO): 3, ("once", AWAY): 0,
        ("low 1", NEAREST): 80, ("low 1", ZERO): 0, ("low 1", AWAY): 0,
    }  # fmt: skip


def test_a_way_is_left_where_no_other_is_right_alone_more_often_than_chance() -> None:
    pool = EvidencePool([SOME, SOME])
    assert pool.alive == [("low 1", NEAREST)]
    assert pool.alone(("low 1", NEAREST), ("once", NEAREST)) == 60
    assert (pool.kept, pool.flushed, pool.out) == (6, 8, 4)
    close = Evidence(("once", "low 1"), {0b001001: 50, 0b001000: 6, 0b000001: 4})
    assert set(EvidencePool([close]).alive) == {("once", NEAREST), ("low 1", NEAREST)}
    other = Evidence(("once",), {0b1: 40})  # tried on fewer outputs, a way is compared by those
    assert EvidencePool([close, other]).alone(("once", NEAREST), ("low 1", NEAREST)) == 4
