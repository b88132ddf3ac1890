"""Tensors made of others: their values, shapes and statistics."""

import numpy as np
import pytest
from hand_made import FUSE, Dump, attention, by_name, f32

from vllm_accprobe.align.derived import derive, read, rope
from vllm_accprobe.align.names import apply
from vllm_accprobe.dump.schema import Layout


def test_statistics_of_a_join_are_those_of_the_whole():
    golden, _, _ = apply(FUSE, *attention())
    stats = by_name(golden)[("a.qkv_proj", "output.0")].stats
    whole = np.array([0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23], np.float64)
    assert (stats.count, stats.min, stats.max) == (12, 0, 23)
    assert stats.mean == pytest.approx(whole.mean())
    assert stats.l2 == pytest.approx(np.linalg.norm(whole))


def test_bfloat16_terms_are_added_without_rounding():
    mine = Dump()
    one = mine.put("n", "output.0", np.array([[0x3F80]], np.uint16), dtype="bfloat16")  # 1.0
    tiny = mine.put("n", "output.1", np.array([[0x3B80]], np.uint16), dtype="bfloat16")  # 2**-8
    total = derive([one, tiny], "n", "output.0+1", join="sum")
    assert total.dtype == "float32"
    assert read(mine, total).tolist() == [[1 + 2**-8]]


def test_shards_are_joined_per_rank_and_keep_their_blocks():
    golden = Dump()
    parts = []
    for rank in (0, 1):
        layouts = [Layout("shard", "tp", rank, 2, -1, ((n, 1),)) for n in (2, 1)]
        parts.append(
            [golden.put(t, "output.0", np.full((1, n), rank, np.float32), rank=rank, layout=y)
             for (t, n), y in zip((("q", 2), ("k", 1)), layouts, strict=True)]
        )  # fmt: skip
    made = [derive(p, "qk", "output.0") for p in parts]
    assert [m.layout for m in made] == [Layout("shard", "tp", r, 2, -1, ((2, 1), (1, 1))) for r in (0, 1)]
    mixed = golden.put("v", "output.0", f32([1]))
    assert derive([parts[0][0], mixed], "qv", "output.0") == "its parts are cut differently over ranks"


@pytest.mark.parametrize(("arrays", "how", "reason"), [
    (([[1.0]], [[1.0], [2.0]]), {}, "different shapes"),
    (([[1]], [[1]]), {"join": "sum"}, "cannot|not numbers"),
    (([[1.0]], [[1.0, 2.0]]), {"join": "sum"}, "different shapes"),
    (([[1.0]], [[1.0]]), {"dim": 5}, "no such dimension"),
    (([[1.0]], [[1.0]]), {"transpose": (0, 1, 2)}, "other dimensions"),
    (([[1.0, 2, 3]], [[1.0, 2]], [[1.0, 2]]), {"join": "rope"}, "rotary"),
])  # fmt: skip
def test_what_cannot_be_made_has_a_reason(arrays, how, reason):
    dump = Dump()
    records = [dump.put("t", f"output.{i}", np.array(a)) for i, a in enumerate(arrays)]
    made = derive(records, "m", "output.0", **how)
    assert isinstance(made, str)
    assert any(r in made for r in reason.split("|"))


def test_rotation_by_hand():
    x = f32([1, 2, 3, 4])  # one head of 4, halves (1, 2) and (3, 4)
    cos, sin = f32([0, 1, 0, 1]), f32([1, 0, 1, 0])  # first pair by 90 degrees, second by 0
    assert rope(x, cos, sin).tolist() == [[-3, 2, 1, 4]]
    two = rope(f32([1, 2, 3, 4, 1, 0, 0, 0]), cos, sin)
    assert two.tolist() == [[-3, 2, 1, 4, 0, 0, 1, 0]]


def test_of_larger_heads_only_the_first_part_is_rotated() -> None:
    """Two heads of 4, of which 2 are rotated by a quarter turn."""
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    out = rope(x, np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    assert out.tolist() == [[[-1, 0, 2, 3], [-5, 4, 6, 7]]]
