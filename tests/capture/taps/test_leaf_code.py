"""Norms and rotary embeddings whose class's name says another formula than their source: clean ones never fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.opchecked import check
from torch import nn

from vllm_accprobe.capture.taps.leaf_code import leaf_code
from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.dump.block_code import MINUS_MEAN, ONE_PLUS_WEIGHT
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, SKIP, CheckResult

D = 32


class OddLayerNorm(nn.Module):
    """T5's formula, the mean's square root by another function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(D) + 0.5), 1e-5

    def forward(self, x):
        wide = x.float()
        return self.weight * self.scaled(wide).to(x.dtype)

    def scaled(self, x):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)


class OddRMSNorm(OddLayerNorm):
    """LayerNorm's formula."""

    def forward(self, x):
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        return self.weight * self.scaled(wide - mean).to(x.dtype)


class PlusRMSNorm(OddLayerNorm):
    def forward(self, x):
        return (self.scaled(x.float()) * (1.0 + self.weight.float())).to(x.dtype)


def of_transformers(place: str) -> nn.Module:
    module, name = place.split(".")
    cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    if name.endswith("RotaryEmbedding"):
        config = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
        return cls(getattr(config, name.replace("RotaryEmbedding", "Config"))())
    return cls(D, eps=1e-5)


class Box(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args):
        return self.part(*args)


def rows_of(
    part: nn.Module, root: Path, run: Callable[..., torch.Tensor] | None = None, gate: bool = True
) -> list[CheckResult]:
    """opcheck's rows of ``part``; run: what runs in place of the code that the capture read."""
    torch.manual_seed(0)
    for p in part.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    rotary = type(part).__name__.endswith("RotaryEmbedding")
    model = Box(part if rotary else part.bfloat16()).eval()
    x = (torch.randn(1, 6, D) * 1.7 + 0.6).bfloat16()
    inputs = (
        (x, torch.arange(6).view(1, -1) * 3) if rotary else (x, x) if gate and "Gated" in type(part).__name__ else (x,)
    )
    with Probe(model, dir=str(root)), torch.no_grad():
        right = type(part).forward.__code__
        if run is not None:
            type(part).forward.__code__ = run.__code__
        try:
            model(*inputs)
        finally:
            type(part).forward.__code__ = right
    return [row for row in check(Calls(open_dump(root), None), default_references()) if row.tap == "part"]


CLEAN = [
    "t5.T5LayerNorm", "pop2piano.Pop2PianoLayerNorm", "kosmos2_5.Kosmos2_5LayerNorm", "videoprism.VideoPrismLayerNorm",
    "vaultgemma.VaultGemmaRMSNorm", "bamba.BambaRMSNormGated", "cohere.CohereRotaryEmbedding",
    "cohere.CohereLayerNorm", "llama.LlamaRMSNorm", "llama.LlamaRotaryEmbedding",
]  # fmt: skip


@pytest.mark.parametrize("place", CLEAN)
def test_a_clean_class_of_transformers_passes(place: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = rows_of(of_transformers(place), tmp_path / "d")
    assert {r.status for r in rows} == {PASS}, [r.message for r in rows]


@pytest.mark.parametrize("kind", [OddLayerNorm, OddRMSNorm, PlusRMSNorm])
def test_the_source_and_not_the_name_chooses_the_formula(kind: type[nn.Module], tmp_path: Path) -> None:
    rows = rows_of(kind(), tmp_path / "d")
    assert [r.status for r in rows] == [PASS], rows[0].message


@pytest.mark.parametrize(("kind", "run"), [(OddLayerNorm, OddRMSNorm), (OddRMSNorm, OddLayerNorm),
                                           (OddLayerNorm, PlusRMSNorm), (PlusRMSNorm, OddLayerNorm)])  # fmt: skip
def test_another_formula_than_the_source_shows_fails(
    kind: type[nn.Module], run: type[nn.Module], tmp_path: Path
) -> None:
    rows = rows_of(kind(), tmp_path / "d", run=run.forward)
    assert [r.status for r in rows] == [FAIL]


def test_words() -> None:
    assert MINUS_MEAN in leaf_code(OddRMSNorm())
    assert MINUS_MEAN not in leaf_code(OddLayerNorm())
    assert {ONE_PLUS_WEIGHT, "square"} <= {*leaf_code(PlusRMSNorm())}
    assert leaf_code(nn.LayerNorm(4)) == []


@pytest.mark.parametrize(("activation", "status"), [("silu", PASS), ("sigmoid", PASS), ("gelu", SKIP), (1, SKIP)])
@pytest.mark.parametrize("place", ["qwen3_next.Qwen3NextRMSNormGated", "kimi_linear.KimiLinearRMSNormGated"])
def test_a_gate_of_a_table_is_the_one_of_the_module(
    place: str, activation: object, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    part: Any = of_transformers(place)
    part.activation = activation
    table = type(part).forward.__globals__["ACT2FN"]
    monkeypatch.setitem(type(part).forward.__globals__, "ACT2FN", {1: torch.tanh, "silu": nn.SiLU(), "gelu": nn.GELU(),
                                                                   "sigmoid": table["sigmoid"]})  # fmt: skip
    for gates, wanted in ((None, status), ("tanh", FAIL if status == PASS else status)):
        if gates is not None:  # what the capture read is not what runs
            monkeypatch.setitem(type(part).forward.__globals__, "ACT2FN", {activation: torch.tanh})
        rows = rows_of(part, tmp_path / str(gates))
        assert [r.status for r in rows] == [wanted], rows[0].message


def test_a_gated_norm_of_groups_is_checked_where_their_size_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    part = importlib.import_module("transformers.models.zamba2.modeling_zamba2").Zamba2RMSNormGated(D, 8)
    (row,) = rows_of(part, tmp_path / "known")
    assert row.status == PASS, row.message
    monkeypatch.setattr(type(part), "group_size", property(lambda self: 8), raising=False)
    del part.__dict__["group_size"]
    (row,) = rows_of(part, tmp_path / "unknown")
    assert (row.status, row.message) == (SKIP, "its source norms groups of channels")


def test_a_gated_norm_without_a_gate_passes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    part = of_transformers("bamba.BambaRMSNormGated")
    rows = rows_of(part, tmp_path / "d", gate=False)
    assert [r.status for r in rows] == [PASS], rows[0].message


@pytest.mark.parametrize(("made", "status"), [
    (lambda layers, kda: kda.FusedRMSNormGated(D, activation="sigmoid"), PASS),  # its gate's name is g
    (lambda layers, kda: kda.FusedRMSNormGated(D, activation="swish"), PASS),
    (lambda layers, kda: layers.RMSNormGated(D, norm_before_gate=True, activation="sigmoid"), PASS),
    (lambda layers, kda: layers.RMSNormGated(D, norm_before_gate=False, activation="silu"), PASS),
    (lambda layers, kda: layers.RMSNormGated(D, group_size=D // 4, norm_before_gate=True), PASS),
    (lambda layers, kda: layers.RMSNormGated(D, group_size=D // 4, norm_before_gate=False), PASS),
    (lambda layers, kda: layers.RMSNormGated(D, norm_before_gate=False, activation="sigmoid"), SKIP),
])  # fmt: skip
def test_a_gated_norm_of_vllm_follows_its_activation(made: Any, status: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import layernorm
    from vllm.third_party.flash_linear_attention.ops import kda

    def doubled(self, *args):
        return self._forward_method(args[0], 2.0 * args[1])

    with set_current_vllm_config(VllmConfig()):
        for run, wanted in ((None, status), (doubled, FAIL if status == PASS else status)):
            part = made(layernorm, kda)
            rows = rows_of(part, tmp_path / str(run is None), run)
            assert [r.status for r in rows] == [wanted], rows[0].message


class SpelledRMSNormGated(OddLayerNorm):
    """silu, as z times its sigmoid."""

    def forward(self, x, gate):
        rest = torch.sigmoid(gate.float())
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normal * gate.float() * rest).to(x.dtype)


def test_a_sigmoid_of_a_source_is_no_gate_that_is_known(tmp_path: Path) -> None:
    rows = rows_of(SpelledRMSNormGated(), tmp_path)
    assert [r.status for r in rows] == [SKIP]
    assert "a sigmoid" in rows[0].message
