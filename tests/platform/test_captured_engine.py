"""A whole engine on the captured platform: it pads, captures and replays, and serves what it serves without graphs.

One process (conftest.py) builds all engines, one after another: with graphs, without, with each planted fault, and at
last with the probe's taps, which must name the faults. A fault must change what is served exactly where it can be:
the requests are sent one at a time, so that a request of n tokens is one step of n rows, padded to a captured size or
too large for any, and then steps of one row.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import captured_bench as bench
import pytest
from support.captures import explain
from support.engine import Ask, EngineError, EngineHost, Run
from support.prompts import prompts
from tiny_model import make

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.gaps import taps_of

pytestmark = pytest.mark.engine

LENGTHS = range(1, 11)
MIXED = [
    Ask(ids, tokens, sampling={"logprobs": 5})
    for ids, tokens in zip(prompts(1, 3, 12, 2, 5, 8, 4, 7, 6, 9), (20, 18, 22, 14, 16, 12, 6, 8, 3, 5), strict=True)
]
ONE_BY_ONE = [Ask(ids, 2, sampling={"logprobs": 5}) for ids in prompts(*LENGTHS)]
PIECES = 5
"""The tiny Qwen2 has four layers; its model is cut at their attentions."""

Served = tuple[Run, list[bench.PieceCall]]
Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(captured_host: tuple[EngineHost, Path]) -> Serve:
    host, folder = captured_host
    done: dict[str, Served] = {}

    def once(
        how: str = "serial", *, graphs: bool = True, faults: Sequence[Mapping[str, Any]] = (), taps: bool = False
    ) -> Served:
        name = "-".join([how, str(graphs), str(taps), *(fault["kind"] for fault in faults)])
        if name not in done:
            asks, log = MIXED if how == "staggered" else ONE_BY_ONE, folder / name
            fill = math.nan if how == "staggered" else 1.0
            options = bench.options(log=log, faults=faults, fill=fill)
            options |= {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_GRAPHS": "1"} if taps else {"VLLM_ACCPROBE": ""}
            model = make("qwen2", folder / "model")
            run = host.capture(
                model, asks, out=folder / f"dump-{name}", how=how, env=options, **bench.engine(graphs=graphs)
            )
            done[name] = run, bench.calls(log)
        return done[name]

    return once


def steps(calls: list[bench.PieceCall]) -> list[bench.PieceCall]:
    """The last piece's calls that served somebody: one a step."""
    return [call for call in calls if call.piece == PIECES - 1 and call.real and call.size < 100]


def differing(one: Run, other: Run) -> list[tuple[int, int]]:
    """(length of the prompt, which token) wherever the bits of a token's log-probabilities differ, or the token."""
    rows = [(a.tokens[i], a.logprobs[i]) for a in (one, other) for i in range(len(LENGTHS))]
    pairs = zip(LENGTHS, rows[: len(LENGTHS)], rows[len(LENGTHS) :], strict=True)
    return [
        (length, token)
        for length, (mine, liked), (theirs, likes) in pairs
        for token in range(len(mine))
        if (mine[token], liked[token]) != (theirs[token], likes[token])
    ]


def test_each_piece_is_captured_once_a_size_and_then_replayed(serve: Serve) -> None:
    _, calls = serve("staggered")
    captures = Counter((call.piece, call.size) for call in calls if call.did == "capture")
    assert captures == {(piece, size): 1 for piece in range(PIECES) for size in bench.SIZES}
    small = [step for step in steps(calls) if step.did == "replay"]
    large = [step for step in steps(calls) if step.did == "plain"]
    assert {step.real for step in small} == set(range(1, 9)), "every number of rows that fits"
    assert large
    assert min(step.real for step in large) > max(bench.SIZES)
    replays = [call for call in calls if call.did == "replay"]
    assert len(replays) == PIECES * len(small)


def test_a_replay_runs_no_python_and_writes_where_the_capture_wrote(serve: Serve) -> None:
    _, calls = serve("staggered")
    at = {(call.piece, call.size): call.at for call in calls if call.did == "capture"}
    for call in calls:
        assert call.bodies == (call.did != "replay"), call
        if call.did == "replay":
            assert call.at == at[call.piece, call.size]


def test_rows_are_padded_to_a_captured_size_and_the_padding_is_not_empty(serve: Serve) -> None:
    _, calls = serve()
    prefills = steps(calls)[::2]
    assert [(step.real, step.size) for step in prefills] == [
        (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (6, 8), (7, 8), (8, 8), (9, 9), (10, 10)
    ]  # fmt: skip
    padded = [step for step in prefills if step.size > step.real]
    assert not any(step.zero for step in padded), "what stands there is what was computed from an earlier step's rows"


def test_with_graphs_it_serves_what_it_serves_without(serve: Serve) -> None:
    """Tokens, and the log-probabilities of the five likeliest, bit for bit, though where attention writes nothing, in
    its rows of padding, stands NaN: nobody reads them."""
    (captured, calls), (plain, none) = serve("staggered"), serve("staggered", graphs=False)
    assert none == [], "nothing is wrapped without graphs"
    padded = [step for step in steps(calls) if step.size > step.real]
    assert {step.nan for step in padded} == {True, False}, "or what an earlier, fuller step has left there"
    assert captured.tokens == plain.tokens
    assert captured.logprobs == plain.logprobs
    assert [len(likely[0]) >= 5 for likely in plain.logprobs] == [True] * len(MIXED)


SMALL = [
    {"kind": "share", "piece": 2, "size": 2},
    {"kind": "size", "piece": 1, "size": 4, "factor": 1.5},
    {"kind": "leak", "piece": 1, "size": 8, "factor": 1.0},
]
"""Each at a captured size of its own, so that one engine has them all, and the prompt's length says which one it is."""


@pytest.mark.parametrize(("faults", "shows"), [
    (SMALL, lambda n, token: n == 2 or n in (3, 4) or n in (5, 6, 7)),
    ([{"kind": "stale", "piece": 1, "input": "positions"}], lambda n, token: token == 1 or 1 < n <= 8),
], ids=["share, size and leak", "stale"])  # fmt: skip
def test_planted_faults_show_where_they_can_and_nowhere_else(serve, faults, shows):
    """In the first (0) or second (1) token after a prompt of n. The second comes from a step of one row; it is wrong,
    too, where the first step has left wrong keys and values. Stale positions are those of the capture, all 0: right
    for a prompt of one token. Without padding, at 8 of 8 rows, nothing leaks; 9 and 10 fit into no graph."""
    expected = [(n, token) for n in LENGTHS for token in (0, 1) if shows(n, token)]
    (clean, before), (faulty, after) = serve(), serve(faults=faults)
    assert differing(clean, faulty) == expected
    assert [(c.did, c.size, c.bodies) for c in before] == [(c.did, c.size, c.bodies) for c in after]


def test_a_replay_with_an_input_at_another_address_is_refused(serve: Serve) -> None:
    with pytest.raises(EngineError, match="Input addresses for cudagraphs are different"):
        serve(faults=[{"kind": "move", "piece": 1, "input": "positions"}])


# --- with the probe's taps, behind all others: the process is patched from here on ---------------------------------

NAMED = [
    {"kind": "leak", "piece": 2, "size": 8, "factor": 0.5, "at": "product#0"},
    {"kind": "size", "piece": 3, "size": 4, "factor": 1.1, "at": "product#2"},
]
"""In one engine: padding that leaks in the second layer, NaN to begin with, and one captured size that is wrong in the
third, of which that NaN leaves too few steps to say so."""


def test_taps_show_the_same_rows_with_graphs_and_without(serve: Serve) -> None:
    """Padded against plain: every row has its partner, and the sampled tokens are those of an engine without taps."""
    (captured, _), (plain, _) = (serve("staggered", graphs=graphs, taps=True) for graphs in (True, False))
    assert captured.tokens == plain.tokens == serve("staggered")[0].tokens
    result = compare(plain.dump, captured.dump)
    assert result.verdict == "pass", explain(result)
    assert result.counts.bit_identical == result.counts.compared
    assert not result.coverage["rows_only_golden"]
    assert not result.coverage["rows_only_mine"]
    assert any("rows of padding" in why for why in result.coverage["skipped"])


def test_faults_of_captured_graphs_are_named_with_piece_size_and_padding(serve: Serve) -> None:
    (plain, _), (faulty, _) = serve("staggered", graphs=False, taps=True), serve("staggered", faults=NAMED, taps=True)
    result = compare(plain.dump, faulty.dump)
    found = {taps_of(origin)[0]: origin["graph"] for origin in result.origins}  # no sampler that is given NaN is there
    leak, size = found["model.layers.1.self_attn.o_proj"], found["model.layers.2.mlp.down_proj"]
    assert result.origins[0]["graph"] is leak, explain(result)
    assert (leak["condition"], leak["sizes"], leak["piece"]) == ("size and padding", [8], 2)
    assert leak["in_padding"].startswith("rows of padding hold")
    assert (size["condition"], size["piece"]) == (None, 3)
