"""The ledger of states in real engines: faults told as what they are, silence where there is none, and compare's word.

One process builds all engines (state_lab.py), as scripts/state_cases.py does, which has more cases."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from preloaded_vllm import FORKED

from vllm_accprobe.cli import main
from vllm_accprobe.dump.journal import StateFinding
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    "hits", "fp8", "fp8-dropped-row", "preemption-hits", "freed", "stale-slot", "other-state", "late-load",
    "compiled-flipped-bit",
)  # fmt: skip
MORE = ("falcon-h1", "dropped-row", "compiled-stale-slot")
"""With ``--all``."""
LABELLED: dict[str, str] = {"VLLM_ACCPROBE_STATES": "full"}


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, preloaded_vllm: Path) -> Path:
    """Dumps of CASES."""
    out = tmp_path_factory.mktemp("states")
    command = [
        str(preloaded_vllm / FORKED),
        str(ROOT / "scripts" / "state_cases.py"),
        "--out",
        str(out),
        "--only",
        ",".join([*CASES, *(MORE if request.config.getoption("--all") else ())]),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return out


def findings(told: Path, name: str) -> list[StateFinding]:
    return [one for _, one in open_dump(told / name).states]


@pytest.mark.parametrize("name", [
    "hits", "fp8", "preemption-hits",
    pytest.param("falcon-h1", marks=pytest.mark.extra("as hits; a recurrence: other-state")),
])  # fmt: skip
def test_clean_runs_are_silent(told: Path, name: str) -> None:
    dump = open_dump(told / name)
    assert (dump.states, dump.problems) == ([], [])
    totals = dump.state_totals[0]
    assert totals.layers >= 4
    assert min(totals.hashed, totals.checked, totals.held) > 0
    assert totals.skipped == {}
    if name == "preemption-hits":
        assert totals.events["reuse"] > 0
        assert totals.events["resume after preemption"] > 0 or totals.events["prefix hit"] > 0


def test_a_block_freed_while_it_is_read(told: Path) -> None:
    (found,) = [one for one in findings(told, "freed") if one.kind == "freed"]
    assert (found.request, found.low, found.writer) == ("a", 0, "a")
    assert "was assigned to request 'c' in step" in found.how


def test_a_stale_slot(told: Path) -> None:
    (found,) = findings(told, "stale-slot")
    assert (found.kind, found.request, found.low) == ("stale", "a", found.high)
    assert found.slot is not None
    assert f"written to slot {found.slot - 1} of block {found.block}" in found.how


@pytest.mark.parametrize(("name", "kind", "layer"), [
    ("compiled-flipped-bit", "changed", "model.layers.2.self_attn.attn"),
    pytest.param("compiled-stale-slot", "stale", "", marks=pytest.mark.extra("the fault: stale-slot")),
])  # fmt: skip
def test_a_compiled_engine_is_watched_around_its_forward(told: Path, name: str, kind: str, layer: str) -> None:
    assert not json.loads((told / name / "run.json").read_text())["engine"]["eager"]
    (found,) = findings(told, name)
    assert (found.kind, found.request) == (kind, "a")
    assert found.layer == layer if layer else found.layers == 4


@pytest.mark.extra("a row left out: the next test")
def test_a_row_that_the_kernel_leaves_out(told: Path) -> None:
    (found,) = findings(told, "dropped-row")
    assert (found.kind, found.request, found.layer) == ("stale", "b", "model.layers.1.self_attn.attn")


def test_a_row_that_is_left_out_of_a_cache_of_8_bits(told: Path) -> None:
    """The write is tried again, so its rows are rounded anew, to the very same codes."""
    (found,) = findings(told, "fp8-dropped-row")
    assert (found.kind, found.request, found.layer) == ("stale", "b", "model.layers.1.self_attn.attn")


def test_the_state_of_another_request(told: Path) -> None:
    found = findings(told, "other-state")
    assert {(one.kind, one.cache, one.request) for one in found} == {("other", "state", "a"), ("other", "state", "b")}
    assert "assigned to request 'b'" in found[0].how


def test_two_ledgers_alone_are_compared(told: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sides = ["compare", str(told / "hits")]
    assert main([*sides, str(told / "fp8"), "--out", str(tmp_path / "clean")]) == 0
    assert "PASS: nothing wrong in what was compared: mine's ledger of states in" in capfd.readouterr().out
    assert main([*sides, str(told / "fp8-dropped-row"), "--out", str(tmp_path / "wrong")]) == 1
    said = capfd.readouterr().out
    assert "FAIL: the cache, not the kernel: a stale slot" in said
    assert "no tensors were compared" in said


def test_a_copy_that_comes_late(told: Path) -> None:
    found = findings(told, "late-load")
    assert {one.kind for one in found} == {"late"}
    assert all(one.between == (f"transfer in step {one.step - 1}",) for one in found)


def test_beside_a_capture_compare_says_the_cache(engines, tmp_path, capsys):
    """The lines stand in the capture's journal, the answers are those of the bare engine, and a finding fails a
    comparison of equal tensors."""
    bare = engines.run("bare", host="bare")
    mine = engines.run("states-full", env=LABELLED)
    golden = engines.run("plain")
    assert mine.tokens == bare.tokens
    assert mine.dump is not None
    totals = open_dump(mine.dump).state_totals[0]
    assert (totals.mode, totals.findings) == ("full", 0)
    planted: dict[str, Any] = {
        "event": "state", "step": 1, "kind": "freed", "cache": "kv", "group": 0, "layer": "", "layers": 4, "block": 3,
        "request": "ask-1", "how": "it was given away",
    }  # fmt: skip
    journal = mine.dump / "rank0000" / "journal.jsonl"
    kept = journal.read_bytes()
    journal.write_bytes(kept + json.dumps(planted).encode() + b"\n")
    try:
        code = main(["compare", str(golden.dump), str(mine.dump), "--out", str(tmp_path / "out")])
        said = capsys.readouterr().out
        assert main(["inspect", str(mine.dump), "states"]) == 0
    finally:
        journal.write_bytes(kept)
    assert code == 1
    assert "FAIL: the cache, not the kernel: a block freed while it is still read: step 1" in said
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    (origin,) = result["origins"]
    assert (origin["module"], origin["class"], origin["role"]) == ("cache group 0", "KV cache", "cache")
    assert origin["request"] == "ask-1"
    assert origin["shape"].startswith("a block freed while it is still read: step 1")
    assert result["states"]["mine"]["findings"][0]["block"] == 3
    assert "the cache, not the kernel: a block freed" in capsys.readouterr().out


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, preloaded_vllm: Path) -> dict[str, Any]:
    """What compare says of two engines of one process, beside their golden ones."""
    out = tmp_path_factory.mktemp("pairs")
    command = [str(preloaded_vllm / FORKED), str(ROOT / "scripts" / "state_pairs.py"), "--out", str(out), "--only",
               "adapter-shared,tokens-stale"]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    lines = map(json.loads, (out / "pairs.jsonl").read_text().splitlines())
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize(("name", "named", "says"), [
    ("adapter-shared", "cache",
     "request 'b' (adapter adapter2) reads blocks 0-1 (positions 0 to 63), which request 'a' (adapter"),
    ("tokens-stale", "<root>/input.input_ids", "the runner, not the model: the token id of request 'a' in row 41"),
])  # fmt: skip
def test_a_capture_names_the_cache_and_the_runner_by_default(name, named, says, pairs):
    """Two adapters that share prefix blocks (vllm 30931), and tokens that are fed again: not the attention, with
    default settings."""
    assert (pairs[name]["named"], pairs[name]["exit"]) == (named, 1)
    assert says in pairs[name]["said"]
