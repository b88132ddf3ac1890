"""Layouts from layer attributes, as vLLM's parallel layers carry them at TP=2 and, for KV heads, TP=4."""

from types import SimpleNamespace as Plain
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.align.ranks import RankPiece, merge, plan_merge
from vllm_accprobe.capture.core.layout import Layouts, reduces_later


def module(cls: str = "Module", children: dict[str, Any] | None = None, **attributes: Any) -> Any:
    made = type(cls, (Plain,), {})(**attributes)
    made._modules = children or {}
    return made


def attention(tp: int, heads: int, kv_heads: int, head: int, hidden: int) -> Any:
    local_kv, replicas = max(kv_heads // tp, 1), max(tp // kv_heads, 1)
    sizes = [heads // tp * head, local_kv * head, local_kv * head]
    qkv = module(
        "QKVParallelLinear", tp_size=tp, num_heads=heads // tp, num_kv_heads=local_kv, head_size=head,
        num_kv_head_replicas=replicas, output_partition_sizes=sizes, gather_output=False,
        input_size_per_partition=hidden,
    )  # fmt: skip
    o = module(
        "RowParallelLinear", tp_size=tp, input_is_parallel=True, input_size_per_partition=heads // tp * head,
        output_partition_sizes=[hidden], reduce_results=True,
    )  # fmt: skip
    rotary, attn = module("RotaryEmbedding"), module("Attention", num_heads=heads // tp, head_size=head)
    return module("Qwen2Attention", {"qkv_proj": qkv, "o_proj": o, "rotary_emb": rotary, "attn": attn})


def layouts(tp: int, rank: int, tree: dict[str, Any], hidden: int) -> Layouts:
    found: dict[str, Any] = {}

    def walk(path: str, node: Any) -> None:
        found[path] = node
        for name, child in node._modules.items():
            walk(f"{path}.{name}" if path else name, child)

    walk("", module("Model", tree))
    return Layouts(found, rank, tp, hidden)


def test_attention_at_tp2() -> None:
    of = layouts(2, 1, {"self_attn": attention(2, 4, 2, 32, 128)}, 128).of
    qkv = of("self_attn.qkv_proj", "output.0", (5, 128))
    assert (qkv.kind, qkv.index, qkv.size, qkv.dim, qkv.parts) == ("shard", 1, 2, -1, ((64, 1), (32, 1), (32, 1)))
    assert of("self_attn.qkv_proj", "input.input_", (5, 128)).kind == "replicated"
    assert of("self_attn.rotary_emb", "input.query", (5, 64)).parts == ((64, 1),)
    assert of("self_attn.rotary_emb", "input.key", (5, 32)).parts == ((32, 1),)
    assert of("self_attn.rotary_emb", "output.1", (5, 32)).parts == ((32, 1),)
    assert of("self_attn.rotary_emb", "input.positions", (5,)).kind == "replicated"
    assert of("self_attn.attn", "output.0", (5, 64)).parts == ((64, 1),)
    assert of("self_attn.o_proj", "input.input_", (5, 64)).parts == ((64, 1),)
    assert of("self_attn.o_proj", "output.0", (5, 128)).kind == "replicated"
    # the block's own hidden states have the size of a local QKV here, and are whole all the same
    assert of("self_attn", "output.0", (5, 128)).kind == "replicated"


def test_queries_as_wide_as_a_hidden_state_are_slices_all_the_same() -> None:
    """Four heads of 64 at a hidden size of 128: what two ranks hold of the queries is 128 wide."""
    block = attention(2, 4, 2, 64, 128)
    block._modules["rotary_emb"]._modules["apply_rotary_emb"] = module("ApplyRotaryEmb")
    of = layouts(2, 0, {"self_attn": block}, 128).of
    for role in ("input.query", "inplace.query", "output.0"):
        assert of("self_attn.rotary_emb", role, (5, 128)).parts == ((128, 1),)
    assert of("self_attn", "output.0", (5, 128)).kind == "replicated"


def test_kv_heads_fewer_than_ranks_are_replicated_among_neighbours() -> None:
    of = layouts(4, 3, {"self_attn": attention(4, 8, 2, 16, 128)}, 128).of
    assert of("self_attn.qkv_proj", "output.0", (5, 64)).parts == ((32, 1), (16, 2), (16, 2))
    assert of("self_attn.attn", "input.key", (5, 16)).parts == ((16, 2),)
    heads = of("self_attn.attn", "input.query", (5, 2, 16))
    assert (heads.dim, heads.parts) == (-2, ((2, 1),))


def test_mlp_and_its_activation() -> None:
    gate_up = module("MergedColumnParallelLinear", tp_size=2, output_partition_sizes=[48, 48], gather_output=False)
    down = module(
        "RowParallelLinear", tp_size=2, input_is_parallel=True, input_size_per_partition=48,
        output_partition_sizes=[128],
    )  # fmt: skip
    tree = {"mlp": module("MLP", {"gate_up_proj": gate_up, "act_fn": module("SiluAndMul"), "down_proj": down})}
    found = layouts(2, 0, tree, 128)
    assert found.of("mlp.act_fn", "input.x", (5, 96)).parts == ((48, 1), (48, 1))
    assert found.of("mlp.act_fn", "output.0", (5, 48)).parts == ((48, 1),)
    weight = found.of_param("mlp.gate_up_proj", "weight", (96, 128))
    assert (weight.dim, weight.parts) == (-2, ((48, 1), (48, 1)))
    assert found.of_param("mlp.down_proj", "weight", (128, 48)).dim == -1
    assert found.of_param("mlp.down_proj", "bias", (128,)).kind == "replicated"
    assert found.of_param("mlp.gate_up_proj", "weight", (7, 7)).kind == "unknown"  # packed by some kernel


def test_partial_sums_vocabulary_and_replicated_layers() -> None:
    down = module(
        "RowParallelLinear", tp_size=2, input_is_parallel=True, input_size_per_partition=48,
        output_partition_sizes=[128], reduce_results=False,
    )  # fmt: skip
    head = module(
        "ParallelLMHead", tp_size=2, num_embeddings_per_partition=256, org_vocab_size=500, output_partition_sizes=[9]
    )
    gate = module("ReplicatedLinear", tp_size=2, output_partition_sizes=[8])
    tree = {"experts": module("Shared", {"down_proj": down}), "lm_head": head, "gate": gate}
    found = layouts(2, 0, tree, 128)
    assert found.of("experts.down_proj", "output.0", (5, 128)).kind == "partial"
    assert found.of("experts", "output.0", (5, 128)).kind == "partial"
    logits = found.of("lm_head", "output.0", (5, 256))
    assert (logits.kind, logits.parts, logits.valid) == ("shard", ((256, 1),), 500)
    assert layouts(2, 0, tree, 128).of("lm_head", "output.0", (5, 128)).kind == "replicated"  # used as an embedding
    assert found.of("gate", "output.0", (5, 8)).kind == "replicated"


def test_norms_whose_channels_are_distributed_to_ranks() -> None:
    """MiniMax-M2 on four ranks with two heads of keys, which two ranks have alike."""
    block = attention(4, 8, 2, 16, 128)
    for name, width, shards in (("q_norm", 32, 4), ("k_norm", 16, 2)):
        block._modules[name] = module("MiniMaxText01RMSNormTP", weight=np.ones(width), tp_world=4,
                                      weight_shard_world=shards)  # fmt: skip
    found = layouts(4, 3, {"self_attn": block}, 128)
    for name, parts in (("q_norm", ((32, 1),)), ("k_norm", ((16, 2),))):
        for role in ("input.x", "output.0"):
            assert found.of(f"self_attn.{name}", role, (5, parts[0][0])).parts == parts
        assert found.of_param(f"self_attn.{name}", "weight", (parts[0][0],)).parts == parts


def test_one_rank_has_no_layouts() -> None:
    found = layouts(1, 0, {"self_attn": attention(1, 4, 2, 32, 128)}, 128)
    assert found.of("self_attn.qkv_proj", "output.0", (5, 256)).kind == "replicated"


def experts(rank: int, placement: str, **more: Any) -> Any:
    parallel = Plain(use_ep=True, ep_size=2, ep_rank=rank, enable_eplb=False)
    return module(
        "RoutedExperts", moe_config=Plain(moe_parallel_config=parallel), local_num_experts=3,
        expert_map_manager=Plain(placement_strategy=placement), intermediate_size_per_partition=8, **more,
    )  # fmt: skip


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("tp", [1, 2])  # data-parallel ranks deal out experts too
def test_experts_dealt_out_over_ranks_are_put_together_by_global_id(placement: str, tp: int) -> None:
    whole = np.arange(6 * 4 * 2).reshape(6, 4, 2)
    held = {"linear": [[0, 1, 2], [3, 4, 5]], "round_robin": [[0, 2, 4], [1, 3, 5]]}[placement]
    trees = [layouts(tp, r, {"mlp": experts(r, placement)}, 64) for r in (0, 1)]
    found = [tree.of_param("mlp", "w13_weight", (3, 4, 2)) for tree in trees]
    plan = plan_merge([RankPiece(r, found[r], (3, 4, 2), "float32", None) for r in (0, 1)])
    np.testing.assert_array_equal(merge(plan, [whole[ids] for ids in held]), whole)


def test_experts_that_move_are_not_put_together() -> None:
    balanced = layouts(1, 0, {"mlp": experts(0, "linear", enable_eplb=True)}, 64)
    assert balanced.of_param("mlp", "w2_weight", (3, 4, 2)).kind == "unknown"


def test_latent_attention_whose_head_is_as_wide_as_a_slice() -> None:
    """DeepSeek's: rotary heads of 64 beside an o_proj that takes 64 per rank; vLLM 0.32's MLA modules."""
    q = module("ColumnParallelLinear", tp_size=2, output_partition_sizes=[192], gather_output=False)
    o = module(
        "RowParallelLinear", tp_size=2, input_is_parallel=True, input_size_per_partition=64,
        output_partition_sizes=[128],
    )  # fmt: skip
    inner = module("MLAAttention", num_heads=2, kv_lora_rank=512)
    wrapper = module(
        "MultiHeadLatentAttentionWrapper", num_heads=2, kv_lora_rank=512,
        children={
            "q_proj": q, "o_proj": o, "mla_attn": inner,
            "rotary_emb": module("Rotary"), "kv_a_layernorm": module("RMSNorm"),
        },
    )  # fmt: skip
    of = layouts(2, 1, {"mla_attn": wrapper}, 128).of
    query = of("mla_attn.rotary_emb", "input.query", (5, 2, 64))
    assert (query.kind, query.dim, query.parts) == ("shard", -2, ((2, 1),))
    assert of("mla_attn.rotary_emb", "input.key", (5, 1, 64)).kind == "replicated"
    assert of("mla_attn.kv_a_layernorm", "output.0", (5, 512)).kind == "replicated"
    assert of("mla_attn.mla_attn", "input.kv_c_normed", (5, 512)).kind == "replicated"
    assert of("mla_attn.mla_attn", "input.q", (5, 2, 96)).dim == -2
    out = of("mla_attn.mla_attn", "output.0", (5, 64))
    assert (out.kind, out.dim) == ("shard", -1)


@pytest.mark.parametrize(
    ("attributes", "later"),
    [
        ({"reduce_results": False}, True),  # to 0.19
        ({"reduce_results": True}, False),
        ({"moe_config": Plain(skip_final_all_reduce=True)}, True),  # from 0.26 on
        ({"moe_config": Plain(skip_final_all_reduce=False)}, False),
        ({"moe_config": Plain()}, False),
        ({}, False),
    ],
)
def test_experts_that_leave_the_all_reduce_to_the_model(attributes: dict[str, Any], later: bool) -> None:
    experts = Plain(global_num_experts=8, _modules={}, **attributes)
    assert reduces_later(experts) is later  # asked at each call: a model may ask for it after it has made its experts
    layout = Layouts({"": Plain(_modules={"experts": experts}), "experts": experts}, 1, 2, 128)
    found = layout.of("experts", "output.0", (5, 128))
    assert (found.kind == "partial") is later
    if later:
        assert (found.index, found.size) == (1, 2)
