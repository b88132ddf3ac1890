"""The pieces and their limits."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_accprobe.online import arrivals
from vllm_accprobe.online.arrivals import FrameError

_KINDS = st.sampled_from([arrivals.DATA, arrivals.JOURNAL_FRAME])


@given(st.lists(st.tuples(_KINDS, st.binary(max_size=200)), max_size=5))
def test_pieces_come_out_as_they_went_in(given_: list[tuple[int, bytes]]) -> None:
    made = b"".join(b"".join(arrivals.placed(kind, 7, 1 << 40, body)) for kind, body in given_)
    found = list(arrivals.pieces(io.BytesIO(made).read, len(made)))
    assert [(kind, *arrivals.place_of(body)) for kind, body in found] == [(k, 7, 1 << 40, b) for k, b in given_]


@given(st.binary(min_size=arrivals.HEAD.size, max_size=arrivals.HEAD.size))
def test_no_head_is_believed(head: bytes) -> None:
    try:
        kind, length = arrivals.length_of(head)
    except FrameError:
        return
    assert kind in range(1, 11)
    assert length <= arrivals.CHUNK + arrivals.PLACE.size


def test_lengths_are_refused_before_they_are_read() -> None:
    read = []

    def gives(n: int) -> bytes:
        read.append(n)
        return arrivals.head(arrivals.DATA, 1 << 60)

    with pytest.raises(FrameError, match="announces 1,152,921,504,606,846,976 bytes where 1,048,592 are allowed"):
        list(arrivals.pieces(gives, 1 << 61))
    assert read == [arrivals.HEAD.size]
    whole = b"".join(arrivals.placed(arrivals.DATA, 0, 0, b"abc"))
    for cut in (len(whole) - 1, 5):
        with pytest.raises(FrameError, match="ends within a piece"):
            list(arrivals.pieces(io.BytesIO(whole).read, cut))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"1"])
def test_words_are_one_object(body: bytes) -> None:
    with pytest.raises(FrameError):
        arrivals.json_in(body)


@pytest.mark.parametrize("value", [-1, 1 << 60, 1.0, True, "1", None])
def test_numbers_are_numbers(value: object) -> None:
    with pytest.raises(FrameError, match="rank is no number from 0 to 9"):
        arrivals.number({"rank": value}, "rank", 9)
