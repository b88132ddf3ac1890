"""Origins between two taps: captures of a synthetic model of which one side, or both, saw some modules only."""

from dataclasses import replace

import pytest
from synthetic_model import capture, scaled

from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.engine import compare, rejudge
from vllm_accprobe.comparison.gaps import NOTHING, Gap, splitting
from vllm_accprobe.comparison.plan.make_plan import make_plan
from vllm_accprobe.dump.schema import Skip
from vllm_accprobe.report import facts, terminal

KERNELS = ("qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj", "logits_processor", "sampler", "<root>")
L1, L2 = "model.layers.1", "model.layers.2"


def only(dump, keep, inputs=()):
    """``dump`` with the outputs of the modules in ``keep``, the inputs of those in ``inputs``, and the root's."""

    def seen(r):
        leaf = r.tap.rpartition(".")[2]
        if r.step is None:
            return False
        return leaf in inputs or (leaf in keep and (leaf == "<root>" or not r.role.startswith("input")))

    return replace(dump, records=[r for r in dump.records if seen(r)])


def compiled(faults, inputs=()):
    """As an engine whose compiled graph shows where its kernels end."""
    return only(capture(chunk=4, faults=faults), KERNELS, inputs)


@pytest.mark.parametrize(
    ("fault", "after", "before", "within", "inside"),
    [
        (f"{L1}.mlp.act_fn", f"{L1}.mlp.gate_up_proj", f"{L1}.mlp.down_proj", f"{L1}.mlp", f"{L1}.mlp.act_fn"),
        (f"{L2}.input_layernorm", f"{L1}.mlp.down_proj", f"{L2}.self_attn.qkv_proj", "model", f"{L2}.input_layernorm"),
        ("layers.1:residual", f"{L1}.self_attn.o_proj", f"{L1}.mlp.gate_up_proj", L1, f"{L1}.post_attention_layernorm"),
        ("layers.1:output", f"{L1}.mlp.down_proj", f"{L2}.self_attn.qkv_proj", "model", L1),
        ("model.norm", f"{L2}.mlp.down_proj", "<root>", "<root>", "model.norm"),
    ],
)
def test_what_lies_between_two_taps_is_the_gap(golden, fault, after, before, within, inside):
    some = scaled(3.0, lambda positions, decode: positions >= 0)

    def changed(values, positions, decode):
        values[:, :16] = some(values[:, :16], positions, decode)  # a norm divides a factor of all columns out
        return values

    origin = compare(golden, compiled({fault: changed})).origins[0]
    assert (origin["gap"]["after"], origin["gap"]["before"], origin["module"]) == (after, before, within)
    assert inside in origin["gap"]["contains"]
    assert origin["role"] == f"{before}/output.0"


@pytest.mark.parametrize("leaf", ["self_attn.o_proj", "self_attn.attn"])
def test_an_operator_whose_inputs_are_outputs_that_were_seen_is_named_itself(golden, leaf):
    origin = compare(golden, compiled({f"{L1}.{leaf}": scaled(1.2)})).origins[0]
    assert (origin["module"], origin["gap"]) == (f"{L1}.{leaf}", None)


def test_an_operator_whose_input_is_wrong_is_not_in_the_gap(golden):
    faults = {f"{L1}.mlp.act_fn": scaled(1.2)}
    origin = compare(golden, compiled(faults, inputs=("down_proj",))).origins[0]
    assert origin["gap"] == {"after": f"{L1}.mlp.gate_up_proj", "before": f"{L1}.mlp.down_proj",
                             "contains": [f"{L1}.mlp.act_fn"]}  # fmt: skip
    right = compare(golden, compiled({f"{L1}.mlp.down_proj": scaled(1.2)}, inputs=("down_proj",))).origins[0]
    assert (right["module"], right["gap"]) == (f"{L1}.mlp.down_proj", None)


def test_what_compute_logits_returns_is_not_the_samplers_work(golden):
    origin = compare(golden, capture(chunk=4, faults={"compute_logits": scaled(1.5)})).origins[0]
    assert origin["gap"] == {"after": "logits_processor", "before": "sampler", "contains": ["<root>"]}
    assert origin["module"] == "<root>"


def test_a_norm_vouches_for_nothing_in_front_of_it(golden):
    """A scaled embedding comes out of the first norm as it should, and shows behind the first residual sum."""
    origin = compare(golden, compiled({"model.embed_tokens": scaled(3.0)})).origins[0]
    assert origin["gap"]["before"] == "model.layers.0.mlp.gate_up_proj"
    assert "model.embed_tokens" in origin["gap"]["contains"]


def test_what_an_earlier_right_tensor_was_made_of_is_not_in_the_gap(golden):
    origin = compare(golden, compiled({f"{L2}.post_attention_layernorm": scaled(1.2)})).origins[0]
    inside = origin["gap"]["contains"]
    assert {f"{L2}.post_attention_layernorm", f"{L2}.mlp.gate_up_proj", L2} <= set(inside)
    # The sum that layer 1 gives out may be too large as a whole: the norm in front of qkv_proj would not show it.
    assert [m for m in inside if not m.startswith(L2)] == [L1]


def test_where_nobody_saw_the_modules_the_tree_names_them(golden):
    def selected(dump):
        kept = only(dump, ("1", "self_attn"), inputs=("1", "self_attn"))
        seen = {r.tap for r in kept.records}
        left = [Skip(m.tap, "not selected by VLLM_ACCPROBE_MODULES") for m in dump.modules[0] if m.tap not in seen]
        return replace(kept, skips=left, modules={0: [m for m in dump.modules[0] if m.tap in seen]})

    faulty = capture(chunk=4, faults={f"{L1}.mlp.down_proj": scaled(1.5)})
    origin = compare(selected(golden), selected(faulty)).origins[0]
    assert (origin["module"], origin["gap"]["after"], origin["gap"]["before"]) == (L1, f"{L1}.self_attn", L1)
    assert f"{L1}.mlp.down_proj" in origin["gap"]["contains"]
    assert f"{L1}.self_attn.qkv_proj" not in origin["gap"]["contains"]  # its module's output was compared


def test_layers_without_a_tap_lie_in_the_gap(golden):
    def some(dump):
        taps = {"model.layers.0", "model.layers.2"}
        return replace(dump, records=[r for r in dump.records if r.tap in taps and r.role == "output.0"], modules={})

    faulty = capture(chunk=4, faults={f"{L1}.mlp.down_proj": scaled(3.0)})
    origin = compare(some(golden), some(faulty)).origins[0]
    assert origin["gap"] == {"after": "model.layers.0", "before": L2, "contains": [L1, L2]}


def test_nothing_is_kept_where_both_sides_saw_the_same(golden):
    assert make_plan(golden, capture(chunk=4)).untapped == NOTHING


def test_a_gap_outlives_the_saved_comparison(golden, tmp_path):
    result = compare(golden, compiled({f"{L1}.mlp.act_fn": scaled(1.2)}))
    assert result.measured is not None
    store.save(result.measured, tmp_path)
    assert rejudge(store.load(tmp_path)).origins == result.origins


def test_the_report_names_the_two_ends(golden):
    result = compare(golden, compiled({f"{L1}.mlp.act_fn": scaled(1.2)}))
    graphs = {"tool": "accprobe", "probe": {"modules": []}, "engine": {"graphs": {"set": "default"}}}
    result = replace(result, mine_run=graphs, golden_path="g", mine_path="m")
    ends = f"between {L1}.mlp.gate_up_proj and {L1}.mlp.down_proj"
    assert facts.headline(result).startswith(f"FAIL: the error is introduced {ends}: {L1}.mlp.down_proj/output.0, ")
    said = terminal.other_origins(result)
    gap = next(line for line in said if line.startswith("gap: "))
    taps = f"{L1}.mlp.gate_up_proj,{L1}.mlp.act_fn,{L1}.mlp.down_proj"
    assert gap == (
        f"gap: not seen there: {L1}.mlp.act_fn; {L1}.mlp.down_proj itself, whose input was not compared. "
        f"VLLM_ACCPROBE_GRAPH_TAPS={taps} would split it"
    )
    assert next(p for p in result.pairs if p.measure == "created").message.startswith(
        f"shows an error that was created since {L1}.mlp.gate_up_proj"
    )
    assert f"GRAPH_TAPS={taps}" in result.next_steps[0]["command"]
    assert facts.divergence(result).endswith("where origin 1 is")
    points = {p.tap: p.origin for p in __import__("vllm_accprobe.report.charts", fromlist=["depth"]).depth(result)}
    assert [tap for tap, origin in points.items() if origin] == [f"{L1}.mlp.down_proj"]


@pytest.mark.parametrize(
    ("probe", "graphs", "expected"),
    [
        ({"modules": ["attention"]}, None, {"MODULES": "attention,a.c"}),
        ({"modules": []}, None, {}),
        ({"modules": []}, {}, {"GRAPHS": "1", "GRAPH_TAPS": "a.b,a.c,a.d"}),
        ({"graph_taps": ["all"]}, {}, {"GRAPHS": "0"}),
    ],
)
def test_the_setting_that_would_split_it(probe, graphs, expected):
    run = {"tool": "accprobe", "probe": probe, "engine": {"graphs": graphs}}
    assert splitting(Gap("a.b", "a.d", ("a.c", "a.d")).plain(), run) == expected
    assert splitting(Gap("a.b", "a.d", ("a.c", "a.d")).plain(), {"tool": "other"}) == {}


@pytest.mark.parametrize(
    ("after", "before", "module"),
    [
        ("m.layers.1.mlp.down", "m.layers.2.attn.qkv", "m"),
        ("m.layers.1.mlp.up", "m.layers.1.mlp.down", "m.layers.1.mlp"),
        ("m.layers.1.attn", "m.layers.1", "m.layers.1"),
        ("m.layers.1/input.x", "m.layers.1.norm", "m.layers.1"),
        ("layers.0", "layers.2", "<root>"),
        ("", "m.a", "<root>"),
    ],
)
def test_the_module_of_a_gap_encloses_it(after, before, module):
    assert Gap(after, before, ()).module == module
