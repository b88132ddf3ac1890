"""A compiled engine against an eager one: a whole model of unseen operators lies between the taps that both have.

torch.compile's inductor takes a minute here, so that one compiled engine serves all tests. What is planted is planted
in the eager one: an error is a difference, whichever side has it. With taps inside the graph: test_graph_taps.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.captures import Engines, explain
from support.engine import Run

pytestmark = pytest.mark.engine
ROOT = "<root>"


@pytest.fixture(scope="module")
def compiled(engines: Engines) -> Run:
    return engines.compiled("compiled-untapped", VLLM_ACCPROBE_GRAPH_MB="0")


def test_compiled_against_eager(engines: Engines, compiled: Run, compared: Any) -> None:
    result = compared(engines.serial(), compiled)
    assert result.mine_run["engine"]["eager"] is False
    assert result.verdict == "pass", explain(result)
    root = [p for p in result.pairs if (p.tap, p.role) == (ROOT, "output.0")]
    assert root
    assert not all(p.identical for p in root), "nothing was compiled into other arithmetic"


@pytest.mark.parametrize(("fault", "culprit"), [
    ({"kind": "attn", "module": "model.layers.1.self_attn.attn", "factor": 1.5}, ROOT),
    ({"kind": "scale", "module": "logits_processor", "factor": 1.03}, "logits_processor"),
], ids=["inside", "behind"])  # fmt: skip
def test_a_fault_shows_through_compiled_code(
    engines: Engines, compiled: Run, compared: Any, fault: dict[str, Any], culprit: str
) -> None:
    faulty = engines.run(f"fault-{fault['kind']}-eager", how="serial", fault=[fault])
    result = compared(faulty, compiled)
    assert result.verdict == "fail", explain(result)
    assert result.origins[0]["module"] == culprit, explain(result)
