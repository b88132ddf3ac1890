"""Lines of a ledger of states: written as the journal has them, read back as they were, and what else they may say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_accprobe.dump.journal import (
    CACHED,
    FINDING,
    TOTALS,
    CachedPrefix,
    CachedRows,
    StateFinding,
    StateTotals,
    sentence,
)
from vllm_accprobe.dump.journal_writer import encode

STALE = StateFinding(
    5, "stale", "kv", 0, "l.0.attn", 4, 2, "a", "its row is written to slot 75", 76, 44, 44, "b", 4, 43, 43,
    ("copy in step 4",),
)  # fmt: skip
CASES: list[tuple[Any, Any, str]] = [
    (FINDING, STALE,
     '{"event":"state","step":5,"kind":"stale","cache":"kv","group":0,"layer":"l.0.attn","layers":4,"block":2,'
     '"request":"a","how":"its row is written to slot 75","slot":76,"low":44,"high":44,"writer":"b","written":4,'
     '"wrote_low":43,"wrote_high":43,"between":["copy in step 4"]}'),
    (FINDING, StateFinding(0, "changed", "state", 1, "x", 1, 3, "", "nobody's"),
     '{"event":"state","step":0,"kind":"changed","cache":"state","group":1,"layer":"x","layers":1,"block":3,'
     '"how":"nobody\'s"}'),
    (TOTALS, StateTotals("full", 4, 9, 10, 20, 30, 1, {"copy": 2}, {"odd": 1}),
     '{"event":"states","mode":"full","layers":4,"steps":9,"hashed":10,"checked":20,"held":30,"findings":1,'
     '"events":{"copy":2},"skipped":{"odd":1}}'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "line"), CASES)
def test_a_line_is_read_as_it_was_written(kind: Any, value: Any, line: str) -> None:
    assert bytes(encode(kind.to_line(value))).decode().strip() == line
    assert kind.from_line(json.loads(line)) == value


@pytest.mark.parametrize(
    "change",
    [{"kind": "bad"}, {"kind": 3}, {"between": "x"}, {"between": [1]}, {"block": -1}, {"step": "2"}, {"low": 1.5}],
)
def test_what_no_ledger_writes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        FINDING.from_line(json.loads(CASES[0][2]) | change)


def test_strangers_texts_are_cut() -> None:
    read = FINDING.from_line(json.loads(CASES[0][2]) | {"between": ["x" * 5000] * 50})
    assert len(read.between) == 8
    assert len(read.between[0]) == 200


def test_sentences() -> None:
    assert sentence(STALE) == (
        "a stale slot: step 5, layer l.0.attn and 3 more, block 2, slot 76, read by request 'a' (position 44): its "
        "row is written to slot 75; written last by request 'b' in step 4 (position 43); since then: copy in step 4"
    )


def test_owners_of_a_prefix_are_a_line() -> None:
    line = CachedPrefix(8, 1, (CachedRows(0, 32, 0), CachedRows(32, 32, -1)))
    written = CACHED.to_line(line)
    assert written == {
        "event": "cached", "step": 8, "req": 1,
        "runs": [{"low": 0, "n": 32, "owner": 0}, {"low": 32, "n": 32, "owner": -1}],
    }  # fmt: skip
    assert CACHED.from_line(written) == line
    assert CACHED.from_line({**written, "why": "another's"}).why == "another's"


@pytest.mark.parametrize("owner", [-2, "a", None, 1 << 70, True])
def test_an_owner_that_is_no_number_is_refused(owner: Any) -> None:
    with pytest.raises(ValueError, match="owner is"):
        CACHED.from_line({"event": "cached", "step": 8, "req": 1, "runs": [{"low": 0, "n": 32, "owner": owner}]})


def test_a_hit_says_who_reads_what_of_whom() -> None:
    how = "request 'b' (adapter a2) reads blocks 0-1 (positions 0 to 63), which request 'a' (adapter a1) wrote"
    found = StateFinding(8, "foreign", "kv", 0, "", 4, 1, "b", how, None, 0, 63, "a", first="layers.0.attn")
    assert sentence(found) == f"a prefix hit of another context: step 8, all 4 layers of cache group 0: {how}"
    half = StateFinding(1, "unwritten", "state", 0, "layers.0.mixer", 3, 1, "a", "not written", part="conv state")
    assert "layer layers.0.mixer (conv state) and 2 more, block 1" in sentence(half)
    assert FINDING.from_line(FINDING.to_line(half)) == half
