"""Ten faults in ten kinds of module: in each of them, the planted module is the one that is named first.

The golden is a clean run with the requests one at a time; mine has the fault, and its requests are batched and chunked,
so that the fault must be found among honest differences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from support.captures import FIVE, VISION, Engines, explain

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Case:
    """``fault``: see tests/faults/accprobe_faults.py. ``culprit``: where it is not the planted module's own path."""

    name: str
    fault: dict[str, Any]
    model: str = "qwen2"
    culprit: str | None = None
    origin: dict[str, Any] = field(default_factory=dict)


FAULTS = [
    Case("norm", {"kind": "eps", "module": "model.layers.1.post_attention_layernorm", "factor": 0.3}),
    Case("rope", {"kind": "rope", "module": "model.layers.0.self_attn.rotary_emb", "factor": 1.1}),
    Case("attention", {"kind": "attn", "module": "model.layers.1.self_attn.attn", "factor": 1.3}),
    Case(
        "linear-row",
        {"kind": "scale", "module": "model.layers.2.mlp.gate_up_proj", "factor": 1.7, "features": [37]},
    ),
    Case(
        "decode-only",
        {"kind": "scale", "module": "model.layers.1.mlp.down_proj", "factor": 1.1, "rows": "decode"},
        origin={"phase": "decode"},
    ),
    Case(
        "one-position",
        {"kind": "scale", "module": "model.layers.3.self_attn.o_proj", "factor": 1.1, "rows": "position:45"},
        origin={"position": 45},
    ),
    Case(
        "one-expert",
        {"kind": "expert", "module": "model.layers.1.mlp.experts", "expert": 3, "factor": 1.2},
        model="qwen2-moe",
    ),
    Case(
        "vision",
        {"kind": "scale", "module": "visual.blocks.1.mlp.down_proj", "factor": 1.1},
        model="qwen2.5-vl",
    ),
    Case("lm-head", {"kind": "head", "module": "lm_head", "factor": 3.0, "features": [100, 101]}),
    Case("sampled-token", {"kind": "sampler"}, culprit="sampler"),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda c: c.name)
def test_planted_module_is_named_first(engines: Engines, compared: Any, case: Case) -> None:
    asks = VISION if case.model == "qwen2.5-vl" else FIVE
    golden = engines.serial(case.model, asks)
    mine = engines.run(f"fault-{case.name}", case.model, asks, fault=case.fault, max_num_batched_tokens=48)
    result = compared(golden, mine)
    assert result.verdict == "fail"
    assert result.origins, explain(result)
    assert result.origins[0]["module"] == (case.culprit or case.fault["module"]), explain(result)
    for key, value in case.origin.items():
        assert result.origins[0][key] == value, explain(result)
