"""A tensor's line is made as the journal has it, byte for byte, and read back as it was."""

import json

import pytest

from vllm_accprobe.dump.journal import TensorHead, last
from vllm_accprobe.dump.journal_writer import spell, template_of
from vllm_accprobe.dump.record_table import RecordTable, TensorSites
from vllm_accprobe.dump.schema import Layout, Payload, Record, Stats
from vllm_accprobe.dump.stats import StatsCell

STATS = Stats(6, -1.0, 2.0, 0.5, 3.0, 1, 0)
SUMS = (5, -1.0, 2.0, 2.5, 9.0, 1, 0)
SHARD = Layout("shard", "tp", 1, 2, -1, ((3, 1),))
LINES = [
    (
        TensorHead("a.b", "M", "input.x", "tokens", 0, SHARD.to_event(), True), 2, 1, 7, Payload(0, 64, 24),
        '{"event":"tensor","tap":"a.b","class":"M","role":"input.x","rows":"tokens","row_dim":0,'
        '"layout":{"kind":"shard","group":"tp","index":1,"size":2,"dim":-1,"parts":[[3,1]]},"mutated":true,'
        '"dtype":"float32","shape":[2,3],"call":1,"seq":7,"step":2,"hash":"ab","seg":0,"off":64,"nbytes":24,'
        '"stats":{"count":6,"min":-1.0,"max":2.0,"mean":0.5,"l2":3.0,"nan":1,"inf":0}}',
        Record(0, 2, "a.b", "M", "input.x", 1, 7, "float32", (2, 3), "tokens", 0, STATS, "ab", SHARD,
               Payload(0, 64, 24), None, True),
    ),
    (
        TensorHead('quo"te\\d', "M", "output.0"), 0, 0, 0, None,
        '{"event":"tensor","tap":"quo\\"te\\\\d","class":"M","role":"output.0","rows":null,"row_dim":0,"dtype":"float32",'
        '"shape":[2,3],"call":0,"seq":0,"step":0,"hash":"ab","stats":{"count":6,"min":-1.0,"max":2.0,"mean":0.5,'
        '"l2":3.0,"nan":1,"inf":0}}',
        Record(0, 0, 'quo"te\\d', "M", "output.0", 0, 0, "float32", (2, 3), None, 0, STATS, "ab", Layout("replicated"),
               None),
    ),
    (
        TensorHead("a", "M", "param.w", layout=SHARD.to_event(), sample="cd", once=True), None, 0, 0, Payload(1, 0, 24),
        '{"event":"param","tap":"a","class":"M","role":"param.w","rows":null,"row_dim":0,"sample":"cd",'
        '"layout":{"kind":"shard","group":"tp","index":1,"size":2,"dim":-1,"parts":[[3,1]]},"dtype":"float32",'
        '"shape":[2,3],"call":0,"seq":0,"hash":"ab","seg":1,"off":0,"nbytes":24,"stats":{"count":6,"min":-1.0,'
        '"max":2.0,"mean":0.5,"l2":3.0,"nan":1,"inf":0}}',
        Record(0, None, "a", "M", "param.w", 0, 0, "float32", (2, 3), None, 0, STATS, "ab", SHARD, Payload(1, 0, 24),
               "cd"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("head", "step", "call", "seq", "place", "text", "value"), LINES)
def test_there_and_back(head, step, call, seq, place, text, value):
    cell = StatsCell(None, "ab")
    cell.sums, cell.payload = SUMS, place
    for template in (
        template_of(head, "float32", (2, 3), 24),
        template_of(head, "int8", (4,), 4).reshaped("float32", (2, 3), 24),
    ):
        assert spell((template, step, call, seq, cell)) == text + "\n"
    sites = TensorSites()
    site, event = sites.whole(text.encode(), json.loads(text))
    known, tails = sites.known([text.encode()])
    assert known == [site]
    found = sites.tails(tails)
    assert found is not None
    assert len(found[0]) < len(event)  # the head was not parsed again
    assert list(RecordTable.of_lines(sites, 0, [site, site], [event, *found])[0]) == [value, value]


@pytest.mark.parametrize(
    ("stats", "ends"),
    [
        (STATS, ',"stats":{"count":6,"min":-1.0,"max":2.0,"mean":0.5,"l2":3.0,"nan":1,"inf":0}}\n'),
        (None, ',"seq":0,"stats":null}\n'),
    ],
)
def test_a_fingerprint_has_no_hash_and_perhaps_no_statistics(stats: Stats | None, ends: str) -> None:
    template = template_of(TensorHead("a", "M", "param.w", once=True), "float32", (6,), 24)
    line = spell((template, None, 0, 0, StatsCell(stats)))
    assert line.endswith(ends)
    assert "hash" not in line


def test_keys_are_moved_to_the_end_in_the_order_that_is_asked_for() -> None:
    assert list(last({"a": 1, "b": 2, "c": 3, "d": 4}, "c", "x", "a")) == ["b", "d", "c", "a"]


def test_lines_read_together_are_those_of_the_file() -> None:
    """One line that holds two, and two that hold one, are as many as there should be."""
    two, whole = b'0},{"call":1}\n', b'1}\n'
    half = b'0,"stats":{"min":[1\n', b'0}]}}\n'
    assert TensorSites.tails([whole, whole]) == [{"call": 1}, {"call": 1}]
    for lines in ([two], [*half], [two, *half], [whole, b'1,"new":2}\n'], [whole, b"1,\n"]):
        assert TensorSites.tails(lines) is None
