"""A compiled engine against an eager one: a whole model of unseen operators lies between the taps that both have.

torch.compile's inductor takes a minute here, so that one compiled engine serves all tests. What is planted is planted
in the eager one: an error is a difference, whichever side has it. With taps inside the graph: test_graph_taps.py.
"""

from typing import Any

import pytest
from support.captures import TWO_LAYERS, Engines, explain
from support.engine import Run

from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
ROOT = "<root>"


@pytest.fixture(scope="module")
def compiled(engines: Engines) -> Run:
    return engines.compiled("compiled-untapped", VLLM_ACCPROBE_GRAPH_MB="0")


def test_compiled_against_eager(engines: Engines, compiled: Run, compared: Any) -> None:
    result = compared(engines.serial(TWO_LAYERS), compiled)
    assert result.mine_run["engine"]["eager"] is False
    assert result.verdict == "pass", explain(result)
    root = [p for p in result.pairs if (p.tap, p.role) == (ROOT, "output.0")]
    assert root
    assert not all(p.identical for p in root), "nothing was compiled into other arithmetic"


@pytest.mark.parametrize(("fault", "culprit"), [
    ({"kind": "attn", "module": "model.layers.1.self_attn.attn", "factor": 1.5}, ROOT),
    ({"kind": "scale", "module": "logits_processor", "factor": 1.03}, "logits_processor"),
], ids=["inside", "behind"])  # fmt: skip
def test_a_fault_shows_through_compiled_code(engines, compiled, compared, fault, culprit):
    faulty = engines.run(f"fault-{fault['kind']}-eager", TWO_LAYERS, how="serial", fault=[fault])
    result = compared(faulty, compiled)
    assert result.verdict == "fail", explain(result)
    assert result.origins[0]["module"] == culprit, explain(result)


def test_what_is_compiled_is_skipped_loudly_and_answers_as_without_the_probe(engines: Engines, compiled: Run) -> None:
    """Its tokens are those of a compiled engine without the probe: eager arithmetic may honestly decide a near tie
    otherwise, and does so with the kernels for AVX2."""
    control = engines.uncaptured()
    assert control.dump is None
    assert compiled.tokens == control.tokens
    found = open_dump(compiled.dump)
    assert not found.run["engine"]["eager"]
    assert {"<root>", "logits_processor", "lm_head", "sampler"} <= {r.tap for r in found.records if r.step is not None}
    unseen = {s.tap: s.reason for s in found.skips}
    assert unseen["model"] == "compiled by torch.compile, which calls past its own tap"
    assert "model.layers.0.mlp.down_proj" in unseen
    assert "compiles or captures graphs" in engines.host("inductor").log.read_text(errors="replace")
