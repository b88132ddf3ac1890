"""Taps inside a compiled engine: looking changes nothing, what they show is what eager shows, and a fault is found.

Engines: inductor without taps (shared with test_compiled.py), with them, and with some of them chosen; one that only
traces (dynamo, torch's eager backend) with a fault, whose compiled code no other may find in a cache.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.captures import Engines, explain
from support.engine import Run

from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
KERNELS = [
    f"model.layers.{i}.{name}"
    for i in range(4)
    for name in ("self_attn.qkv_proj", "self_attn.attn", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


@pytest.fixture(scope="module")
def untapped(engines: Engines) -> Run:
    return engines.compiled("compiled-untapped", VLLM_ACCPROBE_GRAPH_MB="0")


@pytest.fixture(scope="module")
def tapped(engines: Engines) -> Run:
    return engines.compiled("compiled-tapped")


@pytest.fixture(scope="module")
def masked(engines: Engines) -> Run:
    some = {"VLLM_ACCPROBE_MODULES": "*.1.*_proj,logits,<root>", "VLLM_ACCPROBE_STEPS": "1-3"}
    return engines.compiled("compiled-masked", **some)


def hashes(run: Run) -> dict[tuple[int | None, str, str, int], str]:
    assert run.dump is not None
    return {(r.step, r.tap, r.role, r.call): r.hash for r in open_dump(run.dump).records if r.step is not None}


def test_looking_changes_no_bit(untapped: Run, tapped: Run, masked: Run) -> None:
    """Of the root's inputs and outputs, the logits, the top logits and the sampled tokens, in every step."""
    assert untapped.tokens == tapped.tokens == masked.tokens
    without, all_, some = hashes(untapped), hashes(tapped), hashes(masked)
    assert {(tap, role) for _, tap, role, _ in without} >= {("sampler", "output.top_logits"), ("<root>", "output.0")}
    assert without.items() <= all_.items()
    assert some.items() <= all_.items()
    inside = {(step, tap) for step, tap, _, _ in some if tap.startswith("model")}
    chosen = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert inside == {(step, f"model.layers.1.{name}") for step in (1, 2, 3) for name in chosen}


def test_the_dump_says_what_was_compiled(tapped: Run, masked: Run) -> None:
    assert tapped.dump is not None
    assert masked.dump is not None
    all_, some = (open_dump(dump).run["engine"]["graphs"] for dump in (tapped.dump, masked.dump))
    assert (all_["mode"], all_["backend"], all_["set"]) == ("DYNAMO_TRACE_ONCE", "inductor", "default")
    assert (all_["taps"], all_["chosen"], all_["rows"]) == (len(KERNELS), len(KERNELS), 512)
    assert (some["taps"], some["chosen"]) == (len(KERNELS), 4)
    assert all_["key"] == some["key"], "choosing modules would compile again"


def test_compiled_against_eager(engines: Engines, tapped: Run, compared: Any) -> None:
    result = compared(engines.serial(), tapped)
    assert result.verdict == "pass", explain(result)
    outputs = {p.tap for p in result.pairs if p.role == "output.0"}
    assert outputs >= set(KERNELS)
    assert not result.coverage["rows_only_golden"]
    assert not result.coverage["rows_only_mine"]


def test_a_fault_of_the_compiled_engine_is_named(engines: Engines, compared: Any) -> None:
    fault = [{"kind": "attn", "module": "model.layers.1.self_attn.attn", "factor": 1.5}]
    faulty = engines.run(
        "fault-in-graph", host="dynamo", fault=fault, env={"VLLM_ACCPROBE_GRAPHS": "1"}, enforce_eager=False
    )
    result = compared(engines.serial(), faulty)
    assert result.verdict == "fail", explain(result)
    assert result.origins[0]["module"] == "model.layers.1.self_attn.attn", explain(result)
