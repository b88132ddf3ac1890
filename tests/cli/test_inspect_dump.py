"""inspect of operator calls: a row per operator, from the journal alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump.dumps import put_event

from vllm_accprobe.cli import main
from vllm_accprobe.dump.writer import RankWriter, write_run_json


def tensor(role: str, shape: list[int], low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"tensor": {"role": role, "dtype": "float32", "shape": shape, "stride": [1] * len(shape), "device": "cpu",
                       "min": low, "max": high, "nan": 0, "inf": 0, **more}}  # fmt: skip


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return dump_of_operators(tmp_path / "d")


def dump_of_operators(root: Path) -> Path:
    """Two calls of mm in two modules and shapes, one of them stored, and one of add_ in step 1 outside any module."""
    write_run_json(root, {"model": "tests"})
    writer = RankWriter(root, 0, {}, budget_bytes=1 << 20)
    values = np.arange(4, dtype=np.float32)
    event = {"event": "tensor", "step": 0, "tap": "a::aten.mm.default", "class": "aten.mm.default", "role": "output.0",
             "call": 0, "seq": 1, "dtype": "float32", "shape": [2, 2]}  # fmt: skip
    put_event(writer, values, event)
    for module, rows, high in (("a", 2, 3.0), ("b", 5, 9.0)):
        writer.line({
            "event": "op", "step": 0, "tap": f"{module}::aten.mm.default", "op": "aten.mm.default", "call": 0, "seq": 0,
            "module": module, "args": [tensor("input.0", [rows, 2], 0, 1), tensor("input.1", [2, 2], 0, 1)],
            "outputs": [tensor("output.0", [rows, 2], -1.5, high, nan=rows)], "mutates": [],
        })  # fmt: skip
    x = tensor("input.0", [7], 0, 1, after={"min": 2.0, "max": 4.0, "nan": 0, "inf": 1})
    writer.line({
        "event": "op", "step": 1, "tap": "::aten.add_.Tensor", "op": "aten.add_.Tensor", "call": 0, "seq": 0,
        "module": None, "args": [x, 2], "outputs": [], "mutates": ["input.0"],
    })  # fmt: skip
    writer.close("test", {"skipped": {}})
    return root


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out = capsys.readouterr()
    assert out.err == ""
    return [line.rstrip() for line in out.out.splitlines()]


def test_the_table_word_for_word(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dump), "--ops"]) == 0
    assert lines(capsys)[:4] == [
        "operator          calls  stored  modules  forms  commonest input             output min  max  NaN  Inf",
        "aten.mm.default       2       1        2      2  float32[2x2], float32[2x2]        -1.5    9    7    0",
        "aten.add_.Tensor      1       0        0      1  float32[7]                           2    4    0    1",
        "3 calls of 2 operators, of 3 captured",
    ]


def test_globs_and_steps_choose_calls(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dump), "b::*"]) == 0
    out = lines(capsys)
    assert out[1].split()[:5] == ["aten.mm.default", "1", "0", "1", "1"]
    assert main(["inspect", str(dump), "aten.mm"]) == 0
    assert lines(capsys)[2] == "2 calls of 1 operator, of 3 captured"
    assert main(["inspect", str(dump), "--step", "1"]) == 0
    assert lines(capsys)[1].startswith("aten.add_.Tensor")


def test_operators_tensors_are_listed_where_they_are_asked_for(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dump)]) == 0
    assert not any("output.0" in line for line in lines(capsys))
    assert main(["inspect", str(dump), "a::*"]) == 0
    assert sum("output.0" in line for line in lines(capsys)) == 1


def test_a_dump_without_what_was_asked_for(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dump), "no.such*"]) == 3
    assert "no tensor matches" in capsys.readouterr().err
