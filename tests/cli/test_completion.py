"""Completion by the shells' own means: what bash runs, what it is answered, and that nothing heavy is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ACCPROBE = Path(sys.executable).with_name("accprobe")


def asked(script: str) -> str:
    """What a real bash prints after it took accprobe's completion and ran ``script``."""
    path = f"{ACCPROBE.parent}{os.pathsep}{os.environ['PATH']}"
    taken = 'eval "$(_ACCPROBE_COMPLETE=source_bash accprobe)"\n'
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", taken + script],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def completed(words: str) -> list[str]:
    """The answers of the function that bash's ``complete`` names, for the last of ``words``."""
    return asked(
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_accprobe_completion accprobe; printf '%s\\n' \"${COMPREPLY[@]}\""
    ).split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_and_options():
    assert "-F _accprobe_completion accprobe" in asked("complete -p accprobe")
    assert completed("accprobe opc") == ["opcheck"]
    assert set(completed("accprobe op")) == {"opcheck", "opdiff"}
    assert "--format" in completed("accprobe compare --fo")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str):
    done = subprocess.run(
        [str(ACCPROBE)], env={**os.environ, "_ACCPROBE_COMPLETE": f"source_{shell}"}, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "accprobe" in done.stdout
    assert "_ACCPROBE_COMPLETE" in done.stdout
    assert not done.stderr


def test_completing_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'numba', 'pandas', 'plotly', 'rich', 'vllm'}"
    code = (
        "import sys\nfrom vllm_accprobe.cli import main\n"
        "try:\n    main([])\nexcept SystemExit:\n    pass\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "_ACCPROBE_COMPLETE": "complete_bash", "COMP_WORDS": "accprobe compare --fo", "COMP_CWORD": "2",
        },
        capture_output=True, text=True,
    )  # fmt: skip
    assert "--format" in done.stdout.split()
    assert done.stderr.strip() == "[]"
