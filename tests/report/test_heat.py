"""Layers by tokens: codes, bins, and what does not fit."""

import base64

import numpy as np
from report_examples import comparison, pair, row_table
from small_examples import two_requests

from vllm_accprobe.report import charts as heat_module
from vllm_accprobe.report.charts import INFINITE, MISSING, encode, factors, heat
from vllm_accprobe.report.html.data import heat_json


def decode(code):
    return 10 ** ((code - 2) / 30 - 4)


def test_codes():
    codes = encode(np.array([0.0, 1e-9, 1.0, 13.1, np.inf, np.nan, 1e9]))
    assert codes.tolist()[0] == 1
    assert codes[1] == 2
    assert codes[2] == 122
    assert abs(decode(int(codes[3])) / 13.1 - 1) < 0.04
    assert codes[4] == codes[5] == INFINITE
    assert codes[6] == 254


def test_outputs_by_tap_and_token():
    h = heat(two_requests())
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
    entries = [
        (1, "a", 0, False, 0.2, 12.5),
        (0, "c", 0, False, 0.3, 40.0),
        (0, "b", 0, False, 0.3, 40.0),
        (1, "c", 1, False, 0.1, 1.5),
        (0, "a, image 0", 0, False, float("nan"), float("nan")),
    ]
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
        (0, "a", 7, False, 0.05, 4.3),
        (0, "b", 7, False, 0.04, 4.2),
        (0, "a", 8, False, 0.001, 0.1),
        (1, "a", 9, False, 0.05, 4.4),
        (1, "a", 10, False, 0.05, 4.35),
        (2, "a", 11, False, 0.02, 2.0),
        (2, "b", 11, False, 0.06, 4.0),
        (3, "a", 7, False, 0.01, 60.0),
    ]
    result = comparison(pairs=pairs, rows=row_table(entries))
    assert np.round(factors(result).astype(float), 4).tolist() == [28.0, 20.0, 0.5, 3.0, 2.5, 1.6667, 5.0, 60.0]
    assert np.round(result.rows.ratio.astype(float), 4).tolist() == [4.3, 4.2, 0.1, 4.4, 4.35, 2.0, 4.0, 60.0]
    shown = heat_json(heat(comparison(pairs=pairs[:3], rows=row_table(entries[:7]))))["requests"][0]
    assert (shown["label"], shown["worst"]) == ("a", 28.0)


def test_rows_without_a_pair_that_was_condemned_keep_their_factors():
    made = pair(tap="o_proj", status="fail", measure="created", measured=9.0, allowed=1.0)
    result = comparison(pairs=[made, pair(tap="norm", order=1)], rows=row_table([(1, "a", 0, False, 0.1, 0.5)]))
    assert factors(result).tolist() == [0.5]
