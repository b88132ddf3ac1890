"""Norms of other tools' dumps: where their epsilon comes from, and that a wrong norm is found by it."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.calls.records import parsed_attributes as parsed

DUMPS = {
    "msprobe": ("a_msprobe_tensor", "Qwen2RMSNorm"), "msit": ("c_msit_torch", "Qwen2RMSNorm"),
    "torch_xray": ("d_xray_h5", "LayerNorm"),
}  # fmt: skip
SAID = {
    "msprobe": "epsilon 1e-06, fitted to input and output; 1e-12 to 1e-06 fit as well",
    "msit": "epsilon 1e-06, fitted to input and output of 5 of 5 modules",
    "torch_xray": "epsilon 1e-12, fitted to input and output; 1e-12 to 0.001 fit as well",
}  # fmt: skip


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("peers")
    return lambda tool: unpack(DUMPS[tool][0], root) / "golden"


def norms(dump: Path, out: Path, cls: str, *more: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["opcheck", str(dump), "--ops", cls, "--out", str(out), "-j", "0", *more])
    with (out / "opcheck.csv").open(newline="") as f:
        return code, list(csv.DictReader(f))


@pytest.mark.parametrize("tool", DUMPS)
def test_norms_of_other_tools_are_judged(tool: str, golden: Callable[[str], Path], tmp_path: Path) -> None:
    code, rows = norms(golden(tool), tmp_path, DUMPS[tool][1])
    assert code == 0
    assert [r["status"] for r in rows] == ["pass"] * 5
    said = {r["message"] for r in rows}
    assert len(said) == 1
    assert said.pop().startswith(SAID[tool])


def test_the_user_s_and_config_json_s_come_first(golden: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-2}))
    dump, cls = golden("msprobe"), DUMPS["msprobe"][1]
    weights = ("--weights", str(tmp_path / "model"))
    code, rows = norms(dump, tmp_path / "a", cls, *weights)
    assert (code, {r["message"] for r in rows}) == (0, {"epsilon 1e-06, of config.json"})
    code, rows = norms(dump, tmp_path / "b", cls, *weights, "--attribute", "*RMSNorm:eps=1e-4")
    assert code == 1
    assert {r["status"] for r in rows} == {"fail"}
    assert all(r["message"].endswith("epsilon 0.0001, of --attribute") for r in rows)
    code, rows = norms(dump, tmp_path / "c", cls, "--attribute", "Other*:eps=1e-4")
    assert code == 0


def test_one_norm_with_another_epsilon_is_found(golden: Callable[[str], Path], tmp_path: Path) -> None:
    """It is held against what its siblings fit."""
    shutil.copytree(golden("msprobe"), tmp_path / "d")
    (data,) = (tmp_path / "d").rglob("dump_tensor_data")
    name = "Module.model.layers.1.input_layernorm.Qwen2RMSNorm.forward.0"
    x, w = (torch.load(data / f"{name}.{part}.pt").float() for part in ("input.0", "parameters.weight"))
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4) * w
    torch.save(y.to(torch.load(data / f"{name}.output.0.pt").dtype), data / f"{name}.output.0.pt")
    code, rows = norms(tmp_path / "d", tmp_path / "o", "Qwen2RMSNorm")
    assert code == 1
    assert {r["tap"]: r["status"] for r in rows if r["status"] != "pass"} == {"model.layers.1.input_layernorm": "fail"}


@pytest.mark.parametrize("text", ["eps", "=1", "a b=1", "*:=2"])
def test_what_is_no_attribute_is_one_line(
    text: str, golden: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is not NAME=VALUE"):
        parsed([text])
    assert main(["opcheck", str(golden("msprobe")), "--out", str(tmp_path), "--attribute", text]) == 2
    assert capsys.readouterr().err.startswith("accprobe: --attribute: ")


def test_attributes_are_json_or_text() -> None:
    found = parsed(["eps=1e-6", "a.b*:x=[1]", "mode=half"])
    assert found == (("*", "eps", 1e-6), ("a.b*", "x", [1]), ("*", "mode", "half"))
