"""Three faults of the laboratory, and with ``--all`` a dozen: in each, the planted module is the one named first.

Mine has the fault, and its requests are batched and chunked; the golden served them one at a time, in float32, or on
two ranks, so that the fault must be found among honest differences. All: ``python -m lab.faults``, docs/laboratory.md.
"""

from typing import Any

import pytest
from support.captures import FIVE, VISION, Engines, explain
from support.engine import Run

from lab.cases import CASES, Case

pytestmark = pytest.mark.engine

DOZEN: dict[str, dict[str, Any]] = {
    "norm-eps": {}, "rope-one-percent": {}, "softmax-scale": {}, "one-head": {}, "kv-slot-zero": {"position": 21},
    "down-weight-row": {}, "decode-only": {"phase": "decode"}, "one-position": {"position": 45}, "logits-scale": {},
    "sampler": {}, "one-expert": {}, "merger": {},
}  # fmt: skip
"""Names of cases, and what the first origin must say besides the module."""
HANDFUL = ("norm-eps", "kv-slot-zero", "decode-only")
"""A module of its own, the cache, one phase. Two ranks, float32: test_clean_pairs.py; a parameter: test_weights.py;
what has no tensor output, the sampler: test_masked_logits.py; a picture's encoder: test_golden_engine.py."""


def golden(engines: Engines, case: Case) -> Run:
    """The clean run of a case's golden kind. Those that the clean pairs need, too, are made once for both."""
    if case.golden == "tp2":
        return engines.run("tp2", host="tp2", tensor_parallel_size=2, distributed_executor_backend="mp")
    asks = VISION if case.model == "qwen2.5-vl" else FIVE
    if case.golden == "float32":
        name = "float32" if case.model == "qwen2" else f"{case.model}-float32"
        return engines.run(name, case.model, asks, how="serial", dtype="float32")
    assert case.golden == "serial"
    return engines.serial(case.model, asks)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in HANDFUL else pytest.mark.extra("as HANDFUL"))
        for c in CASES
        if c.name in DOZEN
    ],
)
def test_planted_module_is_named_first(each_engines: Engines, compared: Any, case: Case) -> None:
    asks = VISION if case.model == "qwen2.5-vl" else FIVE
    mine = each_engines.run(f"fault-{case.name}", case.model, asks, fault=case.faults, max_num_batched_tokens=48)
    result = compared(golden(each_engines, case), mine)
    assert result.verdict == "fail"
    assert result.origins, explain(result)
    assert result.origins[0]["module"] in case.expected, explain(result)
    for key, value in DOZEN[case.name].items():
        assert result.origins[0][key] == value, explain(result)


def test_the_dozen_is_one() -> None:
    assert len([c for c in CASES if c.name in DOZEN]) == 12
    assert set(HANDFUL) <= set(DOZEN)
