"""All names of vLLM that capture touches, place by place, and what is lost where one is missing.

The words in which it is said what of vLLM capture touches: a place, the names needed there, and what a loss means.

The problem: capture touches some two hundred names of vLLM, of releases and vendors that nobody can run here, and a
name that is gone is seen only on the machine that has it. The idea: each is declared once, as plain data, with the
releases that have it and what capture cannot do without it; `accprobe doctor --wheel` holds a wheel's source against
that, and a test holds the declaration against the code of capture, in both directions.

What capture relies on in LoRA: who asks for which adapter, and who reads an adapter's files.

The problem, the words and who reads this: need.py.

What the ledger of states relies on: where caches lie, who writes them, and what metadata say of slots and states.

The problem, the words and who reads this: need.py. A name that is gone here is counted by the ledger as not watched.

What capture relies on around the engine: arguments, configuration, the scheduler's output, processes and groups.

The problem, the words and who reads this: need.py.

What capture relies on in a model: how layers are cut, when their weights are packed, who deals images out.

The problem, the words and who reads this: need.py.

Modes of vLLM and of vendors in which rows are others than the scheduler's, and what is done about each.

The problem: some modes deal rows out to ranks, reorder them, or decide on the device which there are; a tensor with as
many rows as the step has tokens would then be written under wrong names. The idea: each mode is declared once: how a
running engine shows it, how a wheel's source shows that a release has it, and what follows: the capture is refused, or
a part of it is skipped, in one line; never a wrong row.

What capture relies on in a worker: its runner of either generation, the batch that it keeps, its sampler.

The problem, the words and who reads this: need.py. These are the places that vendors derive from or copy.

What capture relies on where weights change: calls of runners, workers, models and adapters' managers.

The problem, the words and who reads this: need.py. A name that is gone here costs the weights' life or a part of it,
never a capture.

All places of vLLM that capture touches, in the order in which a report names them.

The problem, the words and who reads this: need.py. The idea: one list, for `accprobe doctor --wheel` and for the test
that holds it against capture's source.

Not here: reading wheels (doctor/wheel), who asks (vllm_compat.py, runner.py, sampling.py), who reads wheels
(doctor/wheel), the declarations themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Release = tuple[int, ...]
"""(0, 11) or (0, 14, 1)."""


@dataclass(frozen=True)
class Need:
    """names: spellings, of which one must be there. loss: what follows where none is, in a few words.

    takes: the first parameters after ``self``, by position. keywords: parameters that it must have, wherever.
    since, until: the releases that have it, the latter not included; None where all have. called: capture wraps it, so
    it must be called as an attribute of its object, or it would never be seen.
    """

    names: tuple[str, ...]
    loss: str
    takes: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    since: Release | None = None
    until: Release | None = None
    called: bool = False

    def due(self, release: Release | None) -> bool:
        """Whether ``release`` has it; None is an unknown release, held to what the newest has."""
        if release is None:
            return self.until is None
        return (self.since is None or release >= self.since) and (self.until is None or release < self.until)


@dataclass(frozen=True)
class VllmPlace:
    """A kind of vLLM's objects, or a module. at: ``module:Class``, or ``module``, where releases have it; the first
    that is there counts. of: (another place, attribute): it is what that attribute is made of. kind: runners
    and workers are also looked for among a vendor's own classes.
    """

    name: str
    at: tuple[str, ...]
    needs: tuple[Need, ...]
    loss: str = ""
    of: tuple[str, str] | None = None
    kind: str = ""
    since: Release | None = None
    until: Release | None = None

    def due(self, release: Release | None) -> bool:
        """Whether ``release`` has such a place at all."""
        return Need((), "", since=self.since, until=self.until).due(release)


V1, V2, WORKER = "V1", "V2", "worker"


def each(names: str, loss: str, *, since: Release | None = None, until: Release | None = None) -> tuple[Need, ...]:
    """A need for each of the names."""
    return tuple(Need((name,), loss, since=since, until=until) for name in names.split())


def one_of(names: str, loss: str, **other: object) -> Need:
    """One need with several spellings."""
    return replace(Need(tuple(names.split()), loss), **other)  # type: ignore[arg-type]


_NAME = "requests with different adapters are taken for the same"
_WEIGHTS = "adapters' weights are not in the dump: skipped"

LORA_PLACES = (
    VllmPlace("an adapter's request", ("vllm.lora.request:LoRARequest",), each("lora_name lora_int_id", _NAME)),
    VllmPlace(
        "runners with adapters", ("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin",),
        each("lora_manager", _WEIGHTS),
    ),
    VllmPlace(
        "who loads adapters", ("vllm.lora.worker_manager:WorkerLoRAManager",),
        (Need(("_load_adapter",), _WEIGHTS, takes=("lora_request",)),),
    ),
    VllmPlace(
        "a loaded adapter", ("vllm.lora.lora_model:LoRAModel", "vllm.lora.models:LoRAModel"), each("loras", _WEIGHTS),
    ),
    VllmPlace(
        "an adapter of one layer", ("vllm.lora.lora_weights:LoRALayerWeights",),
        each("lora_a lora_b scaling", _WEIGHTS),
    ),
)  # fmt: skip


_CACHES = "the ledger of states is off: it does not know the engine's caches"
_LAYER = "the ledger of states does not watch these layers"
_MOMENT = "the ledger of states does not see when a layer writes"
_METADATA = "the ledger of states does not hold these numbers against the schedule"
_STATES = "the ledger of states does not hold recurrent states against the schedule"

CACHE_PLACES = (
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


_ROWS = "the rows of a step cannot be told: refused"
_EAGER = "the engine is not made eager: start it with --enforce-eager"
_FACT = "run.json does not say it"
_BLOCKS = "the ledger of states does not know which blocks a request has"
_MOVED = "the ledger of states takes copied or zeroed blocks for bytes that nobody wrote"
_PREEMPTED = "the ledger of states does not know that a request was resumed"
_IMAGES = "rows of images have no names: skipped"

ENGINE_PLACES = (
    VllmPlace(
        "the package", ("vllm.version",), each("__version__", _FACT), "this is no vLLM",
    ),
    VllmPlace(
        "environment names", ("vllm.envs",),
        each("environment_variables", "vLLM warns of our settings' names"), "vLLM warns of our settings' names",
    ),
    VllmPlace(
        "the engine's arguments", ("vllm.engine.arg_utils:EngineArgs",),
        (Need(("create_engine_config",), _EAGER), *each("enforce_eager compilation_config", _EAGER)), _EAGER,
    ),
    VllmPlace(
        "VllmConfig", ("vllm.config.vllm:VllmConfig", "vllm.config:VllmConfig"),
        (
            *each("parallel_config", "ranks are not known: capture cannot attach"),
            *each("model_config compilation_config", "whether modules run Python is not known: capture cannot attach"),
            *each("scheduler_config cache_config", _FACT),
            *each("speculative_config", "drafts would be taken for accepted tokens"),
            *each("offload_config", "operators of offloaded weights are not told apart", since=(0, 18)),
        ),
    ),
    VllmPlace(
        "ParallelConfig", ("vllm.config.parallel:ParallelConfig",),
        (
            *each("rank world_size", "ranks are not known: capture cannot attach"),
            *each("data_parallel_rank data_parallel_size distributed_executor_backend",
                  "replicas share a rank's place"),
            *each("data_parallel_index", "replicas of a dense model share a rank's place", since=(0, 14)),
            *each("tensor_parallel_size", "images dealt out to ranks are not noticed"),
            *each("prefill_context_parallel_size", "rows dealt out by context parallelism are not noticed",
                  since=(0, 13)),
            *each("enable_dbo", "a batch that runs in pieces is not noticed"),
            *each("ubatch_size", "a batch that runs in pieces is not noticed", since=(0, 15)),
        ),
    ),
    VllmPlace(
        "ModelConfig", ("vllm.config.model:ModelConfig", "vllm.config:ModelConfig"),
        (
            *each("model dtype quantization max_model_len seed", _FACT),
            *each("enforce_eager", "whether modules run Python is not known: capture cannot attach"),
            *each("get_hidden_size", "tensors split along the hidden dimension are not told from whole ones"),
            *each("multimodal_config", "images dealt out to ranks are not noticed"),
        ),
    ),
    VllmPlace(
        "MultiModalConfig", ("vllm.config.multimodal:MultiModalConfig",),
        each("mm_encoder_tp_mode", "images dealt out to ranks are not noticed"),
    ),
    VllmPlace(
        "CompilationConfig", ("vllm.config.compilation:CompilationConfig",),
        (
            one_of("mode level", _EAGER),
            *each("mode", _EAGER, since=(0, 13)),
            *each("cudagraph_mode", _EAGER),
            *each("backend cudagraph_capture_sizes", _FACT),
            *each("splitting_ops", "taps in compiled graphs do not know where the graph is cut"),
            *each("use_inductor_graph_partition", "taps in compiled graphs do not know where the graph is cut"),
        ),
    ),
    VllmPlace(
        "SchedulerConfig", ("vllm.config.scheduler:SchedulerConfig", "vllm.config:SchedulerConfig"),
        each("max_num_batched_tokens async_scheduling", _FACT),
    ),
    VllmPlace(
        "CacheConfig", ("vllm.config.cache:CacheConfig",),
        (
            *each("block_size enable_prefix_caching", _FACT),
            *each("cpu_offload_gb", "operators of offloaded weights are not told apart", until=(0, 18)),
        ),
    ),
    VllmPlace(
        "OffloadConfig", ("vllm.config.offload:OffloadConfig",),
        each("uva prefetch", "operators of offloaded weights are not told apart"), since=(0, 18),
    ),
    VllmPlace(
        "UVAOffloadConfig", ("vllm.config.offload:UVAOffloadConfig",),
        each("cpu_offload_gb", "operators of offloaded weights are not told apart"), since=(0, 18),
    ),
    VllmPlace(
        "PrefetchOffloadConfig", ("vllm.config.offload:PrefetchOffloadConfig",),
        each("offload_group_size", "operators of offloaded weights are not told apart"), since=(0, 18),
    ),
    VllmPlace(
        "SpeculativeConfig", ("vllm.config.speculative:SpeculativeConfig", "vllm.config:SpeculativeConfig"),
        each("method", _FACT),
    ),
    VllmPlace(
        "SchedulerOutput", ("vllm.v1.core.sched.output:SchedulerOutput",),
        (
            *each("scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens", _ROWS),
            *each("finished_req_ids", "finished requests are never forgotten"),
            *each("scheduled_spec_decode_tokens", "rows of drafts would be taken for tokens"),
            *each("scheduled_encoder_inputs", _IMAGES),
            *each("preempted_req_ids", _PREEMPTED, since=(0, 13)),
            *each("new_block_ids_to_zero", _MOVED, since=(0, 18)),
            *each("kv_cache_block_copies", _MOVED, since=(0, 26)),
        ),
        _ROWS,
    ),
    VllmPlace(
        "NewRequestData", ("vllm.v1.core.sched.output:NewRequestData",),
        (
            *each("req_id prompt_token_ids num_computed_tokens", _ROWS),
            *each("mm_features", _IMAGES),
            *each("sampling_params", "tokens cannot be forced"),
            *each("prompt_is_token_ids", "a prompt of tokens and embeddings is not told from one of embeddings",
                  since=(0, 21)),
            *each("prompt_embeds", "the length of a prompt that came as embeddings is not known", since=(0, 13)),
            *each("block_ids", _BLOCKS),
            *each("lora_request", "requests with different adapters are taken for the same"),
        ),
        _ROWS,
    ),
    VllmPlace(
        "CachedRequestData", ("vllm.v1.core.sched.output:CachedRequestData",),
        (
            *each("req_ids num_computed_tokens", _ROWS),
            *each("new_block_ids", _BLOCKS),
            one_of("resumed_req_ids resumed_from_preemption", _PREEMPTED),
        ),
        _ROWS,
    ),
    VllmPlace(
        "GrammarOutput", ("vllm.v1.core.sched.output:GrammarOutput", "vllm.v1.core.sched.output:SchedulerOutput"),
        each("structured_output_request_ids grammar_bitmask", "logits masked by a grammar are not told"),
    ),
    VllmPlace(
        "SamplingParams", ("vllm.sampling_params:SamplingParams",), each("extra_args", "tokens cannot be forced"),
    ),
    VllmPlace(
        "MultiModalFeatureSpec", ("vllm.multimodal.inputs:MultiModalFeatureSpec",),
        (
            *each("mm_position modality data", _IMAGES),
            one_of("mm_hash identifier", "images are not recognised by their content"),
            *each("identifier", "images are not recognised by their content"),
        ),
    ),
    VllmPlace(
        "PlaceholderRange", ("vllm.multimodal.inputs:PlaceholderRange",),
        (
            *each("offset length", _IMAGES),
            *each("get_num_embeds", "rows of an image with other tokens between have no names: skipped"),
        ),
    ),
    VllmPlace(
        "the engine's core", ("vllm.v1.engine.core:EngineCore",),
        (
            Need(("step",), "a running server cannot be armed"),
            Need(("step_with_batch_queue",), "a running server cannot be armed"),
            *each("scheduler", "a running server cannot be armed"),
        ),
    ),
    VllmPlace(
        "a request of the scheduler", ("vllm.v1.request:Request",),
        each("cache_salt", "prefixes that requests with different cache salts share are not seen"),
    ),
    VllmPlace(
        "the scheduler", ("vllm.v1.core.sched.scheduler:Scheduler",),
        (Need(("schedule",), "a running server cannot be armed"),),
    ),
    VllmPlace(
        "the end of processes", ("vllm.v1.engine.utils",),
        (
            Need(("shutdown",), "a dump that takes more than five seconds to close is cut", takes=("procs",)),
            Need(("shutdown",), "the front end's patience is not known", takes=("procs",), keywords=("timeout",),
                 since=(0, 18)),
        ),
    ),
    VllmPlace(
        "process groups", ("vllm.distributed.parallel_state",),
        each("get_tp_group get_pp_group get_dp_group get_ep_group", "a rank does not know its place in the group"),
    ),
    VllmPlace(
        "a process group", ("vllm.distributed.parallel_state:GroupCoordinator",),
        each("rank_in_group world_size", "a rank does not know its place in the group"),
    ),
    VllmPlace(
        "the forward's context", ("vllm.forward_context",),
        each("get_forward_context", "which captured graph computed a step is not told"),
    ),
    VllmPlace(
        "ForwardContext", ("vllm.forward_context:ForwardContext",),
        (
            *each("cudagraph_runtime_mode batch_descriptor", "which captured graph computed a step is not told"),
            *each("attn_metadata", "the ledger of states does not see what attention is given"),
            *each("slot_mapping", "the ledger of states does not see which slots are written", since=(0, 15)),
        ),
    ),
    VllmPlace(
        "BatchDescriptor", ("vllm.forward_context:BatchDescriptor",),
        each("num_tokens", "which captured graph computed a step is not told"),
    ),
    VllmPlace(
        "the platform", ("vllm.platforms",), each("current_platform", _FACT),
    ),
)  # fmt: skip


_CUT = "tensors of several ranks are not put together: skipped"
_PACKED = "parameters are recorded as they are packed"
_TOLD = "an operator is replayed without this property"
_DEALT = "images dealt out to ranks have rows without names"

LAYER_PLACES = (
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


REFUSED, SKIPPED, WORKS = "refused", "skipped", "works"


@dataclass(frozen=True)
class Mode:
    """name: in a few words. fate: REFUSED, SKIPPED or WORKS. says: the line, or what is done. marks: ``file:text``,
    where a source shows that it has the mode: the file's end, and what stands in a line of it. on: whether a runner is
    in it, None where nothing has to be asked."""

    name: str
    fate: str
    says: str
    marks: tuple[str, ...]
    on: Callable[[Any], bool] | None = None


def _parallel(runner: Any) -> Any:
    return getattr(getattr(runner, "vllm_config", None), "parallel_config", None)


def _context(runner: Any) -> bool:
    return int(getattr(_parallel(runner), "prefill_context_parallel_size", 1) or 1) > 1


def _pieces(runner: Any) -> bool:
    config = _parallel(runner)
    return bool(getattr(config, "enable_dbo", False)) or int(getattr(config, "ubatch_size", 0) or 0) > 1


def _experts(runner: Any) -> bool:
    return getattr(_parallel(runner), "use_sequence_parallel_moe", False) is True


def _xlite(runner: Any) -> bool:
    return any(kind.__name__ == "XliteModelRunner" for kind in type(runner).__mro__)


def _flash(runner: Any) -> bool:
    """As the vendor's own functions say it, which read settings of several names."""
    utils = sys.modules.get("vllm_ascend.utils")
    if utils is None or not any(kind.__module__.startswith("vllm_ascend.") for kind in type(runner).__mro__):
        return False
    config = getattr(runner, "vllm_config", None)
    enabled, second = getattr(utils, "enable_sp", None), getattr(utils, "flashcomm2_enable", None)
    return bool(enabled is not None and enabled(config)) or bool(second is not None and second())


def _sharded(runner: Any) -> bool:
    return getattr(runner, "batch_sharder", None) is not None


def _verified(runner: Any) -> bool:
    return getattr(runner, "adaptive_verification", None) is not None


def _several(runner: Any) -> bool:
    count = getattr(getattr(runner, "model_state", None), "num_new_sampled_tokens_per_step", 1)
    return isinstance(count, int) and count != 1


CONTEXT = Mode(
    "prefill context parallelism", REFUSED, "prefill context parallelism deals a prompt's rows to several ranks",
    ("config/parallel.py:prefill_context_parallel_size",), _context,
)  # fmt: skip
PIECES = Mode(
    "dual-batch overlap", REFUSED, "dual-batch overlap (--enable-dbo) runs a batch in pieces, on two threads",
    ("config/parallel.py:enable_dbo:",), _pieces,
)  # fmt: skip
EXPERTS = Mode(
    "sequence parallelism of experts", REFUSED,
    "expert, tensor and data parallelism together deal the rows of expert blocks to several ranks",
    ("config/parallel.py:def use_sequence_parallel_moe",), _experts,
)  # fmt: skip
XLITE = Mode(
    "xlite", REFUSED, "xlite runs the model without Python, and no module is seen: start without xlite_graph_config",
    ("xlite/xlite_model_runner.py:class XliteModelRunner",), _xlite,
)  # fmt: skip
FLASH = Mode(
    "FlashComm and sequence parallelism", REFUSED,
    "FlashComm or sequence parallelism deals rows to several ranks: start with VLLM_ASCEND_ENABLE_FLASHCOMM1=0, "
    "VLLM_ASCEND_ENABLE_FLASHCOMM=0 and VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE=0, without enable_shared_expert_dp",
    ("vllm_ascend/platform.py:if enable_sp(", "vllm_ascend/utils.py:def enable_sp("), _flash,
)  # fmt: skip
SHARDED = Mode(
    "batch-sharded sampling", SKIPPED, "batch-sharded sampling: each rank has other rows of the logits",
    ("worker/gpu/model_runner.py:if self.batch_sharder is not None",), _sharded,
)  # fmt: skip
SEVERAL = Mode(
    "several tokens a step", SKIPPED, "this model samples several tokens of a request in a step",
    ("worker/gpu/model_runner.py:num_new_sampled_tokens_per_step",), _several,
)  # fmt: skip
VERIFIED = Mode(
    "drafts admitted on the device", SKIPPED, "which drafts of a step are verified is decided on the device (dspark)",
    ("worker/gpu/model_runner.py:if adaptive_verification is not None",), _verified,
)  # fmt: skip

MODES = (
    CONTEXT, PIECES, EXPERTS, XLITE, FLASH, SHARDED, SEVERAL, VERIFIED,
    Mode(
        "drafts taken back in a copy of the scheduler's output", WORKS,
        "the runner's own copy is read, after its _update_states",
        (
            "worker/model_runner_v1.py:scheduler_output = deepcopy(",
            "worker/gpu_model_runner.py:scheduler_output = deepcopy(",
            "worker/gpu_model_runner.py:num_scheduled_tokens_copy =",
        ),
    ),
    Mode(
        "sampling inside execute_model, without _sample", WORKS,
        "tokens are taken from the sampler's result; those of a step with drafts are skipped",
        ("vllm_ascend/worker/model_runner_v1.py:scheduler_output.grammar_bitmask is not None",),
    ),
    Mode(
        "five seconds at shutdown", WORKS, "the front end waits while a dump is written, up to 30 s, in every release",
        ("v1/utils.py:def shutdown(procs",),
    ),
    Mode(
        "Ray", WORKS,
        "ray.kill leaves no time: what the writer's flush timer (0.2 s) gave to the disk is in the dump, not closed",
        ("v1/executor/ray_executor.py:ray.kill(", "executor/ray_distributed_executor.py:ray.kill("),
    ),
)  # fmt: skip
"""In the order in which a report names them. What nothing has to be asked for is read in the source, and handled."""


def refused(runner: Any) -> str:
    """Why this runner cannot be observed at all, "" where it can."""
    return _first(REFUSED, runner)


def unsampled(runner: Any) -> str:
    """Why what this runner samples cannot be told by rows, "" where it can. Known once its model is loaded."""
    return next((mode.says for mode in (SHARDED, SEVERAL) if mode.on is not None and mode.on(runner)), "")


def unplaced(runner: Any, out: Any) -> str:
    """Why the rows of this step cannot be told, "" where they can. out: the scheduler's output."""
    drafts = getattr(out, "scheduled_spec_decode_tokens", None)
    return VERIFIED.says if drafts and _verified(runner) else ""


def in_graphs(vllm_config: Any) -> str:
    """Why taps inside compiled graphs would see rows of one rank only, "" where they see all."""
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    if getattr(passes, "enable_sp", False) is True or getattr(passes, "enable_sequence_parallelism", False) is True:
        return "sequence parallelism in compiled graphs deals rows to several ranks"
    return ""


def _first(fate: str, runner: Any) -> str:
    return next((mode.says for mode in MODES if mode.fate == fate and mode.on is not None and mode.on(runner)), "")


_NOTHING = "nothing is captured"
_TOKENS = "sampled tokens are not captured: skipped"
_MASKS = "masked logits are not told from free ones"
_GRAPHS = "no taps in compiled graphs: skipped"

_QUIET = "batches that vLLM invents would be taken for steps"
_DRAFTS = "what a draft model calls would be taken for the model's"
_FORCED = "tokens cannot be forced"
_SET = "what a row was sampled with is not captured"
_ASKED = "what a request asks of the sampler is not captured whole: rows that need it have no reference"
_NOISE = "seeded tokens are not drawn again"

RUNNER_PLACES = (
    VllmPlace(
        "the worker's wrapper",
        ("vllm.v1.worker.worker_base:WorkerWrapperBase", "vllm.worker.worker_base:WorkerWrapperBase"),
        (
            Need(("init_device",), _NOTHING),
            Need(("shutdown",), "the dump is closed when the process ends only"),
            *each("worker vllm_config", _NOTHING),
        ),
        _NOTHING,
    ),
    VllmPlace(
        "the worker", ("vllm.v1.worker.gpu_worker:Worker",),
        (
            *each("model_runner", _NOTHING),
            *each("determine_available_memory initialize_from_config compile_or_warm_up_model execute_dummy_batch",
                  _QUIET),
        ),
        kind=WORKER,
    ),
    VllmPlace(
        "the V1 runner", ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",),
        (
            Need(("load_model",), _NOTHING, called=True),
            Need(("execute_model",), _NOTHING, takes=("scheduler_output",), called=True),
            Need(("get_model",), _NOTHING),
            *each("input_batch requests", _ROWS),
            *each("positions input_ids", "rows carry no token ids and positions of the runner's own"),
            *each("device vllm_config", _NOTHING),
            Need(("_update_states",), "drafts that the runner takes back would count as rows",
                 takes=("scheduler_output",), called=True),
            Need(("sample_tokens",), "the tokens of a step are not seen", since=(0, 13), called=True),
            one_of("_sample sampler", _TOKENS),
            Need(("_sample",), "tokens are the sampler's; those of a step with drafts are skipped", called=True),
            Need(("propose_draft_token_ids",), _DRAFTS),
            *each("sampler", _TOKENS),
            *each("drafter", "a draft model is compiled in the look at a compiled engine"),
            *each("kv_caches", "operators do not know the cache"),
            Need(("_dummy_run",), _GRAPHS, takes=("num_tokens",)),
            Need(("_model_forward",), "a compiled forward that is replayed as a whole is not seen: skipped",
                 since=(0, 13), called=True),
        ),
        _NOTHING, kind=V1,
    ),
    VllmPlace(
        "V1's batch", ("vllm.v1.worker.gpu_input_batch:InputBatch",),
        (
            *each("req_ids", _ROWS),
            *each("sampling_metadata", _MASKS),
            *each("has_allowed_token_ids frequency_penalties_reqs presence_penalties_reqs repetition_penalties_reqs",
                  _MASKS),
        ),
        of=("the V1 runner", "input_batch"),
    ),
    VllmPlace(
        "V1's request", ("vllm.v1.worker.gpu_input_batch:CachedRequestState",),
        (*each("num_tokens", _ROWS), *each("mm_features", _IMAGES)),
    ),
    VllmPlace(
        "SamplingMetadata", ("vllm.v1.sample.metadata:SamplingMetadata",),
        (
            *each("all_greedy temperature top_k top_p", _SET),
            *each("no_penalties repetition_penalties presence_penalties frequency_penalties", _SET),
            *each("bad_words_token_ids logitsprocs", _MASKS),
            *each("thinking_budget_state_holder", _MASKS, since=(0, 21)),
        ),
    ),
    VllmPlace(
        "logits processors", ("vllm.v1.sample.logits_processor.state:LogitsProcessors",),
        (*each("non_argmax_invariant", _MASKS), *each("argmax_invariant", _SET)),
    ),
    VllmPlace(
        "MinPLogitsProcessor", ("vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor",),
        each("min_p min_p_count", _SET),
    ),
    VllmPlace(
        "SamplingParams", ("vllm.sampling_params:SamplingParams",),
        (
            *each("allowed_token_ids all_stop_token_ids bad_words_token_ids", _ASKED),
            one_of("structured_outputs guided_decoding", _ASKED),
            *each("thinking_token_budget", _ASKED, since=(0, 21)),
            *each("trace_decode_token_ids watermarking", _ASKED, since=(0, 32)),
        ),
    ),
    VllmPlace(
        "MinTokensLogitsProcessor", ("vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor",),
        each("min_toks", _MASKS),
    ),
    VllmPlace(
        "LogitBiasLogitsProcessor", ("vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor",),
        each("biases", _MASKS),
    ),
    VllmPlace(
        "ThinkingBudgetStateHolder", ("vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder",),
        each("has_tracked_requests", _MASKS), since=(0, 21),
    ),
    VllmPlace(
        "V1's sampler", ("vllm.v1.sample.sampler:Sampler",),
        (Need(("sample",), _FORCED, takes=("logits",), called=True), *each("topk_topp_sampler", _NOISE)),
        of=("the V1 runner", "sampler"),
    ),
    VllmPlace(
        "V1's draw", ("vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",),
        each("use_fp64_gumbel", _NOISE, since=(0, 32)),
    ),
    VllmPlace(
        "SamplerOutput", ("vllm.v1.outputs:SamplerOutput",), each("sampled_token_ids", _TOKENS),
    ),
    VllmPlace(
        "a pair of buffers", ("vllm.v1.utils:CpuGpuBuffer",),
        each("cpu gpu np", "rows carry no token ids and positions of the runner's own"),
    ),
    VllmPlace(
        "the V2 runner", ("vllm.v1.worker.gpu.model_runner:GPUModelRunner",),
        (
            Need(("load_model",), _NOTHING, called=True),
            Need(("execute_model",), _NOTHING, takes=("scheduler_output",), keywords=("dummy_run",), called=True),
            Need(("prepare_inputs",), _ROWS, takes=("scheduler_output",), called=True),
            Need(("sample_tokens",), "the tokens of a step are not seen", called=True),
            Need(("sample",), _TOKENS, called=True),
            Need(("get_model",), _NOTHING),
            *each("req_states", _ROWS),
            *each("device vllm_config", _NOTHING),
            *each("sampler", _TOKENS),
            *each("kv_caches", "operators do not know the cache"),
            *each("speculator", _DRAFTS, since=(0, 13)),
            *each("encoder_cache", _IMAGES, since=(0, 18)),
            *each("cudagraph_manager", _GRAPHS),
            Need(("pool",), "a pooling model's step does not end with its answer", since=(0, 18), called=True),
            Need(("_dummy_run",), _GRAPHS, takes=("num_tokens",)),
        ),
        since=(0, 13), kind=V2,
    ),
    VllmPlace(
        "V2's batch", ("vllm.v1.worker.gpu.input_batch:InputBatch",),
        (
            *each("req_ids num_scheduled_tokens num_tokens num_tokens_after_padding idx_mapping_np", _ROWS),
            *each("input_ids positions", "rows carry no token ids and positions of the runner's own"),
            *each("prefill_len_np", _ROWS, since=(0, 23)),
        ),
        _ROWS, since=(0, 13),
    ),
    VllmPlace(
        "V2's request states", ("vllm.v1.worker.gpu.states:RequestState",), each("prefill_len", _ROWS),
        of=("the V2 runner", "req_states"), since=(0, 13), until=(0, 23),
    ),
    VllmPlace(
        "V2's encoder cache", ("vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache",), each("mm_features", _IMAGES),
        since=(0, 18),
    ),
    VllmPlace(
        "V2's speculator", ("vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator",
                            "vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator",
                            "vllm.v1.worker.gpu.spec_decode.eagle:EagleSpeculator"),
        (Need(("propose",), _DRAFTS),), since=(0, 13),
    ),
    VllmPlace(
        "V2's sampler", ("vllm.v1.worker.gpu.sample.sampler:Sampler",),
        (
            one_of("apply_sampling_params sample", _MASKS),
            Need(("sample",), _FORCED, takes=("logits",), called=True),
        ),
        of=("the V2 runner", "sampler"), since=(0, 13),
    ),
    VllmPlace(
        "V2's states of the sampler", ("vllm.v1.worker.gpu.sample.sampler:Sampler",),
        (
            *each("penalties_state", _MASKS),
            *each("logit_bias_state bad_words_state", _MASKS, until=(0, 29)),
            one_of("logits_processors logit_bias_state", _MASKS),
            *each("logits_processors", _MASKS, since=(0, 32)),
            *each("trace_replay_state", "replayed tokens are not told from sampled ones", since=(0, 32)),
        ),
        of=("the V2 runner", "sampler"), since=(0, 18),
    ),
    VllmPlace(
        "V2's penalties", ("vllm.v1.worker.gpu.sample.penalties:PenaltiesState",),
        each("use_penalty", _MASKS), since=(0, 18),
    ),
    VllmPlace(
        "V2's biases", ("vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState",),
        each("num_allowed_token_ids num_logit_bias num_stop_token_ids", _MASKS), since=(0, 18),
    ),
    VllmPlace(
        "V2's bad words", ("vllm.v1.worker.gpu.sample.bad_words:BadWordsState",),
        each("num_bad_words", _MASKS), since=(0, 18),
    ),
    VllmPlace(
        "V2's host-backed arrays", ("vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",),
        each("np", _MASKS), since=(0, 18),
    ),
    VllmPlace(
        "V2's graphs", ("vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
                        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager"),
        (*each("run_fullgraph", _GRAPHS), *each("run_pw_graph", _GRAPHS, since=(0, 23))), since=(0, 18),
    ),
    VllmPlace(
        "a replay of V2", ("vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",),
        each("cg_mode num_tokens", _GRAPHS),
        since=(0, 19),
    ),
)  # fmt: skip


_RELOADS = "weights that are reloaded are not looked at"
_TRANSFERS = "a session of vLLM's weight transfer is not looked at"
_SLEEPS = "weights are not looked at after sleep"
_SYNCS = "weights that are handed to the live model are not looked at"
_SLOTS = "adapters' slots are not looked at"
_BASE = "a layer under an adapter's is looked at twice"

WEIGHT_PLACES = (
    VllmPlace(
        "the V1 runner's weights", ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",),
        each("reload_weights", _RELOADS), kind=V1,
    ),
    VllmPlace(
        "the V2 runner's weights", ("vllm.v1.worker.gpu.model_runner:GPUModelRunner",),
        each("reload_weights", _RELOADS), since=(0, 22), kind=V2,
    ),
    VllmPlace(
        "the worker's weights", ("vllm.v1.worker.gpu_worker:Worker",),
        (Need(("sleep",), _SLEEPS, takes=("level",)), Need(("wake_up",), _SLEEPS, takes=("tags",))), kind=WORKER,
    ),
    VllmPlace(  # a vendor's worker that has no transfer has none that could be missed
        "weight transfer", ("vllm.v1.worker.gpu_worker:Worker",),
        (
            *each("update_weights", _TRANSFERS),
            *each("start_weight_update finish_weight_update", _TRANSFERS, since=(0, 21)),
        ),
        since=(0, 18),
    ),
    VllmPlace(
        "a model's weights", ("vllm.model_executor.models.llama:LlamaForCausalLM",),
        (Need(("load_weights",), _SYNCS, takes=("weights",)),),
    ),
    VllmPlace(
        "who keeps adapters", ("vllm.lora.worker_manager:WorkerLoRAManager",), each("_adapter_manager", _SLOTS),
    ),
    VllmPlace(
        "adapters' slots", ("vllm.lora.model_manager:LoRAModelManager", "vllm.lora.models:LoRAModelManager"),
        (
            *each("activate_adapter lora_index_to_id _registered_adapters", _SLOTS),
            *each("_get_lora_layer_weights", "what an adapter was to put into its slot is not known"),
        ),
    ),
    VllmPlace(
        "an adapter's layer", ("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA",),
        (*each("base_layer", _BASE), *each("lora_a_stacked lora_b_stacked", _SLOTS)),
    ),
)  # fmt: skip


PLACES: tuple[VllmPlace, ...] = (
    *ENGINE_PLACES, *RUNNER_PLACES, *LAYER_PLACES, *LORA_PLACES, *WEIGHT_PLACES,
    *CACHE_PLACES,
)  # fmt: skip
