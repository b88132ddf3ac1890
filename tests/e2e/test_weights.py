"""Weights as the checkpoint gave them and over their life: a wrong one is found first and said first, a clean run is
silent. scripts/weight_cases.py has more faults, planted in engines of one process."""

import csv
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from preloaded_vllm import FORKED
from support.captures import Engines, explain

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.judge.weights import weights_between

pytestmark = pytest.mark.engine
DOWN = "model.layers.1.mlp.down_proj"
ROOT = Path(__file__).resolve().parents[2]
FAULTS = {  # of the script: who is named, and with which words
    "scale": f"{DOWN}.weight_scale was not written by reload 1",
    "shard-q": "model.layers.1.self_attn.qkv_proj.weight (q) was not written by reload 1",
}


def test_parameters_are_recorded_before_they_are_packed(engines: Engines) -> None:
    run = engines.serial()
    assert run.dump is not None
    shapes = {r.name: r.shape for r in open_dump(run.dump).records if r.step is None}
    assert shapes[f"{DOWN}/param.weight"] == (128, 256)
    assert shapes["model.layers.1.self_attn.qkv_proj/param.weight"] == (256, 128)
    assert shapes["lm_head/param.weight"] == (512, 128)
    assert len(shapes) == len([r for r in open_dump(run.dump).records if r.step is None])


def test_a_wrong_weight_is_said_first(engines: Engines, compared: Any) -> None:
    fault = {"kind": "noise", "module": DOWN, "factor": 0.05, "features": [3]}
    mine = engines.run("wrong-weight", fault=fault, how="together")
    result = compared(engines.serial(), mine)
    assert result.verdict == "fail"
    assert result.origins[0]["module"] == DOWN, explain(result)
    assert result.origins[0]["role"] == "param.weight", explain(result)
    assert result.origins[0]["evidence"] == "values"
    assert "weight" in result.notes[0], result.notes
    assert DOWN in result.notes[0]
    others = [p for p in result.pairs if p.role.startswith("param.") and p.tap != DOWN]
    assert others
    assert {p.status for p in others} == {"pass"}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, preloaded_vllm: Path) -> Path:
    """Dumps of FAULTS, and of the clean runs that they are compared with."""
    out = tmp_path_factory.mktemp("lives")
    script = [str(preloaded_vllm / FORKED), str(ROOT / "scripts" / "weight_cases.py"), "--out", str(out), "--only",
              ",".join(("load", *FAULTS))]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return out


def found_in(lives: Path, golden: str, mine: str) -> dict[str, Any]:
    """compare.json's ``weights`` of two cases."""
    return weights_between(open_dump(lives / golden).lives, open_dump(lives / mine).lives)


@pytest.mark.parametrize(("fault", "golden"), [("scale", "sync-int8"), ("shard-q", "sync")])
def test_a_planted_fault_is_told_as_what_it_is(lives: Path, fault: str, golden: str) -> None:
    (found,) = found_in(lives, golden, fault)["findings"]
    assert FAULTS[fault] in found["says"]
    assert found["side"] == "mine"


def test_clean_runs_are_silent(lives: Path) -> None:
    for golden, mine in (("load", "sync"), ("sync", "load"), ("sync", "sync"), ("sync-int8", "sync-int8")):
        assert found_in(lives, golden, mine)["findings"] == []
    clean = found_in(lives, "load", "sync")
    assert [e["event"] for e in clean["events"]["mine"]] == ["loading", "reload 1"]
    assert clean["compared"] > 20


def test_compare_and_show_tell_of_it(lives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(lives / "sync"), str(lives / "shard-q"), "--out", str(tmp_path / "o")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the weights, not the kernel: " in said
    assert FAULTS["shard-q"] in said
    assert main(["inspect", str(lives / "shard-q"), "weights"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the weights, not the kernel: {FAULTS['shard-q']}" in said
    assert "reload 1, before step " in said


def test_calls_after_a_sync_are_not_held_against_the_weights_before(lives: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["opcheck", str(lives / "sync"), "-j", "0", "--out", str(tmp_path / "checked")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "calls: a reload before step 3 changed its weights; the dump holds those before" in said
    rows = list(csv.DictReader((tmp_path / "checked" / "opcheck.csv").open()))
    products, others = (
        {int(r["step"]) for r in rows if r["class"] == cls and r["status"] == "pass" and r["step"]}
        for cls in ("RowParallelLinear", "SiluAndMul")
    )
    assert products == {0, 1, 2}
    assert others > products
