"""Taps in graphs that are captured and replayed, held against what the platform's own log says of each piece.

One engine with taps at all modules; requests one at a time, so that a request of n tokens is one step of n rows, padded
to a captured size or too large for any.
"""

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import captured_bench as bench
import pytest
from support.engine import Ask, EngineHost
from support.prompts import prompts
from tiny_model import make

from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import Record, StepGraph

pytestmark = pytest.mark.engine
LENGTHS = (1, 2, 3, 5, 9)
PIECES = 5
Taken = tuple[Dump, list[bench.PieceCall]]


@pytest.fixture(scope="module")
def taken(captured_host: tuple[EngineHost, Path]) -> Taken:
    host, folder = captured_host
    options = bench.options(log=folder / "steps", fill=math.nan)
    settings = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_GRAPHS": "1", "VLLM_ACCPROBE_MODULES": "all"}
    run = host.capture(
        make("qwen2", folder / "model"), [Ask(ids, 2) for ids in prompts(*LENGTHS)], out=folder / "dump-all",
        how="serial", env=options | settings, **bench.engine(),
    )  # fmt: skip
    assert run.dump is not None
    return open_dump(run.dump), [call for call in bench.calls(folder / "steps") if call.real and call.size < 100]


def digests(dump: Dump, records: Iterable[Record]) -> dict[str, set[str]]:
    """As the log makes them: which tensors have these bytes."""
    found: dict[str, set[str]] = {}
    for r in records:
        digest = hashlib.sha256(dump.read(r).tobytes()).hexdigest()[:16]
        found.setdefault(digest, set()).add(r.name.removesuffix("@padding"))
    return found


def test_a_step_says_which_graph_computed_it(taken: Taken) -> None:
    dump, calls = taken
    steps = [step for _, step in sorted((key[1], step) for key, step in dump.steps.items())]
    last = calls[PIECES - 1 :: PIECES]
    assert [step.graph for step in steps] == [
        StepGraph("PIECEWISE", call.size) if call.did == "replay" else None for call in last
    ]
    assert [step.batch["tokens"] for step in steps] == [call.real for call in last]
    assert {step.graph.size if step.graph else 0 for step in steps} == {1, 2, 4, 8, 0}


def test_what_a_piece_computed_is_in_the_dump_under_its_modules(taken: Taken) -> None:
    """Of each replayed piece the log has the bytes of its first output, those of its real rows and of its padding."""
    dump, calls = taken
    pieces: list[list[str]] = dump.run["engine"]["graphs"]["pieces"]
    assert dump.run["engine"]["graphs"]["between"] == [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    assert len(pieces) == PIECES
    padded = 0
    for step in range(len(calls) // PIECES):
        rows = digests(dump, (r for r in dump.records if r.step == step and r.payload))
        padding = digests(dump, (r for r in dump.padding if r.step == step))
        for call in calls[step * PIECES :][:PIECES]:
            names = {name for name in rows.get(call.rows, ()) if name.rpartition("/")[0] in pieces[call.piece]}
            assert names, (step, call)
            if call.size > call.real:
                padded += 1
                assert names & padding[call.padding], (step, call)
    assert padded == 2 * PIECES, "of 3 rows at size 4 and 5 at size 8"


def test_nothing_of_the_padding_is_stored_twice_or_elsewhere(taken: Taken) -> None:
    dump, calls = taken
    want = {step: call.size - call.real for step, call in enumerate(calls[::PIECES]) if call.size > call.real}
    assert {(r.step, r.shape[0]) for r in dump.padding} == set(want.items())
    taps = {(r.step, r.name) for r in dump.records if r.step in want and inside(r)}
    assert {(r.step, r.name.removesuffix("@padding")) for r in dump.padding} == taps
    assert not any(problem for problem in dump.problems)


def inside(r: Any) -> bool:
    return r.tap.startswith("model.") and r.rows == "tokens"


def test_every_layer_has_its_own_call_of_the_one_rotary_embedding(taken: Taken) -> None:
    dump, _ = taken
    found = {(r.tap, r.call) for r in dump.records if "rotary_emb" in r.tap and r.role == "output.0"}
    assert found == {(f"model.layers.{i}.self_attn.rotary_emb", 0) for i in range(4)}


def test_the_full_set_has_the_output_of_every_module_that_runs(taken: Taken) -> None:
    """But of the compiled module itself: 98 % and more of what an eager capture has."""
    dump, _ = taken
    inside = {module.tap for module in dump.modules[0] if module.tap.startswith("model")}
    outputs = {r.tap for r in dump.records if r.role == "output.0"}
    reasons = {skip.tap: skip.reason for skip in dump.skips}
    runs = {tap for tap in inside if not reasons.get(tap, "").startswith(("a container", "never called"))}
    assert runs - outputs == {"model"}
    assert reasons["model"].startswith("compiled by torch.compile")
    assert len(runs & outputs) / len(runs) > 0.98
