"""`gate --self` with real servers: a clean one passes, and of one whose decode is wrong that path is named."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from vllm_server import Server

from vllm_accprobe.cli import main

pytestmark = pytest.mark.engine
FAULT = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.3, "rows": "decode"}
FAULTS = Path(__file__).parents[2] / "lab" / "planted"


def asked(folder: Path) -> str:
    draw = random.Random(1)
    lines = [
        {"id": f"p{i}", "token_ids": [draw.randrange(20, 500) for _ in range(n)], "max_tokens": 12}
        for i, n in enumerate((20, 50, 90, 140, 200, 300, 150, 30, 25, 40, 60, 80))
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "p.jsonl")


def by_itself(url: str, folder: Path, capsys: Any) -> tuple[int, dict[str, Any]]:
    code = main(["self-check", "--prompts", asked(folder), "--out", str(folder / "out"), "--json", url])
    return code, json.loads(capsys.readouterr().out)


def test_a_clean_server_passes(server: Server, tmp_path: Path, capsys: Any) -> None:
    code, said = by_itself(server.url, tmp_path, capsys)
    assert (code, said["verdict"]) == (0, "pass"), said
    ways = {w["name"]: w for w in said["ways"]}
    assert ways["again"]["unequal"] == 0
    assert {name: w["prompts"] for name, w in ways.items()} == {
        "again": 12, "batch": 12, "hit": ways["hit"]["prompts"], "pieces": 4, "scoring": 12
    }  # fmt: skip
    assert ways["hit"]["prompts"] >= 4  # of a block or more


def test_a_decode_that_is_wrong_is_named(served_model: Path, preloaded_vllm: Path, tmp_path: Path, capsys: Any) -> None:
    env = {"ACCPROBE_FAULT": json.dumps(FAULT), "PYTHONPATH": str(FAULTS), "VLLM_ACCPROBE_FORCE": "1"}
    args = ["--enforce-eager", "--enable-prompt-tokens-details"]
    env |= {"OMP_NUM_THREADS": "1"}
    with Server(served_model, log=tmp_path / "server.log", env=env, args=args, vllm=preloaded_vllm / "vllm") as faulty:
        code, said = by_itself(faulty.url, tmp_path, capsys)
    assert (code, said["odd"]) == (1, ["scoring"]), said
