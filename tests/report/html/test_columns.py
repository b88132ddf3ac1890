"""Pairs as columns: every field of every pair comes back."""

import json
import math

from report_examples import pair

from vllm_accprobe.report.html.data import columns_json


def values(column, n):
    if "c" in column:
        return [column["c"]] * n
    return column["v"] if "v" in column else [column["d"][i] for i in column["i"]]


def test_columns_hold_every_field_of_every_pair():
    pairs = [
        pair(rel_l2=0.123456789, step=None, message="x", status="fail"),
        pair(rel_l2=math.nan, step=3, identical=True),
        pair(rel_l2=math.inf, step=4, shape=(), tap="</script>"),
    ]
    got = json.loads(columns_json(pairs))
    assert got["n"] == 3
    cols = got["cols"]
    assert values(cols["rel_l2"], 3) == [0.123457, "NaN", "Inf"]
    assert values(cols["step"], 3) == [None, 3, 4]
    assert values(cols["shape"], 3) == ["4 × 64", "4 × 64", "scalar"]
    assert values(cols["identical"], 3) == [False, True, False]
    assert values(cols["tap"], 3) == ["model.norm", "model.norm", "</script>"]
    assert cols["rule"] == {"c": "exact"}
