"""action.yml as it stands: its steps are run in bash with a workflow's inputs, on two real servers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.prompts import prompts
from vllm_server import ENV, SMALL

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
PLANTED = "model.layers.2.mlp.down_proj"
FAULT = json.dumps({"kind": "scale", "module": PLANTED, "factor": 1.06})


def action() -> dict[str, Any]:
    said: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return said


def filled(text: str, values: dict[str, str]) -> str:
    """``text`` with ``${{ name }}`` as GitHub fills it in. KeyError where the action asks for what nobody gives."""
    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda m: values[m[1]], text)


def steps(at: Path, inputs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The steps that compare, and the verdict, as a runner takes them; what is printed, and the last one's code."""
    out, summary = at / "github-output", at / "github-summary"
    values = {f"inputs.{name}": str(one.get("default", "")) for name, one in action()["inputs"].items()}
    values |= {f"inputs.{name}": value for name, value in inputs.items()}
    values["github.action_path"] = str(ROOT)
    said = ""
    for step in action()["runs"]["steps"]:
        if step["name"] in ("Install accprobe", "Comment"):  # installed already; nobody to tell
            continue
        assert "${{" not in step["run"]  # an input in a script would be run
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
        env |= ENV | {"OMP_NUM_THREADS": "1", "GITHUB_OUTPUT": str(out), "GITHUB_STEP_SUMMARY": str(summary)}
        env |= {name: filled(value, values) for name, value in step["env"].items()}
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=at, env=env,
                              capture_output=True, text=True, timeout=400)  # fmt: skip
        said += done.stdout + done.stderr
        if out.exists():
            values |= {f"steps.compare.outputs.{line.split('=')[0]}": line.split("=", 1)[1]
                       for line in out.read_text().splitlines()}  # fmt: skip
    return subprocess.CompletedProcess([], done.returncode, said, "")


@pytest.fixture
def serve(engines, preloaded_vllm, tmp_path, monkeypatch):
    """The command of a right server; the prompts lie there."""
    path = os.pathsep.join([str(preloaded_vllm), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    lines = [json.dumps({"id": f"p{i}", "token_ids": ids}) + "\n" for i, ids in enumerate(prompts(20, 27))]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    return f"vllm serve {engines.model('qwen2')} {' '.join(SMALL)} --enforce-eager"


@pytest.mark.engine
def test_two_servers_and_the_verdict(serve: str, tmp_path: Path) -> None:
    wrong = f"PYTHONPATH={ROOT / 'lab' / 'planted'} ACCPROBE_FAULT={shlex.quote(FAULT)} {serve}"
    done = steps(tmp_path, {"prompts": "prompts.jsonl", "tokens": "0-1", "golden": serve, "mine": wrong})
    assert done.returncode == 1, done.stdout[-3000:]
    comment = (tmp_path / "accprobe-out" / "comment.md").read_text()
    assert PLANTED in comment
    assert comment in (tmp_path / "github-summary").read_text()
    assert (tmp_path / "accprobe-out" / "report" / "compare.html").exists()


@pytest.mark.engine
@pytest.mark.extra("the action: the test before; a clean pair: test_clean_pairs.py")
def test_an_earlier_run_s_folder_as_the_golden_starts_no_server(serve: str, tmp_path: Path) -> None:
    inputs = {"prompts": "prompts.jsonl", "tokens": "0-1", "golden": serve, "mine": serve}
    assert steps(tmp_path, inputs).returncode == 0
    done = steps(tmp_path, inputs | {"golden": "accprobe-out", "out": "second"})
    assert done.returncode == 0, done.stdout[-3000:]
    assert not (tmp_path / "second" / "golden").exists()


def test_a_folder_without_a_golden_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    done = steps(tmp_path, {"golden": "empty", "mine": "vllm serve MODEL"})
    assert done.returncode == 2
    assert "error: empty has no golden and golden-sent" in done.stdout
    assert "Nothing was compared" in (tmp_path / "github-summary").read_text()
