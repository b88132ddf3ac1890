"""A comparison under another tool's standard: columns, status, verdict, and the same from a saved one."""

import csv
import json

import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main
from vllm_accprobe.standards import built_in

ONE = {"prompts": {"a": [3, 14, 15, 9, 2, 6]}, "tokens": 3}
FOREIGN = {name: s.pairs for name, s in built_in().items() if s.pairs is not None}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign")
    write(capture(**ONE), root / "golden")
    write(capture(chunk=2, **ONE), root / "same")
    write(capture(faults={DOWN: scaled(1.2)}, **ONE), root / "wrong")
    return root


def table(path):
    with open(path / "compare.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("name", FOREIGN)
def test_columns_status_and_verdict(dumps, tmp_path, name):
    standard = FOREIGN[name]
    assert main(["compare", str(dumps / "golden"), str(dumps / "same"), "--standard", name, "-o", str(tmp_path)]) == 0
    rows = table(tmp_path)
    assert tuple(rows[0])[-len(standard.columns) :] == standard.columns
    assert {r["status"] for r in rows} <= {"pass", "skip"}
    assert main(["compare", str(dumps / "golden"), str(dumps / "wrong"), "--standard", name, "-o", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "compare.json").read_text())
    assert data["origins"][0]["module"] == DOWN  # the search for the culprit stays ours
    assert (data["verdict"], data["standard"]["name"]) == ("fail", name)
    said = {(r["tap"], r["role"]): r for r in table(tmp_path) if r["step"] == "0"}
    assert said[DOWN, "output.0"]["status"] == "fail"
    assert said["model.layers.0.mlp.down_proj", "output.0"]["status"] == "pass"


@pytest.mark.parametrize("name", [n for n, s in FOREIGN.items() if not s.needs_kl])
def test_a_saved_comparison_gives_the_same(dumps, tmp_path, name):
    both = str(dumps / "golden"), str(dumps / "wrong")
    main(["compare", *both, "--standard", name, "-o", str(tmp_path / "direct")])
    main(["compare", *both, "-o", str(tmp_path / "own")])
    main(["compare", "--rejudge", str(tmp_path / "own"), "--standard", name, "-o", str(tmp_path / "again")])
    assert table(tmp_path / "again") == table(tmp_path / "direct")


def test_ait_says_that_kl_takes_the_dumps(dumps, tmp_path, capsys):
    both = str(dumps / "golden"), str(dumps / "wrong")
    main(["compare", *both, "-o", str(tmp_path / "own")])
    capsys.readouterr()
    main(["compare", "--rejudge", str(tmp_path / "own"), "--standard", "ait"])
    assert "the KL divergence was not measured" in capsys.readouterr().out
    again = table(tmp_path / "own-rejudged")
    assert not any(r["kl_divergence"] for r in again if r["tap"] == DOWN and r["role"] == "output.0")
    main(["compare", *both, "--standard", "ait", "-o", str(tmp_path)])
    assert "not measured" not in capsys.readouterr().out
    found = [float(r["kl_divergence"]) for r in table(tmp_path) if r["tap"] == DOWN and r["role"] == "output.0"]
    assert found
    assert min(found) > 0
