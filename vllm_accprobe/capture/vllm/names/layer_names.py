"""What capture relies on in a model: how layers are cut, when their weights are packed, who deals images out.

The problem, the words and who reads this: need.py. Not here: the engine (engine_names.py), runners (runners.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names.need import Need, VllmPlace, each, one_of

_CUT = "tensors of several ranks are not put together: skipped"
_PACKED = "parameters are recorded as they are packed"
_TOLD = "an operator is replayed without this property"
_DEALT = "images dealt out to ranks have rows without names"

PLACES = (
    VllmPlace(
        "loading", ("vllm.model_executor.model_loader.base_loader",),
        (Need(("process_weights_after_loading",), _PACKED),), _PACKED,
    ),
    VllmPlace(
        "packing", ("vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase",),
        (
            Need(("process_weights_after_loading",), _PACKED, takes=("layer",)),
            Need(("apply",), "a head that is called through its method is not seen", takes=("layer",)),
        ),
    ),
    VllmPlace(
        "linear layers", ("vllm.model_executor.layers.linear:LinearBase",),
        (*each("tp_size", _CUT), *each("quant_method", _PACKED)),
    ),
    VllmPlace(
        "column-parallel layers", ("vllm.model_executor.layers.linear:ColumnParallelLinear",),
        each("gather_output output_partition_sizes input_size_per_partition", _CUT),
    ),
    VllmPlace(
        "row-parallel layers", ("vllm.model_executor.layers.linear:RowParallelLinear",),
        each("input_is_parallel reduce_results input_size_per_partition", _CUT),
    ),
    VllmPlace(
        "QKV layers", ("vllm.model_executor.layers.linear:QKVParallelLinear",),
        (
            *each("head_size num_heads num_kv_heads num_kv_head_replicas", _CUT),
            *each("v_head_size", _CUT, since=(0, 15)),
        ),
    ),
    VllmPlace(
        "vocabulary layers", ("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",),
        each("num_embeddings_per_partition org_vocab_size tp_size", _CUT),
    ),
    VllmPlace(
        "expert layers", ("vllm.model_executor.layers.fused_moe.layer:FusedMoE",
                          "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"),
        (
            *each("local_num_experts global_num_experts moe_config intermediate_size_per_partition", _CUT),
            one_of("expert_map_manager expert_placement_strategy", _CUT, since=(0, 12)),
            *each("expert_map_manager", _CUT, since=(0, 23)),
            *each("enable_eplb", _CUT, until=(0, 15)),
            *each("reduce_results", "sums that come later are taken for finished ones", until=(0, 20)),
        ),
    ),
    VllmPlace(
        "expert parallelism", ("vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig",),
        (*each("use_ep ep_size ep_rank", _CUT), *each("enable_eplb", _CUT, since=(0, 15))),
    ),
    VllmPlace(
        "the experts' configuration", ("vllm.model_executor.layers.fused_moe.config:FusedMoEConfig",),
        each("moe_parallel_config", _CUT),
    ),
    VllmPlace(
        "where experts lie", ("vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager",),
        each("placement_strategy", _CUT), since=(0, 23),
    ),
    VllmPlace(
        "latent attention", ("vllm.model_executor.models.deepseek_v2:DeepseekV2MLAAttention",),
        each("num_local_heads kv_lora_rank", _CUT),
    ),
    VllmPlace(
        "operators with several forwards", ("vllm.model_executor.custom_op:CustomOp",),
        each("_forward_method forward_native", "an operator's arguments have numbers instead of names"),
    ),
    VllmPlace(
        "attention's kernel", ("vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",),
        each("scale alibi_slopes sinks logits_soft_cap sliding_window kv_cache_dtype", _TOLD),
    ),
    VllmPlace(
        "a pipeline's tensors", ("vllm.sequence:IntermediateTensors",),
        each("tensors", "what a pipeline's ranks hand on is not captured"),
    ),
    VllmPlace(
        "images dealt out", ("vllm.model_executor.models.vision",),
        (
            Need(("run_dp_sharded_mrope_vision_model",), _DEALT,
                 takes=("vision_model", "pixel_values", "grid_thw_list")),
            Need(("run_dp_sharded_vision_model",), _DEALT, takes=("image_input", "vision_model")),
            Need(("get_load_balance_assignment",), _DEALT, takes=("sizes", "num_gpus")),
            *each("get_tensor_model_parallel_rank get_tensor_model_parallel_world_size", _DEALT),
        ),
    ),
    VllmPlace(
        "models", ("vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration",),
        (Need(("compute_logits",), "logits are not captured: skipped", takes=("hidden_states",)),),
    ),
    VllmPlace(
        "embedding of tokens", ("vllm.model_executor.models.interfaces_base:VllmModel",),
        each("embed_input_ids", "tokens embedded beside prompts of embeddings may get other rows", since=(0, 13)),
    ),
    VllmPlace(
        "models of images", ("vllm.model_executor.models.interfaces:SupportsMultiModal",),
        each("get_language_model", "the language model inside is looked for by its attribute"),
    ),
    VllmPlace(
        "compiled modules", ("vllm.compilation.decorators",),
        each("do_not_compile", "which modules run no Python is not known"),
    ),
)  # fmt: skip
