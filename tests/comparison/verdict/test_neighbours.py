"""What fed an origin and what it feeds: with faults that were put in, each edge's error is known."""

from dataclasses import replace

import pytest
from synthetic_model import capture, scaled

from vllm_accprobe.comparison import engine, store
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.verdict.neighbours import MOST_ORIGINS, NEAREST, neighbours

LAYER = "model.layers.1"


def told(edges):
    return [(f"{e.tap}/{e.role}", e.role_in, e.status, e.by) for e in edges]


def test_a_leafs_inputs_are_named_by_who_made_them_and_its_output_by_who_takes_it(golden):
    result = compare(golden, capture(faults={f"{LAYER}.self_attn.attn": scaled(1.08)}))
    (around,) = result.neighbours
    made = f"{LAYER}.self_attn.qkv_proj/output.0"
    assert told(around.fed_by) == [
        (made, f"input.{role}", "identical", "order") for role in ("query", "key", "value")
    ]  # parts of one product: no bytes tell
    assert told(around.feeds) == [(f"{LAYER}.self_attn.o_proj/input.input_", "", "fail", "both")]
    assert [e.over for e in around.fed_by] == [0.0] * 3
    edge = around.feeds[0]
    pair = result.pairs[edge.pair]
    assert (pair.tap, pair.role, pair.status) == (edge.tap, edge.role, "fail")
    assert edge.error == pair.worst_row_rel_l2 == pytest.approx(0.08, rel=0.05)
    assert edge.over == pytest.approx(edge.error / pair.limit)


def test_in_front_of_a_parents_own_doing_are_its_input_and_the_children_before(golden):
    result = compare(golden, capture(faults={"layers.1:residual": scaled(1.1)}))
    (around,) = result.neighbours
    assert (around.tap, around.role) == (f"{LAYER}.post_attention_layernorm", "input.x")
    assert told(around.fed_by) == [
        ("model.layers.0/output.0", "input.hidden_states", "identical", "both"),
        (f"{LAYER}.self_attn/output.0", "", "identical", "order"),
        (f"{LAYER}.input_layernorm/output.0", "", "identical", "order"),
    ]
    assert told(around.feeds) == [(f"{LAYER}.post_attention_layernorm/input.x", "", "fail", "order")]


def test_honest_noise_before_is_a_passing_edge_with_its_factor(golden):
    result = compare(golden, capture(faults={f"{LAYER}.mlp.down_proj": scaled(1.2)}, noise=2.0**-10))
    (around,) = result.neighbours
    first, weight = around.fed_by
    assert (first.tap, first.status, first.by) == (f"{LAYER}.mlp.act_fn", "pass", "both")
    assert 0 < first.over < 1 < around.feeds[0].over
    assert (weight.role, weight.status, weight.by) == ("param.weight", "identical", "own")


def test_edges_are_of_the_step_in_which_the_error_began(golden):
    """One row of decoding is wrong in each request; what comes later is another step's."""
    fault = scaled(1.5, lambda at, decode: at == 10)
    result = compare(golden, capture(faults={"model.layers.0.mlp.down_proj": fault}))
    (around,) = result.neighbours
    steps = {result.pairs[e.pair].step for e in (*around.fed_by, *around.feeds) if e.role_in != "param.weight"}
    failed = {p.step for p in result.pairs if p.tap == "model.layers.0.mlp.down_proj" and p.status == "fail"}
    assert len(failed) > 1
    assert steps == {min(failed)}
    assert 0 not in steps


def test_a_wrong_weight_is_an_edge_of_its_modules_output(golden):
    def spoil(weights):
        weights[f"{LAYER}.mlp.down_proj"][:] *= 1.25

    result = compare(golden, capture(weights=spoil))
    assert result.origins[0]["role"] == "param.weight"
    around = result.neighbours[0]
    assert (around.tap, around.role) == (f"{LAYER}.mlp.down_proj", "output.0")
    weight = next(e for e in around.fed_by if e.role == "param.weight")
    assert weight.status == "fail"
    assert around.fed_by[0].status == "identical"


def test_a_judged_again_comparison_has_the_same_neighbours(golden, tmp_path):
    result = compare(golden, capture(faults={f"{LAYER}.mlp.act_fn": scaled(1.08)}))
    store.save(result.measured, tmp_path)
    again = engine.rejudge(store.load(tmp_path))
    assert again.neighbours == result.neighbours
    assert again.measured.setting.links == result.measured.setting.links
    assert again.to_json()["origins"] == result.to_json()["origins"]


def test_a_file_of_earlier_releases_has_the_order_alone(golden, tmp_path):
    result = compare(golden, capture(faults={f"{LAYER}.mlp.act_fn": scaled(1.08)}))
    assert {e.by for e in result.neighbours[0].feeds} == {"both"}
    setting = replace(result.measured.setting, links={})
    older = replace(result, measured=replace(result.measured, setting=setting))
    (around,) = older.neighbours
    assert told(around.fed_by) == [(f"{LAYER}.mlp.gate_up_proj/output.0", "input.x", "identical", "order")]
    assert told(around.feeds) == [(f"{LAYER}.mlp.down_proj/input.input_", "", "fail", "order")]


def test_what_is_beyond_the_nearest_is_counted(golden):
    """A container of many children: what the last of them was made after is the whole row of them."""
    result = compare(golden, capture(faults={"layers.1:output": scaled(1.08)}))
    many = replace(result.measured.units[-1])
    units = [*result.measured.units]
    place = max(u.order for u in units if u.key[0] == f"{LAYER}.mlp" and u.key[1] == "output.0")
    tree = dict(result.measured.setting.children)
    names = [f"{LAYER}.extra{i}" for i in range(10)]
    tree[LAYER] = [*tree[LAYER], *names]
    units += [replace(many, key=(name, "output.0", 0), order=place) for name in names]
    parent = result.measured.setting.parent | dict.fromkeys(names, LAYER)
    setting = replace(result.measured.setting, children=tree, parent=parent)
    (around,) = neighbours(result.origins, result.pairs, replace(result.measured, setting=setting, units=units), None)
    before = 5  # the layer's input, and its four children's outputs
    assert len(around.fed_by) == NEAREST
    assert around.left_out == (before + len(names) - NEAREST, 0)
    assert around.plain()["fed_by_more"] == around.left_out[0]


def test_places_that_are_in_no_flow_have_none(golden):
    result = compare(golden, capture(faults={f"{LAYER}.mlp.act_fn": scaled(1.08)}))
    strange = [{"module": "nowhere", "role": "output.0"}, {"module": None, "role": None}, {}]
    assert neighbours(strange, result.pairs, result.measured, result.rows) == [None] * 3
    assert neighbours(strange, result.pairs, None, None) == [None] * 3
    many = neighbours(result.origins * (MOST_ORIGINS + 2), result.pairs, result.measured, result.rows)
    assert [a is None for a in many] == [False] * MOST_ORIGINS + [True] * 2
