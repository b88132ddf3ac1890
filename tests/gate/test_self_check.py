"""Which way is named, of made-up answers whose rounding lies on the logits' grid."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_paths import FakePaths

from vllm_accprobe.gate import self_check
from vllm_accprobe.gate.self_check import REQUESTS, OwnPath, SaltedSender, SelfGate, judge, step
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.prompts import GRAMMAR, PromptLine
from vllm_accprobe.report.servers import self_check_json as to_json, self_check_lines as lines

STEP = 2.0**-5
WAYS = list(REQUESTS)


def answers(
    seed: int, *, wrong: dict[str, float] | None = None, only: int = 0, exact: tuple[str, ...] = ("alone", "again")
) -> dict[str, dict[str, Reply]]:
    """By way, of 12 prompts. wrong: by way, how far its logits are off; only: of prompts from this number on."""
    found: dict[str, dict[str, Reply]] = {}
    for n, way in enumerate(WAYS):
        found[way.name] = {}
        draw = np.random.default_rng((seed, n))
        for i in range(12):
            base = np.random.default_rng((seed, 77, i))
            logits = np.floor(np.sort(base.uniform(2, 12, (24, 8)), axis=1)[:, ::-1] / STEP) * STEP
            logits[:, 0] += 6.0  # no flips
            if way.name not in exact:
                logits = logits + np.round(draw.normal(0, 1.0, logits.shape)) * STEP
            if i >= only:
                size = (wrong or {}).get(way.name, 0.0)
                logits = logits + size * np.random.default_rng((seed, 5, i)).choice((-1, 1), logits.shape)
            top = [([int(100 * k + j) for j in range(8)], [float(v) for v in row - 20]) for k, row in enumerate(logits)]
            ids = [t[0][0] for t in top]
            values: list[float | None] = [t[1][0] for t in top]
            margins: list[float | None] = [t[1][0] - t[1][1] for t in top]
            cached = 16 if way.before else 0
            found[way.name][f"p{i}"] = Reply(f"p{i}", 0, 0.1, [1, 2, i], ids, values, top, margins, "length", cached)
    return found


def named(**wrong: float) -> SelfGate:
    return judge(WAYS, answers(1, wrong=wrong))


def test_equal_servers_pass() -> None:
    """No false alarm in 12: what is allowed is four times what the others show, and rounding never is."""
    assert [judge(WAYS, answers(seed)).outliers for seed in range(12)] == [()] * 12
    exact = tuple(w.name for w in WAYS)
    gate = judge(WAYS, answers(1, exact=exact))
    assert gate.verdict == "pass"
    assert {f.why for f in gate.findings} == {"the same bits", "the same numbers"}
    # Where all the others are equal to the bit, one that rounds is still within the steps of the logits.
    assert judge(WAYS, answers(1, exact=tuple(n for n in exact if n != "scoring"))).verdict == "pass"


@pytest.mark.parametrize("name", ["batch", "hit", "pieces", "scoring"])
def test_the_odd_way_is_named(name: str) -> None:
    gate = named(**{name: 0.5})
    assert (gate.verdict, gate.outliers, gate.agree) == ("fail", (name,), None)
    assert lines(gate)[0].startswith(f"FAIL: only {name} differs: ")
    assert to_json(gate)["odd"] == [name]


def test_ways_that_are_wrong_do_not_excuse_one_another() -> None:
    """Three of four are off by 5 nats, in other tokens each: their middle is no measure of rounding."""
    assert named(hit=5.0, pieces=5.0, scoring=5.0).outliers == ("hit", "pieces", "scoring")


def test_one_bit_of_the_same_request_is_a_fault() -> None:
    said = answers(1)
    reply = said["again"]["p3"]
    said["again"]["p3"] = replace(reply, logprobs=[*(reply.logprobs or [])[:-1], -1.0])
    gate = judge(WAYS, said)
    assert gate.outliers == ("again",)
    (found,) = [f for f in gate.findings if f.ok is False]
    assert (found.unequal, found.outliers) == (1, ("p3",))


def test_a_fault_of_few_prompts_is_seen_in_their_tokens() -> None:
    gate = judge(WAYS, answers(1, wrong={"hit": 0.5}, only=11))
    assert gate.outliers == ("hit",)
    assert gate.findings[2].outliers == ("p11",)


def test_two_odd_ways_and_the_odd_first_one() -> None:
    assert (named(hit=0.5, pieces=0.5).outliers, named(hit=0.5, pieces=0.5).agree) == (("hit", "pieces"), True)
    assert lines(named(hit=0.5, pieces=-0.5))[0] == "FAIL: hit and pieces differ"
    all_but_alone = dict.fromkeys(("batch", "hit", "pieces", "scoring"), 0.8)
    gate = named(**all_but_alone)
    if gate.verdict == "fail":
        assert lines(gate)[0].endswith("one request at a time is the outlier")


def test_what_met_the_cache_otherwise_is_left_out() -> None:
    said = answers(1)
    said["hit"] = {n: replace(r, cached=0) for n, r in said["hit"].items()}
    said["batch"]["p1"] = replace(said["batch"]["p1"], cached=32)
    gate = judge(WAYS, said, missing={"hit": "no prompt was long enough"})
    found = {f.way.name: f for f in gate.findings}
    assert (found["hit"].ok, found["hit"].left_out) == (None, {self_check.NO_HIT: 12})
    assert found["batch"].left_out == {self_check.NOT_FRESH: 1}
    assert any(line.startswith("not compared: hit: no prompt was long enough") for line in lines(gate))


def test_another_start_may_round_otherwise() -> None:
    """Where the way that must be equal had to be started anew, rounding is told and is no fault; more is one."""
    ways = [*WAYS[:2], OwnPath("sync", "synchronous", "the same bits", add=("--x",)), WAYS[2]]
    said = answers(1)
    said["sync"] = said["hit"]
    said["sync"] = {n: replace(r, cached=0) for n, r in said["sync"].items()}
    gate = judge(ways, said)
    assert gate.verdict == "pass"
    assert "another start" in gate.findings[1].why
    off = {n: replace(r, cached=0) for n, r in answers(1, wrong={"hit": 0.5})["hit"].items()}
    assert judge(ways, said | {"sync": off}).outliers == ("sync",)


# --- what is asked, and of which command ---


def test_restarts_are_what_the_command_is_not() -> None:
    words = ["vllm", "serve", "M"]
    found = {w.name: self_check.path_command(words, w) for w in self_check.restarts(words, 2000)}
    assert found == {
        "eager": "vllm serve M --enable-prompt-tokens-details --enforce-eager",
        "sync": "vllm serve M --enable-prompt-tokens-details --no-async-scheduling",
        "sync-batch": "vllm serve M --enable-prompt-tokens-details --no-async-scheduling",
        "chunks": "vllm serve M --enable-prompt-tokens-details --long-prefill-token-threshold=256",
    }
    other = [*words, "--enforce-eager", "--no-async-scheduling", "--enable-prompt-tokens-details"]
    found = {w.name: self_check.path_command(other, w) for w in self_check.restarts(other, 10)}
    assert found == {
        "compiled": "vllm serve M --no-async-scheduling --enable-prompt-tokens-details",
        "async": "vllm serve M --enforce-eager --enable-prompt-tokens-details --async-scheduling",
        "async-batch": "vllm serve M --enforce-eager --enable-prompt-tokens-details --async-scheduling",
    }


def test_pieces_are_whole_blocks() -> None:
    assert self_check.pieces(128) == []
    assert self_check.pieces(129) == [128]
    assert self_check.pieces(512) == [128, 256, 384]
    assert self_check.pieces(8000) == [2048, 4096, 6144]


# --- what meets the cache, and what does not ---


PATHS = {w.name: w for w in REQUESTS}


def test_only_what_is_to_hit_hits() -> None:
    how = {"min_tokens": 4, "temperature": 0}
    fake, line = FakePaths(), PromptLine("p", token_ids=tuple(range(300)), max_tokens=4, parameters=how)
    with fake.serve() as (url, seen):
        cached: dict[str, Any] = {}
        replies: dict[str, Any] = {}
        for name, path in PATHS.items():
            forced = "scored" if path.scored else "accprobe" if path.before else None
            asked = replace(line, along=tuple(replies["alone"].token_ids or ())) if forced else line
            sender = SaltedSender(url, model="tiny", top=5, own=path, salt="s", way=forced)
            reply = replies[name] = sender.ask(asked, "p", {}, time.monotonic())
            cached[name] = reply.cached
            assert reply.refused is None
    assert cached == {"alone": 0, "again": 0, "batch": 0, "hit": 288, "pieces": 256, "scoring": None}
    assert [c for _, _, c in fake.salts] == [0, 0, 0, 0, 288, 0, 128, 256, 0]
    assert len({salt for salt, *_ in fake.salts}) == len(PATHS)
    assert len({request for _, request in seen}) == len(seen)
    scored, alone = replies["scoring"], replies["alone"]
    assert scored.token_ids == alone.token_ids
    assert len(scored.logprobs or ()) == len(scored.top or ()) == 4
    assert scored.prompt_token_ids == alone.prompt_token_ids


def test_what_a_grammar_forbids_is_not_scored() -> None:
    """Only a server that decodes applies it: the two paths have other numbers anyway."""
    base = {"p": Reply("p", 0.0, 0.0, [1] * 300, [7, 8])}
    for name in ("top_p", *GRAMMAR):
        lines = [PromptLine("p", token_ids=(1,) * 300, parameters={name: {}})]
        sent = {path: len(self_check._lines(lines, base, PATHS[path], "accprobe")) for path in ("hit", "scoring")}
        assert sent == {"hit": 1, "scoring": int(name not in GRAMMAR)}


# --- the step of the logits, from log-probabilities ---


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(("size", "steps"), [(5.0, {2**-5, 2**-4}), (20.0, {2**-3, 2**-4})])
def test_bfloat16_shows_its_spacing(size: float, steps: set[float]) -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        logits = bfloat16(draw.uniform(size * 0.85, size * 1.5, 20))
        normal = np.float32(np.log(np.exp(logits.astype(np.float64)).sum()))
        said = sorted((float(v) for v in logits - normal), reverse=True)
        assert step(said) in steps


def test_float32_has_none() -> None:
    values = np.sort(np.random.default_rng(2).normal(-5, 2, 20).astype(np.float32))[::-1]
    assert step([float(v) for v in values]) == 0.0
    assert step([]) == step([-1.0, -2.0]) == 0.0
