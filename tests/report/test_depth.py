"""Which point each tap gets on the error axis."""

import math

from report_examples import comparison, pair

from vllm_accprobe.report.depth import depth, layer_of


def test_worst_of_each_phase_over_steps_and_outputs_in_order():
    points = depth(
        comparison(
            pairs=[
                pair(tap="model.layers.1.mlp", order=9, prefill_rel_l2=0.1, limit=0.02, status="fail"),
                pair(tap="model.layers.1.mlp", order=8, prefill_rel_l2=0.3, decode_rel_l2=0.2, limit=0.01),
                pair(tap="model.layers.1.mlp", order=7, role="input.0", prefill_rel_l2=5.0),
                pair(tap="model.layers.1.mlp", order=7, role="param.weight", rel_l2=5.0),
                pair(tap="ids", order=1, dtype_golden="int64", rel_l2=7.0),
                pair(tap="embed", order=1, identical=True, phase="decode", prefill_rel_l2=None),
                pair(tap="visual", order=2, phase=None, worst_row_rel_l2=0.5, nonfinite_mismatch=1),
                pair(tap="gone", order=3, status="skip", prefill_rel_l2=0.1),
            ]
        )
    )
    assert [(p.tap, p.prefill, p.decode, p.other) for p in points] == [
        ("embed", None, 0.0, None),
        ("visual", None, None, 0.5),
        ("model.layers.1.mlp", 0.3, 0.2, None),
    ]
    mlp = points[-1]
    assert (mlp.limit, mlp.order, mlp.pairs, mlp.failed, mlp.layer) == (0.01, 8, 2, 1, "model.layers.1")
    assert points[1].nonfinite == 1


def test_nan_is_no_point_but_is_counted():
    (point,) = depth(comparison(pairs=[pair(prefill_rel_l2=math.nan, status="fail", nonfinite_mismatch=3)]))
    assert (point.prefill, point.failed, point.nonfinite) == (None, 1, 1)


def test_layers_of_names():
    assert layer_of("visual.blocks.12.attn.qkv") == "visual.blocks.12"
    assert layer_of("model.layers.3") == "model.layers.3"
    assert layer_of("transformer.h.0.mlp") == "transformer.h.0"
    assert layer_of("model.norm") is None
