"""A vendor's switches: read as they stand, and one line for whatever else is in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe.gate.bisect.edits import BisectError, command
from vllm_accprobe.gate.bisect.edits import read_vendor as read

TARGET = command(["vllm", "serve", "M", "--kernels", "fast"], {"VENDOR_NORM": "1", "OFF": "0"})
GOOD = """
[[switch]]
name = "norm"
environment = "VENDOR_NORM"
plain = "0"
[[switch]]
name = "gone"
environment = "VENDOR_NORM"
[[switch]]
name = "off already"
environment = "OFF"
plain = 0
[[switch]]
name = "kernels"
option = "--kernels"
[[switch]]
name = "words"
words = ["--vendor-plain"]
"""


def test_what_differs_is_an_axis(tmp_path: Path) -> None:
    file = tmp_path / "switches.toml"
    file.write_text(GOOD)
    found = {a.name: a for a in read(file, TARGET)}
    assert list(found) == ["norm", "gone", "kernels", "words"]
    assert TARGET.edited([found["norm"].edit]).full()["VENDOR_NORM"] == "0"
    assert "VENDOR_NORM" not in TARGET.edited([found["gone"].edit]).full()
    assert TARGET.edited([found["kernels"].edit]).words == ("vllm", "serve", "M")
    assert TARGET.edited([found["words"].edit]).words[-1] == "--vendor-plain"
    same = tmp_path / "switches.json"
    same.write_text(json.dumps([{"name": "norm", "environment": "VENDOR_NORM", "plain": "0"}]))
    assert read(same, TARGET)[0].value == "1"


E1: dict[str, Any] = {"name": "a", "environment": "A", "plain": "1"}


@pytest.mark.parametrize(
    "value",
    [
        "", "{", "[[switch]", "\x00", "[" * 100_000, "null", "[]", "{}", "3", '{"switch": 3}', "[3]", '["a"]',
        [E1 | {"name": ""}], [E1 | {"name": "a\x1b[2J"}], [E1 | {"name": "a,b"}], [E1 | {"name": 3}],
        [E1 | {"name": "x" * 101}], [E1 | {"environment": "A=B"}], [E1 | {"environment": "A B"}],
        [E1 | {"environment": ["A"]}], [E1 | {"plain": {"a": 1}}], [E1 | {"plain": "a\0b"}], [E1 | {"plain": True}],
        [E1 | {"option": "--a"}], [{"name": "a"}], [{"name": "a", "option": "rm -rf"}],
        [{"name": "a", "words": []}], [{"name": "a", "words": "--a"}], [{"name": "a", "words": ["--a"], "plain": "1"}],
        [E1 | {"unknown": 1}], [E1 | {"__class__": 1}],
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_line(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "switches.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(BisectError) as error:
        read(file, TARGET)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).isprintable()


def test_no_file_and_too_large(tmp_path: Path) -> None:
    with pytest.raises(BisectError, match="is no file"):
        read(tmp_path, TARGET)
    (tmp_path / "large").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(BisectError, match="larger"):
        read(tmp_path / "large", TARGET)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BisectError, match="neither json nor toml"):
        read(tmp_path / "bytes", TARGET)
