"""``accprobe doctor`` as typed."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli.conftest import Typed


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_json_and_exit_code_0(typed: Typed, tmp_path: Path) -> None:
    done = typed("doctor", "--quick", "--json", VLLM_ACCPROBE="1", VLLM_ACCPROBE_DIR=str(tmp_path / "d"))
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], done.stderr) == (0, True, "")
    assert {"level", "check", "text", "todo"} == set(report["findings"][0])


def test_what_would_go_wrong_is_exit_code_1(typed: Typed, tmp_path: Path) -> None:
    done = typed("doctor", "--quick", VLLM_PLUGINS="other", VLLM_ACCPROBE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "error    VLLM_PLUGINS" in done.stdout
    assert " compiled loops " not in done.stdout  # compiling them takes a second
    assert "→ VLLM_PLUGINS=other,accprobe, or unset it" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("a capture would NOT work: 1 error")
