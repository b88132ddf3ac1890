"""Dumps of one model cut over ranks in several ways: each compares with each, and differing copies are said."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from comparison.synthetic_model import LAYERS, MemoryDump, capture

from vllm_accprobe.align.ranks import RankPiece, merge, plan_merge
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.schema import Layout, Module


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


@pytest.mark.parametrize("mine", CUTS)
@pytest.mark.parametrize("golden", CUTS)
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
    from vllm_accprobe.comparison.plan.unit import _row_dims

    one = capture(tp=1).records[-1]
    flat = replace(one, shape=(64, 64), rows="vision/4", row_dim=0)
    deep = replace(one, shape=(1, 64, 2, 32), rows="vision/4", row_dim=1)
    assert _row_dims([flat, deep, deep]) == {4: 1}  # the square tells nothing, and nobody tells it
    assert _row_dims([flat, replace(flat, shape=(60, 64)), deep]) == {2: 0, 4: 1}
