"""``accprobe gate --dig`` as typed: by hand where a side is a folder, and what goes wrong; engines: e2e."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_folders import folder

from vllm_accprobe.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder(Path("golden"), 1)
    folder(Path("equal"), 2)
    folder(Path("wrong"), 3, fault=lambda length, k, i: 1.0 if length == 60 and k > 3 else 0.3)
    return tmp_path


def gate(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["gate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_of_folders_the_commands_are_printed(here: Path, capsys: Any) -> None:
    code, plain, _ = gate(capsys, "golden", "wrong")
    assert code == 1
    code, out, err = gate(capsys, "golden", "wrong", "--dig", "--dig-gb", "3")
    assert (code, err) == (1, "")
    assert out.startswith(plain)
    lines = out[len(plain) :].splitlines()
    assert lines[0].startswith("dig: token ")
    assert " of p2 (" in lines[0]
    settings = next(line for line in lines if "VLLM_ACCPROBE_DIR=mine-dump" in line)
    assert "VLLM_ACCPROBE_MAX_GB=3" in settings
    assert "p2" in settings.partition("VLLM_ACCPROBE_REQUESTS=")[2]
    assert sum("accprobe send --along golden " in line for line in lines) == 2
    assert lines[-1] == "  accprobe compare golden-dump mine-dump --out compare"
    code, out, err = gate(capsys, "golden", "wrong", "--dig", "--json")
    assert code == 1
    assert json.loads(out)["verdict"] == "fail"
    assert err.startswith("dig: token ")


def test_a_pass_is_not_dug(here: Path, capsys: Any) -> None:
    code, out, _ = gate(capsys, "golden", "equal", "--dig")
    assert (code, out) == gate(capsys, "golden", "equal")[:2]
    assert code == 0


@pytest.mark.parametrize(("words", "says"), [
    (("golden", "wrong", "--samples", "--dig"), "--dig are for servers"),
    (("golden", "wrong", "--dig", "--dig-gb", "0"), "--dig-gb"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(words: Any, says: str, here: Path, capsys: Any) -> None:
    code, out, err = gate(capsys, *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert says in err
