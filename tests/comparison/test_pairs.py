"""Columns with one value for all pairs of a place: the same table, files and page as of pairs one by one."""

from dataclasses import replace

import numpy as np
import pytest
from report_examples import comparison

from vllm_accprobe.comparison.pair import FAIL, PASS, ByPlace, Pair, Pairs
from vllm_accprobe.dump.record_table import LazyTable
from vllm_accprobe.report.html.data import columns_json
from vllm_accprobe.report.notebook import to_pandas
from vllm_accprobe.report.table import pair_lines

NAMES = ("golden", "mine", "step", "rank", "dtype_golden", "dtype_mine", "shape", "rel_l2", "status", "message", "tap")


def table(which, steps, values, names=("a", '"100%", b', "=c")) -> LazyTable[Pair]:
    """Places of one column, and one of each kind beside it."""
    place = np.array(which)
    columns = {
        "golden": ByPlace([f"{n}/output.0" for n in names], place), "mine": ByPlace(names, place),
        "tap": ByPlace(names, place), "rank": ByPlace([0, None, 1], place), "step": steps,
        "shape": ByPlace([(2, 4), (3,), (2, 4)], place), "rel_l2": values,
        "worst_row_rel_l2": ByPlace([0.125, None, 1 / 3], place), "limit": ByPlace([0.5, 0.5, 1 / 7], place),
        "message": [f"step {s}: 100% of {v}" for s, v in zip(steps, values, strict=True)],
    }  # fmt: skip
    same = {f: Pair.__dataclass_fields__[f].default for f in Pair.__dataclass_fields__}
    return LazyTable(Pair, len(which), columns, same | {"dtype_golden": "bf16", "dtype_mine": None, "status": PASS})


@pytest.fixture
def tables():
    return [table([2, 0, 2, 1], [0, 0, 1, None], [0.5, None, 1e-7, np.inf]), table([1, 1], [3, 3], [1.0, 0.0], "xyz")]


@pytest.fixture
def pairs(tables):
    return Pairs.joined(tables)


def alone(pairs):
    """The same without any column by place."""
    return Pairs(list(pairs))


def test_tables_are_joined_by_place_or_one_by_one(tables, pairs):
    assert list(pairs) == [p for t in tables for p in t]
    assert isinstance(pairs.column("tap"), ByPlace)
    mixed = Pairs.joined([*tables, Pairs(list(tables[0]))])
    assert list(mixed) == [p for t in (*tables, tables[0]) for p in t]
    assert not isinstance(mixed.column("tap"), ByPlace)


def test_pairs_in_another_order_share_their_places(pairs):
    order = np.array([5, 2, 0, 1, 4, 3])
    found = pairs.taken(order)
    assert list(found) == [pairs[i] for i in order]
    placed = [c for c in map(found.column, ("golden", "tap", "shape", "limit")) if isinstance(c, ByPlace)]
    assert len(placed) == 4
    assert len({id(c.which) for c in placed}) == 1
    assert [len(pairs.taken(order[:n])) for n in (0, 1, 2)] == [0, 1, 2]


def test_a_changed_pair_changes_its_own_columns_alone(pairs):
    found = pairs.changed({1: replace(pairs[1], status=FAIL, limit=0.25)})
    assert [p.status for p in found] == [PASS, FAIL, PASS, PASS, PASS, PASS]
    assert [p.limit for p in found] == [1 / 7, 0.25, 1 / 7, 0.5, 0.5, 0.5]
    assert [replace(p, status=PASS, limit=None) for p in found] == [replace(p, limit=None) for p in pairs]
    assert isinstance(found.column("tap"), ByPlace)
    assert "dtype_golden" in found.same


@pytest.mark.parametrize("failed", [(), (0,), (1,), range(6)])
def test_files_and_page_do_not_show_what_lies_together(pairs, failed):
    pairs = pairs.changed({i: replace(pairs[i], status=FAIL) for i in failed})
    assert "".join(pair_lines(pairs, None)) == "".join(pair_lines(alone(pairs), None))
    others = [(i, "50%, more") for i in range(len(pairs))]
    assert "".join(pair_lines(pairs, others)) == "".join(pair_lines(alone(pairs), others))
    assert columns_json(pairs) == columns_json(alone(pairs))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_of_a_column_is_the_same(pairs, name):
    other, at = alone(pairs), np.array([4, 1, 0, 2])
    assert list(pairs.column(name)) == list(other.column(name)) == [getattr(p, name) for p in pairs]
    assert pairs.missing(name).tolist() == other.missing(name).tolist()
    assert pairs.those(name, str).tolist() == other.those(name, str).tolist()
    (values, which), (own, at_own) = pairs.numbered(name, at), other.numbered(name, at)
    assert (values, which.tolist()) == (own, at_own.tolist())


def test_a_frame_has_the_same_dtypes(pairs):
    frames = [to_pandas(comparison(pairs=own)) for own in (pairs, alone(pairs))]
    assert frames[0].equals(frames[1])
    assert frames[0].dtypes.tolist() == frames[1].dtypes.tolist()


def test_a_column_by_place_is_an_array_where_one_is_needed(pairs):
    for name in ("limit", "worst_row_rel_l2"):
        assert np.array_equal(pairs.numbers(name), alone(pairs).numbers(name), equal_nan=True)
    assert list(pairs.column("tap")[1:3]) == ["a", "=c"]
    assert pairs.severities.tolist() == alone(pairs).severities.tolist()
