"""What the charts show: a point for each tap on the error axis, and layers by tokens."""

import base64
import math

import numpy as np
import pytest
from report_examples import comparison, pair, row_table
from synthetic_model import capture, scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.report import charts as heat_module, facts, markdown, terminal
from vllm_accprobe.report.charts import INFINITE, MISSING, depth, encode, factors, heat, layer_of, on_axis
from vllm_accprobe.report.html.data import heat_json

# --- which point each tap gets on the error axis ---


def test_worst_of_each_phase_over_its_own_limit_and_in_order():
    mlp = {"tap": "model.layers.1.mlp"}
    pairs = [
        pair(**mlp, order=9, prefill_rel_l2=0.1, limit=0.02, worst_row_rel_l2=0.1, status="fail"),
        pair(**mlp, order=8, prefill_rel_l2=0.3, decode_rel_l2=0.2, limit=0.1, worst_row_rel_l2=0.3),
        pair(**mlp, order=7, role="input.0", prefill_rel_l2=5.0),
        pair(**mlp, order=7, role="param.weight", rel_l2=5.0),
        pair(tap="ids", order=1, dtype_golden="int64", rel_l2=7.0),
        pair(tap="embed", order=1, identical=True, phase="decode", prefill_rel_l2=None),
        pair(tap="visual", order=2, phase=None, worst_row_rel_l2=0.008),
        pair(tap="gone", order=3, status="skip", prefill_rel_l2=0.1),
    ]
    points = depth(comparison(pairs=pairs, created={"embed": 0.0, "visual": 0.25}))
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
    "small": {"model.layers.1.self_attn.o_proj": scaled(1.03)},
    "two": {"model.layers.0.mlp": scaled(0.9), "model.layers.2.self_attn.o_proj": scaled(1.5)},
    "nan": {"model.layers.1.mlp.down_proj": scaled(math.nan, lambda position, decode: position == 2)},
}


@pytest.mark.parametrize(("fault", "standard"), [("small", "accprobe"), ("nan", "accprobe"), ("two", "msprobe")])
def test_who_failed_is_not_below_the_line_and_one_fault_has_one_factor(fault, standard):
    result = compare(capture(), capture(faults=FAULTS[fault], chunk=3), standard=standard)
    points = {p.tap: p for p in depth(result)}
    failed = [result.pairs[i] for i in np.flatnonzero(result.table.failed & on_axis(result.table))]
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


# --- layers by tokens: codes, bins, and what does not fit ---


def test_codes_and_layers_of_names():
    codes = encode(np.array([0.0, 1e-9, 1.0, 13.1, np.inf, np.nan, 1e9])).tolist()
    assert abs(10 ** ((codes.pop(3) - 2) / 30 - 4) / 13.1 - 1) < 0.04
    assert codes == [1, 2, 122, INFINITE, INFINITE, 254]
    names = ("visual.blocks.12.attn.qkv", "model.layers.3", "transformer.h.0.mlp", "model.norm")
    assert [layer_of(n) for n in names] == ["visual.blocks.12", "model.layers.3", "transformer.h.0", None]


def test_outputs_by_tap_and_token():
    """Two layers, an integer tap and a skipped one; seven rows of two requests, in prefill and decode."""
    mlp = {"tap": "model.layers.0.mlp"}
    pairs = [
        pair(**mlp, order=1), pair(**mlp, step=1, order=1), pair(**mlp, role="input.0", step=1),
        pair(tap="model.layers.1", step=1, order=2, status="fail"),
        pair(tap="ids", step=1, order=3, dtype_golden="int64", limit=0.0),
        pair(tap="none", step=1, order=4, status="skip", limit=None),
    ]  # fmt: skip
    rows = row_table(
        [(0, "a", 0, False, 0.0, 0.0), (0, "a", 1, False, 0.016, 1.0), (1, "a", 2, True, 0.16, 10.0),
         (2, "a", 2, True, 9.0, 900.0), (3, "a", 2, True, 0.0016, 0.1), (4, "a", 2, True, 9.0, np.inf),
         (0, "b", 0, False, 0.0, 0.0)],
    )  # fmt: skip
    h = heat(comparison(pairs=pairs, rows=rows))
    assert h.taps == ("model.layers.0.mlp", "model.layers.1")
    assert h.layers == ("model.layers.0", "model.layers.1")
    assert [r.label for r in h.requests] == ["a", "b"]
    a, b = h.requests
    assert a.codes.tolist() == [[1, 122, 152], [MISSING, MISSING, 92]]
    assert (a.start.tolist(), a.width, a.worst) == ([0, 1, 2], 1, 10.0)
    assert (a.step0.tolist(), a.step1.tolist(), a.decode.tolist()) == ([0, 0, 1], [0, 0, 1], [0, 0, 1])
    assert b.codes.tolist() == [[1], [MISSING]]
    told = heat_json(h)
    assert base64.b64decode(told["requests"][0]["codes"]) == a.codes.tobytes()


def test_it_begins_with_the_request_that_shows_most():
    pairs = [pair(tap="visual.blocks.0"), pair(tap="model.layers.0", order=1)]
    entries = [(1, "a", 0, False, 0.2, 12.5), (0, "c", 0, False, 0.3, 40.0), (0, "b", 0, False, 0.3, 40.0),
               (1, "c", 1, False, 0.1, 1.5), (0, "a, image 0", 0, False, math.nan, math.nan)]  # fmt: skip
    h = heat(comparison(pairs=pairs, rows=row_table(entries)))
    assert [r.label for r in h.requests] == ["a, image 0", "c", "b", "a"]


def test_however_many_rows_are_looked_at_together_the_map_is_the_same(monkeypatch):
    pairs = [pair(tap="layers.0"), pair(tap="layers.1", order=1), pair(tap="none", status="skip", limit=None)]
    entries = [(i, who, k, k > 4, 0.1, 0.3 * k + i) for i in range(3) for who in "bca" for k in range(7)]
    result = comparison(pairs=pairs, rows=row_table(entries))
    whole = heat(result)
    monkeypatch.setattr(heat_module, "STRETCH", 4)
    parts = heat(result, over=factors(result))
    assert (parts.taps, parts.left_out) == (whole.taps, whole.left_out)
    for a, b in zip(whole.requests, parts.requests, strict=True):
        assert (a.label, a.width, a.worst) == (b.label, b.width, b.worst)
        for name in ("start", "step0", "step1", "decode", "codes"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_long_requests_are_binned_by_their_worst_row():
    n = 1100
    rows = row_table([(0, "a", 10 + i, False, 1.0, 5.0 if i == 700 else 0.5) for i in range(n)])
    (request,) = heat(comparison(pairs=[pair(tap="t")], rows=rows)).requests
    assert request.width == 3
    assert request.codes.shape == (1, 367)
    assert request.start[:3].tolist() == [10, 13, 16]
    assert np.flatnonzero(request.codes[0] > 122).tolist() == [700 // 3]


def test_what_does_not_fit_is_counted_and_the_worst_stays():
    rows = row_table([(0, f"r{i}", k, False, 0.1, 50.0 if i == 7 else 0.1) for i in range(9) for k in range(10)])
    h = heat(comparison(pairs=[pair(tap="t")], rows=rows), max_cells=35)
    assert [r.label for r in h.requests] == ["r7", "r0", "r1"]
    assert h.left_out == 6
    assert heat(comparison(pairs=[pair()])).requests == ()


def test_the_worst_row_has_its_pair_s_factor_and_no_other_has_more():
    """A pair in which an error was created is so many times what one operator may create: 28, or 3 of another step;
    and its other rows are measured against that, too."""
    made = {"status": "fail", "measure": "created", "worst_request": "a"}
    pairs = [
        pair(tap="o_proj", measured=0.056, allowed=0.002, worst_position=7, **made),
        pair(tap="o_proj", step=1, measured=0.06, allowed=0.02, worst_position=9, **made),
        pair(tap="o_proj", step=2, measured=0.06, allowed=0.012, worst_position=99, **made),
        pair(tap="norm", order=1),
    ]
    entries = [
        (0, "a", 7, False, 0.05, 4.3), (0, "b", 7, False, 0.04, 4.2), (0, "a", 8, False, 0.001, 0.1),
        (1, "a", 9, False, 0.05, 4.4), (1, "a", 10, False, 0.05, 4.35), (2, "a", 11, False, 0.02, 2.0),
        (2, "b", 11, False, 0.06, 4.0), (3, "a", 7, False, 0.01, 60.0),
    ]  # fmt: skip
    result = comparison(pairs=pairs, rows=row_table(entries))
    assert np.round(factors(result).astype(float), 4).tolist() == [28.0, 20.0, 0.5, 3.0, 2.5, 1.6667, 5.0, 60.0]
    assert np.round(result.rows.ratio.astype(float), 4).tolist() == [4.3, 4.2, 0.1, 4.4, 4.35, 2.0, 4.0, 60.0]
    shown = heat_json(heat(comparison(pairs=pairs[:3], rows=row_table(entries[:7]))))["requests"][0]
    assert (shown["label"], shown["worst"]) == ("a", 28.0)


def test_rows_without_a_pair_that_was_condemned_keep_their_factors():
    made = pair(tap="o_proj", status="fail", measure="created", measured=9.0, allowed=1.0)
    result = comparison(pairs=[made, pair(tap="norm", order=1)], rows=row_table([(1, "a", 0, False, 0.1, 0.5)]))
    assert factors(result).tolist() == [0.5]
