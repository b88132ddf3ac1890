"""A sampler fault in a real engine: compare and opcheck both name it. scripts/sampler_cases.py has all of them."""

import os
import subprocess
from pathlib import Path

import pytest
from preloaded_vllm import FORKED

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]


def test_penalties_that_forget_are_named_with_and_without_a_golden(tmp_path: Path, preloaded_vllm: Path) -> None:
    command = [str(preloaded_vllm / FORKED), str(ROOT / "scripts" / "sampler_cases.py"), "--out", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "--only", "penalties_of_prompt_alone"], env=env, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "; as if nothing had been generated yet" in ran.stdout
    assert "1 of 1 faults named, 0 passed by a command" in ran.stdout
