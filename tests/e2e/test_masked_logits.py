"""Structured output and word lists against plain requests: what a grammar forbids is not the sampler's fault."""

from dataclasses import replace
from typing import Any

import pytest
from support.captures import Engines, explain
from support.engine import Ask
from support.opchecked import check
from support.prompts import prompt

from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, CheckResult

pytestmark = pytest.mark.engine
PLAIN = [Ask(prompt(20, 1)), Ask(prompt(30, 2)), Ask(prompt(25, 3))]
GRAMMAR = {"regex": "[a-z ]{30,60}"}
STRUCTURED = [PLAIN[0], replace(PLAIN[1], structured=GRAMMAR), PLAIN[2]]


def sampled(run: Any) -> list[CheckResult]:
    """What a replay of the sampler alone finds."""
    return list(check(Calls(open_dump(run.dump), None), default_references(), ops=["sampler"]))


def masks(run: Any) -> dict[str, set[tuple[str, ...]]]:
    dump = open_dump(run.dump)
    found: dict[str, set[tuple[str, ...]]] = {}
    for (rank, _, req), mask in dump.masks.items():
        found.setdefault(dump.requests[rank, req].id, set()).add(mask.by)
    return found


def test_a_grammar_in_one_run_is_said_and_nobody_blamed(engines: Engines, compared: Any) -> None:
    """With the V1 runner: V2's bitmask kernel does not run in Triton's interpreter ("mask has unsupported dtype")."""
    plain, structured = (
        engines.run(f"masks-{name}", asks=asks) for name, asks in (("plain", PLAIN), ("grammar", STRUCTURED))
    )
    assert plain.tokens[1] != structured.tokens[1]
    assert masks(plain) == {}
    assert masks(structured) == {"ask-1": {("a grammar",)}}
    result = compared(plain, structured)
    assert result.verdict == "pass", explain(result)
    assert result.origins == []
    (flip,) = result.tokens["flipped"]
    assert (flip["request"], flip["why"], flip["masked"]) == ("ask-1", "logits were masked", {"mine": ["a grammar"]})
    assert result.notes[0].startswith("logits were masked by a grammar in mine only (request 'ask-1', generated token ")
    # two runs with the grammar: its rows are compared to the end
    again = engines.run("masks-again", asks=STRUCTURED, how="serial")
    assert compared(structured, again).tokens == {"compared": 24, "flipped": []}


@pytest.mark.parametrize("host", ["v1", pytest.param("v2", marks=pytest.mark.extra("the runner: test_clean_pairs.py"))])
def test_everything_else_that_masks_is_named(engines: Engines, host: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "allowed token ids": {"allowed_token_ids": list(range(100, 140))}, "bad words": {"bad_words": ["the", "fox"]},
        "a logit bias": {"logit_bias": {300: 50.0}}, "penalties": {"repetition_penalty": 1.5},
        "a minimum of tokens": {"min_tokens": 8, "stop_token_ids": [77]},
    }  # fmt: skip
    asks = [Ask(prompt(10, i), 8, sampling=sampling) for i, sampling in enumerate(ways.values())]
    run = engines.run(f"masks-kinds-{host}", asks=[*asks, Ask(prompt(10, 9), 8)], host=host)
    assert masks(run) == {f"ask-{i}": {(word,)} for i, word in enumerate(ways)}
    # what was left and taken of each row follows from its own request
    rows = {role: [r for r in sampled(run) if r.role == role] for role in ("output.token", "output.masked_logits")}
    for found in rows.values():
        assert found, rows
        assert {r.status for r in found} == {PASS}, [r.message for r in found if r.status != PASS]
        assert all(r.checked == r.rows for r in found)


def test_a_sampler_that_is_wrong_under_the_same_masks_is_found(engines: Engines, compared: Any) -> None:
    asks = [Ask(prompt(20, i), 8, sampling={"allowed_token_ids": list(range(100, 140))}) for i in range(3)]
    golden, same = (
        engines.run(f"masks-{name}", asks=asks, how=how) for name, how in (("a", "together"), ("b", "serial"))
    )
    assert compared(golden, same).tokens["flipped"] == []
    result = compared(golden, engines.run("masks-wrong", asks=asks, fault={"kind": "sampler"}))
    assert result.verdict == "fail", explain(result)
    assert [o["module"] for o in result.origins] == ["sampler"], explain(result)
    assert {f["why"] for f in result.tokens["flipped"]} == {"sampler"}
    wrong = [r for r in sampled(engines.run("masks-wrong", asks=asks, fault={"kind": "sampler"})) if r.status == FAIL]
    assert {r.role for r in wrong} == {"output.token"}  # without a golden
