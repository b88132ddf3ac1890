"""Where generated cases plant their faults: the operators of each model of the laboratory, by hand from its own dumps.

The problem: a module may be called under another path than the one at which it is built, has as many columns as it has,
and some conditions on rows never hold in some models. The idea: a `Place` says all of that once.
Not here: what is planted there (options.py), which are drawn (generated.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Fault = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """One operator of one model.

    path: ``{}`` is the layer. layers: those that have it. sort: of options.OPTIONS. columns: of its output.
    block: columns of a head, or a quarter of all. culprits: where it is called, if elsewhere than where it is built.
    rows: conditions that can hold there. experts: how many it has.
    """

    model: str
    op: str
    path: str
    sort: str
    layers: tuple[int, ...] = (0,)
    columns: int = 128
    block: int = 32
    culprits: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    experts: int = 0

    def expected(self, layer: int) -> tuple[str, ...]:
        return tuple(c.format(layer) for c in self.culprits)


ROWS = ("decode", "position>=100", "position>=200", "position:45", "position:21", "chunk>=2", "row>=64", "batch>=4")
UNCHUNKED = tuple(r for r in ROWS if not r.startswith("chunk"))  # vLLM's CPU MLA takes prompts whole
_SHORT = ("decode", "row>=32")  # of the requests with pictures


def attention(model: str, at: str, layers: tuple[int, ...], h: int, rows: tuple[str, ...], bias: bool) -> list[Place]:
    """Attention with its norms: 4 heads, 2 of keys and values."""
    p, linear = f"{at}.{{}}", "linear with bias" if bias else "linear"
    places = [
        Place(model, "qkv_proj", f"{p}.self_attn.qkv_proj", linear, layers, 2 * h, h // 4, rows=rows),
        Place(model, "o_proj", f"{p}.self_attn.o_proj", "linear", layers, h, h // 4, rows=rows),
        Place(model, "attn", f"{p}.self_attn.attn", "attention", layers, h, h // 4, rows=rows),
        Place(model, "rotary_emb", f"{p}.self_attn.rotary_emb", "rotation", layers[:1]),  # all layers share one
        Place(model, "input_layernorm", f"{p}.input_layernorm", "first norm", layers[:1], h, rows=rows),
        Place(model, "input_layernorm", f"{p}.input_layernorm", "later norm", layers[1:], h, rows=rows),
        Place(model, "post_attention_layernorm", f"{p}.post_attention_layernorm", "later norm", layers, h, rows=rows),
    ]
    return places


def mlp(model: str, at: str, layers: tuple[int, ...], h: int, inner: int, rows: tuple[str, ...]) -> list[Place]:
    p = f"{at}.{{}}.mlp"
    return [
        Place(model, "gate_up_proj", f"{p}.gate_up_proj", "linear", layers, 2 * inner, inner // 4, rows=rows),
        Place(model, "act_fn", f"{p}.act_fn", "activation", layers, inner, inner // 4, rows=rows),
        Place(model, "down_proj", f"{p}.down_proj", "linear", layers, h, h // 4, rows=rows),
    ]


def ends(model: str, h: int, rows: tuple[str, ...], norm: str = "later norm") -> list[Place]:
    return [
        Place(model, "embed_tokens", "model.embed_tokens", "embedding", columns=h),
        Place(model, "norm", "model.norm", norm, columns=h, rows=rows),
        Place(model, "lm_head", "lm_head", "head", columns=512),
        Place(model, "logits_processor", "logits_processor", "logits", columns=512),
    ]


def experts(model: str, moe: str, layers: tuple[int, ...], n: int, h: int, rows: tuple[str, ...]) -> list[Place]:
    """The routed part. vLLM runs it in a module inside; which experts were chosen are inputs of that one."""
    block, inside = f"{moe}.experts", f"{moe}.experts.routed_experts.quant_method"
    routed = f"{block}.routed_experts"
    return [
        Place(model, "experts", block, "experts", layers, h, culprits=(routed, block, inside), rows=rows, experts=n),
        Place(model, "expert", inside, "expert", layers, h, culprits=(inside, block), rows=rows, experts=n),
        Place(model, "weights", routed, "expert weights", layers, h, culprits=(routed, inside), rows=rows, experts=n),
    ]


def _shared(
    model: str, moe: str, built: str, layers: tuple[int, ...], inner: int, rows: tuple[str, ...]
) -> list[Place]:
    """The shared expert, which is built at one path and called at another."""
    p, at, h = f"{moe}.{built}", f"{moe}.experts._shared_experts._layer", 4 * 32
    return [
        Place(model, "shared", p, "shared", layers, h, culprits=(at,), rows=rows),
        Place(model, "shared.down_proj", f"{p}.down_proj", "linear", layers, h, culprits=(f"{at}.down_proj",),
              rows=rows),
        Place(model, "shared.gate_up_proj", f"{p}.gate_up_proj", "linear", layers, 2 * inner,
              culprits=(f"{at}.gate_up_proj",), rows=rows),
        Place(model, "shared.act_fn", f"{p}.act_fn", "activation", layers, inner, culprits=(f"{at}.act_fn",),
              rows=rows),
    ]  # fmt: skip


_L = "model.layers"


def dense_model(model: str, layers: int, h: int, inner: int, bias: bool) -> list[Place]:
    every = tuple(range(layers))
    places = attention(model, _L, every, h, ROWS, bias) + mlp(model, _L, every, h, inner, ROWS)
    return [*places, Place(model, "layer", f"{_L}.{{}}", "residual", every, rows=ROWS), *ends(model, h, ROWS)]


def _qwen2_moe(model: str, layers: int, h: int, inner: int) -> list[Place]:
    every, moe = tuple(range(layers)), f"{_L}.{{}}.mlp"
    gate = f"{moe}.experts._shared_experts._layer.expert_gate"
    return [
        *attention(model, _L, every, h, ROWS, True),
        Place(model, "router", f"{moe}.gate", "router", every, 8, 2, rows=ROWS),
        *experts(model, moe, every, 8, h, ROWS),
        *_shared(model, moe, "shared_expert", every, inner, ROWS),
        Place(model, "shared_gate", f"{moe}.shared_expert_gate", "small", every, 1, culprits=(gate,), rows=ROWS),
    ]


def _mixtral() -> list[Place]:
    model, every, moe = "mixtral", (0, 1), f"{_L}.{{}}.block_sparse_moe"
    return [
        *attention(model, _L, every, 128, ROWS, False),
        Place(model, "router", f"{moe}.gate", "router", every, 4, 1, rows=ROWS),
        *experts(model, moe, every, 4, 128, ROWS),
        *ends(model, 128, ROWS),
    ]


def _deepseek(model: str, layers: int, h: int, inner: int, q: int, head: int, shared: int) -> list[Place]:
    every, moe = tuple(range(layers)), f"{_L}.{{}}.mlp"
    mla, rows, routed = f"{_L}.{{}}.self_attn.mla_attn", UNCHUNKED, tuple(range(1, layers))
    return [
        Place(model, "q_proj", f"{mla}.q_proj", "linear", every, q, q // 4, rows=rows),
        Place(model, "kv_a_proj", f"{mla}.kv_a_proj_with_mqa", "linear", every, 576, 64, rows=rows),
        Place(model, "kv_a_layernorm", f"{mla}.kv_a_layernorm", "first norm", every, 512, 128, rows=rows,
              culprits=(f"{mla}.kv_a_layernorm", f"{_L}.{{}}.self_attn.kv_a_layernorm")),  # one module, two names
        Place(model, "mla_attn", f"{mla}.mla_attn", "latent attention", every, 4 * head, head, rows=rows),
        Place(model, "rotary_emb", f"{mla}.rotary_emb", "rotation", (0,)),
        Place(model, "o_proj", f"{mla}.o_proj", "linear", every, h, h // 4, rows=rows),
        Place(model, "input_layernorm", f"{_L}.{{}}.input_layernorm", "later norm", every[1:], h, rows=rows),
        Place(model, "post_attention_layernorm", f"{_L}.{{}}.post_attention_layernorm", "norm", every, h, rows=rows),
        *mlp(model, _L, (0,), h, inner, rows),
        Place(model, "router", f"{moe}.gate", "router", routed, 8, 2, culprits=(f"{moe}.experts.gate",), rows=rows),
        *experts(model, moe, routed, 8, h, rows),
        *_shared(model, moe, "shared_experts", routed, shared, rows),
    ]


def _pictures() -> list[Place]:
    model, blocks, text = "qwen2.5-vl", (0, 1, 2), "language_model.model.layers"
    p = "visual.blocks.{}"
    return [
        Place(model, "patch_embed", "visual.patch_embed", "picture", columns=64),
        Place(model, "visual.norm1", f"{p}.norm1", "picture", blocks, 64),
        Place(model, "visual.norm2", f"{p}.norm2", "picture", blocks, 64),
        Place(model, "visual.qkv", f"{p}.attn.qkv", "picture linear", blocks, 192),
        Place(model, "visual.attn", f"{p}.attn.attn", "picture", blocks, 32),
        Place(model, "visual.proj", f"{p}.attn.proj", "picture linear", blocks, 64),
        Place(model, "visual.gate_up_proj", f"{p}.mlp.gate_up_proj", "picture linear", blocks, 192),
        Place(model, "visual.down_proj", f"{p}.mlp.down_proj", "picture linear", blocks, 64),
        Place(model, "merger.0", "visual.merger.mlp.0", "picture linear", columns=256),
        Place(model, "merger.2", "visual.merger.mlp.2", "picture linear", columns=128),
        *[_rerowed(place) for place in attention(model, text, blocks, 128, _SHORT, True) if place.sort != "attention"],
        *mlp(model, text, blocks, 128, 256, _SHORT),
    ]


def _rerowed(place: Place) -> Place:
    return replace(place, rows=_SHORT)


def _gemma3() -> list[Place]:
    model, every, h = "trained-gemma3", (0, 1, 2, 3), 256
    p = f"{_L}.{{}}"
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    gated = [
        place if place.op != "act_fn" else replace(place, sort="gate") for place in mlp(model, _L, every, h, 512, ROWS)
    ]
    return [
        *[
            p_
            for p_ in attention(model, _L, every, h, ROWS, False)
            if p_.op in ("qkv_proj", "o_proj", "attn", "rotary_emb")
        ],
        Place(model, "q_norm", f"{p}.self_attn.q_norm", "gate", every, 64),
        Place(model, "k_norm", f"{p}.self_attn.k_norm", "gate", every, 64),
        *[Place(model, norm, f"{p}.{norm}", "gate", every, h, rows=ROWS) for norm in norms],
        *gated,
    ]


def without(places: Sequence[Place], *sorts: str) -> list[Place]:
    return [place for place in places if place.sort not in sorts]


def _trained(places: Sequence[Place]) -> list[Place]:
    """Norms by other faults than eps: what is small beside a trained residual is not known here."""
    return [replace(place, sort="norm") if place.sort.endswith("norm") else place for place in places]


RANDOM: dict[str, list[Place]] = {
    "qwen2": dense_model("qwen2", 4, 128, 256, True), "llama": dense_model("llama", 3, 128, 256, False),
    "qwen2-moe": _qwen2_moe("qwen2-moe", 3, 128, 96), "mixtral": _mixtral(),
    "deepseek-v2": _deepseek("deepseek-v2", 3, 128, 256, 384, 32, 64), "qwen2.5-vl": _pictures(),
}  # fmt: skip
TRAINED: dict[str, list[Place]] = {
    "trained-qwen2": _trained(dense_model("trained-qwen2", 4, 256, 512, True)),
    "trained-llama": _trained(dense_model("trained-llama", 4, 256, 512, False)),
    "trained-gemma3": _gemma3(),
    "trained-qwen2-moe": _trained(_qwen2_moe("trained-qwen2-moe", 4, 256, 192)),
    "trained-deepseek-v2": _trained(_deepseek("trained-deepseek-v2", 4, 256, 512, 512, 64, 128)),
}


SHARED = (("trained-gemma3", "act_fn"),)
"""Modules that vLLM keeps in a registry: a fault there is one of all layers, and of the process's next engines."""


def planted(place: Place, layer: int, fault: Fault) -> tuple[Fault, str]:
    """The fault with its module, and what it is called."""
    where = f"{layer}.{place.op}" if "{}" in place.path else place.op
    parts = [where, _strength(fault)]
    if "expert" in fault:
        parts.append(f"expert{fault['expert']}")
    if "features" in fault:
        first, last = fault["features"][0], fault["features"][-1]
        parts.append(f"column{first}" if first == last else f"columns{first}to{last}")
    if "rows" in fault:
        parts.append(fault["rows"].replace(">=", "from").replace(":", ""))
    return fault | {"module": place.path.format(layer)}, "-".join(parts)


def _strength(fault: Fault) -> str:
    param = fault["param"].split(".")[-1] + "-" if "param" in fault else ""
    return f"{fault['kind']}-{param}{fault['factor']:g}"
