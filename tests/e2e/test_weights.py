"""Weights as the checkpoint gave them, before kernels re-pack them: a wrong one is found first and said first."""

from __future__ import annotations

from typing import Any

import pytest
from support.captures import Engines, explain

from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
DOWN = "model.layers.1.mlp.down_proj"


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
