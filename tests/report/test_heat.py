"""The heat map's numbers, and what the page is told about single pairs: computed by hand."""

import base64

import numpy as np
from report_examples import comparison, pair, row_table

from vllm_accprobe.comparison.row_table import ValueSample
from vllm_accprobe.report.heat import INFINITE, MISSING, encode, heat
from vllm_accprobe.report.html.looks import heat_json, looks_json, tree_json


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


def example():
    pairs = [
        pair(tap="model.layers.0.mlp", step=0, order=1),
        pair(tap="model.layers.0.mlp", step=1, order=1),
        pair(tap="model.layers.0.mlp", role="input.0", step=1, order=0),
        pair(tap="model.layers.1", step=1, order=2, status="fail"),
        pair(tap="ids", step=1, order=3, dtype_golden="int64", limit=0.0),
        pair(tap="none", step=1, order=4, status="skip", limit=None),
    ]
    rows = row_table(
        [
            (0, "a", 0, False, 0.0, 0.0),
            (0, "a", 1, False, 0.016, 1.0),
            (1, "a", 2, True, 0.16, 10.0),
            (2, "a", 2, True, 9.0, 900.0),
            (3, "a", 2, True, 0.0016, 0.1),
            (4, "a", 2, True, 9.0, np.inf),
            (0, "b", 0, False, 0.0, 0.0),
        ]
    )
    return comparison(pairs=pairs, rows=rows)


def test_outputs_by_tap_and_token():
    h = heat(example())
    assert h.taps == ("model.layers.0.mlp", "model.layers.1")
    assert h.layers == ("model.layers.0", "model.layers.1")
    assert [r.label for r in h.requests] == ["a", "b"]
    a, b = h.requests
    assert a.codes.tolist() == [[1, 122, 152], [MISSING, MISSING, 92]]
    assert (a.start.tolist(), a.width, a.worst) == ([0, 1, 2], 1, 10.0)
    assert (a.step0.tolist(), a.step1.tolist(), a.decode.tolist()) == ([0, 0, 1], [0, 0, 1], [0, 0, 1])
    assert b.codes.tolist() == [[1], [MISSING]]
    told = heat_json(h, "b")
    assert told["first"] == 1
    assert base64.b64decode(told["requests"][0]["codes"]) == a.codes.tobytes()


def test_it_begins_with_the_request_that_has_the_culprit():
    pairs = [pair(tap="visual.blocks.0"), pair(tap="model.layers.0", order=1)]
    entries = [
        (1, "a", 0, False, 0.2, 12.5),
        (0, "a, image 0", 0, False, 0.1, 6.0),
        (0, "b, image 0", 0, False, 0.1, 7.0),
    ]
    h = heat(comparison(pairs=pairs, rows=row_table(entries)))
    first = [heat_json(h, r, t)["first"] for r, t in (("a", "visual.blocks.0"), ("a", "model.layers.0"), ("z", "z"))]
    assert [h.requests[i].label for i in first] == ["a, image 0", "a", "a"]


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


def test_tree_takes_the_worst_output_and_every_failure():
    told = tree_json(example())
    assert [t[0] for t in told["taps"]] == ["model.layers.0.mlp", "model.layers.1", "ids", "none"]
    by = {t[0]: t[3:] for t in told["taps"]}
    assert by["model.layers.1"] == [1.0, 1, 1]
    assert by["none"] == [-1.0, 0, 1]
    assert by["model.layers.0.mlp"] == [0.0, 0, 3]


def test_worst_rows_of_a_pair_first_and_all_counted():
    rows = row_table([(0, "a", i, i > 4, (float("nan") if i == 3 else 0.01 * i), 0.1 * i) for i in range(20)])
    sample = ValueSample(0, np.array([1.0, np.nan]), np.array([2.0, np.inf]), 1, "a", 19)
    told = looks_json(comparison(pairs=[pair(status="fail"), pair()], rows=rows, samples=(sample,)), {0: 4, 1: 5})
    assert set(told["rows"]) == {"4"}
    total, *worst = told["rows"]["4"]
    assert total == 19
    assert [w[1] for w in worst] == [3, 19, 18, 17, 16, 15, 14, 13]
    assert worst[0] == ["a", 3, "prefill", "NaN", 0.3]
    assert worst[1] == ["a", 19, "decode", 0.19, 1.9]
    assert told["samples"]["4"]["golden"] == [1.0, "NaN"]
    assert told["samples"]["4"]["mine"] == [2.0, "Inf"]
