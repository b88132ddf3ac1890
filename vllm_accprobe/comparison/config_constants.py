"""Causes that need no reference: what config.json asks for against what was built, and what mine's tensors show.

The problem: a replay computes with the constants that the module says of itself, so that one that was built with
another epsilon, base or window is right by its own word. The idea: one table (`RULES`) says which key of config.json
must be found in which constant of which modules, and `ModelKeys` reads the keys with the spellings that model families
have. What differs in a module is a `ConfigMismatch`; a key that no rule uses and that is not known to be without effect
is counted as unchecked, and so is a rule whose constant was not recorded. Only the language model's modules are
checked. Where the capture wrote down config.json (run.json, ``model.config``) that counts, else the model's directory.
Of tensors (`record_causes`): a module whose outputs are its inputs to the bit in calls where golden's are not was
passed over; of a pooler, golden's outputs are one function of a request's rows, and mine's may be another one.
Not here: weights (weight_places.py), what differs between two dumps' constants (notes.py).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison.plan.unit import loose, unsummed_taps
from vllm_accprobe.dump.block_code import FORWARD
from vllm_accprobe.dump.decode import object_at, object_in
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.journal import NO_LIVES
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import ROOT_TAP, TOKENS, Module, Record
from vllm_accprobe.judge.origins import OriginEntry

MAX_JSON = 16 << 20
_DIGITS = 1e-5
"""chosen: relative; a constant may have been rounded to float32, or its root taken in it."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_OTHER_TOWERS = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|multi_modal_projector|encoder|mm_\w+|draft:?\w*|mtp)(\.|$)"
)
_ABSENT = object()


@dataclass(frozen=True)
class ConfigMismatch:
    """key: of config.json; taps: the modules, in order; cls: of the first; name: of the constant; built, due: its two
    values, the second as config.json asks."""

    key: str
    taps: tuple[str, ...]
    cls: str
    name: str
    built: Any
    due: Any
    of: int = 0

    @property
    def says(self) -> str:
        every = 1 < self.of == len(self.taps)
        more = f" and {len(self.taps) - 1} more" if len(self.taps) > 1 and not every else ""
        built = f"{self.taps[0]}{more} ({self.cls}): {self.name} is {_value_text(self.built)}"
        rest = f", in all {self.of} such modules" if every else ""
        return f"{built}, config.json asks for {_value_text(self.due)} ({self.key}){rest}"

    @property
    def cause(self) -> dict[str, Any]:
        """As compare.json's ``origins[].cause``."""
        parameter = {"name": self.name, "built": self.built, "due": self.due, "key": self.key}
        return {"family": "setting", "text": self.says, "parameter": parameter, "residual": 0.0, "chance": None}


@dataclass
class BuiltCheck:
    """mismatches: in the order of the table; checked: key -> modules, right and wrong; unchecked: key -> why."""

    mismatches: list[ConfigMismatch] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    unchecked: dict[str, str] = field(default_factory=dict)

    def corrections(self) -> dict[str, dict[str, Any]]:
        """Tap -> constants with the values that config.json asks for, of plain attributes."""
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for m in self.mismatches:
            for tap in m.taps if m.name != "class" and "(" not in m.name else ():
                found[tap][m.name] = m.due
        return dict(found)

    def summary(self) -> str:
        """One line: how many keys hold, and which are not checked."""
        wrong = len({m.key for m in self.mismatches})
        right = len(self.checked) - wrong
        left = f"; {len(self.unchecked)} unchecked: {', '.join(sorted(self.unchecked)[:8])}" if self.unchecked else ""
        left += f" and {len(self.unchecked) - 8} more" if len(self.unchecked) > 8 else ""
        return f"config.json: {right} of {len(self.checked)} keys hold in the modules that were built{left}"


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.9g}" if isinstance(value, float) else str(value)[:120]


# --- what a model asks for -------------------------------------------------------------------------------------------


class ModelKeys:
    """config.json's language part, with the spellings of its keys. used: keys that were read."""

    def __init__(self, config: Mapping[str, Any]):
        inner: Mapping[str, Any] = next((config[k] for k in ("text_config", "llm_config", "language_config")
                      if isinstance(config.get(k), Mapping)), {})  # fmt: skip
        self._values, self._levels = {**config, **inner}, (config, inner)
        self.used: set[str] = set()
        self.key = ""
        """Of the value that was read last."""

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` that is there and not null."""
        for name in names:
            if self._values.get(name) is not None:
                self.used.add(name)
                self.key = name
                return self._values[name]
        return default

    def disputed(self, name: str) -> bool:
        """Whether the whole and its language part have different values, of which vLLM's releases take either."""
        whole, part = (c.get(name) for c in self._levels)
        return whole is not None and part is not None and bool(whole != part)

    def has(self, name: str) -> bool:
        return name in self._values

    def names(self) -> Iterable[str]:
        return list(self._values)

    def mentions(self, expression: str) -> bool:
        """Whether any key is about something."""
        return any(re.search(expression, k) for k in self._values)

    @property
    def family(self) -> str:
        return str(self._values.get("model_type") or "")

    @property
    def head_dim(self) -> int | None:
        found = self.get("head_dim")
        heads, size = self.get("num_attention_heads"), self.get("hidden_size")
        if isinstance(found, int):
            return found
        return size // heads if isinstance(heads, int) and isinstance(size, int) and heads > 0 else None

    def kind_of_layer(self, layer: int | None) -> str:
        """``sliding``, ``full``, or "" where config.json does not tell the layers apart."""
        if layer is None:
            return ""
        types = self.get("layer_types")
        if isinstance(types, Sequence) and not isinstance(types, str) and layer < len(types):
            word = str(types[layer])
            return "sliding" if "sliding" in word else "full" if "full" in word else word
        pattern = self.get("sliding_window_pattern")
        if isinstance(pattern, int) and pattern > 0:
            return "full" if (layer + 1) % pattern == 0 else "sliding"
        if self.family == "gemma2":
            return "full" if layer % 2 else "sliding"
        return ""

    def rope(self, layer: int | None) -> dict[str, Any]:
        """Of a layer: ``rope_theta``, ``rope_type`` and the factors, as one set of names; ``:key`` says where from."""
        found: dict[str, Any] = {}
        source = self.get("rope_parameters", "rope_scaling")
        origin = self.key if source is not None else "rope_theta"
        kind = self.kind_of_layer(layer)
        if isinstance(source, Mapping):
            each = next((source[k] for k in (f"{kind}_attention", kind) if isinstance(source.get(k), Mapping)), None)
            if each is not None:
                source = each
            found |= {str(k): v for k, v in source.items() if not isinstance(v, Mapping)}
        local = self.get("rope_local_base_freq")
        if local is not None and kind == "sliding" and "rope_theta" not in found:
            return {"rope_theta": local, "rope_type": "default", ":key": "rope_local_base_freq"}
        theta = self.get("rope_theta", "rotary_emb_base", "rotary_base")
        found.setdefault("rope_theta", theta)
        word = found.get("rope_type", found.get("type")) or "default"
        found["rope_type"] = {"mrope": "default", "su": "longrope"}.get(str(word), str(word))
        if (
            found["rope_type"] == "yarn"
            and ("mscale" in found or "mscale_all_dim" in found)
            and self.has("kv_lora_rank")
        ):
            found["rope_type"] = "deepseek_yarn"
        return found | {":key": origin}


def config_of(run: Mapping[str, Any], directory: Path | None) -> Mapping[str, Any]:
    """config.json as the capture wrote it down, else from the model's directory; {} where neither has one."""
    return object_at(run, "model", "config") or object_in(directory and directory / "config.json", MAX_JSON)


# --- the table -------------------------------------------------------------------------------------------------------

Due = Callable[[ModelKeys, Module, "int | None"], Any]
"""What a module's constant must be: a value; a frozenset, any of which will do; _ABSENT where config.json says
nothing of it."""


@dataclass(frozen=True)
class Rule:
    """keys: of config.json, named when it fails; classes, taps: expressions over class and tap of the modules that it
    is about; names: of the constant, the first that was recorded; due: its value; lacking: what a constant is that was
    not recorded, _ABSENT for unknown."""

    keys: tuple[str, ...]
    classes: str
    names: tuple[str, ...]
    due: Due
    taps: str = ""
    lacking: Any = _ABSENT


def _key(*names: str, map_: Callable[[Any], Any] = lambda v: v) -> Due:
    def due(model: ModelKeys, module: Module, layer: int | None) -> Any:
        found = model.get(*names)
        return _ABSENT if found is None else map_(found)

    return due


def _by_layer(name: str) -> Due:
    """One value, or one for each layer (Gemma 3n)."""

    def due(model: ModelKeys, module: Module, layer: int | None) -> Any:
        found = model.get(name, default=_ABSENT)
        if not isinstance(found, list):
            return found
        return found[layer] if layer is not None and layer < len(found) else _ABSENT

    return due


def _rope(name: str) -> Due:
    def due(model: ModelKeys, module: Module, layer: int | None) -> Any:
        found = model.rope(layer).get(name)
        return _ABSENT if found is None else found

    return due


_ROTARY_CLASSES = {
    "default": ("RotaryEmbedding", "MRotaryEmbedding", "MRotaryEmbeddingInterleaved", "FourierRotaryEmbedding",
                "Gemma4RotaryEmbedding", "DualChunkRotaryEmbedding", "Llama4VisionRotaryEmbedding"),
    "linear": ("LinearScalingRotaryEmbedding",),
    "llama3": ("Llama3RotaryEmbedding",),
    "dynamic": ("DynamicNTKScalingRotaryEmbedding", "DynamicNTKAlphaRotaryEmbedding"),
    "ntk": ("NTKScalingRotaryEmbedding",),
    "yarn": ("YaRNScalingRotaryEmbedding", "MRotaryEmbedding"),
    "deepseek_yarn": ("DeepseekScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding"),
    "longrope": ("Phi3LongRoPEScaledRotaryEmbedding",),
    "proportional": ("Gemma4RotaryEmbedding",),
}  # fmt: skip
"""rope_type -> vLLM's classes (model_executor/layers/rotary_embedding)."""
_PLAIN_SCALE = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "phi3", "olmo",
    "olmo2", "starcoder2", "glm4", "glm4_moe", "minimax_m2", "internlm2", "stablelm", "gpt_oss",
})  # fmt: skip
"""model_type of families whose softmax scale is head_dim**-0.5 whatever config.json says."""
_HALVES = frozenset({
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "gemma",
    "gemma2", "gemma3", "gemma3_text", "phi3", "olmo2", "starcoder2", "gpt_oss", "glm4_moe", "minimax_m2",
})  # fmt: skip
_NEIGHBOURS = frozenset({"glm4", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gptj", "codegen"})
"""model_type of families that rotate halves, and of those that rotate neighbouring channels."""
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu",
}  # fmt: skip
_GATED = {"SiluAndMul": "silu", "QuickGELU": "quick_gelu", "ReLUSquaredActivation": "relu2", "NewGELU": "gelu_tanh",
          "FastGELU": "gelu_tanh", "SiLU": "silu", "ReLU": "relu"}  # fmt: skip


def _rotary_class(model: ModelKeys, module: Module, layer: int | None) -> Any:
    kind = model.rope(layer)["rope_type"]
    known = _ROTARY_CLASSES.get(kind)
    if known is None or not any(module.cls in classes for classes in _ROTARY_CLASSES.values()):
        return _ABSENT  # of transformers' own code or a vendor's: what it computes is not known by its name
    if kind in ("default", "yarn") and "mrope_section" in model.rope(layer):
        return frozenset(c for c in known if c.startswith("MRotary"))
    return frozenset(c for c in known if kind != "default" or not c.startswith("MRotary"))


def _rotary_dim(model: ModelKeys, module: Module, layer: int | None) -> Any:
    if (found := model.get("qk_rope_head_dim", "rotary_dim")) is not None:
        return found
    part = model.rope(layer).get("partial_rotary_factor")
    if part is None:
        part = model.get("partial_rotary_factor", "rotary_pct", "rope_pct", default=1.0)
    size = module.attrs.get("head_size", model.head_dim)
    if model.rope(layer)["rope_type"] == "proportional":  # what does not turn has a frequency of 0
        return size if isinstance(size, int) else _ABSENT
    return int(size * part) if isinstance(size, int) and isinstance(part, (int, float)) else _ABSENT


def _original(model: ModelKeys, module: Module, layer: int | None) -> Any:
    rope = model.rope(layer)
    return rope.get("original_max_position_embeddings", model.get("original_max_position_embeddings", default=_ABSENT))


def _window(model: ModelKeys, module: Module, layer: int | None) -> Any:
    """The window of a layer, None for none."""
    window, kind = model.get("sliding_window"), model.kind_of_layer(layer)
    if model.get("use_sliding_window") is False or window is None:
        return None if model.has("sliding_window") or not model.mentions(_LOCAL) else _ABSENT
    if kind:
        if kind != "sliding":
            return None
        return frozenset({int(window), int(window) + 1}) if model.family in _SEES_ITSELF else int(window)
    if isinstance(first := model.get("max_window_layers"), int) and model.has("use_sliding_window"):
        return int(window) if layer is not None and layer >= first else None
    if model.family in ("mistral", "mixtral", "starcoder2", "phi3"):
        return int(window)
    return _ABSENT


def _query_heads(model: ModelKeys, module: Module, layer: int | None) -> Any:
    """Twice as many where the projection makes a gate for each head, too."""
    gated = model.get("attn_output_gate", default=model.family in _GATES_HEADS)
    found = model.get("num_attention_heads", default=_ABSENT)
    return found * (1 + bool(gated)) if isinstance(found, int) else found


_GATES_HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""model_type of families that gate the attention's output unless config.json says ``attn_output_gate`` false."""
_SEES_ITSELF = ("cohere2", "cohere2_moe", "modernbert", "openai_privacy_filter")
"""model_type of families whose window is of the tokens before, without the query's own in vLLM 0.32; earlier releases
took config.json's number."""
_LOCAL = r"window|attention_chunk|(^|_)local_(attn|attention|base)|attention_type|layer_types"
"""What keys are about that ask for a window, in whatever spelling."""


def _soft_cap(model: ModelKeys, module: Module, layer: int | None) -> Any:
    found = model.get("attn_logit_softcapping")
    return (
        float(found) if found is not None else 0.0 if not model.mentions(r"attn\w*(soft_?cap|logit_cap)") else _ABSENT
    )


def _scale(model: ModelKeys, module: Module, layer: int | None) -> Any:
    if model.has("kv_lora_rank") or module.cls.startswith("MLA"):
        return _ABSENT
    if (found := model.get("query_pre_attn_scalar")) is not None:
        return float(found) ** -0.5
    if (found := model.get("attention_multiplier")) is not None:
        return float(found)
    size = model.head_dim
    return float(size) ** -0.5 if size and model.family in _PLAIN_SCALE else _ABSENT


_activation = _key("hidden_activation", "hidden_act", "activation_function",
                   map_=lambda v: _ACTIVATIONS.get(str(v), _ABSENT))  # fmt: skip


def _factor(model: ModelKeys, module: Module, layer: int | None) -> Any:
    found = model.get("routed_scaling_factor")
    return _ABSENT if found is None else frozenset({float(found), 1.0})  # some blocks multiply the sum instead


def _logits_scale(model: ModelKeys, module: Module, layer: int | None) -> Any:
    """Granite divides logits by ``logits_scaling``, HyperCLOVA X multiplies them with it."""
    found = model.get("logits_scaling")
    if not isinstance(found, (int, float)):
        return _ABSENT
    return float(found) if model.family == "hyperclovax" else 1.0 / found if found else 0.0


def _norm_class(model: ModelKeys, module: Module, layer: int | None) -> Any:
    """Families whose norms add one to the weight."""
    plus_one = model.family.startswith(("gemma", "paligemma")) and not model.family.startswith(("gemma3n", "gemma4"))
    return frozenset({"GemmaRMSNorm"}) if plus_one else _ABSENT


def _epsilon(model: ModelKeys, module: Module, layer: int | None) -> Any:
    found = {float(v) for n in _EPSILONS if isinstance(v := model.get(n), (int, float))}
    last = module.tap.rpartition(".")[2]
    return frozenset(found) if found and (model.family, last) not in _OWN_EPSILON else _ABSENT


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_OWN_EPSILON = {("olmoe", "q_norm"), ("olmoe", "k_norm"), ("deepseek_v3", "k_norm"), ("deepseek_v32", "k_norm")}
"""Norms whose epsilon the family's code has, not config.json."""
_NORMS = (r"(^|\.)(input_layernorm|post_attention_layernorm|pre_feedforward_layernorm|post_feedforward_layernorm|"
          r"norm|final_layernorm|ln_f|q_norm|k_norm|q_a_layernorm|kv_a_layernorm)$")  # fmt: skip
_ATTENTION, _ROTARY, _ROUTED = (
    r"^Attention$",
    r"RotaryEmbedding(Interleaved)?$",
    r"^(RoutedExperts|FusedMoE|SharedFusedMoE)$",
)
_HEAD = r"^LogitsProcessor$"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")

RULES: tuple[Rule, ...] = (
    Rule(_EPSILONS, r"Norm(TP)?$", ("variance_epsilon", "eps"), _epsilon, _NORMS),
    Rule(("model_type",), r"^(Gemma)?RMSNorm$", ("class",), _norm_class, _NORMS),
    Rule(("rope_theta", "rope_parameters"), _ROTARY, ("base",), _rope("rope_theta")),
    Rule(("rope_scaling", "rope_parameters"), _ROTARY, ("class",), _rotary_class),
    Rule(("partial_rotary_factor", "rotary_dim", "qk_rope_head_dim"), _ROTARY, ("rotary_dim",), _rotary_dim),
    Rule(("model_type",), _ROTARY, ("is_neox_style",), lambda model, *_: (
        model.family in _HALVES if model.family in _HALVES | _NEIGHBOURS else _ABSENT)),
    Rule(("factor",), r"(Scaling|Llama3)\w*RotaryEmbedding$", ("scaling_factor",), _rope("factor")),
    Rule(("low_freq_factor",), r"^Llama3Rotary", ("low_freq_factor",), _rope("low_freq_factor")),
    Rule(("high_freq_factor",), r"^Llama3Rotary", ("high_freq_factor",), _rope("high_freq_factor")),
    Rule(("original_max_position_embeddings",), r"^Llama3Rotary", ("orig_max_position",), _original),
    Rule(("original_max_position_embeddings",), r"^(YaRN|Deepseek)\w*Rotary", ("max_position_embeddings",), _original),
    Rule(("original_max_position_embeddings",), r"^Phi3LongRoPE", ("original_max_position_embeddings",), _original),
    Rule(("beta_fast",), r"^(YaRN|Deepseek|MRotary)", ("beta_fast",), _rope("beta_fast")),
    Rule(("beta_slow",), r"^(YaRN|Deepseek|MRotary)", ("beta_slow",), _rope("beta_slow")),
    Rule(("alpha",), r"^DynamicNTKAlpha", ("scaling_alpha",), _rope("alpha")),
    Rule(("short_factor",), r"^Phi3LongRoPE", ("short_factor",), _rope("short_factor")),
    Rule(("long_factor",), r"^Phi3LongRoPE", ("long_factor",), _rope("long_factor")),
    Rule(("mrope_section",), r"^MRotary", ("mrope_section",), _rope("mrope_section")),
    Rule(("mrope_interleaved",), r"^MRotary", ("mrope_interleaved",), _rope("mrope_interleaved")),
    Rule(("sliding_window", "layer_types"), _ATTENTION, ("impl.sliding_window", "sliding_window"), _window),
    Rule(("attn_logit_softcapping",), _ATTENTION, ("impl.logits_soft_cap", "logits_soft_cap"), _soft_cap),
    Rule(("query_pre_attn_scalar", "attention_multiplier", "head_dim", "num_attention_heads"), _ATTENTION,
         ("impl.scale", "scale"), _scale),
    Rule(("num_attention_heads",), r"^QKVParallelLinear$", ("total_num_heads",), _query_heads,
         r"(^|\.)self_attn\.qkv_proj$"),
    Rule(("num_key_value_heads",), r"^QKVParallelLinear$", ("total_num_kv_heads",), _key("num_key_value_heads"),
         r"(^|\.)self_attn\.qkv_proj$"),
    Rule(("head_dim",), r"^QKVParallelLinear$", ("head_size",), _key("head_dim"), r"(^|\.)self_attn\.qkv_proj$"),
    Rule(("hidden_act", "hidden_activation"), r"(AndMul|GELU|SiLU|ReLU|Activation)$", ("activation (class)",),
         _activation, r"(^|\.)(act_fn|act)$"),
    Rule(("hidden_act", "hidden_activation"), _ROUTED, ("activation",), _activation),
    Rule(_TOP_K, _ROUTED, ("top_k",), _key(*_TOP_K)),
    Rule(_EXPERTS, _ROUTED, ("global_num_experts",), _key(*_EXPERTS)),
    Rule(("norm_topk_prob",), _ROUTED, ("router.renormalize", "renormalize"), _key("norm_topk_prob")),
    Rule(("scoring_func",), _ROUTED, ("scoring_func",),
         _key("scoring_func", map_=lambda v: v if v in ("softmax", "sigmoid") else _ABSENT)),
    Rule(("n_group",), _ROUTED, ("num_expert_group",), _key("n_group")),
    Rule(("topk_group",), _ROUTED, ("topk_group",), _key("topk_group")),
    Rule(("routed_scaling_factor",), _ROUTED, ("routed_scaling_factor",), _factor),
    Rule(("final_logit_softcapping",), _HEAD, ("soft_cap",), _key("final_logit_softcapping", map_=float), "", None),
    Rule(("logit_scale",), _HEAD, ("scale",), _key("logit_scale", map_=float)),
    Rule(("logits_scaling",), _HEAD, ("scale",), _logits_scale),
    Rule(("vocab_size",), r"^VocabParallelEmbedding$", ("org_vocab_size",), _key("vocab_size"), r"(^|\.)embed_tokens$"),
    Rule(("hidden_size",), r"^VocabParallelEmbedding$", ("embedding_dim",), _key("hidden_size"),
         r"(^|\.)embed_tokens$"),
    Rule(("intermediate_size",), r"^RowParallelLinear$", ("input_size",), _by_layer("intermediate_size"),
         r"layers\.\d+\.mlp\.down_proj$"),
)  # fmt: skip
"""Which key of config.json must be found where. A rule of modules that the model lacks checks nothing."""

WITHOUT_EFFECT = frozenset({
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "attention_dropout", "hidden_dropout",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range", "initializer_factor",
    "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha",
    "router_jitter_noise", "cache_implementation", "_name_or_path", "name_or_path", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder", "chunk_size_feed_forward",
    "problem_type", "use_bfloat16", "torchscript", "model_type", "max_position_embeddings", "text_config",
    "vision_config", "audio_config", "vision_start_token_id", "vision_end_token_id", "vision_token_id",
    "image_token_id", "video_token_id", "max_window_layers", "image_token_index", "pad_index",
    "vocab_size_per_layer_input", "pruned_heads", "tf_legacy_loss", "seq_aux", "ep_size", "_attn_implementation",
})  # fmt: skip
"""Keys that change nothing of what a forward of the language model computes, or are read with another."""


def check_built(modules: Iterable[Module], config: Mapping[str, Any], overridden: Iterable[str] = ()) -> BuiltCheck:
    """The modules of one rank against config.json. overridden: keys that the user changed for this run, which are not
    checked."""
    out = BuiltCheck()
    if not config:
        return out
    model, mods = ModelKeys(config), [m for m in modules if not _OTHER_TOWERS.search(m.tap)]
    changed = set(overridden)
    found: dict[tuple[str, str, str, str], tuple[ConfigMismatch, list[str]]] = {}
    totals: Counter[tuple[str, str]] = Counter()
    not_recorded: dict[str, str] = {}
    for number, rule in enumerate(RULES):
        for m in mods:
            if not re.search(rule.classes, m.cls) or not re.search(rule.taps, m.tap):
                continue
            match = _LAYER.search(m.tap)
            due = rule.due(model, m, int(match[1]) if match else None)
            key = _named(rule, model)
            if due is _ABSENT or key.partition(".")[0] in changed or "*" in changed:
                continue
            name, built = _constant(m, rule)
            if built is _ABSENT:
                not_recorded.setdefault(key, "its constant was not recorded")
                continue
            out.checked[key] += 1
            totals[str(number), name] += 1
            if not _holds(built, due):
                place = str(number), name, repr(built), repr(due)
                first = ConfigMismatch(key, (), m.cls, name, built, min(due) if isinstance(due, frozenset) else due)
                found.setdefault(place, (first, []))[1].append(m.tap)
    for (number_, name, _, _), (first, taps) in found.items():
        of = totals[number_, name]
        out.mismatches.append(ConfigMismatch(first.key, tuple(taps), first.cls, name, first.built, first.due, of))
    known = model.used | set(out.checked) | WITHOUT_EFFECT
    out.unchecked = {k: "no rule for it" for k in model.names() if k not in known and _matters(model.get(k))}
    out.unchecked |= {k: why for k, why in not_recorded.items() if k not in out.checked}
    return out


# --- what there must be, and how often -------------------------------------------------------------------------------

_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_QK = ("self_attn.q_norm", "self_attn.k_norm")
_LAYER_NORMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "gemma"), _TWO),
    **dict.fromkeys(("qwen3", "qwen3_moe"), (*_TWO, *_QK)),
    "gemma2": _FOUR,
    **dict.fromkeys(("gemma3", "gemma3_text"), (*_FOUR, *_QK)),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm", *_QK),
}
"""model_type -> the norms of a layer, all of them."""
_OF_LAYER = re.compile(r"^(.*?(?:layers|h|blocks)\.\d+)\.(.+)$")
_TIED = "tie_word_embeddings"


def check_structure(
    modules: Sequence[Module], config: Mapping[str, Any], params: Mapping[tuple[str, str], str], whole: bool,
    out: BuiltCheck,
) -> None:  # fmt: skip
    """Adds what is about several modules to ``out``. params: (tap, name) -> a fingerprint; whole: all layers and all
    modules of the model are in the dump."""
    if not config:
        return
    model, mods = ModelKeys(config), [m for m in modules if not _OTHER_TOWERS.search(m.tap)]
    cls = {m.tap: m.cls for m in mods}

    def compared(key: str, taps: Sequence[str], name: str, built: Any, due: Any) -> None:
        out.checked[key] += 1
        out.unchecked.pop(key, None)
        if built != due:
            out.mismatches.append(ConfigMismatch(key, tuple(taps), cls.get(taps[0], ""), name, built, due, 0))

    layers = {int(found[1]) for m in mods if (found := _LAYER.search(m.tap))}
    stacks = {m.tap[: found.start()] for m in mods if (found := _LAYER.search(m.tap))}
    due = model.get("num_hidden_layers", "n_layer")
    # of several stacks, as recurrent models have them, the configuration does not tell how many each has
    if whole and layers and isinstance(due, int) and (len(stacks) == 1 or due == len(layers)):
        compared(model.key, [mods[0].tap], "layers", len(layers), due)
    _ties(model, params, compared)
    for key, part in (("attention_bias", "self_attn.qkv_proj"), ("qkv_bias", "self_attn.qkv_proj"),
                      ("mlp_bias", "mlp.gate_up_proj")):  # fmt: skip
        taps = [m.tap for m in mods if m.tap.endswith(part) and (m.tap, "weight") in params]
        if taps and isinstance(model.get(key), bool):
            wrong = [t for t in taps if ((t, "bias") in params) != model.get(key)]
            compared(key, wrong or taps, "bias", not model.get(key) if wrong else model.get(key), model.get(key))
    norms = _LAYER_NORMS.get(model.family)
    if whole and norms is not None:
        _norms(mods, norms, compared)


def _ties(model: ModelKeys, params: Mapping[tuple[str, str], str], compared: Callable[..., None]) -> None:
    embedded = [(k, v) for k, v in params.items() if k[1] == "weight" and k[0].endswith("embed_tokens")]
    heads = [(k, v) for k, v in params.items() if k[1] == "weight" and k[0].rpartition(".")[2] == "lm_head"]
    due = model.get(_TIED)
    if not isinstance(due, bool) or len(embedded) != 1 or model.disputed(_TIED):
        return
    if heads and heads[0][1] and embedded[0][1]:
        compared(_TIED, [heads[0][0][0]], "the same weight as embed_tokens", heads[0][1] == embedded[0][1], due)
    elif due and not heads:
        compared(_TIED, [embedded[0][0][0]], "the same weight as embed_tokens", True, due)


def _norms(mods: Sequence[Module], due: Sequence[str], compared: Callable[..., None]) -> None:
    layers: dict[str, set[str]] = defaultdict(set)
    for m in mods:
        found = _OF_LAYER.match(m.tap)
        if found and re.search(r"Norm", m.cls):
            layers[found[1]].add(found[2])
    for layer, there in layers.items():
        own = {n for n in there if n.endswith("norm")}
        if own != set(due):
            compared("model_type", [layer], "norms", sorted(own), sorted(due))
            return


def _matters(value: Any) -> bool:
    """A key that is null, false or empty asks for nothing."""
    return value is not None and value is not False and value != {} and value != []


def _named(rule: Rule, model: ModelKeys) -> str:
    """The key of config.json that a rule's value came from, as it is spelt there."""
    for origin in ("rope_parameters", "rope_scaling"):
        if isinstance(found := model.get(origin), Mapping) and rule.keys[0] in found and not model.has(rule.keys[0]):
            return f"{origin}.{rule.keys[0]}" if len(rule.keys) == 1 else origin
    return next((k for k in rule.keys if model.has(k)), f"no {rule.keys[0]}")


def _constant(m: Module, rule: Rule) -> tuple[str, Any]:
    if rule.names == ("class",):
        return "class", m.cls
    if rule.names == ("activation (class)",):
        return rule.names[0], _activation_of(m)
    for name in rule.names:
        if name in m.attrs:
            value = m.attrs[name]
            if name.endswith("sliding_window"):
                return name, _window_of(value)
            if name == "activation":
                return name, _ACTIVATIONS.get(str(value).lower(), _ABSENT)
            return name, value
    if "sliding_window" in rule.names and not any(n.endswith("sliding_window") for n in m.attrs):
        return rule.names[0], _ABSENT
    return rule.names[0], rule.lacking


def _activation_of(m: Module) -> Any:
    if m.cls in ("GeluAndMul", "GELU"):
        return "gelu_tanh" if m.attrs.get("approximate") == "tanh" else "gelu"
    return _GATED.get(m.cls, _ABSENT)


def _window_of(value: Any) -> Any:
    """A backend's window as so many tokens, None for none: flash attention has (tokens - 1, 0)."""
    if isinstance(value, (list, tuple)) and value:
        return None if value[0] in (-1, None) else int(value[0]) + 1
    return None if value in (-1, 0) else value


def _holds(built: Any, due: Any) -> bool:
    if isinstance(due, frozenset):
        return any(_holds(built, one) for one in due)
    if isinstance(built, bool) or isinstance(due, bool):
        return bool(built) == bool(due) and isinstance(built, (bool, int)) and isinstance(due, (bool, int))
    if isinstance(built, (int, float)) and isinstance(due, (int, float)):
        return math.isclose(built, due, rel_tol=_DIGITS, abs_tol=0.0)
    if isinstance(built, (list, tuple)) and isinstance(due, (list, tuple)):
        return len(built) == len(due) and all(_holds(b, d) for b, d in zip(built, due, strict=True))
    return bool(built == due)


# --- a dump, and two -------------------------------------------------------------------------------------------------


def check_built_of(dump: Any, model: Path | None) -> BuiltCheck:
    """The modules of a dump's ranks against config.json."""
    config = config_of(dump.run, model)
    described, probe, parallel = (object_at(dump.run, name) or {} for name in ("model", "probe", "parallel"))
    listed, pp = described.get("overrides"), parallel.get("pp")
    changed = [str(k) for k in listed] if isinstance(listed, list) else []
    whole = not probe.get("modules") and (not isinstance(pp, list) or pp[1:] == [1])
    first: BuiltCheck | None = None
    for rank, modules in sorted(dump.modules.items()):
        out = check_built(modules, config, changed)
        prints = getattr(dump, "lives", NO_LIVES).prints
        params = {(p.tap, p.name): p.order for p in prints if p.rank == rank and p.life == 0}
        check_structure(modules, config, params, whole and bool(params), out)
        first = first if first is not None else out
        if out.mismatches:
            return out
    return first if first is not None else BuiltCheck()


def built_otherwise(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Tap -> the cause of an error there, where one of golden and mine was built otherwise than its config.json asks
    and the other was not; mine's where both were."""
    golden, mine = (check_built_of(dump, None).mismatches for dump in dumps)
    found: dict[str, dict[str, Any]] = {}
    for side, own, others in (("mine", mine, golden), ("golden", golden, mine)):
        known = {(m.key, m.name, str(m.built)) for m in others}
        for m in own:
            if (m.key, m.name, str(m.built)) not in known:
                cause = m.cause | {"text": f"{side} is built otherwise than config.json asks: {m.says}"}
                for tap in m.taps:
                    found.setdefault(tap, cause)
    return found


def with_built(origins: Iterable[OriginEntry], causes: Mapping[str, dict[str, Any]]) -> list[OriginEntry]:
    """``origins`` with ``causes``, by tap, where no other cause is known."""
    return [{**o, "cause": causes[o["module"]]} if o["module"] in causes and not o.get("cause") else o for o in origins]


def built_notes(origins: Iterable[OriginEntry], causes: Mapping[str, dict[str, Any]]) -> list[str]:
    """What is built otherwise, where no origin stands; each sentence once."""
    named = {causes[o["module"]]["text"] for o in origins if o["module"] in causes}
    return [t for t in dict.fromkeys(c["text"] for c in causes.values() if c["family"] == "setting") if t not in named]


MOST_BYTES = 64 << 20
"""Chosen: of hidden states that are read for poolers, of both dumps together."""
_NEAR = 1e-3
"""Chosen: relative L2. Of a mean in float32 1e-6 is left, of a row in bfloat16 2**-9; two rows differ by about 1."""


def record_causes(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Tap -> compare.json's ``cause`` of an error there."""
    return {**recoded(dumps), **unsummed(dumps), **passed_over(dumps), **pooled(dumps)}


def _cause(text: str) -> dict[str, Any]:
    return {"family": "address", "text": text, "parameter": None, "residual": 0.0, "chance": None}


def recoded(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Blocks of one class whose own code computes another formula in mine than in golden."""
    theirs, own = ({m.tap: m for ms in dump.modules.values() for m in ms} for dump in dumps)
    found = {}
    for tap, m in own.items():
        golden = theirs.get(tap)
        if golden and comparable_code(m, golden, own) and (says := other_code(m.attrs[FORWARD], golden.attrs[FORWARD])):
            found[tap] = _cause(says)
    return found


def comparable_code(mine: Module, golden: Module, taps: Container[str]) -> bool:
    """Whether two formulas of one class are of one package and of the same outputs, and every child that golden's names
    is one of mine's ``taps``: else other formulas may compute the same."""
    own, theirs = ({role: text for role, text in code.items() if role.startswith("output")}
                   if isinstance(code := m.attrs.get(FORWARD), Mapping) else {} for m in (mine, golden))  # fmt: skip
    same = own and own.keys() == theirs.keys() and mine.cls == golden.cls and package(mine) == package(golden)
    named = (path for role, text in theirs.items() if isinstance(text, str)
             for path in ([text] if role == "output" else _CHILD.findall(text[:_LONGEST])))  # fmt: skip
    start = "" if mine.tap == ROOT_TAP else f"{mine.tap}."
    return bool(same) and all(f"{start}{path}" in taps for path in named)


_CHILD = re.compile(r"([\w.]+)\[\d+\]")


def package(module: Module) -> str:
    """The package whose file has a module's forward, "" where that was not recorded."""
    return (module.source or "").partition("/")[0]


def other_code(mine: Any, golden: Any) -> str:
    """The first input of a part, or output, whose formulas (capture/taps/formulas.py) have other terms, "" where there
    is none."""
    both = isinstance(mine, Mapping) and isinstance(golden, Mapping)
    for role, text in sorted(golden.items(), key=lambda item: item[0].startswith("output")) if both else ():
        own = mine.get(role)
        if _ROLE.match(role) and isinstance(own, str) and isinstance(text, str) and _terms(own) != _terms(text):
            part, _, name = role.removeprefix("inside.").rpartition("/")
            place = f"input {name} of {part}" if part else role
            return f"its own code computes {place} = {own[:_LETTERS]}, golden's {text[:_LETTERS]}"
    return ""


_ROLE = re.compile(r"output|inside\.")


_LETTERS = 200
"""Chosen: of a formula in a sentence."""


@functools.cache
def _terms(text: str) -> list[str]:
    """What a formula adds up, in an order of its own; the formula itself where it is no sum."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        nodes, terms = [ast.parse(text[:_LONGEST], mode="eval").body], []
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                nodes += [node.left, node.right]
            else:
                terms.append(ast.unparse(node))
        return sorted(terms)
    return [text]


_LONGEST = 4000


def unsummed(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Modules whose partial sums are not added up in mine, as is done in golden."""
    theirs, own = (unsummed_taps(dump, loose(dump)) for dump in dumps)
    text = "the ranks' partial sums are not added up: each rank goes on with its own share"
    return {tap: _cause(text) for tap in own if tap not in theirs}


# --- passed over -----------------------------------------------------------------------------------------------------


def passed_over(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Modules with others in them that return their inputs in mine, and never do so in golden."""
    theirs, own = (_calls(dump) for dump in dumps)
    found = {}
    for tap, (same, calls) in own.items():
        if same and tap in theirs and not theirs[tap][0]:
            text = f"in {same:,} of {calls:,} calls its outputs are its inputs to the bit: it was passed over"
            found[tap] = _cause(text)
    return found


def _calls(dump: Any) -> dict[str, tuple[int, int]]:
    """Of each module with others in it: (calls whose outputs are all among their inputs, calls)."""
    outer = {t for named in dump.modules.values() for m in named for t in enclosing(m.tap) if t != m.tap}
    calls: dict[tuple[str, int, int | None, int], tuple[set[str], list[str]]] = defaultdict(lambda: (set(), []))
    for r in of_sites(dump.records, lambda site: site.tap in outer and site.rows is not None):
        if r.hash is not None:
            inputs, outputs = calls[r.tap, r.rank, r.step, r.call]
            if r.role.startswith("input."):
                inputs.add(r.hash)
            elif r.role.startswith("output."):
                outputs.append(r.hash)
    found: dict[str, tuple[int, int]] = {}
    for (tap, *_), (inputs, outputs) in calls.items():
        if inputs and outputs:
            same, n = found.get(tap, (0, 0))
            found[tap] = same + inputs.issuperset(outputs), n + 1
    return found


# --- poolers ---------------------------------------------------------------------------------------------------------

_ROWS = ("its request's last row", "its request's row before the last", "its request's first row",
         "the mean of its request's rows", "another request's last row")  # fmt: skip


def pooled(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Poolers that make another function of a request's rows in mine than in golden."""
    left = [MOST_BYTES]
    theirs, own = (_forms(dump, left) for dump in dumps)
    found = {}
    for tap, forms in own.items():
        wrong = [form for form in forms if form is not None and form not in theirs.get(tap, ())]
        known = set(theirs.get(tap, ()))
        right = known.pop() if len(known) == 1 else None
        if wrong and right is not None:
            many = f"{len(wrong):,} of {len(forms):,} outputs are" if len(wrong) < len(forms) else "each output is"
            found[tap] = _cause(f"{many} made of {_words(wrong[0])}; golden's of {_words(right)}")
    return found


def _words(form: tuple[int, bool]) -> str:
    return f"{_ROWS[form[0]]} ({'normalised' if form[1] else 'not normalised'})"


def _forms(dump: Any, left: list[int]) -> dict[str, list[tuple[int, bool] | None]]:
    """Of each pooler: which function of its request's rows each output is; None for none of those that are known."""
    poolers = {m.tap for named in dump.modules.values() for m in named if m.cls.endswith("Pooler")}
    calls: dict[tuple[str, int, int | None], dict[str, Record]] = defaultdict(dict)
    for r in of_sites(dump.records, lambda site: site.tap in poolers):
        if not r.call and r.payload is not None:
            calls[r.tap, r.rank, r.step][r.role] = r
    found: dict[str, list[tuple[int, bool] | None]] = defaultdict(list)
    for (tap, rank, step), records in calls.items():
        rows, hidden = dump.rows.get((rank, step, TOKENS)), records.get("input.hidden_states")
        outputs = [records[role] for k in range(len(records)) if (role := f"output.{k}") in records]
        if rows is None or hidden is None or len(hidden.shape) != 2 or len(outputs) != len(rows.segments):
            continue
        left[0] -= hidden.payload.nbytes if hidden.payload is not None else 0
        if left[0] < 0:
            break
        states = _values(dump, hidden)
        parts = [(s.pos, states[at]) for s, at in rows.stretches()]
        found[tap] += [_form(_values(dump, o), k, parts) for k, o in enumerate(outputs) if len(o.shape) == 1]
    return found


def _values(dump: Any, record: Record) -> np.ndarray:
    return np.asarray(widen(dump.read(record), record.dtype, as_float=True), np.float64).reshape(record.shape)


def _form(output: np.ndarray, number: int, parts: Sequence[tuple[int, np.ndarray]]) -> tuple[int, bool] | None:
    for kind, row in _candidates(number, parts):
        row = row[: len(output)]
        for normalised, value in ((True, row / max(float(np.linalg.norm(row)), 1e-12)), (False, row)):
            if np.linalg.norm(output - value) <= _NEAR * np.linalg.norm(value):
                return kind, normalised
    return None


def _candidates(number: int, parts: Sequence[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
    first, rows = parts[number]
    yield 0, rows[-1]
    if len(rows) > 1:
        yield 1, rows[-2]
    if first == 0:
        yield 2, rows[0]
        yield 3, rows.mean(0)
    yield from ((4, other[-1]) for k, (_, other) in enumerate(parts) if k != number)
