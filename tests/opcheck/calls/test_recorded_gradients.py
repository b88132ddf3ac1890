"""Gradients that msprobe recorded: right ones pass, one wrong number is found, of statistics they are made here."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_accprobe.cli import main

Recorded = Callable[[str], Path]


def rows(dump: Path, out: Path, *more: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["opcheck", str(dump), "--out", str(out), "-j", "0", *more])
    with (out / "opcheck.csv").open() as f:
        return code, list(csv.DictReader(f))


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_every_recorded_gradient_is_checked(recorded: Recorded, tmp_path: Path, task: str) -> None:
    code, found = rows(recorded(task), tmp_path / "out")
    assert code == 0
    gradients = [r for r in found if r["tap"].startswith("backward.")]
    assert {r["status"] for r in found} == {"pass"}
    # of the products bias, input and weight, as autograd has them; of the others what went into them
    assert len([r for r in gradients if r["op"] == "Functional.linear"]) == 6
    assert {r["op"] for r in gradients} >= {"Functional.gelu", "Functional.layer_norm", "Torch.rsqrt", "Tensor.pow"}
    assert all(r["role"].startswith("grad.output.") for r in gradients)
    assert all(("weaker evidence" in r["message"]) is (task == "statistics") for r in gradients)


@pytest.mark.parametrize("name", ["Functional.linear.1.backward.output.2", "Functional.gelu.0.backward.output.0"])
def test_a_wrong_gradient_is_found(recorded: Recorded, tmp_path: Path, name: str) -> None:
    home = tmp_path / "dump"
    shutil.copytree(recorded("tensor").parent, home)
    file = home / "dump_tensor_data" / f"{name}.pt"
    values = torch.load(file, weights_only=True)
    torch.save(values * 1.01, file)
    code, found = rows(home / "dump.json", tmp_path / "out")
    assert code == 1
    assert [r["role"] for r in found if r["status"] == "fail"] == [f"grad.{name.partition('backward.')[2]}"]
