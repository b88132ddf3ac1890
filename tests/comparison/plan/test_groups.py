"""Grouping by columns against a plain loop over records; what a group is made of."""

import itertools
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from dump.dumps import put, writer

from vllm_accprobe.align.ranks import RankPiece, Unmergeable, plan_merge
from vllm_accprobe.comparison.plan.groups import Groups, Joining, PlacedRecords, merged
from vllm_accprobe.dump.schema import Layout
from vllm_accprobe.formats import open_dump

RNG = np.random.default_rng(0)
CUT = {"kind": "shard", "group": "tp", "size": 2, "dim": -1, "parts": [[4, 1]]}


@pytest.fixture
def records(tmp_path):
    """Two ranks; steps in another order on the second; a tensor twice in one step; copies that differ in step 7."""
    for rank, steps in ((0, (3, 1, 7)), (1, (1, 3, 7, 9))):
        out = writer(tmp_path, rank)
        for step in steps:
            for call in (0, 1):
                put(out, "a.b", RNG.integers(0, 9, (2, 4), np.uint16), "bfloat16", step=step, call=call, rows="tokens",
                    layout={**CUT, "index": rank})  # fmt: skip
            same = np.full(4, step + (step == 7) * rank, np.uint16)
            put(out, "a.c", same, "bfloat16", step=step, layout={"kind": "replicated"})
        put(out, "a.c", np.full(4, 99, np.uint16), "bfloat16", step=3, layout={"kind": "replicated"})
        out.close("done", {})
    return open_dump(tmp_path).records


def by_loop(records):
    found = {}
    for r in records:
        found.setdefault((r.tap, r.role, r.call), {}).setdefault((r.rank // 2, r.step), {})[r.rank] = r
    return found


@pytest.mark.parametrize("as_list", [False, True])
def test_groups_are_those_of_a_loop(records, as_list):
    given = list(records) if as_list else records
    placed = PlacedRecords(given, np.zeros(len(given), np.int64))
    expected = by_loop(records)
    assert list(placed.keys) == list(expected)
    for key, moments in expected.items():
        groups, _ = merged((placed, placed), (placed.keys[key], placed.keys[key]), Joining(({}, {})))
        assert [g.moment for g in groups] == list(moments)
        assert [g.records for g in groups] == [tuple(by[rank] for rank in sorted(by)) for by in moments.values()]
        assert groups[0] is groups[0]  # a group stands for itself in caches
        assert [g.where for g in groups] == [(*g.moment, g.first.rows) if g.first.rows else None for g in groups]


def test_sites_are_of_these_groups_in_whatever_order_they_come(records):
    """[0, 5, 2] begins and ends as three that lie side by side do."""
    placed = PlacedRecords(records, np.zeros(len(records), np.int64))
    every = range(len(placed.start) - 1)
    for which in itertools.permutations(every, 3):
        one_by_one = sum((placed.sites(np.array([g])) for g in which), Counter())
        assert placed.sites(np.array(which)) == one_by_one


def test_forms_have_one_plan_and_missing_ranks_another(records):
    placed = PlacedRecords(records, np.zeros(len(records), np.int64))
    which = placed.keys["a.b", "output.0", 0]
    groups, _ = merged((placed, placed), (which, which), Joining(({}, {})))
    assert [len(g.records) for g in groups] == [2, 2, 2, 1]
    assert groups[0].merge is groups[1].merge
    assert groups[0].merge.shape == (2, 8)
    assert (groups[3].merge, groups[3].problem) == (None, "not every rank of the group was captured (missing 0 of 2)")


@pytest.mark.parametrize("places", list(itertools.permutations(range(3))))
def test_each_group_of_unknown_layout_has_the_plan_of_its_own_hashes(records, places):
    """Whichever rank is the first of its group, and whichever hashes were taken."""
    (base,) = (r for r in records if (r.rank, r.step, r.tap) == (1, 9, "a.c"))
    hashes = list(itertools.product((None, "", "a", "b"), repeat=3))
    layouts = [Layout("unknown", index=place, size=3) for place in places]
    ranks = [replace(base, rank=k, step=step, seq=step, hash=each[k], layout=layouts[k])
             for step, each in enumerate(hashes) for k in range(3)]  # fmt: skip
    sides = [PlacedRecords(of, np.zeros(len(of), np.int64)) for of in (ranks, [replace(base, layout=Layout("own"))])]
    groups, _ = merged((sides[0], sides[1]), tuple(np.arange(len(s.step)) for s in sides), Joining(({}, {})))
    for group, each in zip(groups, hashes, strict=True):
        pieces = [RankPiece(r.rank, r.layout, r.shape, r.dtype, r.hash) for r in group.records]
        try:
            alone, why = plan_merge(pieces, base.shape), ""
        except Unmergeable as problem:
            alone, why = None, str(problem)
        assert (group.merge, group.problem) == (alone, why), each


def test_copies_that_differ_are_seen(records):
    placed = PlacedRecords(records, np.zeros(len(records), np.int64))
    which = placed.keys["a.c", "output.0", 0]
    groups, _ = merged((placed, placed), (which, which), Joining(({}, {})))
    assert [g.moment[1] for g in groups] == [3, 1, 7, 9]
    assert groups.unequal_copies().tolist() == [False, False, True, False]


def test_what_a_list_of_groups_and_another_process_get(records):
    placed = PlacedRecords(records, np.zeros(len(records), np.int64))
    which = placed.keys["a.b", "output.0", 1]
    groups, _ = merged((placed, placed), (which, which), Joining(({}, {})))
    sent = pickle.loads(pickle.dumps(groups))
    assert [g.records for g in sent] == [g.records for g in groups]
    again = Groups.of(sent)
    for name in ("cell", "step", "size"):
        assert getattr(again, name).tolist() == getattr(groups, name).tolist()
    assert again.space.tolist() == groups.space.tolist() == [-1] * 4  # no row map says what its rows are
    assert again.payload_bytes == groups.payload_bytes == 7 * 16
    assert again.vision is False


def test_steps_beyond_all_numbers_do_not_meet(records):
    far = [replace(r, step=r.step + (1 << 52) * r.call) for r in records]
    placed = PlacedRecords(far, np.zeros(len(far), np.int64))
    assert placed.keys.keys() == by_loop(far).keys()
    assert sum(map(len, placed.keys.values())) == sum(map(len, by_loop(far).values()))


def test_records_that_are_the_whole_have_the_plans_of_the_general_way(records):
    """Whatever their order; of a square's rows other records tell where they lie."""
    base = next(r for r in records if r.tap == "a.c" and r.rank == 0)
    shapes = ((3, 3), 0), ((3, 5), 1), ((4, 5), 1), ((5, 4), 0), ((3, 5), 1), ((4, 4), 1)
    own = [replace(base, step=i, shape=shape, rows="tokens", row_dim=dim) for i, (shape, dim) in enumerate(shapes)]
    found = []
    for plain in (True, False):
        placed = PlacedRecords(own, np.zeros(len(own), np.int64))
        assert placed.plain.tolist() == [False, *[True] * 4, False]
        placed.plain &= plain
        each = [merged((placed, placed), (np.array(which), np.array(which)), Joining(({}, {})))[0]
                for which in itertools.permutations(range(len(own)), 4)]  # fmt: skip
        found.append([(g.records, g.merge, g.problem, g.row_dim, g.where) for groups in each for g in groups])
    assert found[0] == found[1]
    assert {row_dim for (r,), _, _, row_dim, _ in found[0] if r.step == 0} == {0, 1}
