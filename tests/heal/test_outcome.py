"""What a rank has healed: its file, its lines, and how `accprobe run --heal` ends."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe.cli import main
from vllm_accprobe.heal.outcome import HealOutcome, lines, read

ONE = HealOutcome(0, healed={"a.attn": 3, "a.mlp": 0}, left={"b": "no reference for B", "c": "no reference for B"},
                  some={"a.attn": {"tied": 1, "unknown rows": 2}})  # fmt: skip
TWO = HealOutcome(1, problem="nothing is healed on rank 1: the engine is compiled")
SAID = [
    "heal: nothing is healed on rank 1: the engine is compiled",
    "healed: 3 calls of 1 module were replaced by their reference: a.attn",
    "not healed: b, c: no reference for B",
    "in part: a.attn: unknown rows",
]


def test_the_file_comes_back_and_strangers_are_left_out(tmp_path: Path) -> None:
    for one in (TWO, ONE):
        one.write(tmp_path)
    assert oct((tmp_path / "heal" / "rank0000.json").stat().st_mode & 0o777) == "0o600"
    for number, text in enumerate(("[]", "{", '{"healed": 1}', '{"rank": 0, "problem": "", "healed": [], "left": {}}')):
        (tmp_path / "heal" / f"rank9{number}.json").write_text(text)
    assert read(tmp_path) == [ONE, TWO]
    assert lines([ONE, TWO]) == SAID
    assert read(tmp_path / "missing") == lines([]) == []
    many = HealOutcome(0, healed={f"m{n}": 1 for n in range(9)})
    assert lines([many]) == ["healed: 9 calls of 9 modules were replaced by their reference: m0, m1, m2, m3, m4, m5 "
                             "and 3 more"]  # fmt: skip


SCRIPT = """
import os, pathlib
from vllm_accprobe.heal.outcome import HealOutcome
print(os.environ["VLLM_ACCPROBE_HEAL"], os.environ.get("VLLM_ACCPROBE_ARMED"))
HealOutcome(0, healed={"a.attn": 3}).write(pathlib.Path(os.environ["VLLM_ACCPROBE_DIR"]))
"""
PYTHON = [sys.executable, "-c", SCRIPT]
ENDS: dict[str, tuple[list[str], int, str, str]] = {
    "healed": (["--heal", "a.attn", "--", *PYTHON], 0, "a.attn 0", f"accprobe: {SAID[1]}\n"),
    "captured too": (["--heal", "a.attn", "--tokens", "0", "--", *PYTHON], 0, "a.attn None", f"accprobe: {SAID[1]}\n"),
    "nothing": (["--heal", "a.attn", "--", "true"], 3, "", "NOTHING was healed: no process of it loaded vLLM's plugin"),
    "it fails": (["--heal", "a.attn", "--", "exit 7"], 7, "", "the command failed before its model was loaded"),
    "graphs": (["--heal", "a", "--graphs", "--", "true"], 2, "", "VLLM_ACCPROBE_HEAL needs an eager engine"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_how_a_run_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    words, code, out, err = ENDS[name]
    for variable in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        monkeypatch.delenv(variable)
    assert main(["run", "-d", str(tmp_path / "out"), *words]) == code
    said = capfd.readouterr()
    assert out in said.out
    assert err in said.err
    assert "NOTHING was captured" not in said.err
