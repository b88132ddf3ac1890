"""Our dump in ait's folders: read back, it is the same tensors, and the comparison is bit-identical."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from topology.test_data_flow import capture

from vllm_accprobe import compare, open_dump
from vllm_accprobe.cli import main
from vllm_accprobe.formats.write import ait_dump


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = capture(tmp_path / "d"), tmp_path / "out" / "ait_dump"
    assert main(["convert", str(source), str(out), "--to", "ait"]) == 0
    assert "skipped" not in capsys.readouterr().out
    (process,) = (out / "torch_tensors").iterdir()
    device, _, pid = process.name.partition("_")
    assert device == "0"
    assert int(pid) > 0
    tree = json.loads((process / "model_tree.json").read_text())
    assert (tree["name"], tree["type"], tree["children"][0]["name"]) == ("root", "Layered", "root.embed")
    ours, theirs = open_dump(source), open_dump(out)
    assert theirs.kind == "msit"  # type: ignore[attr-defined]
    outputs = {r.tap: r for r in ours.records if r.role == "output.0"}
    back = {r.tap: r for r in theirs.records if r.role == "output.0"}
    assert outputs.keys() == back.keys()
    for tap, r in outputs.items():
        assert (ours.read(r) == theirs.read(back[tap]).reshape(r.shape)).all()
    x = torch.load(process / "0" / "root.layers.0.mixer.core" / "input_1.pth", weights_only=True)
    (k,) = (r for r in ours.records if (r.tap, r.role) == ("layers.0.mixer.core", "input.k"))
    assert (x.view(torch.int16).numpy().view("u2").reshape(k.shape) == ours.read(k)).all()
    found = compare(out, out.parent / "ait_dump")
    assert found.verdict == "pass"
    mixed = compare(source, out)
    assert (mixed.verdict, mixed.coverage["taps_only_golden"]) == ("pass", [])
    assert mixed.coverage["pairs"] >= 2 * len(outputs)


def test_what_has_no_place_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators = capture(tmp_path / "o", layers=1, ops=True)
    assert main(["convert", str(operators), str(tmp_path / "a"), "--to", "ait"]) == 0
    assert ait_dump.OPERATOR in capsys.readouterr().out
    assert not [p for p in (tmp_path / "a").rglob("*.pth") if "::" in str(p)]
    statistics = capture(tmp_path / "s", layers=1, task="stats")
    assert main(["convert", str(statistics), str(tmp_path / "b"), "--to", "ait"]) == 3
    assert "only statistics, no values: nothing to convert" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
