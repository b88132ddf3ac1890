"""Lists of API names, calls that stand for others, devices: what is left out is a row with its reason."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.csv_rows import csv_rows

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.compat.msprobe import left_out, names_of

Recorded = Callable[[str], Path]


def test_names_and_lists() -> None:
    assert "linear" in names_of("Functional.linear")
    assert "linear" in names_of("QKVParallelLinear")
    assert "mm" in names_of("aten.mm.default")
    assert left_out("Functional.linear", ["linear"], []) == ""
    assert left_out("Functional.gelu", ["linear"], []) == "not in white_list"
    assert left_out("Functional.linear", ["linear", "gelu"], ["linear"]) == "in black_list"
    assert left_out("Functional.gelu", [], ["linear"]) == ""


def statuses(out: Path) -> Counter[tuple[str, str]]:
    return Counter((r["status"], r["message"].partition(":")[0]) for r in csv_rows(out / "opcheck.csv"))


def test_the_lists_of_a_config(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    lists = {"white_list": ["linear", "gelu"], "black_list": ["gelu"], "precision": 3}
    config.write_text(json.dumps({"task": "acc_check", "acc_check": {**lists, "host": "10.0.0.1"}}))
    out = tmp_path / "out"
    words = ["-api_info", str(recorded("tensor")), "-config", str(config), "-o", str(out), "-j", "0"]
    assert main(["opcheck", *words]) == 0
    said = capsys.readouterr()
    assert "host: of an online pre-check, without effect here" in said.err
    found = statuses(out)
    assert found["pass", ""] == 8  # two products, three gradients of each
    assert found["skip", "in black_list"] == 2
    assert sum(found.values()) == 8 + 2 + found["skip", "not in white_list"]
    details = next(out.glob("accuracy_checking_details_*.csv")).read_text()
    assert "1.000," in details
    assert "1.0000," not in details


def test_a_call_stands_for_its_like(recorded: Recorded, tmp_path: Path) -> None:
    home = tmp_path / "dump"
    home.mkdir()
    tree = json.loads(recorded("statistics").read_text())
    record = tree["data"]["Functional.gelu.0.forward"]
    other = json.loads(json.dumps(record))
    other["input_args"][0] |= {"Max": 9.0, "Min": -9.0}
    wider = json.loads(json.dumps(record))
    wider["input_args"][0]["shape"] = [5, 32]
    tree["data"] = {f"Functional.gelu.{k}.forward": r for k, r in enumerate((record, other, wider))}
    (home / "dump.json").write_text(json.dumps(tree))
    assert main(["opcheck", str(home / "dump.json"), "-f", "--out", str(tmp_path / "out"), "-j", "0"]) == 0
    found = statuses(tmp_path / "out")
    assert found["skip", "another call stands for it"] == 1
    assert sum(n for (status, _), n in found.items() if status == "pass") == 2


def test_devices(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = str(recorded("tensor"))
    assert main(["opcheck", dump, "-d", "cpu", "-j", "--jobs", "0", "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr()
    assert "--jit_compile: of an NPU's operators, without effect on cpu" in said.err
    if not torch.accelerator.is_available():
        for named in (["0", "1"], ["npu:0", "npu:1"]):
            assert main(["opcheck", "-api_info", dump, "-d", *named, "--out", str(tmp_path / "b")]) == 2
            assert f"--device {named[0]}: " in capsys.readouterr().err
        assert not (tmp_path / "b").exists()  # no header of a check that never began
    for wrong in ("cpu,cpu", "c/p", ","):
        assert main(["opcheck", dump, "-d", wrong, "--out", str(tmp_path / "c")]) == 2
