"""The models of scripts/modes.py that scripts/tiny_model.py has not: state-space models, BERT, adapters, EAGLE, int8.

The problem: each mode of vLLM wants a model, or a part of one, of its own kind, and nothing may be downloaded. The
idea: where the transformers library has the architecture, it makes the module from a small config, every weight is
drawn anew from one seeded generator (a linear layer keeps the size of what goes through it, as in tiny_model.py) and
the library writes the checkpoint; adapters, EAGLE heads and int8 checkpoints are a few tensors beside a tiny model.
Each function does nothing where its directory is finished. Not here: what is run with them (modes.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_model

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"hidden_size": 128, "state_size": 16, "num_heads": 8, "head_dim": 32, "expand": 2, "n_groups": 2,
         "num_hidden_layers": 3, "conv_kernel": 4, "chunk_size": 32, "tie_word_embeddings": False,
         "use_bias": False, "use_conv_bias": True, "rms_norm": True, "residual_in_fp32": False,
         "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "falcon-h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32,
         "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32,
         "mamba_rms_norm": True, "max_position_embeddings": 1024, "num_logits_to_keep": 1, "rope_theta": 10000.0},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
         "decoder_sparse_step": 1, "norm_topk_prob": True, "max_position_embeddings": 1024,
         "partial_rotary_factor": 0.5, "full_attention_interval": 4, "tie_word_embeddings": False},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024, "conv_L_cache": 3, "conv_dim": 128,
         "block_dim": 128, "block_multiple_of": 32,
         "layer_types": ["conv", "full_attention", "conv", "full_attention"], "pad_token_id": 1, "bos_token_id": 0,
         "eos_token_id": 1},
    ),
    "bert": (
        "BertConfig",
        "BertModel",
        {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 512, "hidden_act": "gelu", "pad_token_id": 0},
    ),
}  # fmt: skip
"""Name → (config's class, model's class, config) of the transformers library."""


def finished(path: Path, make: Callable[[], None]) -> Path:
    """``path``, made by ``make`` unless it was finished before."""
    done = path / ".done"
    if not done.exists():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        make()
        done.touch()
    return path


@dataclass(frozen=True)
class Architecture:
    """Classes of the transformers library, by name, and the config's fields. config: its class, or a ``model_type``;
    model: where the library has no such class, vLLM draws the weights (drawn_weights.py); engine: arguments of
    vllm.LLM; late: entries of config.json that the library does not write; defect: what vLLM 0.32 computes wrongly here
    on a CPU, as class and reason: alarms of that class are right; differs: what it computes otherwise than
    transformers, whose golden then fails rightly; picture: requests have one; processor: the class of a model's
    processor and its arguments, of which a pair is a class and its arguments."""

    config: str
    model: str
    fields: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)
    late: Mapping[str, Any] = field(default_factory=dict)
    defect: tuple[str, str] = ("", "")
    differs: str = ""
    picture: bool = False
    processor: tuple[str, Mapping[str, Any]] = ("", {})

    @property
    def drawn(self) -> bool:
        """Whether vLLM draws the weights."""
        import transformers

        if self.engine.get("load_format") == "drawn":
            return True
        return not self.config.endswith("Config") or not hasattr(transformers, self.model)


def of_transformers(name: str, path: Path, seed: int = 0) -> Path:
    """The architecture ``name`` with drawn weights, in bfloat16."""
    return of_architecture(Architecture(*ARCHITECTURES[name]), path, seed)


def of_architecture(entry: Architecture, path: Path, seed: int = 0) -> Path:
    """A model of ``entry`` with drawn weights, in bfloat16."""

    def make() -> None:
        import torch
        import transformers
        from tiny_tokenizer import write_image_processor, write_processor, write_tokenizer

        fields = {"vocab_size": tiny_model.VOCAB, **entry.fields}
        if entry.config.endswith("Config"):
            config = getattr(transformers, entry.config)(**fields)
            config.dtype = torch.bfloat16
            written = config.to_diff_dict()
        else:
            written = {"model_type": entry.config, **fields, "dtype": "bfloat16"}
        write_tokenizer(path, vocab_size=tiny_model.VOCAB)
        if entry.processor[0]:
            write_processor(path, *entry.processor)
        elif entry.picture:
            write_image_processor(path, config.vision_config.to_dict())
        if entry.drawn:
            written |= {"architectures": [entry.model], **entry.late}
            (path / "config.json").write_text(json.dumps(written, default=str))
            return
        model = getattr(transformers, entry.model)(config)
        generator = torch.Generator().manual_seed(seed)
        corrections = [(n, b) for n, b in model.named_buffers() if n.endswith("_bias")]  # of routers' scores
        for parameter_name, parameter in [*model.named_parameters(), *corrections]:
            parameter.data.copy_(_drawn(parameter_name, parameter, generator))
        model.to(torch.bfloat16).save_pretrained(path)
        if entry.late:
            written = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(written | dict(entry.late)))

    return finished(path, make)


def _drawn(name: str, parameter: Any, generator: Any) -> Any:
    """Weights that keep a network alive; what sets the pace of a state (A_log, dt_bias, D) stays as the library has
    it."""
    import torch

    leaf = name.rpartition(".")[2]
    if leaf in ("A_log", "dt_bias", "D"):
        return parameter.data
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() == 1:
        gain = leaf == "weight"
        return parameter.data + 0.1 * noise if gain else 0.1 * noise
    if "embed" in name:
        return noise if "word" in name or "tokens" in name else 0.3 * noise
    fan_in = parameter.shape[-1] if "experts" in name and parameter.dim() == 3 else parameter[0].numel()
    return noise * (4.0 if "lm_head" in name else 1.0) / fan_in**0.5


def adapter(path: Path, base: dict[str, Any], seed: int = 0, rank: int = 8, head: bool = False) -> Path:
    """A LoRA adapter, as PEFT writes it, of all linear layers of a dense model with the config ``base``."""

    def make() -> None:
        import torch
        from safetensors.torch import save_file

        h, inner = base["hidden_size"], base["intermediate_size"]
        kv = h // base["num_attention_heads"] * base["num_key_value_heads"]
        shapes = {
            "self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(base["num_hidden_layers"]):
            for name, (out, in_) in shapes.items():
                at = f"base_model.model.model.layers.{layer}.{name}"
                down = torch.randn((rank, in_), generator=generator) / in_**0.5
                up = torch.randn((out, rank), generator=generator) / rank**0.5 * 0.3
                tensors[f"{at}.lora_A.weight"] = down.to(torch.bfloat16)
                tensors[f"{at}.lora_B.weight"] = up.to(torch.bfloat16)
        save_file(tensors, str(path / "adapter_model.safetensors"))
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
            "bias": "none", "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
            "base_model_name_or_path": "",
        }  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(config))

    return finished(path, make)


def shorter(path: Path, name: str, layers: int) -> Path:
    """The tiny model ``name`` without its last layers: a draft model that guesses some tokens right."""

    def make() -> None:
        from safetensors.torch import load_file, save_file

        whole = tiny_model.make(name, path.with_name(f"{path.name}-of"))
        shutil.copytree(whole, path, dirs_exist_ok=True)
        tensors = load_file(str(whole / "model.safetensors"))
        kept = {k: v for k, v in tensors.items() if ".layers." not in k or int(k.split(".")[2]) < layers}
        save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
        config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": layers}
        (path / "config.json").write_text(json.dumps(config, indent=1))

    return finished(path, make)


def eagle(path: Path, seed: int = 5) -> Path:
    """An EAGLE head for the tiny llama: one layer behind a projection of embedding and hidden state."""

    def make() -> None:
        import torch
        from safetensors.torch import save_file

        base = tiny_model.MODELS["llama"].config
        h = base["hidden_size"]
        config = base | {"num_hidden_layers": 1}
        generator = torch.Generator().manual_seed(seed)
        tensors = {"fc.weight": torch.randn((h, 2 * h), generator=generator) / (2 * h) ** 0.5}
        for name, shape, std in tiny_model.MODELS["llama"].weights(config):
            if ".layers." in name and "input_layernorm" not in name:  # the head's first layer has none
                gain = len(shape) == 1
                tensors[name.removeprefix("model.")] = torch.randn(shape, generator=generator) * std + float(gain)
        save_file({k: v.to(torch.bfloat16) for k, v in tensors.items()}, str(path / "model.safetensors"))
        (path / "config.json").write_text(json.dumps(config, indent=1))

    return finished(path, make)


def w8a8(path: Path, seed: int = 0) -> Path:
    """The tiny qwen2 with int8 weights (a scale per row) and int8 activations (a scale per token, found as they come),
    as compressed-tensors writes it."""

    def make() -> None:
        import torch
        from safetensors.torch import load_file, save_file

        plain = tiny_model.make("qwen2", path.with_name(f"{path.name}-of"), seed=seed)
        shutil.copytree(plain, path, dirs_exist_ok=True)
        tensors = {}
        for name, value in load_file(str(plain / "model.safetensors")).items():
            if name.endswith("_proj.weight"):
                wide = value.float()
                scale = (wide.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
                tensors[name] = (wide / scale.float()).round().clamp(-128, 127).to(torch.int8)
                tensors[f"{name}_scale"] = scale
            else:
                tensors[name] = value
        save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
        config = json.loads((plain / "config.json").read_text())
        eight: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "kv_cache_scheme": None,
            "config_groups": {"group_0": {
                "targets": ["Linear"], "output_activations": None,
                "weights": eight | {"strategy": "channel", "dynamic": False, "observer": "minmax"},
                "input_activations": eight | {"strategy": "token", "dynamic": True},
            }},
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(config, indent=1))

    return finished(path, make)
