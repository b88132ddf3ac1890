"""Labels inside a real vLLM on two ranks: each knows its step, rank, request and position; files are collected. Beside
them, torch_xray's PrecisionDebugger as its users paste it into execute_model."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.captures import FIVE, Engines
from support.engine import ROOT, TP2_ENV, Run

from vllm_accprobe.cli import main
from vllm_accprobe.comparison.labelled_pairs import LabelComparison, compare_labels
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
LAYERS = 4


@pytest.fixture(scope="module")
def labelled(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Five requests together; in layer 2 of rank 1 the last row is spoilt."""
    root = tmp_path_factory.mktemp("labelled")
    paths = [ROOT / "tests" / "labels" / "plugin", ROOT / "lab" / "planted"]
    env = {
        **TP2_ENV, "PYTHONPATH": os.pathsep.join(map(str, paths)), "ACCPROBE_LABELLED": "layer=2,rank=1",
        "ATB_OUTPUT_DIR": str(root / "atb"), "ACCPROBE_XRAY": str(root / "xray"),
    }  # fmt: skip
    host = engines.new_host(root / "log", env)
    try:
        yield host.capture(
            engines.model("qwen2"), FIVE, out=root / "dump", env={"VLLM_ACCPROBE_MODULES": "lm_head"}, **TWO
        )
    finally:
        host.close()


@pytest.fixture(scope="module")
def found(labelled: Run) -> LabelComparison:
    assert labelled.dump is not None
    return compare_labels(open_dump(labelled.dump))


def test_every_layer_of_every_step_and_rank_is_a_pair(labelled: Run, found: LabelComparison) -> None:
    assert labelled.dump is not None
    dump = open_dump(labelled.dump)
    assert dump.problems == []
    steps = {step for _, step in dump.steps}
    keys = {(p.step, p.rank, p.data_id) for p in found.pairs}
    assert keys == {(s, r, f"mlp.{layer}") for s in steps for r in (0, 1) for layer in range(LAYERS)}
    assert len(found.pairs) == len(keys)
    assert found.unpaired == []
    assert found.skipped == {}
    assert all(p.compared for p in found.pairs), [p.reason for p in found.pairs if not p.compared]


def test_a_labels_rows_are_the_steps_requests_and_positions(labelled: Run) -> None:
    assert labelled.dump is not None
    dump = open_dump(labelled.dump)
    for r in dump.records:
        if r.tap.startswith("label:"):
            assert r.rows == "tokens"
            assert r.step is not None
            space = dump.rows[r.rank, r.step, "tokens"]
            assert r.shape[0] == space.n == sum(s.n for s in space.segments)
    first = dump.rows[0, min(step for _, step in dump.steps), "tokens"]
    found = {(dump.requests[0, s.req].id, s.pos, s.n) for s in first.segments}
    assert found == {(f"ask-{n}", 0, len(ask.ids)) for n, ask in enumerate(FIVE)}


def test_the_fault_is_found_where_it_is(labelled: Run, found: LabelComparison) -> None:
    assert labelled.dump is not None
    failed = [p for p in found.pairs if p.status == "fail"]
    assert {(p.rank, p.data_id) for p in failed} == {(1, "mlp.2")}
    dump = open_dump(labelled.dump)
    for p in failed:
        last = dump.rows[1, p.step, "tokens"].segments[-1]  # the plugin spoils the last row of each step
        assert (p.request, p.position) == (dump.requests[1, last.req].id, last.pos + last.n - 1)
        assert p.rel_euclid is not None
        assert 0.001 < p.rel_euclid < 0.06
    assert len(failed) == len({step for _, step in dump.steps})


def test_files_are_collected_and_belong_to_their_execution(labelled: Run, found: LabelComparison) -> None:
    """Bit for bit: an execution's file belongs to its step, though warm-up has executed before."""
    assert labelled.dump is not None
    low = [p for p in found.pairs if p.data_id in ("mlp.1", "mlp.3")]
    assert low
    for p in low:
        assert p.acl is not None
        assert p.acl.path.startswith(f"rank{p.rank:04d}/label-")
        assert p.acl.path.endswith(".bin")
        assert p.rel_euclid == 0.0


def test_the_command(labelled: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labels", str(labelled.dump), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("FAIL: ")
    assert "mlp.2 (step 0, rank 1)" in said[1]
    with open(tmp_path / "labels.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert {row["cmp_flag"] for row in rows} == {"True"}


def test_a_debugger_in_execute_model_as_in_torch_xrays_guide(labelled: Run) -> None:
    """On the chosen rank, the first step of the chosen module; its labels too."""
    assert labelled.dump is not None
    dump = open_dump(labelled.dump.parent / "xray")
    (said,) = dump.problems
    assert said.startswith("rank 1 of 2 is missing (others were chosen)")
    assert dump.ranks == (0,)
    assert {step for _, step in dump.steps} == {1}
    taps = {r.tap for r in dump.records}
    assert {"<root>", "self_attn.qkv_proj", "mlp.down_proj", "label:mlp.0"} <= taps
    assert not any(tap.startswith("label:mlp.1") for tap in taps)
    tokens = sum(len(ask.ids) for ask in FIVE)
    assert next(r for r in dump.records if r.name == "<root>/output.0").shape[0] == tokens


def test_a_labelled_model_computes_what_it_did(engines: Engines, labelled: Run) -> None:
    assert labelled.tokens == engines.run("tp2", host="tp2", **TWO).tokens  # a capture that other tests need, too
