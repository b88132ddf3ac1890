"""Which taps and roles pair, and by which rule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump.dumps import put_event
from hand_made import FUSE, Dump, attention, by_name, f32, rules

from vllm_accprobe.align.derived import Derived, Relation, Relations
from vllm_accprobe.align.names import TapRoles, apply, bridge, pair_names, pair_roles
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import Module
from vllm_accprobe.dump.writer import RankWriter, write_run_json
from vllm_accprobe.topology.data_flow import CallTensor


def place(tap, cls="Linear", roles=("input.0", "output.0")):
    return TapRoles(tap, cls, tuple(roles))


def pair_rules(plan):
    return [(p.golden.tap, p.mine.tap, p.rule) for p in plan.pairs]


def test_exact_names_first_whatever_the_class():
    plan = pair_names([place("a"), place("b", "SiluAndMul")], [place("b", "KunlunSilu"), place("a")])
    assert pair_rules(plan) == [("b", "b", "exact, other class"), ("a", "a", "exact")]
    assert "names: class SiluAndMul is KunlunSilu in mine, 1 taps" in plan.lines()


def test_a_wrapper_adds_a_prefix():
    golden = [place("model.norm", "RMSNorm"), place("model.layers.0.mlp"), place("model.layers.1.mlp")]
    mine = [place(f"language_model.{p.tap}", p.cls) for p in golden] + [place("visual.norm")]
    plan = pair_names(golden, mine)
    assert [r[2] for r in pair_rules(plan)] == ["prefix"] * 3
    assert plan.only_mine == ["visual.norm"]
    assert pair_rules(pair_names(mine, golden))[0] == ("language_model.model.norm", "model.norm", "prefix")


def test_order_only_where_the_counts_agree():
    golden, mine = [place("x.0"), place("x.1")], [place("y.0"), place("y.1")]
    assert pair_rules(pair_names(golden, mine)) == [("x.0", "y.0", "order"), ("x.1", "y.1", "order")]
    left = pair_names(golden, mine[:1])
    assert (left.pairs, left.only_golden, left.only_mine) == ([], ["x.0", "x.1"], ["y.0"])
    # A tool that numbers arguments has other roles; those with the same roles go first.
    named = [place("x.0", roles=("input.x", "output.0")), place("x.1"), place("x.2", roles=("input.x", "input.y"))]
    numbered = [place("y.1"), place("y.0", roles=("input.1", "output.0"))]
    plan = pair_names(named, numbered)
    assert pair_rules(plan) == [("x.1", "y.1", "order"), ("x.0", "y.0", "order")]
    assert (plan.pairs[1].roles[0], plan.only_golden) == (("input.x", "input.1", "order"), ["x.2"])


def test_roles_pair_by_order_except_parameters():
    golden = ("input.hidden_states", "input.residual", "output.0", "param.weight")
    mine = ("input.x", "input.residual", "output.0", "param.scale")
    assert pair_roles(golden, mine) == (
        ("input.hidden_states", "input.x", "order"),
        ("input.residual", "input.residual", "exact"),
        ("output.0", "output.0", "exact"),
    )


def test_the_same_weights_are_the_same_module_whatever_its_name():
    def with_weights(tap, *hashes):
        return TapRoles(tap, "Linear", ("param.weight", "output.0"), tuple(("param.weight", h) for h in hashes))

    golden = [with_weights("enc.a", "h1"), with_weights("enc.b", "h2"), with_weights("enc.c", "same")]
    mine = [with_weights("net.y", "h2"), with_weights("net.x", "h1"), with_weights("net.z", "same")]
    golden.append(with_weights("enc.d", "same"))  # tells nothing
    plan = pair_names(golden, mine, by_order=False)
    assert pair_rules(plan) == [("enc.b", "net.y", "structure"), ("enc.a", "net.x", "structure")]
    assert (plan.only_golden, plan.only_mine) == (["enc.c", "enc.d"], ["net.z"])


def test_the_same_place_of_the_tree():
    golden = [place("m.l"), place("m.l.attn"), place("m.l.attn.q"), place("m.l.attn.drop", roles=("input.0",))]
    mine = [place("m.l"), place("m.l.mixer"), place("m.l.mixer.q"), place("m.l.mixer.drop", roles=("input.0",))]
    assert pair_rules(pair_names(golden, mine, by_order=False)) == [
        ("m.l", "m.l", "exact"),
        ("m.l.attn", "m.l.mixer", "structure"),
        ("m.l.attn.q", "m.l.mixer.q", "structure"),
        ("m.l.attn.drop", "m.l.mixer.drop", "structure"),
    ]


def test_tensors_without_a_partner_are_counted():
    golden = [place("a", roles=("input.x", "input.mask", "output.0"))]
    mine = [place("a", roles=("input.x", "input.positions", "input.y", "output.0"))]
    plan = pair_names(golden, mine)
    assert plan.skips() == {"tensor of a paired tap only in golden": 1, "tensor of a paired tap only in mine": 2}
    assert "names: 2 tensors of paired taps only in mine: input.positions (1), input.y (1)" in plan.lines()
    assert pair_names(mine, mine).skips() == {}


# --- rules applied to records written by hand: what is made, of what, and what is left ---


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


@pytest.mark.parametrize("captured", [1, 2])
def test_a_layer_with_several_names_is_the_one_that_is_called(captured: int):
    """vLLM's Gemma 3n: what is loaded as layers.1 is called as the first layer of a second decoder."""
    golden, mine = Dump(), Dump()
    golden.put("m.layers.1.q", "output.0", f32([1]))
    golden.put("m.layers.1.q", "param.weight", f32([2]), step=None)
    called = ("m.cross.layers.0", "m.other.0")
    for name in called[:captured]:
        mine.put(f"{name}.qk", "output.0", f32([1]))
    mine.put("m.layers.1.q", "param.weight", f32([2]), step=None)
    mine.modules = {0: [Module(name, "Layer", 7) for name in ("m.layers.1", *called)]}
    view, _, lines = apply(rules({"rename": {"no.*": "such.*"}, "rules": []}), golden, mine)
    place = "m.cross.layers.0.q" if captured == 1 else "m.layers.1.q"
    assert set(by_name(view)) == {(place, "output.0"), ("m.layers.1.q", "param.weight")}
    assert bool(lines) == (captured == 1)


VLLM = {"versions": {"vllm": "0.32"}}


def test_two_dumps_of_one_engine_are_left_alone():
    golden, mine = Dump(run=VLLM), Dump(run=VLLM)
    golden.put("a", "output.0", f32([1]))
    b = bridge(golden, mine)
    assert b.golden is golden
    assert b.mine is mine
    assert (b.lines, b.foreign) == ([], False)


THEIRS = {"engine": {"runner": "accprobe.Probe"}, "versions": {"transformers": "5"}}


@pytest.mark.parametrize("swapped", [False, True])
def test_weights_that_loading_puts_into_another_order(swapped: bool) -> None:
    """As vLLM's loaders of GPT-2 (a transpose) and Falcon (queries, keys and values of each group of heads) do."""
    theirs, own = Dump(run=THEIRS), Dump(run=VLLM)
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    fused = np.arange(2 * 4 * 3 * 5, dtype=np.float32).reshape(2 * 4 * 3, 5)  # 2 groups of 2 queries, heads of 3
    split = np.split(fused.reshape(2, 4, 3, 5), [2, 3], axis=1)
    parted = np.concatenate([part.reshape(-1, 5) for part in split])
    for dump, weights, cls in ((theirs, (square, fused), "Conv1D"), (own, (square.T, parted), "RowParallelLinear")):
        dump.modules = {0: [Module("h.c_proj", cls, 0), Module("h.a", "FalconAttention", 1)]}
        dump.put("h.c_proj", "param.weight", weights[0])
        dump.put("h.a.query_key_value", "param.weight", weights[1])
        dump.put("h.a.query_key_value", "output.0", np.ascontiguousarray(weights[1].T))
        dump.put("h.a.query_key_value", "input.0", square)
    heads = {"total_num_heads": 4, "total_num_kv_heads": 2}
    own.modules[0].append(Module("h.a.query_key_value", "QKVParallelLinear", 2, heads))
    found = bridge(own, theirs) if swapped else bridge(theirs, own)
    sides = [by_name(side) for side in (found.golden, found.mine)]
    assert sides[0].keys() == sides[1].keys()
    for place in sides[0]:
        assert np.array_equal(found.golden.read(sides[0][place]), found.mine.read(sides[1][place])), place
    theirs.modules[0][1] = Module("h.a", "PhiAttention", 1)  # has its queries first, too
    found = bridge(theirs, own)
    place = ("h.a.query_key_value", "param.weight")
    assert np.array_equal(found.golden.read(by_name(found.golden)[place]), fused)


def test_partly_rotated_heads_are_those_of_vllm_s_module() -> None:
    """Of projections [rows, heads * size] nothing but mine's module shows how large a head is (Nemotron, GLM-4)."""
    theirs, own = Dump(run=THEIRS), Dump(run=VLLM)
    block = "model.layers.0.self_attn"
    for name in "qk":
        theirs.put(f"{block}.{name}_proj", "output.0", f32(range(8)))
    for k, value in enumerate((0, 1)):  # a quarter turn
        theirs.put("model.rotary_emb", f"output.{k}", f32([value] * 2))
    own.put(f"{block}.rotary_emb", "output.0", f32(range(8)))
    own.put(f"{block}.attn", "input.query", f32(range(8)))
    neox: dict[str, Any] = {"head_size": 4, "is_neox_style": True}
    own.modules = {0: [Module(f"{block}.rotary_emb", "R", 0, neox), Module(f"{block}.attn", "A", 1, {"head_size": 4})]}
    theirs.records = [*theirs.records, *(
        theirs.put(f"{block}.rotary_emb", f"output.{k}", f32([v] * 2)) for k, v in enumerate((0, 1)))]
    found = bridge(theirs, own).golden
    for place in ((f"{block}.rotary_emb", "output.0"), (f"{block}.attn", "input.query")):
        assert found.read(by_name(found)[place]).tolist() == [[-1, 0, 2, 3, -5, 4, 6, 7]]


@pytest.mark.parametrize(("first", "whole"), [("((h + attn[0]) + mlp[0])", True), ("mlp[0]", False)])
def test_a_layer_that_gives_out_the_residual_stream_as_a_whole(first: str, whole: bool) -> None:
    """Stablelm's layer in vLLM gives (stream, a part of it), where others give two terms."""
    theirs, own = Dump(run=THEIRS), Dump(run=VLLM)
    theirs.put("model.layers.0", "output.0", f32([5, 7]))
    for k, row in enumerate(([5, 7], [1, 2])):
        own.put("model.layers.0", f"output.{k}", f32(row))
    formulas = {"output.0": first, "output.1": "(h + attn[0])"}
    own.modules = {0: [Module("model.layers.0", "Layer", 0, {"forward": formulas})]}
    found = bridge(theirs, own)
    roles = {r.role for r in found.mine.records}
    assert roles == ({"output.0", "output.1"} if whole else {"output.0+1"})
    assert ("model.layers.0", "output.0") in by_name(found.golden) or not whole


@pytest.mark.parametrize(("child", "taken"), [("RowParallelLinear", [1, 2]), ("FusedMoE", [11, 12])])
def test_what_a_module_of_transformers_adds_to_its_child_is_not_vllm_s(child: str, taken: list[int]) -> None:
    """Bloom's attention adds the residual stream, in code that no formula shows; vLLM's gives out its projection. A
    child of experts may have shared ones in it, which transformers adds outside of its own."""
    theirs, own = Dump(run=THEIRS), Dump(run=VLLM)
    for dump, row in ((theirs, [11, 12]), (own, [1, 2])):
        dump.put("h.a.dense", "output.0", f32([1, 2]))
        dump.put("h.a", "output.0", f32(row))
    attention = Module("h.a", "BloomAttention", 0, {"forward": {"output.0": "dense[0]"}})
    own.modules = {0: [attention, Module("h.a.dense", child, 1, {})]}
    theirs.modules = {0: [Module("h.a", "BloomAttention", 0, {"forward": {}})]}
    found = bridge(theirs, own).golden
    assert found.read(by_name(found)["h.a", "output.0"]).tolist() == [taken]
    theirs.modules = {0: [Module("h.a", "BloomAttention", 0, {"forward": {"output.0": "(dense[0] * 2)"}})]}
    found = bridge(theirs, own).golden  # golden's own code says otherwise: that is to be seen
    assert found.read(by_name(found)["h.a", "output.0"]).tolist() == [[11, 12]]


# --- a relation is told where all bits agree, and only there ---


X, Y = torch.randn(2, 20, 48, generator=torch.Generator().manual_seed(3)).unbind()


def told(where: Path, missing: torch.Tensor, **had: torch.Tensor) -> Relation | None:
    """What is told of ``missing`` where ``had`` was there before."""
    write_run_json(where, {})
    writer = RankWriter(where, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    for i, (name, t) in enumerate([*had.items(), ("missing", missing)]):
        bits = t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32).numpy()
        put_event(writer, bits, {"event": "tensor", "step": 0, "tap": name, "class": "M", "role": "output.0",
                  "seq": i, "dtype": str(t.dtype)[6:], "shape": list(t.shape)})  # fmt: skip
    writer.close("done", {})
    dump = open_dump(where)
    seen = {r.tap: CallTensor(r.role, None, r.dtype, r.shape, r) for r in dump.records}
    return Relations(dump).explain(seen.pop("missing"), list(seen.items()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_told(tmp_path: Path, dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y.to(dtype)
    assert told(tmp_path / "add", x + y, x=x, y=y) == Relation("Add", ("x", "y"))
    assert told(tmp_path / "mul", x * y, x=x, other=x - y, y=y) == Relation("Mul", ("x", "y"))
    cut = Relation("Slice", ("x",), {"axis": -1, "begin": 8, "end": 24})
    assert told(tmp_path / "slice", x[:, 8:24], x=x, y=y) == cut
    of_groups = x.unflatten(-1, (4, 12))[..., 5:8].flatten(-2)  # of each head what stands behind its first five
    cut = Relation("Slice", ("x",), {"axis": -1, "begin": 5, "end": 8, "groups": 4})
    assert told(tmp_path / "groups", of_groups, x=x, y=y) == cut
    assert told(tmp_path / "rows", x[[3, 17]], y=y, x=x) == Relation("Gather", ("x",), {"axis": 0, "rows": 2})


def test_what_nearly_fits_is_not_told(tmp_path: Path) -> None:
    x, y = X.bfloat16(), Y.bfloat16()
    off = (x + y).view(torch.int16)
    off[3, 5] ^= 1
    assert told(tmp_path / "bit", off.view(torch.bfloat16), x=x, y=y) is None
    assert told(tmp_path / "rounded", (X + Y).bfloat16(), x=x, y=y) is None  # rounded once, the sum of others
    assert told(tmp_path / "order", x[[17, 3]], x=x) is None
    twice = torch.cat([x[:, :8], x[:, :8]], -1)
    assert told(tmp_path / "twice", x[:, :8], x=twice) is None  # in two places: nobody knows which
    assert told(tmp_path / "zero", x, x=x, y=torch.zeros_like(x)) is None
    assert told(tmp_path / "few", x[:1, :4] + y[:1, :4], x=x[:1, :4], y=y[:1, :4]) is None


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    x = X.clone()
    x[2, 2] = np.inf
    assert told(tmp_path / "inf", x + Y, x=x, y=Y) is None
