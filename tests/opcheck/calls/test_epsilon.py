"""An epsilon that was not recorded: named, of config.json, or fitted to a norm's input and output."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.opchecked import opcheck
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.calls.records import EpsilonFit, choose, fit, parsed_attributes as parsed
from vllm_accprobe.opcheck.reference import Call


def draw(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(
    cls: str, eps: float, dtype: torch.dtype, seed: int = 0, rows: int = 12, scale: float = 0.02, less: int = 0
) -> Call:
    """A call whose output a kernel in float32 made. less: terms that its mean leaves out."""
    x = draw(seed, rows, 96, scale=scale).to(dtype)
    w, b = draw(seed + 1, 96).to(dtype), draw(seed + 2, 96).to(dtype)
    wide, params = x.float(), {"weight": w}
    if cls == "LayerNorm":
        wide, params = wide - wide.mean(-1, keepdim=True), {"weight": w, "bias": b}
    power = wide.square().sum(-1, keepdim=True) / (96 - less)
    y = wide * torch.rsqrt(power + eps) * w.float() + (b.float() if cls == "LayerNorm" else 0.0)
    return Call("n", cls, {"0": x}, params=params, outputs={"output.0": y.to(dtype)})


@pytest.mark.parametrize("cls", ["Qwen2RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4])
def test_in_float32_it_is_found(cls: str, eps: float) -> None:
    found = fit(norm(cls, eps, torch.float32))
    assert found is not None
    assert found.allows(eps)
    assert found.value == pytest.approx(eps, rel=0.05)
    assert choose([found]).value == eps


def test_in_bfloat16_the_error_is_what_it_says() -> None:
    """Of 40 norms all lie within the errors that are allowed for, and not by chance."""
    found = [fit(norm("RMSNorm", 1e-5, torch.bfloat16, seed, scale=0.005)) for seed in range(40)]
    z = [abs(f.value - 1e-5) / f.error for f in found if f is not None]
    assert len(z) == 40
    assert max(z) < 2.0
    assert max(z) > 0.1


def test_a_mean_of_fewer_terms_is_no_epsilon() -> None:
    """Rows of different size give different numbers."""
    call = norm("RMSNorm", 1e-6, torch.float32, less=1)
    call.inputs["0"][::2] *= 3.0
    wide = call.inputs["0"].float()
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / 95 + 1e-6) * call.params["weight"]
    found = fit(Call("n", "RMSNorm", call.inputs, params=call.params, outputs={"output.0": y}))
    assert found is not None
    assert not found.agree
    assert choose([found]).value is None
    assert "fit no epsilon: rows give different ones" in choose([found]).source


def test_an_unusual_one_is_said_and_not_taken() -> None:
    found = fit(norm("RMSNorm", 3e-5, torch.float32))
    assert found is not None
    chosen = choose([found])
    assert chosen.value is None
    assert chosen.source.startswith("its epsilon was not recorded; input and output fit 3e-05 ±")
    assert chosen.source.endswith("which is no usual one: name it with --attribute eps=VALUE")


def fits(*values: float, error: float = 1e-8, smallest: float = 1.0) -> list[EpsilonFit]:
    return [EpsilonFit(v, error, smallest, 2.0**-8, True) for v in values]


def test_most_modules_decide() -> None:
    assert choose(fits(1e-6, 1.01e-6, 1e-3)).value == 1e-6
    assert choose(fits(1e-6, 1e-5)).value is None
    assert choose([]).value is None


def test_what_cannot_be_told_apart_and_does_not_matter_is_taken_with_what_it_leaves() -> None:
    chosen = choose(fits(1e-6, error=1e-4))
    assert chosen.value is not None
    assert 0 < chosen.slack <= 0.5e-3
    assert "differ by less than a rounding" in chosen.source


def test_what_cannot_be_told_apart_and_matters_is_not() -> None:
    chosen = choose(fits(1e-6, error=1e-4, smallest=1e-5))
    assert chosen.value is None
    assert "fit all from 1e-12 to 0.0001" in chosen.source


@pytest.mark.parametrize("change", [
    {"inputs": {}}, {"params": {"weight": torch.zeros(0)}}, {"outputs": {}}, {"cls": "Linear"},
    {"outputs": {"output.0": torch.full((12, 96), torch.nan)}},
])  # fmt: skip
def test_nothing_to_fit(change: dict[str, Any]) -> None:
    assert fit(replace(norm("RMSNorm", 1e-6, torch.float32), **change)) is None


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


@pytest.mark.parametrize("tool", DUMPS)
def test_norms_of_other_tools_are_judged(tool: str, golden: Callable[[str], Path], tmp_path: Path) -> None:
    code, rows = opcheck(golden(tool), tmp_path, "--ops", DUMPS[tool][1])
    assert code == 0
    assert [r["status"] for r in rows] == ["pass"] * 5
    said = {r["message"] for r in rows}
    assert len(said) == 1
    assert said.pop().startswith(SAID[tool])


def test_the_user_s_and_config_json_s_come_first(golden: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-2}))
    dump, ops = golden("msprobe"), ("--ops", DUMPS["msprobe"][1])
    weights = ("--weights", str(tmp_path / "model"))
    code, rows = opcheck(dump, tmp_path / "a", *ops, *weights)
    assert (code, {r["message"] for r in rows}) == (0, {"epsilon 1e-06, of config.json"})
    code, rows = opcheck(dump, tmp_path / "b", *ops, *weights, "--attribute", "*RMSNorm:eps=1e-4")
    assert code == 1
    assert {r["status"] for r in rows} == {"fail"}
    assert all(r["message"].endswith("epsilon 0.0001, of --attribute") for r in rows)
    code, rows = opcheck(dump, tmp_path / "c", *ops, "--attribute", "Other*:eps=1e-4")
    assert code == 0


def test_one_norm_with_another_epsilon_is_found(golden: Callable[[str], Path], tmp_path: Path) -> None:
    """It is held against what its siblings fit."""
    shutil.copytree(golden("msprobe"), tmp_path / "d")
    (data,) = (tmp_path / "d").rglob("dump_tensor_data")
    name = "Module.model.layers.1.input_layernorm.Qwen2RMSNorm.forward.0"
    x, w = (torch.load(data / f"{name}.{part}.pt").float() for part in ("input.0", "parameters.weight"))
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4) * w
    torch.save(y.to(torch.load(data / f"{name}.output.0.pt").dtype), data / f"{name}.output.0.pt")
    code, rows = opcheck(tmp_path / "d", tmp_path / "o", "--ops", "Qwen2RMSNorm")
    assert code == 1
    assert {r["tap"]: r["status"] for r in rows if r["status"] != "pass"} == {"model.layers.1.input_layernorm": "fail"}


@pytest.mark.parametrize("text", ["eps", "=1", "a b=1", "*:=2"])
def test_what_is_no_attribute_is_one_line(text, golden, tmp_path, capsys):
    with pytest.raises(ValueError, match="is not NAME=VALUE"):
        parsed([text])
    assert main(["opcheck", str(golden("msprobe")), "--out", str(tmp_path), "--attribute", text]) == 2
    assert capsys.readouterr().err.startswith("accprobe: --attribute: ")


def test_attributes_are_json_or_text() -> None:
    found = parsed(["eps=1e-6", "a.b*:x=[1]", "mode=half"])
    assert found == (("*", "eps", 1e-6), ("a.b*", "x", [1]), ("*", "mode", "half"))
