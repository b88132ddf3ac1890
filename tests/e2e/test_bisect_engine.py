"""``accprobe bisect`` with real servers: a fault that needs prefix caching; what is kept is not run again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import make
from vllm_server import ENV, SMALL

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extra("four servers; two and a fault: test_digging.py; the search: tests/cli/test_bisect.py"),
]
ROOT = Path(__file__).resolve().parents[2]


def test_a_fault_that_needs_prefix_caching(preloaded_vllm: Path, tmp_path: Path) -> None:
    model = make("qwen2", tmp_path / "model")
    lines = [{"id": f"p{i}", "token_ids": [*range(40 + i, 80 + i), 9], "max_tokens": 3} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fault = {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.5, "when": "prefix"}
    path = os.pathsep.join([str(ROOT / "lab" / "planted"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = os.environ | ENV | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environ |= {"PATH": f"{preloaded_vllm}{os.pathsep}{environ['PATH']}", "ACCPROBE_FAULT": json.dumps(fault)}
    serve = ["vllm", "serve", str(model), *SMALL, "--enforce-eager"]
    words = [sys.executable, "-m", "vllm_accprobe.cli", "bisect", "--out", "out", "--prompts", "prompts.jsonl",
             "--only", "prefix caching", "--json", "--", *serve]  # fmt: skip
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["runs"], found["ran"]) == ("found", 4, 4)
    (cause,) = found["causes"]
    assert [s["name"] for s in cause["settings"]] == ["prefix caching"]
    assert (cause["alone"]["outcome"], cause["without"]["outcome"]) == ("fail", "pass")
    assert cause["commands"]["passes"].endswith("--no-enable-prefix-caching")
    again = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert json.loads(again.stdout)["ran"] == 0
