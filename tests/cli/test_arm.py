"""``accprobe arm`` as typed: what it writes, and where it refuses."""

import json
from pathlib import Path
from typing import Any

from dumps import writer

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmSelection
from vllm_accprobe.cli import main


def arm(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["arm", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_on_and_off(tmp_path: Path, capsys: Any) -> None:
    words = ("--requests", "a*,!ab", "--tokens", "0-4,7", "--modules", "layers", "--steps", "0-9")
    code, out, err = arm(capsys, str(tmp_path), *words)
    path = tmp_path / "arm.json"
    assert (code, out, err) == (0, f"armed: the server reads {path} at its first step, once it has one\n", "")
    assert json.loads(path.read_text()) == {
        "on": True, "requests": ["a*", "!ab"], "tokens": "0-4,7", "modules": ["layers"], "steps": "0-9"
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    running = writer(tmp_path)
    try:
        code, out, _ = arm(capsys, str(tmp_path), "--off")
        assert (code, out) == (0, f"disarmed: the server reads {path} before its next step\n")
    finally:
        running.close("test", {})
    assert arm_file.read(path) == ArmSelection(False)
    code, out, err = arm(capsys, str(tmp_path))
    assert (code, out) == (2, "")
    assert err == f"accprobe: {tmp_path}: no server writes into this dump any more\n"
    assert arm_file.read(path) == ArmSelection(False)
