"""Layers by tokens: codes, bins, and what does not fit."""

import base64

import numpy as np
from report_examples import comparison, pair, row_table
from small_examples import two_requests

from vllm_accprobe.report.heat import INFINITE, MISSING, encode, heat
from vllm_accprobe.report.html.looks import heat_json


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
