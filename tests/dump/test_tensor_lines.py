"""A tensor's line is made as the journal has it, byte for byte, and read back as it was."""

from __future__ import annotations

import json

import pytest

from vllm_accprobe.dump.journal import TensorHead, cell_fields, last, record
from vllm_accprobe.dump.journal_writer import TensorLine, encode
from vllm_accprobe.dump.schema import Layout, Payload, Record, Stats
from vllm_accprobe.dump.stats import StatsCell

STATS = Stats(6, -1.0, 2.0, 0.5, 3.0, 1, 0)
SHARD = Layout("shard", "tp", 1, 2, -1, ((3, 1),))
LINES = [
    (
        TensorHead(2, "a.b", "M", "input.x", 1, 7, "tokens", 0, SHARD.to_event(), True), Payload(0, 64, 24),
        '{"event":"tensor","step":2,"tap":"a.b","class":"M","role":"input.x","call":1,"seq":7,"rows":"tokens",'
        '"row_dim":0,"layout":{"kind":"shard","group":"tp","index":1,"size":2,"dim":-1,"parts":[[3,1]]},'
        '"mutated":true,"dtype":"float32","shape":[2,3],"hash":"ab","stats":{"count":6,"min":-1.0,"max":2.0,'
        '"mean":0.5,"l2":3.0,"nan":1,"inf":0},"seg":0,"off":64,"nbytes":24}',
        Record(0, 2, "a.b", "M", "input.x", 1, 7, "float32", (2, 3), "tokens", 0, STATS, "ab", SHARD,
               Payload(0, 64, 24), None, True),
    ),
    (
        TensorHead(0, "a", "M", "output.0"), None,
        '{"event":"tensor","step":0,"tap":"a","class":"M","role":"output.0","call":0,"seq":0,"rows":null,"row_dim":0,'
        '"dtype":"float32","shape":[2,3],"hash":"ab","stats":{"count":6,"min":-1.0,"max":2.0,"mean":0.5,"l2":3.0,'
        '"nan":1,"inf":0}}',
        Record(0, 0, "a", "M", "output.0", 0, 0, "float32", (2, 3), None, 0, STATS, "ab", Layout("replicated"), None),
    ),
    (
        TensorHead(None, "a", "M", "param.w", layout=SHARD.to_event(), sample="cd"), Payload(1, 0, 24),
        '{"event":"param","tap":"a","class":"M","role":"param.w","call":0,"seq":0,"rows":null,"row_dim":0,'
        '"dtype":"float32","shape":[2,3],"sample":"cd","layout":{"kind":"shard","group":"tp","index":1,"size":2,'
        '"dim":-1,"parts":[[3,1]]},"hash":"ab","stats":{"count":6,"min":-1.0,"max":2.0,"mean":0.5,"l2":3.0,"nan":1,'
        '"inf":0},"seg":1,"off":0,"nbytes":24}',
        Record(0, None, "a", "M", "param.w", 0, 0, "float32", (2, 3), None, 0, STATS, "ab", SHARD, Payload(1, 0, 24),
               "cd"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("head", "place", "text", "value"), LINES)
def test_there_and_back(head: TensorHead, place: Payload | None, text: str, value: Record) -> None:
    cell = StatsCell(STATS, "ab")
    cell.payload = place
    assert encode(TensorLine(head.line("float32", (2, 3)), cell).whole()).decode() == text + "\n"
    assert record(0, json.loads(text), {}) == value


def test_a_fingerprint_has_no_hash_and_perhaps_no_statistics() -> None:
    assert cell_fields(StatsCell(STATS)) == {"stats": STATS}
    assert cell_fields(StatsCell()) == {"stats": None}


def test_an_event_stays_as_it_is_while_its_line_is_on_its_way() -> None:
    event = TensorHead(0, "a", "M", "output.0").line("float32", (6,))
    before = dict(event)
    cell = StatsCell(None, "ab", "float32")
    line = TensorLine(event, cell)
    cell.add((6, -1.0, 2.0, 3.0, 9.0, 0, 0))
    cell.payload = Payload(0, 64, 24)
    assert line.whole() == before | {"hash": "ab", "stats": Stats(6, -1.0, 2.0, 0.5, 3.0, 0, 0), "seg": 0, "off": 64,
                                     "nbytes": 24}  # fmt: skip
    assert event == before


def test_keys_are_moved_to_the_end_in_the_order_that_is_asked_for() -> None:
    assert list(last({"a": 1, "b": 2, "c": 3, "d": 4}, "c", "x", "a")) == ["b", "d", "c", "a"]
