"""Healed engines: with each planted operator computed by its reference all tensors are golden's again, within rounding;
a gate of two commands, mine with two faults, ends with both."""

import json
import os
import random
import shlex
from typing import Any

import pytest
from support.captures import FIVE, Engines, explain
from support.engine import ROOT, Ask
from vllm_server import ENV, SMALL

from vllm_accprobe.cli import main
from vllm_accprobe.heal import outcome

pytestmark = pytest.mark.engine
_L = "model.layers"
_EXPERTS = f"{_L}.1.mlp.experts"
DENSE = [
    {"kind": "scale", "module": f"{_L}.1.self_attn.o_proj", "factor": 1.5},
    {"kind": "scale", "module": f"{_L}.0.post_attention_layernorm", "factor": 1.5},
    {"kind": "angle", "module": f"{_L}.0.self_attn.rotary_emb", "factor": 1.1},
    {"kind": "act", "module": f"{_L}.2.mlp.act_fn", "factor": 1.5},
    {"kind": "kernel_scale", "module": f"{_L}.3.self_attn.attn", "factor": 1.5},
    {"kind": "cache", "module": f"{_L}.1.self_attn.attn", "factor": 0.0, "rows": "position:5"},
    {"kind": "logits", "module": "lm_head", "factor": 1.5, "features": list(range(99))},
    {"kind": "scale", "module": "logits_processor", "factor": -1.0},
    {"kind": "sampler"},
]
EXPERTS = [
    {"kind": "expert", "module": f"{_EXPERTS}.routed_experts.quant_method", "factor": 1.5, "expert": 3},
    {"kind": "route", "module": _EXPERTS, "factor": 1.0},
    {"kind": "scale", "module": f"{_L}.2.mlp.gate", "factor": 1.5},
]
CASES: dict[str, tuple[list[dict[str, Any]], str, tuple[str, ...]]] = {
    "qwen2": (DENSE, "layers.*,lm_head,logits_processor,sampler",
              (*(str(f["module"]) for f in DENSE if "module" in f), "sampler")),
    "qwen2-moe": (EXPERTS, f"{_EXPERTS},*.gate", (f"{_EXPERTS}.routed_experts.quant_method", f"{_L}.2.mlp.gate")),
}  # fmt: skip


@pytest.mark.parametrize("model", ["qwen2", pytest.param("qwen2-moe", marks=pytest.mark.extra("as the other"))])
def test_planted_operators_are_healed(engines: Engines, compared: Any, model: str) -> None:
    """The second half of the requests begins with the first one's blocks, from the prefix cache."""
    faults, globs, planted = CASES[model]
    asks = [*FIVE[:2], Ask([*FIVE[0].ids[:36], *FIVE[2].ids], 8)]
    how: dict[str, Any] = {"how": "serial", "enable_prefix_caching": True, "block_size": 32}
    golden = engines.run(f"hits-{model}", model, asks, **how)
    healed = engines.run(f"healed-{model}", model, asks, fault=faults, env={"VLLM_ACCPROBE_HEAL": globs}, **how)
    assert healed.metrics["prefix_hits"] > 0
    assert healed.dump is not None
    (found,) = outcome.read(healed.dump)
    assert {name: found.healed.get(name, 0) > 0 for name in planted} == dict.fromkeys(planted, True), found
    assert not any("failed" in why for why in found.left.values()), found
    result = compared(golden, healed)
    assert result.verdict == "pass", explain(result)  # a token may flip at a tie, which is no failure


@pytest.mark.extra("a gate that localizes: test_digging.py")
def test_two_faults_are_two_causes(engines, preloaded_vllm, tmp_path, monkeypatch, capsys):
    """As typed. The second fault's rows are few, and are named when the first is healed."""
    first, second = f"{_L}.0.mlp.down_proj", f"{_L}.3.self_attn.o_proj"
    faults = [{"kind": "scale", "module": first, "factor": 1.3}, {"kind": "scale", "module": second, "factor": 1.3}]
    draw = random.Random(5)
    lines = [{"id": f"q{i}", "token_ids": [draw.randrange(10, 500) for _ in range(12 + 13 * i)]} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("PATH", f"{preloaded_vllm}{os.pathsep}{os.environ['PATH']}")
    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        monkeypatch.delenv(name)
    for name, value in (ENV | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    golden = f"vllm serve {engines.model('qwen2')} {' '.join(SMALL)} --enforce-eager"
    path = os.pathsep.join([str(ROOT / "lab" / "planted"), *filter(None, [os.environ.get("PYTHONPATH")])])
    mine = f"PYTHONPATH={path} ACCPROBE_FAULT={shlex.quote(json.dumps(faults))} {golden}"
    words = ["gate", golden, mine, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out"), "--no-floor",
             "--max-tokens=6", "--localize", "--localize-gb=1", "--heal"]  # fmt: skip
    assert main(words) == 1
    said = capsys.readouterr().out
    assert f"culprit: {first} " in said, said
    assert f"a second one remains: {second}" in said
    assert "with them healed no difference is seen: 2 causes, as far as these prompts show" in said
    rounds = json.loads((tmp_path / "out" / "gate.json").read_text())["heal"]
    assert [(one["healed"], one["verdict"]) for one in rounds] == [([first], "fail"), ([first, second], None)]
