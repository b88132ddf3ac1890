"""vLLM's places as built from a transformers model's, and of those of other releases of vLLM.

The problem: the most trusted golden is the published transformers model in float32, and it shares hardly a module with
vLLM's; and ``experts/output.0`` is another tensor in other releases. The idea: a table. What vLLM fuses is joined from
its parts; the residual stream, which vLLM passes on as (hidden, residual), is compared as their sum; rotary embeddings
are computed from the projections, cos and sin; attention's output is the input of the projection behind it. A rule
whose places are not there does nothing. Up to 0.18 shared and routed experts come out apart (SharedFusedMoE): their sum
is compared; up to 0.11 the block calls shared experts itself: its experts meet the routed ones' inner output. Fused
experts' weights have no rule: each platform packs them differently. Not here: how rules work (names.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm_accprobe.align.mapping import ROPE, Rename, RoleRule, Rules, Source, TapRule
from vllm_accprobe.dump.block_code import FORWARD, output_of, parsed
from vllm_accprobe.dump.decode import object_at, value_at
from vllm_accprobe.dump.schema import ROOT_TAP, Record

TRANSFORMERS, VLLM = "transformers", "vLLM"


def engine(run: Mapping[str, Any], taps: Iterable[str]) -> str:
    """Which engine a dump is of, by run.json and else by its taps; "" where neither tells."""
    versions = object_at(run, "versions") or {}
    if value_at(run, "engine", "runner") == "accprobe.Probe":
        return TRANSFORMERS if "transformers" in versions else ""
    if "vllm" in versions:
        return VLLM
    ends = {tap.rpartition(".")[2] for tap in taps}
    if ends & {"qkv_proj", "gate_up_proj"}:
        return VLLM
    return TRANSFORMERS if {"q_proj", "gate_proj"} <= ends else ""


def _rule(label: str, pattern: str, *parts: RoleRule, alone: bool = False, needs: str = "") -> TapRule:
    return TapRule(pattern, parts, label, alone, needs)


def _one(mine: str, tap: str, role: str, *, equal: str = "") -> RoleRule:
    return RoleRule(mine, (Source(tap, role),), equal=equal)


def _cat(mine: str | None, *places: tuple[str, str | None]) -> RoleRule:
    return RoleRule(mine, tuple(Source(t, r) for t, r in places))


def _fused(whole: str, *parts: str) -> TapRule:
    first, *others = parts
    label = f"{whole} ← {', '.join(parts)}"
    return _rule(label, f"**.{whole}", _cat(None, (f"**.{first}", None), *((f"{{1}}.{o}", None) for o in others)))


def rope(mine: str, tap: str, attention: str, model: str, heads: tuple[int, ...] = ()) -> list[RoleRule]:
    """By what cos and sin are: arguments of ``attention`` (layers may have different ones), or what the model's one
    rotary embedding gave out."""
    angles = ([Source(attention, f"input.position_embeddings.{k}") for k in (0, 1)],
              [Source(f"{model}.rotary_emb", f"output.{k}") for k in (0, 1)])  # fmt: skip
    return [RoleRule(mine, (Source(tap, OUTPUT), *two), ROPE, heads=heads) for two in angles]


OUTPUT = "output.0"
_BLOCK = r"re:(.*layers\.\d+\.self_attn)"


_STREAM = "input.hidden_states"
_BIAS = "param.e_score_correction_bias"
_NORMS = r"re:((?:.*\.)?[^.]*(?:norm|ln)[^.]*)"
_MLA = r"re:(.*\.self_attn)\.mla_attn"
_RULES = (
    _fused("qkv_proj", "q_proj", "k_proj", "v_proj"),
    _fused("gate_up_proj", "gate_proj", "up_proj"),
    _fused("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
    _fused("in_proj_ba", "in_proj_b", "in_proj_a"),
    _rule(
        "act_fn ← gate_proj, up_proj, down_proj",
        "**.act_fn",
        replace(
            _cat("input.x", ("**.gate_proj", "output.0"), ("{1}.up_proj", "output.0")),
            equal="{1}.gate_up_proj/output.0",  # Falcon-H1 scales what it gives out
        ),
        _one("output.0", "**.down_proj", "input.input"),
        alone=True,
    ),
    _rule(
        "attention's output ← o_proj's input",
        _BLOCK + r"\.attn",
        _one("output.0", "{1}.o_proj", "input.input", equal="{1}.o_proj/input."),  # a gate may stand between
    ),
    _rule(
        "a gated norm's x, z ← hidden_states, gate",
        _NORMS,
        _one("input.x", "{1}", _STREAM),
        _one("input.z", "{1}", "input.gate"),
        needs="{1}/input.z",
    ),
    _rule(
        "x + residual ← the residual stream",
        _NORMS,
        *(_one(own, "{1}", role) for own in ("input.x+input.residual", "output.1") for role in (_STREAM, "input.x")),
        needs="{1}/input.residual",
    ),
    _rule(
        "hidden + residual ← the residual stream",
        r"re:(.*layers\.\d+)",
        _one("input.hidden_states+input.residual", "{1}", _STREAM),
        _one("output.0+output.1", "{1}", "output.0"),
    ),
    _rule("the model's output ← last_hidden_state", "model", _one("output.0", "model", "output.last_hidden_state")),
    _rule(
        "the model's output ← last_hidden_state",
        ROOT_TAP,
        _one("output.0", "language_model.model", "output.last_hidden_state"),
        _one("output.0", "model", "output.last_hidden_state"),
        _one("input.inputs_embeds", "language_model.model", "input.inputs_embeds"),
        alone=True,
    ),
    _rule(
        "logits_processor ← lm_head",
        r"re:(.*)logits_processor",
        _one("input.hidden_states", "{1}lm_head", "input.input"),
        _one("output.0", ROOT_TAP, "output.logits"),
        _one("output.0", "{1}lm_head", "output.0"),
    ),
    # Experts. Where the router stands inside, vLLM hands it the hidden states, and adds the shared experts.
    _rule(
        "experts ← the block with its shared experts",
        r"re:(.*)\.experts",
        _one("output.0", "{1}", "output.0"),
        needs="{1}.experts._shared_experts",
    ),
    _rule(
        "experts with a router ← hidden states",
        r"re:(.*)\.experts",
        _one("input.router_logits", "{1}.experts", _STREAM),
        needs="{1}.experts.gate",
    ),
    _rule(
        "experts' router logits ← the router",
        r"re:(.*)\.experts",
        *(_one("input.router_logits", f"{{1}}.{name}", OUTPUT) for name in ("gate", "router")),
    ),
    _rule(
        "the bias of the experts' scores ← the router's",
        r"re:(.*)",
        _one(_BIAS, "{1}.gate", _BIAS),
        needs=f"{{1}}/{_BIAS}",
    ),
    _rule(
        "routed experts ← experts",
        r"re:(.*)\.experts\.routed_experts\.quant_method",
        _one("input.x", "{1}.experts", _STREAM),
        _one("input.shared_experts_input", "{1}.experts", _STREAM),
        _one("input.topk_ids", "{1}.experts", "input.top_k_index"),
        _one("input.topk_weights", "{1}.experts", "input.top_k_weights"),
        _one("output.0", "{1}.experts", "output.0"),
    ),
    _rule(
        "the shared experts' input ← shared_experts",
        r"re:(.*\._shared_experts)",
        _one("input.shared_experts_input", "{1}._layer", "input.x"),
    ),
    # Latent attention.
    _rule(
        "mla_attn ← self_attn",
        _MLA,
        _one("input.hidden_states", "{1}", _STREAM),
        _one("output.0", "{1}", "output.0"),
    ),
    _fused("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    _rule(
        "latent attention ← kv_a_layernorm, o_proj",
        _MLA + r"\.mla_attn",
        _one("input.kv_c_normed", "{1}.mla_attn.kv_a_layernorm", "output.0"),
        _one("output.0", "{1}.mla_attn.o_proj", "input.input"),
    ),
    # Vision tower.
    _rule("vision block ← hidden_states", r"re:(visual\.blocks\.\d+)", _one("input.x", "{1}", _STREAM)),
    _rule("vision attention ← hidden_states", r"re:(visual\.blocks\.\d+\.attn)", _one("input.x", "{1}", _STREAM)),
    _rule(
        "vision attention's output ← proj's input",
        r"re:(visual\.blocks\.\d+\.attn)\.attn",
        _one("output.0", "{1}.proj", "input.input"),
    ),
    _rule("image features ← pooler_output", "visual", _one("output.0", "visual", "output.pooler_output"), alone=True),
)
_RENAMES = (
    Rename(r"re:model\.visual(.*)", "visual{1}", "visual is model.visual"),
    Rename(r"re:model\.language_model(.*)", "language_model.model{1}", "language_model.model is model.language_model"),
    Rename("lm_head", "language_model.lm_head", "language_model.lm_head is lm_head"),
    Rename(
        r"re:(.*model)\.((?:embed_tokens|altup_projections|per_layer_).*)",
        "{1}.self_decoder.{2}",
        "self_decoder holds what model holds",
    ),
    Rename(
        r"re:(.*\.layers\.\d+)\.mlp((?:\.(?:gate|router|experts)(?:\..*)?)?)",
        "{1}.block_sparse_moe{2}",
        "block_sparse_moe is mlp",
    ),
    Rename(r"re:(.*)\.router", "{1}.gate", "gate is router"),
    Rename(
        r"re:(.*)\.shared_experts(.*)",
        "{1}.experts._shared_experts._layer{2}",
        "_shared_experts is shared_experts",
    ),
    # Qwen2-MoE: vLLM's module holds the gate of the shared expert too, so only what is inside is the same.
    Rename(
        r"re:(.*)\.shared_expert\.(.*)",
        "{1}.experts._shared_experts._layer.{2}",
        "_shared_experts is shared_expert",
    ),
    Rename(r"re:(.*\.layers\.\d+\.mamba)\.(.*)", "{1}.mamba.{2}", "mamba.mamba holds what mamba holds"),
    Rename(r"re:(.*)\.gate", "{1}.experts.gate", "experts.gate is gate"),
    Rename(
        r"re:(.*\.self_attn)\.kv_b_proj", "{1}.mla_attn.mla_attn.kv_b_proj", "mla_attn.mla_attn.kv_b_proj is kv_b_proj"
    ),
    Rename(
        r"re:(.*\.self_attn)\.((?:q|o|q_a|q_b)_proj|kv_a_proj_with_mqa|kv_a_layernorm|q_a_layernorm)",
        "{1}.mla_attn.{2}",
        "self_attn.mla_attn holds what self_attn holds",
    ),
)
RULES = Rules("the built-in table", _RENAMES, _RULES)


_TRANSPOSED = ("Conv1D",)
"""Classes of transformers that multiply by their weight, where a linear layer's is transposed."""
_PER_GROUP = ("BloomAttention", "FalconAttention", "FalconFlashAttention2", "GPTNeoXAttention", "InternLM2Attention",
              "InternLM2FlashAttention2", "PersimmonAttention")  # fmt: skip
"""Modules of transformers whose fused projection has queries, key and value of one group of heads side by side."""


def stored_otherwise(theirs: Any, own: Any) -> dict[str, tuple[TapRule, ...]]:
    """Rules for what vLLM's loaders put into another order than transformers' modules have it, and for what a module
    of transformers gives out that vLLM's code of its name does not (Bloom's attention adds the residual stream), by
    tap. theirs: a dump of transformers; own: of vLLM."""
    modules = {m.tap: m for modules in theirs.modules.values() for m in modules}
    classes = {tap: m.cls for tap, m in modules.items()}
    own_classes = {m.tap: m.cls for of in own.modules.values() for m in of}
    found: dict[str, tuple[TapRule, ...]] = {}
    for module in (m for modules in own.modules.values() for m in modules):
        tap, cls = module.tap, classes.get(module.tap)
        if cls in _TRANSPOSED and module.cls not in _TRANSPOSED:
            role = RoleRule("param.weight", (Source(tap, "param.weight"),), transpose=(1, 0))
            found[tap] = (_rule(f"weight ← {cls}'s, transposed", tap, role),)
        elif module.cls == "QKVParallelLinear" and classes.get(tap.rpartition(".")[0]) in _PER_GROUP:
            heads, groups = (module.attrs.get(f"total_num_{name}") for name in ("heads", "kv_heads"))
            if isinstance(heads, int) and isinstance(groups, int) and 0 < groups <= heads and not heads % groups:
                roles = ("param.weight", "param.bias", "output.0")
                parts = [RoleRule(r, (Source(tap, r),), heads=(groups, heads // groups)) for r in roles]
                found[tap] = (_rule("query, key, value ← those of each group of heads", tap, *parts),)
        elif tap in modules and (known := object_at(modules[tap].attrs, FORWARD)) is not None:
            child, number = output_of(parsed(value_at(module.attrs, FORWARD, OUTPUT))) or ("", 0)
            one_layer = own_classes.get(f"{tap}.{child}", "").endswith("Linear")  # which is the same in both
            if child and not number and OUTPUT not in known and one_layer:
                found[tap] = (_rule(f"output ← {child}'s", tap, _one(OUTPUT, f"{tap}.{child}", OUTPUT)),)
    return found


_APART = "SharedFusedMoE"
_SHARED = (".shared_expert", ".shared_experts", ".experts._shared_experts._layer")
"""Names of a block's shared experts, below the block."""
_INNER = (".routed_experts.quant_method", ".quant_method")
"""Names of what gives the routed sum inside of experts that add, below them."""
_ROUTED = "output.0 of the routed experts alone ← quant_method's"
_LABEL = "output.0+output.1 (shared and routed experts) ← output.0"


def experts_apart(golden: Iterable[Record], mine: Iterable[Record]) -> tuple[Rules, bool] | None:
    """(rules; whether golden is the side that gives them out apart), None where there is no such tap."""
    one, other = _outputs(golden), _outputs(mine)
    for apart, whole, swapped in ((other, one, False), (one, other, True)):
        one_there = {tap for tap, (_, roles) in whole.items() if roles == {"output.0"}}
        taps = [t for t, (cls, roles) in apart.items() if cls == _APART and len(roles) == 2 and t in one_there]
        if taps:
            sums = {t: (RoleRule("output.0+output.1", (Source(t, "output.0"),)),) for t in taps}
            return Rules("vLLM's releases", exact={t: (TapRule(t, how, _LABEL),) for t, how in sums.items()}), swapped
    return None


def routed_alone(golden: Iterable[Record], mine: Iterable[Record]) -> tuple[Rules, bool, frozenset[str]] | None:
    """(rules; whether golden is the side whose experts are the routed ones alone; taps of which the other side has no
    routed sum, whose outputs are nothing to compare), None where both sides add at one place."""
    one, other = _Blocks(golden), _Blocks(mine)
    for alone, whole, swapped in ((other, one, False), (one, other, True)):
        taps = [tap for tap in alone.outside if tap in whole.inside]
        if taps:
            sources = {tap: next((s for s in (tap + i for i in _INNER) if s in whole.outputs), None) for tap in taps}
            exact = {tap: (TapRule(tap, (RoleRule("output.0", (Source(s, "output.0"),)),), _ROUTED),)
                     for tap, s in sources.items() if s}  # fmt: skip
            absent = frozenset(tap for tap, s in sources.items() if not s)
            return Rules("vLLM's releases", exact=exact), swapped, absent
    return None


class _Blocks:
    """outside, inside: taps of experts whose block calls shared ones next to them, or that call them; outputs: taps
    with an output.0."""

    def __init__(self, records: Iterable[Record]):
        first: dict[str, dict[str, int]] = {}  # by tap: role → where it comes first
        for r in records:
            if r.step is not None:
                first.setdefault(r.tap, {}).setdefault(r.role, r.seq)
        self.outputs = {tap for tap, roles in first.items() if "output.0" in roles}
        self.outside: list[str] = []
        self.inside: set[str] = set()
        for tap in [t for t in first if t.endswith(".experts")]:
            block = tap.removesuffix(".experts")
            shared = next((name for name in _SHARED if block + name in self.outputs), None)
            begin = min((seq for role, seq in first[tap].items() if role.startswith("input.")), default=None)
            end = first[tap].get("output.0")
            if shared is None or begin is None or end is None:
                continue
            if begin < first[block + shared]["output.0"] < end:
                self.inside.add(tap)
            else:
                self.outside.append(tap)


def _outputs(records: Iterable[Record]) -> dict[str, tuple[str, set[str]]]:
    found: dict[str, tuple[str, set[str]]] = {}
    for r in records:
        if r.tap.endswith("experts") and r.role.startswith("output."):
            found.setdefault(r.tap, (r.cls, set()))[1].add(r.role)
    return found
