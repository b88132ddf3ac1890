"""A transformers golden in float32 against vLLM in bfloat16: an honest run passes, and a fault is named.

What a recurrence or a rotary embedding rounds is, without the replay, hardly less than a small error: these tests use
the command, which replays by default."""

import json
from pathlib import Path
from typing import Any

import mode_models
import pytest
import zoo
from support.captures import VISION, Engines, explain
from support.engine import Ask, Run
from support.prompts import prompts
from support.transformers_golden import capture

from vllm_accprobe.cli import main

pytestmark = pytest.mark.engine

TEXT = [Ask(ids, 5) for ids in prompts(40, 23, 57)]
ASKS = {"llama": TEXT, "qwen2.5-vl": VISION}
UNPAIRED = {
    "llama": {"sampler"},
    "qwen2.5-vl": {"sampler", "visual.input_norm"} | {f"visual.blocks.{i}.attn.apply_rotary_emb" for i in range(3)},
}
"""Taps of vLLM that no tensor of transformers corresponds to."""


@pytest.fixture(scope="module")
def goldens(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers")
    root, made = tmp_path_factory.mktemp("transformers"), {}

    def golden(model: str) -> Run:
        if model not in made:
            tokens = capture(engines.model(model), ASKS[model], root / model)
            made[model] = Run(Path(root / model), tokens)
        return made[model]

    return golden


def first_origin(golden: Run, mine: Run, out: Path) -> str:
    """What `accprobe compare` names first, where it fails."""
    assert main(["compare", str(golden.dump), str(mine.dump), "--out", str(out)]) == 1
    first: str = json.loads((out / "compare.json").read_text())["origins"][0]["module"]
    return first


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2.5-vl", marks=pytest.mark.extra("as the other"))])
def test_an_honest_run_passes_and_nearly_everything_is_compared(engines, compared, goldens, model):
    golden = goldens(model)
    mine = engines.run(f"{model}-for-transformers", model, ASKS[model], max_num_batched_tokens=48)
    result = compared(golden, mine)
    assert result.verdict == "pass", explain(result)
    assert not result.origins
    cover = result.coverage
    assert (cover["rows_only_golden"], cover["rows_only_mine"]) == (0, 0), explain(result)
    assert set(cover["taps_only_mine"]) == UNPAIRED[model]
    layers = {p.tap for p in result.pairs if p.status == "pass" and not p.role.startswith("param.")}
    for leaf in ("qkv_proj", "rotary_emb", "attn", "o_proj"):
        assert sum(tap.endswith(f"self_attn.{leaf}") for tap in layers) == 3, leaf
    by_rule = {p.rule for p in result.pairs}
    assert "mapping qkv_proj ← q_proj, k_proj, v_proj" in by_rule
    assert "mapping x + residual ← the residual stream" in by_rule
    if model == "qwen2.5-vl":
        assert {"visual.blocks.1.mlp.gate_up_proj", "visual.blocks.2.attn.proj", "visual.merger"} <= layers
        assert not any("different images" in note for note in result.notes)


FAULTS = {
    "llama": [{"kind": "scale", "module": "model.layers.1.mlp.down_proj", "factor": 1.2},
              {"kind": "rope", "module": "model.layers.0.self_attn.rotary_emb", "factor": 1.1}],
    "qwen2.5-vl": [{"kind": "scale", "module": "visual.blocks.1.mlp.down_proj", "factor": 1.2}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        pytest.param(model, fault, marks=[] if model == "llama" and not i else pytest.mark.extra("as the first"))
        for model, faults in FAULTS.items()
        for i, fault in enumerate(faults)
    ],
    ids=lambda v: v if isinstance(v, str) else v["module"].rpartition(".")[2],
)
def test_a_planted_fault_is_named_first(engines, goldens, tmp_path, model, fault):
    name = f"{model}-for-transformers-{fault['module']}"
    mine = engines.run(name, model, ASKS[model], fault=fault, max_num_batched_tokens=48)
    assert first_origin(goldens(model), mine, tmp_path / "out") == fault["module"]


CHANGES = {"decay": 1.3, "dt": 0.0, "beta": 20.0, "begun": 0.05, "other": 1.0, "edge": 1.0}
"""What the kernels of a recurrence get otherwise (lab/planted/accprobe_state_kinds.py), and the change's number."""


@pytest.mark.extra("an operator's fault: the test before")
@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_inside_of_a_recurrence_names_it(engines, tmp_path, change):
    entry, root = zoo.table()["qwen3.5"], engines.root / "qwen3.5"
    model = mode_models.of_architecture(entry, root / "model")
    golden = root / "golden"
    tokens = [] if golden.exists() else capture(model, TEXT, golden)
    layer = "model.layers.1.linear_attn"
    fault = {"kind": "recurrence_as", "module": layer, "param": change, "factor": CHANGES[change]}
    how = {"max_num_batched_tokens": 48, "kv_cache_memory_bytes": 1 << 26, **entry.engine}
    mine = engines.host().capture(model, TEXT, out=root / change, fault=fault, **how)
    assert first_origin(Run(golden, tokens), mine, tmp_path / "out") == layer
