"""Activations against torch's and transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, run, same, value

from vllm_accprobe.opcheck.reference import Declined

draw = drawer(5)
_HALVES: dict[str, Callable[[Any, Any], Any]] = {
    "SiluAndMul": lambda a, b: F.silu(a) * b,
    "MulAndSilu": lambda a, b: a * F.silu(b),
}
_ALONE: dict[str, Callable[[Any], Any]] = {
    "GELU": F.gelu,
    "NewGELU": lambda x: F.gelu(x, approximate="tanh"),
    "GELUTanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "ReLUSquaredActivation": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("cls", _HALVES)
def test_gated_activations_by_torch(cls: str) -> None:
    x = draw(4, 12)
    same(value(cls, {"x": x}), _HALVES[cls](x[:, :6], x[:, 6:]))


@pytest.mark.parametrize("cls", _ALONE)
def test_activations_by_torch(cls: str) -> None:
    x = draw(4, 12)
    same(value(cls, {"x": x}), _ALONE[cls](x))


@pytest.mark.parametrize(("act", "approximate"), [("gelu", "none"), ("gelu_pytorch_tanh", "tanh")])
def test_geglu_is_told_by_the_configuration(act: str, approximate: str) -> None:
    x = draw(4, 12)
    found = value("GeluAndMul", {"x": x}, config={"hidden_act": act})
    same(found, F.gelu(x[:, :6], approximate=approximate) * x[:, 6:])
    with pytest.raises(Declined, match="approximate"):
        run("GeluAndMul", {"x": x})


def test_quick_gelu_and_clamped_swiglu_by_transformers() -> None:
    from transformers.activations import ACT2FN

    x = draw(4, 12)
    same(value("QuickGELU", {"x": x}), ACT2FN["quick_gelu"](x))
    # gpt-oss: gate 10 is cut to 7, up -9 to -7; y = gate * sigmoid(1.702 gate) * (up + 1)
    found = value("SwigluOAIAndMul", {"x": torch.tensor([[10.0, -9.0]])})
    same(found, torch.tensor([[7.0 / (1.0 + math.exp(-1.702 * 7.0)) * -6.0]], dtype=torch.float64))
