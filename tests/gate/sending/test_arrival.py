"""The moments at which requests are sent."""

from __future__ import annotations

import pytest

from vllm_accprobe.gate.sending.passes import parse


def test_words() -> None:
    assert parse("one").alone
    assert parse("all").moments(3) == [0, 0, 0]
    moments = parse("poisson:20").moments(2000)
    assert moments == parse("poisson:20").moments(2000)
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("word", ["", "two", "poisson", "poisson:0", "poisson:-1", "poisson:1e9", "poisson:nan"])
def test_what_is_no_arrival(word: str) -> None:
    with pytest.raises(ValueError, match="poisson:RATE"):
        parse(word)
