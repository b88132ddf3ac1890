"""What `accprobe doctor --graphs` proves of a real engine that traces its model: the tap that changes it is named.

Taps stand in one layer of two; a planted fault makes one module compute something else where it has a tap, as a fusion
that is torn apart does. Seven engines of one process, with a cache of their own: two without taps, two with, three to
find the module. Starting commands and servers: tests/cli/test_doctor_graphs.py.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.captures import TWO_LAYERS, Engines
from support.engine import Ask
from support.prompts import prompt

from vllm_accprobe.config import PREFIX
from vllm_accprobe.doctor.graph_proof import CHANGED, Prover, Runs, TapRun, lines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extra("seven engines; taps change nothing: test_graph_taps.py; the search: tests/doctor/test_proof.py"),
]
ASKS = [Ask(prompt(21, 1), 4), Ask(prompt(9, 2), 4)]
GUILTY = "model.layers.1.mlp.gate_up_proj"


def test_a_tap_that_changes_the_result_is_named(engines: Engines, tmp_path: Path) -> None:
    model = engines.model(TWO_LAYERS)
    host = engines.new_host(tmp_path / "log", {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_CPU_CI_ENV": "1"})
    fault = [{"kind": "tapped", "module": GUILTY, "factor": 1.02}]

    def serve(run: TapRun) -> Sequence[str]:
        settings = {name: value for name, value in run.environ.items() if name.startswith(PREFIX)}
        host.capture(model, ASKS, out=run.place, fault=fault, how="serial", env=settings, enforce_eager=False)
        return ()

    said: list[str] = []
    runs = Runs({PREFIX + "GRAPH_TAPS": "*.1.*_proj,*.1.*.attn"}, tmp_path / "runs")
    try:
        proof = Prover(runs, serve, said.append, time.monotonic).prove()
    finally:
        host.close()
    told = "\n".join([*said, *lines(proof)])
    assert (proof.verdict, proof.repeats) == (CHANGED, True), told
    off, again, on, selected, *rest = proof.runs
    assert (off.taps, again.taps, on.taps, selected.taps) == (0, 0, 5, 5), told
    assert (again.same, on.same, selected.same) == (True, False, False), told
    assert on.graphs["key"] == selected.graphs["key"], "choosing modules has compiled again"
    # the root's rows of two prompts, and of three of four tokens each: the last one's forward never runs
    assert again.outcome is not None
    assert (again.outcome.root.rows, again.outcome.logits.rows) == (21 + 9 + 2 * 3, 2 * 4)
    assert selected.parting is None, "fewer chosen taps show other values"
    (culprit,) = proof.culprits
    assert (culprit.module, culprit.before) == (GUILTY, 3), told
    assert {ran.same for ran in rest} == {True, False}, told
    changed = json.loads((runs.on().place / "run.json").read_text())["engine"]["graphs"]["changed"]
    assert (changed["root"], changed["against"], changed["module"]) == (True, "off", GUILTY)
    assert 0 < changed["root_rel_l2"] < 1
