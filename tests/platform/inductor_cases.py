"""Faults of modules inside engines that inductor compiles, and clean pairs: what `scripts/inductor_faults.py` judges.

The problem: a compiled engine shows the ends of its kernels only, so that most operators lie between two taps. A
verdict there is right where it names the operator, or the gap that contains it, and wrong where it names another one.
The idea: a case plants one fault in one of four architectures, captured with the default taps or with all; the golden
is eager and sees every module. Strengths are such that the error stands out of the rounding that compiling moves: a
norm behind the fault swallows a factor, and a residual sum makes it small. The fault's module is the truth.
Not here: running (graph_lab.py), faults that only captured graphs have (graph_cases.py).
"""

from typing import Any

from graph_cases import GROUP, GraphCase

DEFAULT, TAPS = "inductor", "inductor-taps"
_L = "model.layers.{}."


def _case(name: str, model: str, kind: str, module: str, factor: float, mine: str = DEFAULT, **more: Any) -> GraphCase:
    fault = {"kind": kind, "module": module, "factor": factor, **more}
    return GraphCase(name, model, fault, golden="eager", mine=mine, group=GROUP)


QWEN2 = [
    _case("i-mlp-scale", "qwen2", "scale", _L.format(1) + "mlp", 1.2),
    _case("i-rotary", "qwen2", "rope", _L.format(0) + "self_attn.rotary_emb", 1.2),
    _case("i-activation", "qwen2", "act", _L.format(2) + "mlp.act_fn", 1.15),
    _case("i-norm-eps", "qwen2", "eps", _L.format(2) + "post_attention_layernorm", 2.0),
    _case("i-softmax-scale", "qwen2", "attn", _L.format(1) + "self_attn.attn", 1.1),
    _case("i-down-proj", "qwen2", "scale", _L.format(2) + "mlp.down_proj", 1.05),
]
LLAMA = [
    _case("i-qkv-column", "llama", "scale", _L.format(1) + "self_attn.qkv_proj", 1.5, features=[17]),
    _case("i-o-coarse", "llama", "coarse", _L.format(1) + "self_attn.o_proj", 3),
    _case("i-input-norm", "llama", "scale", _L.format(1) + "input_layernorm", 1.05),
    _case("i-act-coarse", "llama", "coarse", _L.format(0) + "mlp.act_fn", 3),
    _case("i-embedding", "llama", "scale", "model.embed_tokens", 1.3),
    _case("i-final-norm", "llama", "scale", "model.norm", 1.5, features=[5]),
    _case("i-short-sum", "llama", "short", _L.format(2) + "mlp.gate_up_proj", 4),
]
GEMMA3 = [
    _case("i-q-norm", "gemma3", "scale", _L.format(1) + "self_attn.q_norm", 1.1),
    _case("i-behind-mlp-norm", "gemma3", "scale", _L.format(1) + "post_feedforward_layernorm", 2.0),
    _case("i-one-head", "gemma3", "scale", _L.format(0) + "self_attn.attn", 1.1, features=list(range(32, 64))),
    _case("i-gemma-mlp", "gemma3", "scale", _L.format(0) + "mlp", 3.0, features=list(range(32))),
    _case("i-gemma-o-proj", "gemma3", "scale", _L.format(2) + "self_attn.o_proj", 1.1),
]
MOE = [
    _case("i-experts", "qwen2-moe", "scale", _L.format(1) + "mlp.experts", 1.3),
    _case("i-router", "qwen2-moe", "scale", _L.format(1) + "mlp.gate", 1.3),
    _case("i-cached-keys", "qwen2-moe", "cache", _L.format(0) + "self_attn.attn", 1.05),
    _case("i-moe-norm", "qwen2-moe", "scale", _L.format(1) + "post_attention_layernorm", 1.5, features=[3]),
    _case("i-moe-block", "qwen2-moe", "scale", _L.format(0) + "mlp", 1.3),
]
WITH_TAPS = [
    _case("t-mlp-scale", "qwen2", "scale", _L.format(1) + "mlp", 1.2, TAPS),
    _case("t-rotary", "qwen2", "rope", _L.format(0) + "self_attn.rotary_emb", 1.2, TAPS),
    _case("t-activation", "qwen2", "act", _L.format(2) + "mlp.act_fn", 1.15, TAPS),
    _case("t-input-norm", "llama", "scale", _L.format(1) + "input_layernorm", 1.05, TAPS),
    _case("t-q-norm", "gemma3", "scale", _L.format(1) + "self_attn.q_norm", 1.1, TAPS),
]
CASES: list[GraphCase] = [*QWEN2, *LLAMA, *GEMMA3, *MOE, *WITH_TAPS]
CLEAN: list[tuple[str, str, str]] = [
    *[(model, "eager", DEFAULT) for model in ("qwen2", "llama", "gemma3", "qwen2-moe")],
    *[(model, "eager", DEFAULT) for model in ("trained-qwen2", "trained-llama")],
    ("llama", "eager", TAPS),
    ("trained-llama", "eager", TAPS),
]
"""(model, golden, mine) that differ by rounding alone; two of trained weights, whose rows of attention are sharp."""
