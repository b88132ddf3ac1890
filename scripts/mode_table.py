"""Which modes scripts/modes.py runs: engine, requests, the plain run beside it, and the fault that is planted.

Not here: what is done with them (modes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mode_models
import tiny_model
from support.engine import Ask
from support.prompts import prompts, repetitive

Asks = Callable[[Path], Sequence[Ask]]
_PROMPTS = prompts(40, 23, 57, 31)
TEXT = [Ask(ids, 6) for ids in _PROMPTS]
GUESSABLE = [Ask(repetitive(60, 9, i), 20) for i in range(3)]


@dataclass(frozen=True)
class Way:
    """How one run is made. built: arguments of vllm.LLM, of the folder under which models lie. serve: arguments of
    `vllm serve`, for a mode of a server; replicas: how many of them take turns with the requests."""

    asks: Asks = lambda models: TEXT
    engine: Callable[[Path], Mapping[str, Any]] = lambda models: {}
    how: str = "together"
    host: str = "v1"
    env: Mapping[str, str] = field(default_factory=dict)
    during: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    serve: tuple[str, ...] = ()
    replicas: int = 0

    def built(self, root: Path) -> Mapping[str, Any]:
        return self.engine(root / "_models")


@dataclass(frozen=True)
class Mode:
    """model: makes the weights under a folder. plain: the same without the mode, None where that has no meaning.
    equal_to_plain: what compare must say of it. fault: see lab/planted; blamed: the module that must come first.
    refused: vLLM cannot do this on a CPU, and says so."""

    name: str
    model: Callable[[Path], Path]
    way: Way
    plain: Way | None = None
    equal_to_plain: bool = True
    fault: Mapping[str, Any] | None = None
    blamed: str = ""
    refused: bool = False


def _tiny(name: str) -> Callable[[Path], Path]:
    return lambda models: tiny_model.make(name, models / name)


def _library(name: str) -> Callable[[Path], Path]:
    return lambda models: mode_models.of_transformers(name, models / name)


def _scaled(module: str, rows: str = "decode", factor: float = 1.06) -> dict[str, Any]:
    return {"kind": "scale", "module": module, "factor": factor, "rows": rows}


def adapters(models: Path) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
    """Two adapters of the tiny qwen2, as Ask wants them."""
    base = tiny_model.MODELS["qwen2"].config
    a, b = (mode_models.adapter(models / f"adapter-{i}", base, seed=i) for i in (1, 2))
    return ("sql", 1, str(a)), ("chat", 2, str(b))


def _with_adapters(models: Path) -> list[Ask]:
    """One prompt to both, and others; every request has one (without: see docs/capture.md)."""
    sql, chat = adapters(models)
    one, two, three, _ = _PROMPTS
    return [Ask(one, 6, adapter=sql), Ask(one, 6, adapter=chat), Ask(two, 6, adapter=sql), Ask(three, 6, adapter=chat)]


def _with_and_without(models: Path) -> list[Ask]:
    return [Ask(_PROMPTS[0], 6), *_with_adapters(models)]


_LORA: Mapping[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_GUESSING = Way(asks=lambda m: GUESSABLE, how="serial")


def _draft(models: Path) -> Mapping[str, Any]:
    small = mode_models.shorter(models / "qwen2-draft", "qwen2", 3)
    return {"speculative_config": {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}}


def _eagle(models: Path) -> Mapping[str, Any]:
    head = mode_models.eagle(models / "eagle")
    return {"speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}}


def _embeds(models: Path) -> list[Ask]:
    """Two prompts of embeddings as long as each other, one of tokens between them."""
    return [Ask([], 6, embeds=(30, 128, 1)), Ask(_PROMPTS[1], 6), Ask([], 6, embeds=(30, 128, 2))]


def _sampled(**sampling: Any) -> Asks:
    return lambda models: [replace(a, sampling=sampling) for a in TEXT]


_JSON = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
_HYBRID: Mapping[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "block_size": 16}

_ALL = [
    Mode(
        "lora", _tiny("qwen2"), Way(_with_adapters, lambda m: _LORA), Way(_with_adapters, lambda m: _LORA, "serial"),
        fault=_scaled("model.layers.1.self_attn.attn"), blamed="model.layers.1.self_attn.attn",
    ),
    Mode(
        "lora-none", _tiny("qwen2"), Way(_with_and_without, lambda m: _LORA),
        Way(_with_and_without, lambda m: _LORA, "serial"), equal_to_plain=False,
    ),
    Mode(
        "ngram", _tiny("qwen2"), Way(lambda m: GUESSABLE, lambda m: {"speculative_config": _NGRAM}), _GUESSING,
        fault=_scaled("model.layers.1.mlp.down_proj", "position>=62"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "draft-model", _tiny("qwen2"), Way(lambda m: GUESSABLE, _draft), _GUESSING,
        fault=_scaled("model.layers.1.mlp.down_proj", "position>=62"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "eagle", _tiny("llama"), Way(lambda m: GUESSABLE, _eagle), _GUESSING,
        fault=_scaled("model.layers.0.mlp.down_proj", "position>=62"), blamed="model.layers.0.mlp.down_proj",
    ),
    Mode(
        "prompt-embeddings", _tiny("qwen2"), Way(_embeds, lambda m: {"enable_prompt_embeds": True}),
        Way(_embeds, lambda m: {"enable_prompt_embeds": True}, "serial"),
        fault=_scaled("model.layers.1.mlp.down_proj", "position>=20"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "pipeline", _tiny("qwen2"),
        Way(engine=lambda m: {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, host="two"),
        Way(),  # no fault: the plugin that plants it wants its module in every stage
    ),
    Mode(
        "several-answers", _tiny("qwen2"), Way(_sampled(n=3, temperature=0.8, seed=7)),
        fault=_scaled("model.layers.1.mlp.down_proj", "prefill"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "beams", _tiny("qwen2"), Way(lambda m: TEXT[:2], how="beams"),
        fault=_scaled("model.layers.1.mlp.down_proj", "prefill"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "prompt-logprobs", _tiny("qwen2"), Way(_sampled(prompt_logprobs=2)), Way(),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "structured", _tiny("qwen2"),
        Way(lambda m: [replace(TEXT[0], structured=_JSON, max_tokens=8), *TEXT[1:]]),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "mamba2", _library("mamba2"), Way(engine=lambda m: _HYBRID), Way(engine=lambda m: _HYBRID, how="serial"),
        fault=_scaled("backbone.layers.1.mixer.out_proj", "all"), blamed="backbone.layers.1.mixer.out_proj",
    ),
    Mode(
        "falcon-h1", _library("falcon-h1"), Way(engine=lambda m: _HYBRID), Way(engine=lambda m: _HYBRID, how="serial"),
        fault=_scaled("model.layers.1.feed_forward.down_proj"), blamed="model.layers.1.feed_forward.down_proj",
    ),
    Mode(
        "qwen3-next", _library("qwen3-next"), Way(engine=lambda m: _HYBRID),
        Way(engine=lambda m: _HYBRID, how="serial"),
        fault=_scaled("model.layers.1.linear_attn.out_proj", "all"), blamed="model.layers.1.linear_attn.out_proj",
    ),
    Mode(
        "w8a8", lambda m: mode_models.w8a8(m / "w8a8"), Way(), Way(how="serial"),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "whisper", _tiny("whisper"),
        Way(
            lambda m: [Ask([0, *p[:7]], 6, audio=(1.5, i)) for i, p in enumerate(_PROMPTS[:3])],
            lambda m: {"max_model_len": 128},
        ),
        fault=_scaled("model.decoder.layers.1.mlp.fc2"), blamed="model.decoder.layers.1.mlp.fc2",
    ),
    Mode(
        "pooling", _tiny("qwen2"), Way(engine=lambda m: {"runner": "pooling"}),
        Way(engine=lambda m: {"runner": "pooling"}, how="serial"),
        fault=_scaled("model.layers.1.mlp.down_proj", "position>=20"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "bert", _library("bert"), Way(engine=lambda m: {"runner": "pooling"}),
        Way(engine=lambda m: {"runner": "pooling"}, how="serial"),
        fault=_scaled("model.encoder.layer.1.output.dense", "position>=20"),
        blamed="model.encoder.layer.1.output.dense",
    ),
    Mode(
        "reload", _tiny("qwen2"), Way(during={3: ["reload_weights"]}), Way(),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "replicas", _tiny("qwen2"), Way(serve=("--data-parallel-size=2",), replicas=2), Way(),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "api-servers", _tiny("qwen2"), Way(serve=("--api-server-count=2",)), Way(),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "v2", _tiny("qwen2"), Way(host="v2"), Way(),
        fault=_scaled("model.layers.1.mlp.down_proj"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "v2-several-answers", _tiny("qwen2"), Way(_sampled(n=3, temperature=0.8, seed=7), host="v2"),
        fault=_scaled("model.layers.1.mlp.down_proj", "prefill"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "v2-pooling", _tiny("qwen2"), Way(engine=lambda m: {"runner": "pooling"}, host="v2"),
        Way(engine=lambda m: {"runner": "pooling"}),
        fault=_scaled("model.layers.1.mlp.down_proj", "position>=20"), blamed="model.layers.1.mlp.down_proj",
    ),
    Mode(
        "v2-lora", _tiny("qwen2"), Way(_with_adapters, lambda m: _LORA, host="v2"),
        Way(_with_adapters, lambda m: _LORA),
    ),
    Mode("v2-prompt-logprobs", _tiny("qwen2"), Way(_sampled(prompt_logprobs=2), host="v2"), Way()),
    Mode("sleep", _tiny("qwen2"), Way(engine=lambda m: {"enable_sleep_mode": True}), refused=True),
]  # fmt: skip
MODES = {mode.name: mode for mode in _ALL}
