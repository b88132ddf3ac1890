"""The control file: what it may say, and whose it must be."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmFileError, ArmSelection
from vllm_accprobe.config import matches


@pytest.mark.parametrize("selection", [
    ArmSelection(False),
    ArmSelection(),
    ArmSelection(True, ("a*", "!ab"), ((0, 4), (7, 7)), ("layers", "!*.mlp"), ((0, 0),)),
    ArmSelection(True, requests=()),
    ArmSelection(True, rows={"p0": ((0, 0), (31, 33)), "p1": ((7, 7),)}),
])  # fmt: skip
def test_there_and_back(selection: ArmSelection, tmp_path: Path) -> None:
    path = arm_file.write(tmp_path, selection)
    assert path == tmp_path / "arm.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert arm_file.read(path) == selection
    arm_file.write(tmp_path, ArmSelection(False))
    assert arm_file.read(path) == ArmSelection(False)
    assert [p.name for p in tmp_path.iterdir()] == ["arm.json"]


def test_a_wide_umask_and_a_planted_part(tmp_path: Path) -> None:
    """The part of the file that somebody has put there as a link leads nowhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "arm.json.part").symlink_to(victim)
    before = os.umask(0)
    try:
        path = arm_file.write(tmp_path, ArmSelection())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert victim.read_text() == "mine"
    assert not path.is_symlink()


@pytest.mark.parametrize(("text", "rows"), [
    ("0-4,2-7", ((0, 7),)), ("3,3", ((3, 3),)), ("0-9,2-3,11", ((0, 9), (11, 11))), ("0-1,2", ((0, 1), (2, 2))),
])  # fmt: skip
def test_each_row_once(text: str, rows: Any) -> None:
    assert arm_file.parse_selection({"rows": {"p0": text}}).rows == {"p0": rows}


@pytest.mark.parametrize(("value", "says"), [
    ([], "no object"),
    ({"request": "a"}, "'request' is none of on, requests, tokens, modules, steps, rows; did you mean requests?"),
    ({"on": 1}, "on is true or false"),
    ({"on": "no"}, "on is true or false"),
    ({"requests": 3}, "requests is a list of globs"),
    ({"requests": ["a", 3]}, "requests is a list of globs"),
    ({"requests": None}, "requests is a list of globs"),
    ({"tokens": "4-1"}, "ends before it begins"),
    ({"tokens": [1]}, "tokens is a text"),
    ({"tokens": True}, "tokens is a text"),
    ({"steps": "x"}, "is not a number"),
    ({"modules": {}}, "modules is a list of globs"),
    ({"rows": "0-3"}, "rows is an object"),
    ({"rows": {"p0": [1]}}, "rows is an object"),
    ({"rows": {"p0": "4-1"}}, "ends before it begins"),
    ({"rows": {"p0": ""}}, "rows: a request has no positions"),
])  # fmt: skip
def test_what_it_may_not_say(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ArmFileError) as error:
        arm_file.parse_selection(value)
    assert says in str(error.value)
    path = tmp_path / "arm.json"
    path.write_text(json.dumps(value))
    path.chmod(0o600)
    with pytest.raises(ArmFileError):
        arm_file.read(path)


def hostile(path: Path, kind: str) -> None:
    text = json.dumps({"on": True})
    if kind == "link":
        (path.parent / "other").write_text(text)
        (path.parent / "other").chmod(0o600)
        path.symlink_to("other")
        return
    if kind == "fifo":
        os.mkfifo(path, 0o600)
        return
    if kind == "directory":
        path.mkdir(0o600)
        return
    text = {"large": json.dumps({"requests": ["x" * (1 << 16)]}), "not json": "{", "binary": "\0" * 9,
            "deep": "[" * 60000}.get(kind, text)  # fmt: skip
    path.write_text(text)
    path.chmod({"wide": 0o640, "wider": 0o602, "run": 0o700}.get(kind, 0o600))
    if kind == "two names":
        os.link(path, path.parent / "second")


@pytest.mark.parametrize(("kind", "says"), [
    ("link", "it is a link"), ("fifo", "no plain file"), ("directory", "no plain file"), ("large", "than 64 KiB"),
    ("not json", "no json"), ("binary", "no json"), ("deep", "no json"), ("wide", "0640"), ("wider", "0602"),
    ("run", "0700"), ("two names", "second name"),
])  # fmt: skip
def test_what_it_may_not_be(kind: str, says: str, tmp_path: Path) -> None:
    hostile(tmp_path / "arm.json", kind)
    with pytest.raises(ArmFileError) as error:
        arm_file.read(tmp_path / "arm.json")
    assert says in str(error.value)


def test_of_another_user(tmp_path: Path) -> None:
    path = arm_file.write(tmp_path, ArmSelection())
    with pytest.raises(ArmFileError, match="another user"):
        arm_file.read(path, owner=os.geteuid() + 1)
    with pytest.raises(FileNotFoundError):
        arm_file.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize("name", ["p0001", "a*b", "what?", "[x]", "!no", "a,b", "!*[]?,"])
def test_a_glob_of_one_name(name: str) -> None:
    glob = arm_file.literal(name)
    assert "," not in glob
    assert matches((glob,), (name,))
    assert not matches((glob,), (f"{name}x",))
    assert not matches((glob,), ("other",))
