"""Commands as typed, in the test's own process: a process of their own takes a second, and proves nothing more where
no signal, no terminal and no fresh interpreter is in question."""

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from vllm_accprobe.cli import main

ROOT = Path(__file__).resolve().parents[2]
Typed = Callable[..., CompletedProcess[str]]


def environ(more: dict[str, str]) -> dict[str, str]:
    """A budget that any disk has free: less than the default of 20 GB is one more line."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "SMALL_", "ATB_", "ASCEND", "ACL"))}
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_ACCPROBE_MAX_GB": "0.5"} | more


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Typed:
    """A command's words and further variables → exit code, stdout and stderr, of what it starts too. In tmp_path."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - environ({}).keys():
        monkeypatch.delenv(name)

    def run(*words: str | Path, **env: str) -> CompletedProcess[str]:
        for name, value in environ(env).items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        code = main([str(word) for word in words])
        said = capfd.readouterr()
        return CompletedProcess(words, code, said.out, said.err)

    return run
