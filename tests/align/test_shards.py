"""Cutting a tensor over ranks and joining it again, for every layout."""

import numpy as np
import pytest
from rank_pieces import split

from vllm_accprobe.align.ranks import RankPiece, Unmergeable, merge, plan_merge
from vllm_accprobe.dump.schema import REPLICATED, Layout


def members(arrays, layouts, hashes=None, dtype="float32"):
    hashes = hashes or [None] * len(arrays)
    return [RankPiece(r, y, a.shape, dtype, h) for r, (a, y, h) in enumerate(zip(arrays, layouts, hashes, strict=True))]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv"), [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_qkv_with_any_number_of_kv_heads_comes_back(ranks, heads, kv, dim):
    head = 3
    replicas = max(1, ranks // kv)
    sizes = [heads * head, kv * head, kv * head]
    shape = [5, 5]
    shape[dim] = sum(sizes)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    pieces = split(whole, dim, sizes, [1, replicas, replicas], ranks)
    local = [heads * head // ranks] + [max(1, kv // ranks) * head] * 2
    parts = tuple(zip(local, [1, replicas, replicas], strict=True))
    layouts = [Layout("shard", "tp", k, ranks, dim, parts) for k in range(ranks)]
    plan = plan_merge(members(pieces, layouts))
    assert plan.shape == whole.shape
    np.testing.assert_array_equal(merge(plan, [pieces[i] for i in plan.use]), whole)


def test_gate_and_up_are_joined_block_by_block():
    whole = np.array([[1, 2, 3, 4, 50, 60, 70, 80]])  # gate 1-4, up 50-80
    pieces = [np.array([[1, 2, 50, 60]]), np.array([[3, 4, 70, 80]])]
    plan = plan_merge(members(pieces, [Layout("shard", "tp", k, 2, -1, ((2, 1), (2, 1))) for k in range(2)]))
    np.testing.assert_array_equal(merge(plan, pieces), whole)


def test_vocabulary_padding_is_cut():
    pieces = [np.array([[1, 2, 3]]), np.array([[4, 0, 0]])]
    plan = plan_merge(members(pieces, [Layout("shard", "tp", k, 2, -1, ((3, 1),), valid=4) for k in range(2)]))
    np.testing.assert_array_equal(merge(plan, pieces), [[1, 2, 3, 4]])


def test_partial_sums_add_up():
    pieces = [np.array([1.0, 2.0], np.float32), np.array([10.0, 20.0], np.float32)]
    plan = plan_merge(members(pieces, [Layout("partial", "tp", k, 2) for k in range(2)]))
    assert merge(plan, pieces).tolist() == [11.0, 22.0]


def test_replicas_are_listed_so_that_they_can_be_checked():
    a = np.zeros((2, 3))
    plan = plan_merge(members([a, a], [Layout("replicated", "tp", k, 2) for k in range(2)]))
    assert (plan.kind, plan.use, plan.copies) == ("one", (0,), ((0, 1),))


def test_order_in_the_group_counts_not_the_global_rank():
    pieces = [np.array([3, 4]), np.array([1, 2])]
    plan = plan_merge(members(pieces, [Layout("shard", "tp", 1 - k, 2, -1, ((2, 1),)) for k in range(2)]))
    assert merge(plan, [pieces[i] for i in plan.use]).tolist() == [1, 2, 3, 4]


def test_unknown_layouts():
    u = [Layout("unknown", "tp", k, 2) for k in range(2)]
    a, b = np.zeros((4, 2)), np.ones((4, 2))
    assert plan_merge(members([a, a], u, ["x", "x"])).kind == "one"
    joined = plan_merge(members([a, b], u, ["x", "y"]), other=(4, 4))
    assert (joined.kind, joined.dim, joined.shape) == ("cat", 1, (4, 4))
    for other in (None, (4, 2), (8, 4), (4, 6)):
        with pytest.raises(Unmergeable, match="layout unknown"):
            plan_merge(members([a, b], u, ["x", "y"]), other=other)


@pytest.mark.parametrize(("layouts", "reason"), [
    ([Layout("shard", "tp", 0, 2, -1, ((2, 1),))], "not every rank"),
    ([Layout("shard", "tp", 0, 1, -1, ((3, 1),))], "do not add up"),
    ([Layout("shard", "tp", 0, 1, 5, ((2, 1),))], "dimension"),
    ([Layout("shard", "tp", 0, 1, None, ((2, 1),))], "dimension"),
    ([Layout("shard", "tp", 0, 1, -1, ((2, 0),))], "replicas"),
    ([Layout("shard", "tp", 7, 1, -1, ((2, 1),))], "outside its group"),
    ([Layout("braided")], "not known"),
    ([REPLICATED, Layout("partial", "tp", 0, 2)], "disagree about the layout"),
    ([Layout("partial", "tp", 0, 2), Layout("partial", "tp", 1, 3)], "disagree about the size"),
])  # fmt: skip
def test_what_cannot_be_joined_is_named(layouts, reason):
    with pytest.raises(Unmergeable, match=reason):
        plan_merge(members([np.zeros((2, 2))] * len(layouts), layouts))
