"""What the page shows of rows, samples and the tree, as plain values."""

import numpy as np
from report_examples import comparison, pair, row_table
from small_examples import two_requests

from vllm_accprobe.comparison.row_table import ValueSample
from vllm_accprobe.report.html.data import looks_json, tree_json


def test_tree_takes_the_worst_output_and_every_failure():
    told = tree_json(two_requests())
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
