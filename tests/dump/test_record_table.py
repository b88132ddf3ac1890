"""The table of a dump's tensors: hostile and unusual lines are read as if it stood alone; choices as of a list."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from vllm_accprobe.dump.compiled_lines import CompiledLines
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.record_table import (
    ChosenRecords,
    RecordTable,
    TensorSites,
    of_moment,
    of_new_places,
    stored_bytes,
)
from vllm_accprobe.dump.schema import PADDING, Record

HEAD = '{"event":"tensor","tap":"a","class":"L","role":"output.0","dtype":"float32","shape":[2,4]'
GOOD = HEAD + ',"call":0,"seq":1,"step":0,"hash":"ab"}'
DEEP = "[" * 1000 + "]" * 1000
ROWS = (
    '{"event":"rows","step":0,"space":"%s","src_rows":2,"ids":[],'
    '"segments":[{"req":0,"pos":0,"n":2,"phase":"prefill"}]}'
)


def rows_of(space: str, shape: str = "[2,4]") -> str:
    return GOOD.replace('"shape":[2,4]', f'"shape":{shape},"rows":"{space}"')


def by_way(monkeypatch: pytest.MonkeyPatch, compiled: int) -> None:
    """compiled: by machine code, so many lines together, by heads of those before; 0: the general way."""
    monkeypatch.setattr("vllm_accprobe.dump.compiled_lines.WORTH", 0 if compiled else 1 << 60)
    monkeypatch.setattr("vllm_accprobe.dump.reader.LINES", compiled)


@pytest.mark.parametrize(("lines", "wanted", "problem"), [
    # A line that is nested deep is counted, the others are read; the words depend on the recursion limit.
    ((GOOD, GOOD.replace('"seq":1', f'"seq":1,"stats":{DEEP}'), GOOD), [((2, 4), None, "ab")] * 2, "first: line 3: "),
    ((GOOD, GOOD.replace('"seq":1', f'"seq":{DEEP}'), GOOD), [((2, 4), None, "ab")] * 2, "first: line 3: "),
    # A key that comes again behind the head: it counts in its own line alone.
    ((GOOD.replace('"seq":1', '"seq":1,"shape":[7]'), GOOD), [((7,), None, "ab"), ((2, 4), None, "ab")], ""),
    ((GOOD.replace('"seq":1', '"seq":1,"rows":"x"'), GOOD), [((2, 4), None, "ab")] * 2, "without a row map"),
    # What Python's JSON accepts is accepted in every line of a site, not in the first alone.
    ((GOOD.replace('"seq":1', '"seq":1,"stats":{"count":8,"min":NaN,"max":1e999}'),) * 2,
     [((2, 4), None, "ab")] * 2, ""),
    ((GOOD.replace('"ab"', '"\\ud800"'),) * 2, [((2, 4), None, "\ud800")] * 2, ""),
    ((GOOD, GOOD[:-1] + ",}"), [((2, 4), None, "ab")], "line 3: Expecting property name"),
    # A row map without a name is checked as others are.
    ((ROWS % "", rows_of("")), [((2, 4), "", "ab")], ""),
    ((ROWS % "", rows_of("", "[3,4]")), [((3, 4), None, "ab")], "1 tensor without a row map that fits"),
    ((rows_of(""),), [((2, 4), None, "ab")], "1 tensor without a row map that fits"),
    # Tensors of nobody's rows count among those that are known.
    ((ROWS % PADDING, GOOD, rows_of(PADDING)), [((2, 4), None, "ab")], "0 tensors readable, 2 known"),
], ids=("stats", "seq", "shape", "rows", "nan", "pair", "torn", "map", "other map", "none", "padding"))  # fmt: skip
@pytest.mark.parametrize("compiled", [0, 1])
def test_lines_of_a_journal(tmp_path, request, monkeypatch, lines, wanted, problem, compiled):
    by_way(monkeypatch, compiled)
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's default, which torch's compiler raises for its whole process
    rank = tmp_path / "rank0000"
    rank.mkdir()
    (tmp_path / "run.json").write_text('{"schema": 1}')
    (rank / "journal.jsonl").write_text("\n".join(('{"event":"start","schema":1,"rank":0}', *lines, "")))
    dump = open_dump(tmp_path)
    assert [(r.shape, r.rows, r.hash) for r in dump.records] == wanted
    problems = [p for p in dump.problems if problem or "was not closed" not in p]
    assert problems if problem else not problems
    assert problem in " ".join(problems)


STATS = '"stats":{"count":8,"min":-1.5,"max":2e-05,"mean":0.1,"l2":12,"nan":0,"inf":3}'
FORMS = (
    GOOD,
    f'{HEAD},"call":0,"seq":2,"step":7,"hash":"0f","seg":0,"off":4096,"nbytes":32,{STATS}}}',
    f'{HEAD},"call":12,"seq":999999999999999,"step":7,{STATS.replace("2e-05", "null")}}}',
    f'{HEAD.replace("tensor", "param")},"call":0,"seq":0,{STATS}}}',
    f'{HEAD.replace("L", "é")},"call":0,"seq":0,"step":1}}',
)
"""As capture writes them."""
CHANGES = (
    ("}", "}}"), ("}", ""), (":", ": "), ("0", "00"), ("0", "-1"), ("1", "1.0"), ("7", "9007199254740993"),
    ("8", "null"), ("8", "true"), ("0.1", ".1"), ("0.1", "1e999"), ("0.1", "1,2"), ("0.1", "NaN"), ("12", "-"),
    ("12", "18446744073709551616"), ('"0f"', "null"), ('"0f"', '""'), ('"0f"', '"0F"'), ('"0f"', '"x\\n"'),
    ('"ab"', '"ab'), ('"ab"', '"é"'), ("32", "31"), ('"step":7', '"step":null'), ('"seq"', '"call":3,"seq"'),
    ('"seq"', '"hash":"cd","seq"'), ('"min"', '"low"'), ('"off"', '"of"'), ("[2,4]", "[2,5]"), (',"step":0', ""),
    ("}", ',"more":1}'), ("}", ',"call":1}'), ("{", "[{"), ("}}", ",}"),
    ('"seq":0', '"seq":0,"step":3'),
)  # fmt: skip


def test_lines_that_machine_code_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is read, and refused, as without it, whatever is changed in a line; as they are, it reads all lines."""
    changed = [line.replace(old, new, 1) for line in FORMS for old, new in CHANGES]
    changed += [new.join(line.rsplit(old, 1)) for line in FORMS for old, new in CHANGES]
    cut = [line[:end] for line in FORMS for end in range(len(line))]
    rank = tmp_path / "rank0000"
    rank.mkdir()
    (tmp_path / "run.json").write_text('{"schema": 1}')
    (rank / "seg-00000.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(8192))
    (rank / "journal.jsonl").write_text("\n".join((*FORMS, *changed, *FORMS, *cut, *FORMS, "")))
    by_way(monkeypatch, 0)
    wanted = open_dump(tmp_path)
    assert wanted.bad_lines[0] > 100
    for together in (1, 8, 2048):
        by_way(monkeypatch, together)
        found = open_dump(tmp_path)
        assert found.records == wanted.records
        assert (found.problems, found.bad_lines) == (wanted.problems, wanted.bad_lines)
        for name, column in found.records.columns.items():
            if name != "site":
                np.testing.assert_array_equal(column, wanted.records.columns[name])
    reader = CompiledLines(sites := TensorSites())
    lines = [f"{line}\n".encode() for line in FORMS]
    for line in lines:
        sites.whole(line, orjson.loads(line))
    good, table = reader.read(0, [*lines, b'{"event":"step","step":1}\n', *lines])
    assert good.tolist() == [*[True] * 5, False, *[True] * 5]
    assert [r.hash for r in table] == ["ab", "0f", None, None, None] * 2
    assert [r.stats is not None and r.stats.max for r in table] == [False, 2e-05, None, 2e-05, False] * 2


@pytest.mark.parametrize("full", ["places", "bytes"])
def test_a_table_of_heads_that_is_full(monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    """Heads that all want one place are searched for so far and no further; their lines go the general way."""
    reader = CompiledLines(sites := TensorSites())
    if full == "places":
        reader._table = np.full(128, -1)
    else:
        monkeypatch.setattr("vllm_accprobe.dump.compiled_lines._MOST_BYTES", 100 * 2**10)
    lines = [GOOD.replace('"a"', f'"{i:01000}"').encode() + b"\n" for i in range(400)]
    for line in lines:
        sites.whole(line, orjson.loads(line))
    good, table = reader.read(0, lines)
    assert 64 < good.sum() <= 128
    assert [r.tap for r in table] == [f"{i:01000}" for i in np.flatnonzero(good)]


def table_of(*events: dict[str, Any], rank: int = 0, sites: TensorSites | None = None) -> RecordTable:
    """Of lines with these changes to `GOOD`."""
    sites = sites or TensorSites()
    lines = [orjson.dumps(orjson.loads(GOOD) | e) for e in events]
    numbers, found = zip(*(sites.whole(line, orjson.loads(line)) for line in lines), strict=True)
    table, bad = RecordTable.of_lines(sites, rank, numbers, found)
    assert bad == []
    return table


def test_places_of_many_sites_and_calls() -> None:
    """Their product, 1 << 32, is no int32."""
    two = table_of({"tap": "a"}, {"tap": "b"})
    first, last = two.sites.all
    sites, n = TensorSites(), 1 << 16
    sites.all = [first] * n + [last]
    table = RecordTable(sites, {name: np.repeat(c[:1], n + 1) for name, c in two.columns.items()})
    table.columns["site"][n], table.columns["call"][:n] = n, np.arange(n)
    records, which = table.places
    assert len(records) == n + 1
    assert records[which[n]].tap == "b"


EVENTS: list[dict[str, Any]] = [
    {"tap": "a", "step": 0, "seg": 0, "off": 0, "nbytes": 32},
    {"tap": "b", "step": 0, "seg": 0, "off": 32, "nbytes": 32},
    {"tap": "a", "step": 1, "seg": 0, "off": 0, "nbytes": 32},  # the same bytes again
    {"tap": "a", "step": 2},
    {"tap": "a", "step": 2, "call": 1, "seg": 1, "off": 0, "nbytes": 32},  # a call that no step before had
    {"tap": "a", "step": 3, "call": 1},
    {"tap": "c", "event": "param", "role": "param.w", "seg": 0, "off": 0, "nbytes": 32},
]


@pytest.fixture
def ranks() -> RecordTable:
    """Two ranks: ``EVENTS`` of rank 0, the first two of rank 1."""
    sites = TensorSites()
    return RecordTable.joined(sites, [table_of(*EVENTS, sites=sites), table_of(*EVENTS[:2], rank=1, sites=sites)])


def _places(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    return [(r.rank, r.step, r.tap, r.call) for r in records]


ALL = [(0, 0, "a", 0), (0, 0, "b", 0), (0, 1, "a", 0), (0, 2, "a", 0), (0, 2, "a", 1), (0, 3, "a", 1),
       (0, None, "c", 0), (1, 0, "a", 0), (1, 0, "b", 0)]  # fmt: skip


@pytest.mark.parametrize(("choose", "wanted", "same"), [
    (lambda table: table, ALL, True),
    (lambda table: of_moment(table, 0, 2), ALL[3:5], True),
    (lambda table: of_moment(table, 1, 0), ALL[7:], True),
    (lambda table: of_moment(table, 0, None), ALL[6:7], True),
    (lambda table: of_moment(table, 1, None), [], True),
    (of_new_places, [*ALL[:2], *ALL[3:5]], False),  # step 2 whole; rank 1 has no place that rank 0 did not have
    (lambda table: [r for _, r in ChosenRecords(table, np.array([1, 4, 6]))], [ALL[1], ALL[4], ALL[6]], True),
    (lambda table: [ChosenRecords(table, np.array([1, 4]))[-1][1]], [ALL[4]], True),
    (lambda table: [r for _, r in ChosenRecords(table, np.array([1, 4, 6]))[1:]], [ALL[4], ALL[6]], True),
    (lambda table: [r for _, r in ChosenRecords(table, np.arange(9)).but(("a",))], [ALL[1], ALL[6], ALL[8]], True),
], ids=("all", "step", "rank", "parameters", "none", "new places", "chosen", "one", "slice", "but"))  # fmt: skip
def test_a_choice(ranks, choose, wanted, same):
    """same: a list, as other tools' dumps have it, gives the same; of_new_places returns all of it."""
    assert _places(choose(ranks)) == wanted
    assert _places(choose(list(ranks))) == (wanted if same else ALL)


def test_counts(ranks: RecordTable) -> None:
    for records in (ranks, list(ranks)):
        assert stored_bytes(records) == 5 * 32  # three places of rank 0, two of rank 1
        chosen = ChosenRecords(records, np.array([1, 4, 6]))
        assert (len(chosen), chosen.ran, [i for i, _ in chosen]) == (3, 2, [1, 4, 6])
