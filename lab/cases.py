"""The faults that the laboratory plants: each one a model, a fault, a golden, and who is to blame.

The problem: a tool is judged by faults that look like real ones, many and of many sorts. The idea: a case is a
declaration of one line or two; the kinds are in accprobe_fault_kinds.py, the goldens in ways.py.
``python -m lab.faults --list`` prints them. Not here: how they are run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.ways import TEXT

TUNED, HELD_OUT = "tuned", "held out"
HANDWRITTEN = "handwritten"


def half(name: str, group: str = "") -> str:
    """Which half a case or a clean pair is in: rules are chosen by looking at `TUNED` ones, and reported on both.

    All of the group `HANDWRITTEN` were looked at when there were no halves."""
    tuned = group == HANDWRITTEN or hashlib.sha256(name.encode()).digest()[0] < 128
    return TUNED if tuned else HELD_OUT


@dataclass(frozen=True)
class Case:
    """One fault.

    fault: one or several of accprobe_faults.Fault, as dicts. golden, mine: names of ways.WAYS.
    culprits: modules that may rightly be named first, where that is not the planted path.
    second: another module that must be among the origins (a second, independent fault), or some that may be.
    words: regular expressions that the sentence about the error's shape should contain.
    subtle: the planted error is within ten times the bf16 floor (2^-8 of a row) at the module's output.
    also: further goldens against which the same faulty run is judged. group: see generated.py.
    """

    name: str
    model: str
    fault: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    golden: str = "serial"
    mine: str = "mixed"
    culprits: tuple[str, ...] = ()
    second: str | tuple[str, ...] | None = None
    words: tuple[str, ...] = ()
    subtle: bool = False
    also: tuple[str, ...] = ()
    group: str = HANDWRITTEN

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [dict(self.fault)] if isinstance(self.fault, Mapping) else [dict(f) for f in self.fault]

    @property
    def goldens(self) -> tuple[str, ...]:
        return (self.golden, *self.also)

    @property
    def seconds(self) -> tuple[str, ...]:
        return (self.second,) if isinstance(self.second, str) else self.second or ()

    @property
    def expected(self) -> tuple[str, ...]:
        return self.culprits or (self.faults[0]["module"],)


def _fault(kind: str, module: str = "", factor: float | None = None, **more: Any) -> dict[str, Any]:
    out = {"kind": kind, "module": module, **more}
    return out if factor is None else out | {"factor": factor}


_L = "model.layers"
_V = "language_model.model.layers"
_SOME_TOKEN = TEXT[0].ids[7]
_HEAD = [list(range(32 * i, 32 * i + 32)) for i in range(4)]


def _shared(layer: int, tail: str = "") -> tuple[str, ...]:
    """vLLM calls the shared expert under another path than the one at which it is built."""
    at = f"{_L}.{layer}.mlp.experts._shared_experts._layer"
    return (at + tail,)


# A router is no module of its own: what it chose are inputs of the module inside, which a replay names.
_MOE1 = f"{_L}.1.mlp.experts"
_MIX1 = f"{_L}.1.block_sparse_moe.experts"
_INSIDE = ".routed_experts.quant_method"

_DENSE = [
    Case("norm-eps", "qwen2", _fault("eps", f"{_L}.0.input_layernorm", 0.02), subtle=True),
    Case("norm-channel", "qwen2", _fault("scale", f"{_L}.1.post_attention_layernorm", 1.06, features=[17]), "float32",
         words=("column 17",), subtle=True),
    Case("norm-weight", "qwen2", _fault("weight", f"{_L}.2.input_layernorm", 1.06, features=[5]), "tp2", subtle=True),
    Case("qkv-column", "qwen2", _fault("scale", f"{_L}.1.self_attn.qkv_proj", 1.08, features=[77]),
         words=("column 77",), subtle=True),
    Case("qkv-bias", "qwen2", _fault("bias", f"{_L}.2.self_attn.qkv_proj", 0.3), "float32", subtle=True),
    Case("rope-far", "qwen2", _fault("angle", f"{_L}.0.self_attn.rotary_emb", 1.0003), "float32", subtle=True),
    Case("rope-one-percent", "qwen2", _fault("angle", f"{_L}.0.self_attn.rotary_emb", 1.01), "tp2"),
    Case("softmax-scale", "qwen2", _fault("attn", f"{_L}.1.self_attn.attn", 1.03), "float32", subtle=True),
    Case("one-head", "qwen2", _fault("scale", f"{_L}.2.self_attn.attn", 1.03, features=_HEAD[2]), words=("head 2",),
         subtle=True),
    Case("kv-slot-zero", "qwen2", _fault("cache", f"{_L}.1.self_attn.attn", 0.0, rows="position:21")),
    Case("window", "qwen2", _fault("setting", f"{_L}.3.self_attn.attn", 200, param="impl.sliding_window"),
         words=(r"positions ≥ (199|20\d)",)),
    Case("softcap", "qwen2", _fault("setting", f"{_L}.0.self_attn.attn", 20.0, param="impl.logits_soft_cap"),
         "float32"),
    Case("o-proj-weight-row", "qwen2", _fault("product", f"{_L}.3.self_attn.o_proj", 0.05, features=[9]),
         words=("column 9",), subtle=True),
    Case("down-weight", "qwen2", _fault("noise", f"{_L}.1.mlp.down_proj", 0.05), "float32"),
    Case("down-weight-row", "qwen2", _fault("product", f"{_L}.1.mlp.down_proj", 0.3, features=[40]), "tp2",
         words=("column 40",)),
    Case("sum-in-bf16", "qwen2", _fault("low_sum", f"{_L}.2.mlp.down_proj", 1), subtle=True),
    Case("sum-in-bf16-qkv", "qwen2", _fault("low_sum", f"{_L}.1.self_attn.qkv_proj", 1), "transformers", subtle=True),
    Case("short-reduction", "qwen2", _fault("short", f"{_L}.0.mlp.gate_up_proj", 1), "tp2"),
    Case("activation", "qwen2", _fault("act", f"{_L}.1.mlp.act_fn", 1.03), "transformers", subtle=True),
    Case("decode-only", "qwen2", _fault("scale", f"{_L}.1.mlp.down_proj", 1.03, rows="decode"), words=("decode",),
         subtle=True),
    Case("one-position", "qwen2", _fault("scale", f"{_L}.0.self_attn.o_proj", 1.04, rows="position:45"), "float32",
         words=("position 45",)),
    Case("far-positions", "qwen2", _fault("scale", f"{_L}.2.mlp.gate_up_proj", 1.03, rows="position>=200"), "tp2",
         words=("positions ≥ 200",), subtle=True),
    Case("later-chunks", "qwen2", _fault("scale", f"{_L}.1.self_attn.o_proj", 1.04, rows="chunk>=2"), words=("chunk",)),
    Case("batch-of-one", "qwen2", _fault("scale", f"{_L}.3.mlp.down_proj", 1.04, rows="batch:1"), "float32",
         words=("batch size 1",)),
    Case("large-batch", "qwen2", _fault("scale", f"{_L}.2.self_attn.qkv_proj", 1.03, rows="batch>=4"), "tp2",
         words=("batch size",), subtle=True),
    Case("tile", "qwen2", _fault("scale", f"{_L}.0.mlp.down_proj", 1.03, rows="row>=64"), subtle=True),
    Case("one-token", "qwen2", _fault("scale", "model.embed_tokens", 1.03, rows=f"token:{_SOME_TOKEN}"), subtle=True),
    Case("embedding-row", "qwen2", _fault("weight", "model.embed_tokens", 1.02, features=[_SOME_TOKEN]), "float32"),
    Case("vocabulary-tail", "qwen2", _fault("logits", "lm_head", 1.03, features=list(range(448, 512))),
         words=("columns 448.511",), subtle=True),
    Case("logits-scale", "qwen2", _fault("scale", "logits_processor", 1.03), "float32", subtle=True),
    Case("sampler", "qwen2", {"kind": "sampler"}, "tp2", culprits=("sampler",)),
    Case("nan-row", "qwen2", _fault("nan", f"{_L}.2.mlp.down_proj", rows="position:30"), "float32",
         words=("NaN|non-finite",)),
    Case("stale-row", "qwen2", _fault("stale", f"{_L}.1.self_attn.attn", rows="position:10"), "tp2"),
    Case("six-bits", "qwen2", _fault("coarse", f"{_L}.2.self_attn.o_proj", 6), subtle=True),
    Case("residual", "qwen2", _fault("scale", f"{_L}.1", 1.03, output=1), subtle=True),
    Case("two-faults", "qwen2", [_fault("scale", f"{_L}.0.mlp.down_proj", 1.05), _fault("scale",
         f"{_L}.3.self_attn.o_proj", 1.5, features=[3])], "float32", second=f"{_L}.3.self_attn.o_proj"),
    Case("one-rank", "qwen2", _fault("scale", f"{_L}.1.self_attn.o_proj", 1.04, rank=1), mine="tp2-mixed"),
    Case("one-rank-product", "qwen2", _fault("product", f"{_L}.2.mlp.gate_up_proj", 0.5, features=[11], rank=0),
         "float32", mine="tp2-mixed", subtle=True),
    Case("final-norm", "llama", _fault("eps", "model.norm", 0.2), "transformers", subtle=True),
    Case("gate-column", "llama", _fault("scale", f"{_L}.1.mlp.gate_up_proj", 1.2, features=[300]), "transformers",
         words=("column 300",)),
    Case("head-zero", "llama", _fault("scale", f"{_L}.0.self_attn.attn", 0.97, features=_HEAD[0]), "tp2", subtle=True),
    Case("softmax-scale-llama", "llama", _fault("attn", f"{_L}.2.self_attn.attn", 1.02), "transformers", subtle=True),
]  # fmt: skip
_EXPERTS = [
    Case("one-expert", "qwen2-moe", _fault("expert", _MOE1 + _INSIDE, 1.04, expert=3),
         culprits=(_MOE1 + _INSIDE, _MOE1), words=("expert 3",)),
    Case("wrong-experts", "qwen2-moe", _fault("route", _MOE1, 1, rows="position>=8"), "float32",
         culprits=(f"{_MOE1}.routed_experts", _MOE1, _MOE1 + _INSIDE)),
    Case("wrong-experts-same-kind", "qwen2-moe", _fault("route", _MOE1, 3, rows="position>=8"),
         culprits=(f"{_MOE1}.routed_experts", _MOE1, _MOE1 + _INSIDE)),
    Case("wrong-experts-decode", "mixtral", _fault("route", _MIX1, 1, rows="decode"), "transformers",
         culprits=(f"{_MIX1}.routed_experts", _MIX1, _MIX1 + _INSIDE)),
    Case("expert-weight", "qwen2-moe", _fault("noise", f"{_MOE1}.routed_experts", 0.05, param="w2_weight", expert=5),
         "float32", culprits=(f"{_MOE1}.routed_experts", _MOE1 + _INSIDE)),
    Case("router-column", "qwen2-moe", _fault("scale", f"{_L}.1.mlp.gate", 1.05, features=[3]), words=("column 3",)),
    Case("shared-expert-missing", "qwen2-moe", _fault("zero", f"{_L}.1.mlp.shared_expert"), "float32",
         culprits=_shared(1)),
    Case("shared-expert-scale", "qwen2-moe", _fault("scale", f"{_L}.2.mlp.shared_expert.down_proj", 1.03), "tp2",
         culprits=_shared(2, ".down_proj"), subtle=True),
    Case("shared-expert-gate", "qwen2-moe", _fault("scale", f"{_L}.0.mlp.shared_expert_gate", 1.06),
         culprits=_shared(0, ".expert_gate")),
    Case("one-expert-mixtral", "mixtral", _fault("expert", _MIX1 + _INSIDE, 1.04, expert=1), "float32",
         culprits=(_MIX1 + _INSIDE, _MIX1), words=("expert 1",)),
    Case("expert-weight-row", "mixtral",
         _fault("noise", f"{_MIX1}.routed_experts", 0.5, param="w13_weight", expert=2, features=[10]), "tp2",
         culprits=(f"{_MIX1}.routed_experts", _MIX1 + _INSIDE)),
    Case("coarse-router", "mixtral", _fault("coarse", f"{_L}.0.block_sparse_moe.gate", 5), "float32", subtle=True),
]  # fmt: skip
_MLA = f"{_L}.1.self_attn.mla_attn"
_LATENT = [
    Case("latent-eps", "deepseek-v2", _fault("eps", f"{_L}.1.self_attn.kv_a_layernorm", 0.04), "float32",
         culprits=(f"{_MLA}.kv_a_layernorm",), subtle=True),
    Case("latent-column", "deepseek-v2", _fault("scale", f"{_L}.1.self_attn.kv_a_proj_with_mqa", 1.3, features=[70]),
         culprits=(f"{_MLA}.kv_a_proj_with_mqa",), words=("column 70",), subtle=True),
    Case("mla-scale", "deepseek-v2", _fault("attn", f"{_MLA}.mla_attn", 1.03), "tp2", subtle=True),
    Case("latent-slot-zero", "deepseek-v2", _fault("cache", f"{_MLA}.mla_attn", 0.0, rows="position:12")),
    Case("mla-rope", "deepseek-v2", _fault("angle", f"{_MLA}.rotary_emb", 1.002), "tp2",
         culprits=(f"{_L}.0.self_attn.mla_attn.rotary_emb",)),
    Case("one-expert-mla", "deepseek-v2", _fault("expert", _MOE1 + _INSIDE, 1.04, expert=6), "float32",
         culprits=(_MOE1 + _INSIDE, _MOE1)),
    Case("shared-experts-mla", "deepseek-v2", _fault("scale", f"{_L}.2.mlp.shared_experts", 1.03), culprits=_shared(2),
         subtle=True),
]  # fmt: skip
_PICTURES = [
    Case("patch-column", "qwen2.5-vl", _fault("scale", "visual.patch_embed", 1.06, features=[5]), subtle=True),
    Case("vision-head", "qwen2.5-vl", _fault("scale", "visual.blocks.1.attn.qkv", 1.04, features=_HEAD[1]), "float32",
         subtle=True),
    Case("vision-attention", "qwen2.5-vl", _fault("scale", "visual.blocks.2.attn.attn", 1.03), "tp2", subtle=True),
    Case("vision-norm", "qwen2.5-vl", _fault("eps", "visual.blocks.0.norm1", 0.05), "tp2", subtle=True),
    Case("merger", "qwen2.5-vl", _fault("scale", "visual.merger.mlp.0", 1.03), "float32", subtle=True),
    Case("m-rope", "qwen2.5-vl", _fault("angle", f"{_V}.0.self_attn.rotary_emb", 1.01)),
    Case("text-weight-row", "qwen2.5-vl", _fault("product", f"{_V}.1.mlp.down_proj", 0.3, features=[2]), "float32",
         words=("column 2",), subtle=True),
]  # fmt: skip
CASES: list[Case] = [*_DENSE, *_EXPERTS, *_LATENT, *_PICTURES]
