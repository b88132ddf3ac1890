"""``accprobe doctor`` as typed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CODE = "import sys; from vllm_accprobe.cli import main; sys.exit(main())"


def run(*arguments, **environ):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "VLLM_PLUGINS"))} | environ
    return subprocess.run(
        [sys.executable, "-c", CODE, "doctor", *arguments], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_json_and_exit_code_0(tmp_path):
    done = run("--quick", "--json", VLLM_ACCPROBE="1", VLLM_ACCPROBE_DIR=str(tmp_path / "d"))
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], done.stderr) == (0, True, "")
    assert {"level", "check", "text", "todo"} == set(report["findings"][0])


def test_what_would_go_wrong_is_exit_code_1(tmp_path):
    done = run("--quick", VLLM_PLUGINS="other", VLLM_ACCPROBE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "error    VLLM_PLUGINS" in done.stdout
    assert " compiled loops " in done.stdout
    assert "→ VLLM_PLUGINS=other,accprobe, or unset it" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("a capture would NOT work: 1 error")


def test_bad_usage_is_exit_code_2():
    assert run("--no-such-option").returncode == 2
    assert run("--timeout", "0").returncode == 2
