"""One engine in this process, whose weights are changed by vLLM's own calls, and what stands in for a real fault.

The problem: a fault of weights has to be planted where such faults are, inside reloading, packing and exchanging, in an
engine that serves. The idea: `WeightEngine` builds an engine as engine_worker.py does, and offers vLLM's calls; a fault
is a context in which one of vLLM's own functions does a little less or a little else. Models, quantised models and
adapters are small and made from a seed. Not here: which faults are told (scripts/weight_cases.py, tests/e2e).
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DOWN = "model.layers.1.mlp.down_proj"
IGNORED = ["lm_head"]


def quantised(source: Path, target: Path) -> Path:
    """``source`` with int8 weights and a scale for each output, as compressed-tensors writes them (w8a8, dynamic)."""
    if (target / "config.json").exists():
        return target
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    out = {}
    for name, w in tensors.items():
        if name.endswith("_proj.weight"):
            scale = w.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
            out[name] = (w.float() / scale).round().clamp(-127, 127).to(torch.int8)
            out[name.removesuffix("weight") + "weight_scale"] = scale
        else:
            out[name] = w
    save_file(out, str(target / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    ints = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": IGNORED,
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": ints | {"strategy": "channel", "dynamic": False},
            "input_activations": ints | {"strategy": "token", "dynamic": True},
        }},
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return target


def moved(source: Path, target: Path, seed: int = 1) -> Path:
    """``source`` after a step of training: each weight a little elsewhere, each scale, too."""
    if (target / "config.json").exists():
        return target
    shutil.copytree(source, target, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, w in load_file(target / "model.safetensors").items():
        noise = torch.rand(w.shape, generator=generator)
        out[name] = (w + (noise > 0.5).to(torch.int8)).clamp(-127, 127) if w.dtype == torch.int8 else (
            w.float() * (1 + 0.05 * (noise - 0.5))).to(w.dtype)  # fmt: skip
        out[name] = out[name].to(w.dtype)
    save_file(out, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def mixed(source: Path, other: Path, target: Path, name: str) -> Path:
    """``source`` with the tensor ``name`` of ``other``."""
    if (target / "config.json").exists():
        return target
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    tensors[name] = load_file(other / "model.safetensors")[name]
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def adapter(source: Path, target: Path, seed: int, rank: int = 4) -> Path:
    """A LoRA adapter of q, v and down for the model at ``source``."""
    if (target / "adapter_config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, w in load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            base = "base_model.model." + name.removesuffix(".weight")
            out[f"{base}.lora_A.weight"] = torch.randn(rank, w.shape[1], generator=generator).mul(0.05).bfloat16()
            out[f"{base}.lora_B.weight"] = torch.randn(w.shape[0], rank, generator=generator).mul(0.05).bfloat16()
    save_file(out, str(target / "adapter_model.safetensors"))
    (target / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj", "down_proj"], "base_model_name_or_path": str(source),
    }))  # fmt: skip
    return target


class WeightEngine:
    """A real engine, captured into ``out``, whose weights this process may change."""

    def __init__(self, model: Path, out: Path | None, **engine: Any):
        from engine_worker import DEFAULTS, spare_the_imports
        from vllm import LLM
        from vllm.model_executor.models import registry

        os.environ.pop("VLLM_ACCPROBE", None)
        if out is not None:
            from vllm_accprobe.plugin import register

            os.environ |= {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(out)}
            register()
        spare_the_imports()
        registry._run_in_subprocess = lambda inspect: inspect()
        self.out = out
        self._model_at = model
        self.llm: Any = LLM(model=str(model), **(DEFAULTS | engine))
        self._asked = 0

    @property
    def worker(self) -> Any:
        found = self.llm.llm_engine.model_executor.driver_worker
        return getattr(found, "worker", found)

    @property
    def model(self) -> Any:
        return self.worker.model_runner.get_model()

    def ask(self, ids: Sequence[int] = tuple(range(8, 40)), tokens: int = 3, lora: Any = None) -> list[int]:
        """The tokens that are generated."""
        from vllm import SamplingParams

        self._asked += 1
        how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        done = self.llm.generate({"prompt_token_ids": list(ids)}, how, use_tqdm=False, lora_request=lora)
        return list(done[0].outputs[0].token_ids)

    def reload(self, path: Path | None = None) -> None:
        """vLLM's own reload, from the files at ``path``, or those it was started with."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path or self._model_at)})

    def sync(self, path: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        """What a trainer does: named tensors handed to vLLM's reload."""
        weights = [(name, w) for name, w in load_file(path / "model.safetensors").items() if keep(name)]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def load(self, path: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        """What other trainers do: load_weights on the live model, a bucket at a time."""
        weights = [(name, w) for name, w in load_file(path / "model.safetensors").items() if keep(name)]
        for first in range(0, len(weights), 8):
            self.model.load_weights(iter(weights[first : first + 8]))

    def close(self) -> None:
        from engine_worker import _end

        llm, self.llm = self.llm, None
        _end(llm)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, ``owner.name`` is what ``make`` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
