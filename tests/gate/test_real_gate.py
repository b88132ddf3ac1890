"""``accprobe gate`` of a running `vllm serve` and a command with a planted fault: from two servers to the condition."""

from __future__ import annotations

import json
import os
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from vllm_server import ENV, SMALL, Server

from vllm_accprobe.cli import main
from vllm_accprobe.gate.sending import replies

pytestmark = pytest.mark.engine
FAULTS = Path(__file__).resolve().parents[2] / "lab" / "planted"
FAULT = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.05, "rows": "decode"}


def test_a_fault_in_decode(
    server: Server,
    served_model: Path,
    preloaded_vllm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Golden's own batches are the limit here, which on a CPU is none: another two servers would be a minute."""
    draw = random.Random(5)
    asked = [{"id": f"decode{i}", "token_ids": [draw.randrange(10, 500) for _ in range(12 + 13 * i)]} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, value in (
        ENV | {"OMP_NUM_THREADS": "1", "ACCPROBE_FAULT": json.dumps(FAULT), "PYTHONPATH": path}
    ).items():
        monkeypatch.setenv(name, value)
    command = shlex.join(
        [
            str(preloaded_vllm / "vllm"),
            "serve",
            str(served_model),
            "--host=127.0.0.1",
            *SMALL,
            "--max-num-batched-tokens=64",
            "--enforce-eager",  # as golden is, which captures: what is compiled rounds in other places
        ]
    )
    out = tmp_path / "out"
    words = ["gate", server.url, command, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(out), "--max-tokens=6"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAIL: further away than golden is from itself in batches, only decode (8 prompts")
    golden, mine = (replies.read(out / side) for side in ("golden", "mine"))
    assert [p["arrive"] for p in mine.about["passes"]] == ["one", "all", "score"]
    for p in (0, 1):
        assert {n: r.token_ids for n, r in mine.passes[p].items()} == {
            n: r.token_ids for n, r in golden.passes[0].items()
        }
    rows = replies.read_steps(out / "mine").rows(0, "decode7")
    assert [row[1] for row in rows[:2]] == [0, 64]
    table = {c["condition"]: c for c in json.loads((out / "gate.json").read_text())["cells"]}
    # A last chunk of one row is decode to the fault, and prefill to the table.
    assert table["prefill"]["away"] < table["decode"]["away"]
    assert table["decode"]["away"] > 0.01
    assert {"chunk 1", "chunk 2-3"} <= table.keys()
    assert main(words) == 1
    assert len(list((out / "mine").glob("engine-*.log"))) == 1
