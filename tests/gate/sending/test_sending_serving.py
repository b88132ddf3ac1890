"""A command that serves, as it is written: settings in front of it, as in a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_accprobe.gate.sending.client import SendError
from vllm_accprobe.gate.sides import served


def test_settings_in_front_of_a_command(tmp_path: Path) -> None:
    """The program gets them, with blanks and quotes and all; `x=1` behind it is its own word."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "vllm"
    program.write_text('#!/bin/sh\necho "$MODE|$FAULT|$1 $2 $3"\nexit 4\n')
    program.chmod(0o755)
    command = """MODE= FAULT='{"kind": "a=b"}' vllm serve x=1 --port 0"""
    environ = {"PATH": f"{tmp_path / 'bin'}:/bin", "MODE": "old"}
    with pytest.raises(SendError, match="exit code 4"), served(command, environ, tmp_path, 20):
        pass
    assert (tmp_path / "engine-0.log").read_text() == '|{"kind": "a=b"}|serve x=1 --port\n'
    assert environ == {"PATH": environ["PATH"], "MODE": "old"}
    with pytest.raises(SendError, match="write a command"), served("MODE=1", environ, tmp_path, 20):
        pass
