"""Which point each tap gets on the error axis."""

import math

import pytest
from report_examples import comparison, pair
from support.peer_dumps import unpack
from synthetic_model import capture, scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.report import facts, markdown, terminal
from vllm_accprobe.report.charts import depth, layer_of, on_axis


def test_worst_of_each_phase_over_its_own_limit_and_in_order():
    mlp = {"tap": "model.layers.1.mlp"}
    points = depth(
        comparison(
            pairs=[
                pair(**mlp, order=9, prefill_rel_l2=0.1, limit=0.02, worst_row_rel_l2=0.1, status="fail"),
                pair(**mlp, order=8, prefill_rel_l2=0.3, decode_rel_l2=0.2, limit=0.1, worst_row_rel_l2=0.3),
                pair(tap="model.layers.1.mlp", order=7, role="input.0", prefill_rel_l2=5.0),
                pair(tap="model.layers.1.mlp", order=7, role="param.weight", rel_l2=5.0),
                pair(tap="ids", order=1, dtype_golden="int64", rel_l2=7.0),
                pair(tap="embed", order=1, identical=True, phase="decode", prefill_rel_l2=None),
                pair(tap="visual", order=2, phase=None, worst_row_rel_l2=0.008),
                pair(tap="gone", order=3, status="skip", prefill_rel_l2=0.1),
            ],
            created={"embed": 0.0, "visual": 0.25},
        )
    )
    found = [(p.tap, p.created, p.prefill, p.decode, p.other) for p in points]
    assert found[:2] == [("embed", 0.0, None, 0.0, None), ("visual", 0.25, None, None, 0.5)]
    assert found[2] == ("model.layers.1.mlp", None, pytest.approx(5.0), pytest.approx(2.0), None)
    last = points[-1]
    assert (last.order, last.pairs, last.failed, last.layer, last.origin) == (8, 2, 1, "model.layers.1", None)


def test_what_has_no_number_is_no_point_but_is_counted():
    pairs = [pair(prefill_rel_l2=math.nan, status="fail", nonfinite_mismatch=3), pair(tap="made", order=1)]
    nan, made = depth(comparison(pairs=pairs, origins=[{"module": "made", "created": math.inf}]))
    assert (nan.prefill, nan.failed, nan.nonfinite) == (None, 1, 1)
    assert (made.created, made.origin, made.nonfinite) == (None, 1, True)


def test_a_measure_of_its_own_is_drawn_over_its_own_limit():
    """A norm that is off by 6 % fails where 4 % are allowed, however small the row's L2 error is."""
    norm = {"measure": "row_norm_ratio", "measured": 1.06, "allowed": 0.04, "worst_row_rel_l2": 0.001}
    (point,) = depth(comparison(pairs=[pair(**norm, status="fail", prefill_rel_l2=0.001)]))
    assert point.prefill == pytest.approx(1.5)


FAULTS = {
    "one": {"model.layers.1.mlp.down_proj": scaled(1.2)},
    "small": {"model.layers.1.self_attn.o_proj": scaled(1.03)},
    "two": {"model.layers.0.mlp": scaled(0.9), "model.layers.2.self_attn.o_proj": scaled(1.5)},
    "some rows": {"model.layers.1.mlp.act_fn": scaled(1.4, lambda position, decode: decode)},
    "nan": {"model.layers.1.mlp.down_proj": scaled(math.nan, lambda position, decode: position == 2)},
}


@pytest.mark.parametrize(
    ("fault", "standard"), [*((fault, "accprobe") for fault in FAULTS), ("two", "strict"), ("two", "msprobe")]
)
def test_who_failed_is_not_below_the_line_and_one_fault_has_one_factor(fault, standard):
    result = compare(capture(), capture(faults=FAULTS[fault], chunk=3), standard=standard)
    points = {p.tap: p for p in depth(result)}
    failed = [p for p in result.pairs if p.status == "fail" and on_axis(p)]
    assert failed
    for p in failed:
        point = points[p.tap]
        assert point.nonfinite or max(x for x in (point.created, point.prefill, point.decode, point.other) if x) >= 1
    said = "\n".join([*terminal.lines(result), *markdown.markdown_lines(result), *markdown.github_lines(result)])
    for number, origin in enumerate(result.origins, 1):
        point, factor = points[origin["module"]], facts.origin_factor(origin)
        assert point.origin == number
        if factor is None or math.isinf(factor):
            assert point.nonfinite
            continue
        assert point.created == factor > 1
        # The worst of its own pairs in the table, the sentence and the tier say the same.
        own = [p for p in result.pairs if (p.tap, p.role) == (origin["module"], origin["role"]) and p.status == "fail"]
        finite = [x for p in own if math.isfinite(x := facts.severity(p))]
        assert max(finite) == pytest.approx(factor)
        assert f"({facts.origin_times(origin)}" in said
        assert facts.sentence(origin).count(facts.origin_times(origin)[:-1] + " times") == 1
    blamed = {o["module"] for o in result.origins}
    assert all(p.created is None or p.created <= 1 for p in points.values() if p.tap not in blamed)


PEERS = (
    ("b_sglang_tp", "golden", "mine"), ("f_torchair", "ge_nofusion_golden", "ge_mine"), ("g_single", "golden", "mine"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "golden", "mine"), PEERS)
def test_of_another_tools_dump_too_one_fault_has_one_factor(name, golden, mine, tmp_path):
    root = unpack(name, tmp_path)
    result = compare(root / golden, root / mine)
    culprit = result.origins[0]
    own = [p for p in result.pairs if (p.tap, p.role) == (culprit["module"], culprit["role"]) and p.status == "fail"]
    assert max(map(facts.severity, own)) == pytest.approx(facts.origin_factor(culprit))


def test_layers_of_names():
    assert layer_of("visual.blocks.12.attn.qkv") == "visual.blocks.12"
    assert layer_of("model.layers.3") == "model.layers.3"
    assert layer_of("transformer.h.0.mlp") == "transformer.h.0"
    assert layer_of("model.norm") is None
