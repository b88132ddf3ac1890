"""Rules applied to records written by hand: what is made, of what, and what is left."""

import numpy as np
from hand_made import FUSE, Dump, attention, by_name, f32, rules

from vllm_accprobe.align.derived import Derived
from vllm_accprobe.align.names import apply, bridge


def test_parts_are_joined_inputs_are_one():
    golden, _, lines = apply(FUSE, *attention())
    found = by_name(golden)
    assert set(found) == {("a.qkv_proj", r) for r in ("param.weight", "input.input_", "output.0")}
    out = found[("a.qkv_proj", "output.0")]
    assert golden.read(out).tolist() == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]
    assert (out.shape, out.hash, out.name) == ((2, 6), None, "a.{q_proj,k_proj,v_proj}/output.0")
    weight = found[("a.qkv_proj", "param.weight")]
    assert golden.read(weight).tolist() == [[0, 1], [1, 2], [2, 3]]  # along the rows: [out, in]
    one = found[("a.qkv_proj", "input.input_")]
    assert one.name == "a.q_proj/input.input"
    assert one.hash is not None  # the same bytes: equal hashes still spare the reading
    assert lines == ["mapping: 3 tensors of mine made by **.qkv_proj ← **.q_proj, {1}.k_proj, {1}.v_proj"]


def test_a_missing_part_makes_nothing_and_loses_nothing():
    golden, mine = attention()
    golden.records = [r for r in golden.records if r.tap != "a.k_proj"]
    view, _, _ = apply(FUSE, golden, mine)
    assert {r.tap for r in view.records if isinstance(r, Derived)} == {"a.qkv_proj"}
    assert ("a.qkv_proj", "output.0") not in by_name(view)


def test_sums_of_mine_take_the_place_of_their_terms():
    golden, mine = Dump(), Dump()
    golden.put("n", "input.h", f32([5, 7]))
    mine.put("n", "input.x", f32([1, 2]))
    mine.put("n", "input.residual", f32([4, 5]))
    table = rules({"rules": [{"mine": "n", "golden": "n", "roles": {"input.x+input.residual": "input.h"}}]})
    g, m, _ = apply(table, golden, mine)
    assert [(r.tap, r.role, r.name) for r in m.records] == [("n", "input.x+residual", "n/input.x+input.residual")]
    assert m.read(m.records[0]).tolist() == [[5, 7]]
    assert [(r.role, r.name) for r in g.records] == [("input.x+residual", "n/input.h")]


def test_transpose_turns_parameters_and_leaves_activations():
    golden, mine = Dump(), Dump()
    golden.put("g", "param.weight", f32([1, 2, 3], [4, 5, 6]))
    golden.put("g", "output.0", f32([1, 2], [3, 4]))
    mine.put("m", "param.weight", np.zeros((3, 2), np.float32))
    mine.put("m", "output.0", f32([1, 2], [3, 4]))
    view, _, _ = apply(rules({"rules": [{"mine": "m", "golden": "g", "transpose": [1, 0]}]}), golden, mine)
    found = by_name(view)
    assert view.read(found[("m", "param.weight")]).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert view.read(found[("m", "output.0")]).tolist() == [[1, 2], [3, 4]]


def test_renames_only_where_mine_has_the_name():
    golden, mine = Dump(), Dump()
    golden.put("transformer.a", "output.0", f32([1]))
    golden.put("transformer.b", "output.0", f32([2]))
    mine.put("model.a", "output.0", f32([1]))
    table = rules({"rename": {"transformer.*": "model.*"}, "rules": []})
    view, _, lines = apply(rules({"rename": {r"re:transformer\.(.*)": "model.{1}"}, "rules": []}), golden, mine)
    assert {r.tap for r in view.records} == {"model.a", "model.b"}
    assert lines == [r"mapping: 2 taps of golden renamed by re:transformer\.(.*) → model.{1}"]
    mine.records = [mine.put("other", "output.0", f32([1]))]
    view, _, _ = apply(table, golden, mine)
    assert {r.tap for r in view.records} == {"transformer.a", "transformer.b"}


def test_per_layer_offsets():
    golden, mine = Dump(), Dump()
    for i in range(3):
        golden.put(f"h.{i}", "output.0", f32([i]))
    mine.put("layers.0", "output.0", f32([1]))
    view, _, _ = apply(rules({"layers.*": "h.{1+1}"}), golden, mine)
    assert view.read(by_name(view)[("layers.0", "output.0")]).tolist() == [[1]]


VLLM = {"versions": {"vllm": "0.32"}}


def test_two_dumps_of_one_engine_are_left_alone():
    golden, mine = Dump(run=VLLM), Dump(run=VLLM)
    golden.put("a", "output.0", f32([1]))
    b = bridge(golden, mine)
    assert b.golden is golden
    assert b.mine is mine
    assert (b.lines, b.foreign) == ([], False)
