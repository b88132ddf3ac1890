"""Merged projections whose layout nobody wrote down: the blocks of several ranks in the order of one."""

from __future__ import annotations

import numpy as np
import pytest
from rank_pieces import split

from vllm_accprobe.align.ranks import MergePlan, RankPiece, Unmergeable, merge, plan_merged
from vllm_accprobe.dump.schema import Layout, Record

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
def test_blocks_come_in_the_order_of_one_rank(
    place: Record, sizes: list[int], replicas: list[int], ranks: int, dim: int
) -> None:
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
    with pytest.raises(Unmergeable, match="cannot be told"):
        joined(record("layers.0.attn.qkv_proj", "output.0"), whole, pieces, {})
