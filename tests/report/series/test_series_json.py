"""series.json."""

import json

from series_examples import four_days

from vllm_accprobe.report.series.series_json import series_json


def test_dumps_and_taps():
    data = json.loads(json.dumps(series_json("golden", four_days()), allow_nan=False))
    assert list(data) == ["schema", "verdict", "exit_code", "golden", "dumps", "taps"]
    assert (data["schema"], data["verdict"], data["exit_code"], data["golden"]) == (1, "fail", 2, "golden")
    assert [(d["name"], d["verdict"], d["page"]) for d in data["dumps"]] == [
        ("day1", "pass", "day1/compare.html"), ("day2", "fail", "day2/compare.html"), ("day3", "unreadable", None),
        ("day4", "fail", "day4/compare.html"),
    ]  # fmt: skip
    culprit = data["taps"][0]
    assert culprit["tap"] == "model.layers.3.mlp.down_proj"
    assert culprit["over_limit"][0] < 1 < culprit["over_limit"][1] == culprit["over_limit"][3]
    assert culprit["over_limit"][2] is None
    assert culprit["failed"] == [0, data["taps"][0]["failed"][1], 0, data["taps"][0]["failed"][3]]
    assert data["dumps"][1]["origins"][0]["module"] == "model.layers.3.mlp.down_proj"
