"""What the ledger of states relies on: where caches lie, who writes them, and what metadata say of slots and states.

The problem, the words and who reads this: need.py. A name that is gone here is counted by the ledger as not watched.
Not here: the engine (engine_names.py), runners (runners.py), weights (weight_names.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names.need import V1, V2, VllmPlace, each

_CACHES = "the ledger of states is off: it does not know the engine's caches"
_LAYER = "the ledger of states does not watch these layers"
_MOMENT = "the ledger of states does not see when a layer writes"
_METADATA = "the ledger of states does not hold these numbers against the schedule"
_STATES = "the ledger of states does not hold recurrent states against the schedule"

PLACES = (
    VllmPlace(
        "the V1 runner's caches", ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",), each("kv_cache_config", _CACHES),
        kind=V1,
    ),
    VllmPlace(
        "the V2 runner's caches", ("vllm.v1.worker.gpu.model_runner:GPUModelRunner",), each("kv_cache_config", _CACHES),
        since=(0, 13), kind=V2,
    ),
    VllmPlace(
        "the caches' configuration", ("vllm.v1.kv_cache_interface:KVCacheConfig",),
        each("num_blocks kv_cache_groups", _CACHES),
    ),
    VllmPlace(
        "a group of caches", ("vllm.v1.kv_cache_interface:KVCacheGroupSpec",),
        each("layer_names kv_cache_spec", _CACHES),
    ),
    VllmPlace(
        "full attention's cache", ("vllm.v1.kv_cache_interface:FullAttentionSpec",), each("block_size", _CACHES),
    ),
    VllmPlace(
        "a window's cache", ("vllm.v1.kv_cache_interface:SlidingWindowSpec",), each("sliding_window", _LAYER),
    ),
    VllmPlace(
        "chunked attention's cache", ("vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec",),
        each("attention_chunk_size", _LAYER),
    ),
    VllmPlace(
        "caches of several sizes", ("vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs",),
        each("kv_cache_specs", _LAYER),
    ),
    VllmPlace(
        "a recurrent layer's cache", ("vllm.v1.kv_cache_interface:MambaSpec",),
        each("shapes dtypes num_speculative_blocks", _LAYER),
    ),
    VllmPlace(
        "Mamba's way of caching", ("vllm.config.cache:CacheConfig",), each("mamba_cache_mode", _LAYER), since=(0, 15),
    ),
    VllmPlace(
        "layers by name", ("vllm.config.compilation:CompilationConfig",), each("static_forward_context", _CACHES),
    ),
    VllmPlace(
        "transfers", ("vllm.config.vllm:VllmConfig", "vllm.config:VllmConfig"),
        each("kv_transfer_config", "the ledger of states takes blocks that a connector brings for nobody's"),
    ),
    VllmPlace(
        "drafts in a step", ("vllm.config.speculative:SpeculativeConfig", "vllm.config:SpeculativeConfig"),
        each("num_speculative_tokens", "the ledger of states does not know how far the schedule may be ahead"),
    ),
    VllmPlace(
        "attention layers", ("vllm.model_executor.layers.attention.attention:Attention",
                             "vllm.attention.layer:Attention"),
        (*each("kv_cache impl kv_sharing_target_layer_name", _LAYER), *each("attn_backend", _MOMENT)),
    ),
    VllmPlace(
        "attention's backend", ("vllm.v1.attention.backend:AttentionBackend",),
        each("forward_includes_kv_cache_update", _MOMENT), since=(0, 15),
    ),
    VllmPlace(
        "attention's write", ("vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",),
        (*each("forward", _MOMENT), *each("do_kv_cache_update", _MOMENT, since=(0, 15))),
    ),
    VllmPlace(
        "latent attention's kernel", ("vllm.v1.attention.backend:MLAAttentionImpl",),
        (*each("forward_mqa forward_mha", _MOMENT), *each("do_kv_cache_update", _MOMENT)), since=(0, 18),
    ),
    VllmPlace(
        "attention's metadata", ("vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",),
        each("slot_mapping seq_lens query_start_loc block_table", _METADATA),
    ),
    VllmPlace(
        "metadata of all backends", ("vllm.v1.attention.backend:CommonAttentionMetadata",
                                     "vllm.v1.attention.backends.utils:CommonAttentionMetadata"),
        each("block_table_tensor", _METADATA),
    ),
    VllmPlace(
        "latent attention's metadata", ("vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata",
                                        "vllm.v1.attention.backends.mla.flashmla_sparse:FlashMLASparseMetadata"),
        each("block_table", _METADATA), since=(0, 13),
    ),
    VllmPlace(
        "Mamba's metadata", ("vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata",
                             "vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadata"),
        (
            *each("has_initial_states_p", _STATES),
            *each("state_indices_tensor", _STATES, until=(0, 18)),
            *each("state_indices_tensor_d state_indices_tensor_p num_accepted_tokens", _STATES, since=(0, 18)),
        ),
    ),
    VllmPlace(
        "Mamba1's metadata", ("vllm.v1.attention.backends.mamba1_attn:Mamba1AttentionMetadata",),
        each("has_initial_states", _STATES, until=(0, 13)),
    ),
    VllmPlace(
        "linear attention's metadata", ("vllm.v1.attention.backends.linear_attn:LinearAttentionMetadata",),
        each("state_indices_tensor", _STATES),
    ),
    VllmPlace(
        "the delta rule's metadata", ("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata",),
        (
            *each("has_initial_state num_accepted_tokens spec_sequence_masks", _STATES),
            *each("spec_state_indices_tensor non_spec_state_indices_tensor", _STATES),
            *each("spec_sequence_masks_cpu", _STATES, since=(0, 32)),
        ),
    ),
)  # fmt: skip
