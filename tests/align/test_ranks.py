"""Dumps of one model cut over ranks in several ways: each compares with each, and differing copies are said."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from comparison.synthetic_model import LAYERS, MemoryDump, capture

from vllm_accprobe.align.ranks import MergePlan, RankPiece, Unmergeable, merge, plan_merge, plan_merged
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.schema import REPLICATED, Layout, Module, Record


def staged(dump, stages=2):
    """The same capture by pipeline stages: each has its layers, all have the row maps."""
    per = -(-LAYERS // stages)

    def stage(tap):
        name = tap.split(".")
        if "layers" in name:
            return int(name[name.index("layers") + 1]) // per
        return 0 if tap in ("<root>", "model", "model.embed_tokens") else stages - 1

    ranks = len(dump.ranks)
    out = MemoryDump(Path("staged"), dump.run, tuple(range(ranks * stages)), data=dump.data, steps=dump.steps)
    out.records = [replace(r, rank=r.rank + ranks * stage(r.tap)) for r in dump.records]
    for s in range(stages):
        for (rank, *rest), value in dump.rows.items():
            out.rows[(rank + ranks * s, *rest)] = value
        for (rank, req), value in dump.requests.items():
            out.requests[(rank + ranks * s, req)] = value
        for rank, modules in dump.modules.items():
            own = [m for m in modules if stage(m.tap) == s]
            out.modules[rank + ranks * s] = [Module(m.tap, m.cls, i) for i, m in enumerate(own)]
    return out


CUTS = {
    "tp1": lambda **how: capture(tp=1, **how), "tp2": lambda **how: capture(tp=2, **how),
    "pp2": lambda **how: staged(capture(tp=1, **how)), "tp2pp2": lambda **how: staged(capture(tp=2, **how)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("golden", "mine"), [pair for pair in itertools.permutations(CUTS, 2) if "pp2" in "".join(pair)]
)
def test_every_cut_compares_with_every_other(golden, mine):
    result = compare(CUTS[golden](), CUTS[mine](chunk=5))
    cover = result.coverage
    assert result.verdict == "pass"
    assert (cover["taps_only_golden"], cover["taps_only_mine"]) == ([], [])
    assert (cover["rows_only_golden"], cover["rows_only_mine"]) == (0, 0)
    assert not [reason for reason in cover["skipped"] if "rank" in reason or "layout" in reason]


def test_a_copy_that_differs_is_said_on_either_side():
    good, bad = capture(tp=2), capture(tp=2)
    tap = "model.layers.1.self_attn.o_proj"
    places = [i for i, r in enumerate(bad.records) if (r.rank, r.tap, r.role) == (1, tap, "output.0")]
    r = bad.records[places[0]]
    assert r.layout.kind == "replicated"
    off = len(bad.data)
    bad.data[off] = bad.data[r.payload.off] ^ np.uint16(1 << 9)
    bad.records[places[0]] = replace(r, hash="f" * 32, payload=replace(r.payload, off=off))
    as_golden, as_mine = compare(bad, good), compare(good, bad)
    said = "1 tensors that all ranks should hold alike differ between the ranks of {}"
    assert said.format("golden") in as_golden.notes
    assert said.format("mine") in as_mine.notes
    assert as_mine.verdict == "fail"
    assert as_mine.origins[0]["module"] == r.tap


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_are_joined_by_their_global_number(ranks):
    whole = np.arange(4 * 3).reshape(4, 3)
    n = 4 // ranks
    pieces = [whole[k * n : (k + 1) * n] for k in range(ranks)]
    layouts = [Layout("shard", "ep", k, ranks, -2, ((n, 1),)) for k in range(ranks)]
    order = list(reversed(range(ranks)))  # the order of global ranks says nothing
    plan = plan_merge([RankPiece(9 - k, layouts[k], pieces[k].shape, "int64", None) for k in order])
    np.testing.assert_array_equal(merge(plan, [[pieces[k] for k in order][i] for i in plan.use]), whole)


def test_a_square_is_not_turned_because_the_other_side_has_more_dimensions():
    from vllm_accprobe.comparison.plan.groups import _row_dims

    one = capture(tp=1).records[-1]
    flat = replace(one, shape=(64, 64), rows="vision/4", row_dim=0)
    deep = replace(one, shape=(1, 64, 2, 32), rows="vision/4", row_dim=1)
    assert _row_dims([(flat, 1), (deep, 2)]) == {4: 1}  # the square tells nothing, and nobody tells it
    assert _row_dims([(flat, 1), (replace(flat, shape=(60, 64)), 1), (deep, 1)]) == {2: 0, 4: 1}


# --- cutting a tensor over ranks and joining it again, for every layout ---


def split(whole: np.ndarray, dim: int, sizes: Sequence[int], replicas: Sequence[int], ranks: int) -> list[np.ndarray]:
    """The pieces that ``ranks`` ranks hold of ``whole``, made of blocks of ``sizes`` along ``dim``, each with so many
    replicas: the inverse of `merge`."""
    edges = np.cumsum([0, *sizes])
    held: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for b, (size, r) in enumerate(zip(sizes, replicas, strict=True)):
        local = math.ceil(size * r / ranks)
        for k in range(ranks):
            start = edges[b] + (k // r) * local
            held[k].append(np.take(whole, range(start, min(start + local, edges[b + 1])), axis=dim))
    return [np.concatenate(h, axis=dim) for h in held]


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


# --- merged projections whose layout nobody wrote down: the blocks of several ranks in the order of one ---


UNKNOWN = Layout("unknown")


def record(tap: str, role: str, cls: str = "") -> Record:
    return Record(0, 0, tap, cls, role, 0, 0, "float32", (), None, 0, None, None, UNKNOWN, None)


def joined(place: Record, whole: np.ndarray, pieces: list[np.ndarray], widths: dict[str, int]) -> MergePlan | None:
    members = [RankPiece(i, UNKNOWN, p.shape, "float32", None) for i, p in enumerate(pieces)]
    return plan_merged(place, members, whole.shape, widths)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("place", "sizes", "replicas", "ranks"),
    [
        (record("layers.0.mlp.gate_up_proj", "output.0"), [24, 24], [1, 1], 2),
        (record("layers.0.mlp.gate_up_proj", "param.weight"), [24, 24], [1, 1], 4),
        (record("layers.0.mlp.act_fn", "input.x", "SiluAndMul"), [24, 24], [1, 1], 2),
        (record("layers.0.attn.qkv_proj", "output.0"), [32, 8, 8], [1, 1, 1], 2),
        (record("layers.0.attn.qkv_proj", "param.bias"), [32, 8, 8], [1, 2, 2], 4),  # two ranks hold each kv head
    ],
)
def test_blocks_come_in_the_order_of_one_rank(place, sizes, replicas, ranks, dim):
    shape = [6, 6]
    shape[dim] = sum(sizes)
    whole = np.arange(6 * sum(sizes), dtype="f4").reshape(shape)
    pieces = split(whole, dim, sizes, replicas, ranks)
    plan = joined(place, whole, pieces, {"layers.0.attn.o_proj": sizes[0] // ranks})
    assert plan is not None
    assert np.array_equal(merge(plan, [pieces[i] for i in plan.use]), whole)
    assert f"{len(sizes)} merged blocks" in plan.note


def test_what_is_not_merged_is_left_to_the_shapes() -> None:
    whole = np.arange(64, dtype="f4").reshape(2, 32)
    pieces = split(whole, 1, [32], [1], 2)
    assert joined(record("layers.0.mlp.up_proj", "output.0"), whole, pieces, {}) is None
    assert joined(record("layers.0.mlp.gate_up_proj", "input.x"), whole, pieces, {}) is None


def test_a_projection_beside_which_nothing_tells_is_not_guessed() -> None:
    whole = np.arange(96, dtype="f4").reshape(2, 48)
    pieces = split(whole, 1, [32, 8, 8], [1, 1, 1], 2)
    with pytest.raises(Unmergeable, match="is not known"):
        joined(record("layers.0.attn.qkv_proj", "output.0"), whole, pieces, {})
