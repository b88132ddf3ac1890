"""What a call's tensors are called, and what a module says of itself for a replay: numbers, lists, settings."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_accprobe import Probe
from vllm_accprobe.capture.taps.hooks import Inputs, attributes, outputs
from vllm_accprobe.dump.reader import open_dump


def test_convolutions() -> None:
    found = attributes(torch.nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1, groups=2))
    assert (found["in_channels"], found["out_channels"], found["groups"]) == (4, 6, 2)
    assert (found["kernel_size"], found["stride"], found["padding"], found["dilation"]) == (
        [3, 2],
        [2, 1],
        [1, 1],
        [1, 1],
    )
    assert attributes(torch.nn.Conv1d(4, 4, 3, padding="same"))["padding"] == "same"


def test_an_attention_kernels_settings() -> None:
    module = torch.nn.Module()
    module.kv_cache_dtype = "fp8"
    module.impl = SimpleNamespace(
        scale=0.125, alibi_slopes=torch.tensor([0.5, 0.25]), sinks=[1.0], logits_soft_cap=None, sliding_window=(3, 0),
        kv_cache_dtype="fp8", other=object(),
    )  # fmt: skip
    assert attributes(module) == {
        "kv_cache_dtype": "fp8", "impl.scale": 0.125, "impl.alibi_slopes": [0.5, 0.25], "impl.sinks": [1.0],
        "impl.sliding_window": [3, 0], "impl.kv_cache_dtype": "fp8",
    }  # fmt: skip


def test_how_experts_are_chosen() -> None:
    """By an object that is no module, or by the module itself, as up to vLLM 0.18."""

    class Router:
        top_k, scoring_func, renormalize, routed_scaling_factor, use_grouped_topk = 4, "sigmoid", True, 2.5, True
        num_expert_group, topk_group = None, 1
        e_score_correction_bias = torch.zeros(8)

    runner = torch.nn.Module()
    runner.router, runner.routed_scaling_factor = Router(), 1.0
    assert attributes(runner) == {
        "routed_scaling_factor": 1.0, "router.class": "Router", "router.top_k": 4, "router.scoring_func": "sigmoid",
        "router.renormalize": True, "router.routed_scaling_factor": 2.5, "router.use_grouped_topk": True,
        "router.topk_group": 1, "has_correction_bias": True,
    }  # fmt: skip
    layer = torch.nn.Module()
    layer.top_k, layer.e_score_correction_bias, layer.custom_routing_function = 2, None, test_convolutions
    layer.activation = enum.Enum("Activation", {"SILU": "silu"}).SILU
    assert attributes(layer) == {
        "top_k": 2, "activation": "silu", "has_correction_bias": False, "custom_routing": "test_convolutions",
    }  # fmt: skip


def test_a_rotary_embedding_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=rope)
    found = attributes(LlamaRotaryEmbedding(config))
    assert found["rope_type"] == "llama3"
    assert found["rope_parameters"] == rope
    assert found["attention_scaling"] == 1.0
    assert found["max_seq_len_cached"] == 512


def test_what_is_no_description_is_left_out() -> None:
    module = torch.nn.Module()
    module.stride = list(range(1000))
    module.scale = torch.zeros(3, 3)
    module.eps = object()
    module.padding = [1, object()]
    module.base = torch.zeros((), device="meta")
    assert json.loads(json.dumps(attributes(module))) == {}


def test_roles_of_inputs() -> None:
    x = torch.ones(1)
    names = Inputs(["a", "b"], "more.")
    found = names((x, 3, x, None, [x, "s"]), {"k": x, "n": 1.0, "d": {"e": (x,)}})
    assert [role for role, _ in found] == ["input.a", "input.more.0", "input.more.2.0", "input.k", "input.d.e.0"]
    assert [role for role, _ in Inputs([], "")((x, x), {})] == ["input.0", "input.1"]


def test_roles_of_outputs() -> None:
    x = torch.ones(1)
    assert [role for role, _ in outputs(x)] == ["output.0"]
    assert [role for role, _ in outputs((x, None, [x, x], {"k": x}, 5, x))] == [
        "output.0", "output.2.0", "output.2.1", "output.3.k", "output.5",
    ]  # fmt: skip
    assert [role for role, _ in outputs([x, None, x])] == ["output.0", "output.2"]
    assert [role for role, _ in outputs({"k": x})] == ["output.k"]
    assert [role for role, _ in outputs((x,) * 40)] == [f"output.{i}" for i in range(40)]
    assert outputs(None) == []


def test_norms_that_are_computed_past_their_modules_are_taken_all_the_same(tmp_path: Path) -> None:
    """As MiniMax-M2's: a static method computes both; other models of the class are left alone."""

    class Norm(torch.nn.Module):
        @staticmethod
        def forward_qkv(q_norm: Norm, k_norm: Norm, qkv: torch.Tensor, q_size: int, kv_size: int) -> Any:
            q, k, v = qkv.split([q_size, kv_size, kv_size], -1)
            return q * 2, k * 3, v

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.k_norm = Norm(), Norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat(Norm.forward_qkv(self.q_norm, self.k_norm, x, 4, 2), -1)

    original, x = Norm.forward_qkv, torch.arange(24.0).reshape(3, 8)
    model, other = Model(), Model()
    with Probe(model, dir=str(tmp_path / "dump")):
        model(x)
        other(x)
    assert Norm.forward_qkv is original
    dump = open_dump(tmp_path / "dump")
    found = {r.name: dump.read(r) for r in dump.records if r.tap in ("q_norm", "k_norm")}
    assert len(found) == 4
    assert (found["q_norm/input.x"] == x[:, :4].numpy()).all()
    assert (found["q_norm/output.0"] == 2 * x[:, :4].numpy()).all()
    assert (found["k_norm/output.0"] == 3 * x[:, 4:6].numpy()).all()
