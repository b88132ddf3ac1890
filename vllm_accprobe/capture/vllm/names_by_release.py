"""All names of vLLM that capture touches, place by place, and the modes of vLLM in which rows are not the scheduler's.

The problem: capture touches some two hundred names of vLLM, of releases and vendors that nobody can run here, and a
name that is gone is seen only on the machine that has it. Some modes give rows to several ranks, reorder them or choose
them on the device, so that a tensor with as many rows as the step has tokens would be written under wrong names. The
idea: each name is declared once, as a line of a table, with the releases that have it and what capture cannot do
without it; `accprobe doctor --wheel` compares a wheel's source with the table, and a test compares the table with
capture's source, in both directions. Each mode says how a running engine and a wheel's source show it, and what
follows: the capture is refused, or a part of it is skipped.

Not here: reading wheels (doctor/wheel.py), the functions that read these names (vllm_compat.py and its users).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

Release = tuple[int, ...]
"""(0, 11) or (0, 14, 1)."""
OLDEST, NEWEST = (0, 11), (0, 33)
"""Releases whose source was compared with the table, or that were run."""
V1, V2, WORKER = "V1", "V2", "worker"


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
        """Whether ``release`` has it; None is an unknown release, of which the newest one's names are expected."""
        if release is None:
            return self.until is None
        return (self.since is None or release >= self.since) and (self.until is None or release < self.until)


@dataclass(frozen=True)
class VllmPlace:
    """A kind of vLLM's objects, or a module. at: ``module:Class``, or ``module``, where releases have it; the first
    that is there counts. of: (another place, attribute): it is the class of that attribute. kind: runners and workers
    are also looked for among a vendor's own classes.
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


_LOSSES = """
FACT = run.json does not say it
EAGER = the engine is not made eager: start it with --enforce-eager
RANKS = ranks are not known: capture cannot attach
PYTHON = whether modules run Python is not known: capture cannot attach
OFFLOADED = operators of offloaded weights are not distinguished
REPLICAS = replicas share a rank's place
DEALS = images dealt out to ranks are not noticed
PIECES = a batch that runs in pieces is not noticed
CUTS = taps in compiled graphs do not know where the graph is cut
ROWS = the rows of a step cannot be determined: refused
IMAGES = rows of images have no names: skipped
PREEMPTED = the ledger of states does not know that a request was resumed
MOVED = the ledger of states takes copied blocks for bytes that were never written
FORCED = tokens cannot be forced
BLOCKS = the ledger of states does not know which blocks a request has
ADAPTER = requests with different adapters are taken for the same
CONTENT = images are not recognised by their content
ARMED = a running server cannot be armed
GROUP = a rank does not know its place in the group
GRAPH = which captured graph computed a step is not known
NOTHING = nothing is captured
QUIET = batches that vLLM invents would be taken for steps
BUFFERS = rows carry no token ids and positions of the runner's own
UNSEEN = the tokens of a step are not seen
TOKENS = sampled tokens are not captured: skipped
DRAFTS = what a draft model calls would be taken for the model's
KV = operators do not know the cache
GRAPHS = no taps in compiled graphs: skipped
MASKS = masked logits are not distinguished from free ones
SET = what a row was sampled with is not captured
REQUESTED = what a request requires of the sampler is not captured whole: rows that need it have no reference
NOISE = seeded tokens are not drawn again
PACKED = parameters are recorded as they are packed
CUT = tensors of several ranks are not put together: skipped
TOLD = an operator is replayed without this property
DEALT = images dealt out to ranks have rows without names
WEIGHTS = adapters' weights are not in the dump: skipped
RELOADS = weights that are reloaded are not checked
SLEEPS = weights are not checked after sleep
TRANSFERS = a session of vLLM's weight transfer is not checked
SLOTS = adapters' slots are not checked
CACHES = the ledger of states is off: it does not know the engine's caches
LAYER = the ledger of states does not watch these layers
MOMENT = the ledger of states does not see when a layer writes
METADATA = the ledger of states does not hold these numbers against the schedule
STATES = the ledger of states does not hold recurrent states against the schedule
"""
"""What follows where a name is missing, by the word that stands for it in the table."""

_TABLE = """
# the engine: arguments, configuration, the scheduler's output, processes and groups
the package @ vllm.version | this is no vLLM
    __version__ | FACT
environment names @ vllm.envs | vLLM warns of our settings' names
    environment_variables | vLLM warns of our settings' names
the engine's arguments @ vllm.engine.arg_utils:EngineArgs | EAGER
    create_engine_config enforce_eager compilation_config | EAGER
VllmConfig @ vllm.config.vllm:VllmConfig
    @ vllm.config:VllmConfig
    parallel_config | RANKS
    model_config compilation_config | PYTHON
    scheduler_config cache_config | FACT
    speculative_config | drafts would be taken for accepted tokens
    offload_config [since 0.18] | OFFLOADED
ParallelConfig @ vllm.config.parallel:ParallelConfig
    rank world_size | RANKS
    data_parallel_rank data_parallel_size distributed_executor_backend | REPLICAS
    data_parallel_index [since 0.14] | replicas of a dense model share a rank's place
    tensor_parallel_size | DEALS
    prefill_context_parallel_size [since 0.13] | rows dealt out by context parallelism are not noticed
    enable_dbo | PIECES
    ubatch_size [since 0.15] | PIECES
ModelConfig @ vllm.config.model:ModelConfig
    @ vllm.config:ModelConfig
    model dtype quantization max_model_len seed hf_overrides | FACT
    enforce_eager | PYTHON
    get_hidden_size | tensors split along the hidden dimension are not distinguished from whole ones
    multimodal_config | DEALS
MultiModalConfig @ vllm.config.multimodal:MultiModalConfig
    mm_encoder_tp_mode | DEALS
CompilationConfig @ vllm.config.compilation:CompilationConfig
    mode/level | EAGER
    mode [since 0.13] | EAGER
    cudagraph_mode | EAGER
    backend cudagraph_capture_sizes | FACT
    splitting_ops use_inductor_graph_partition | CUTS
SchedulerConfig @ vllm.config.scheduler:SchedulerConfig
    @ vllm.config:SchedulerConfig
    max_num_batched_tokens async_scheduling | FACT
CacheConfig @ vllm.config.cache:CacheConfig
    block_size enable_prefix_caching | FACT
    mamba_ssm_cache_dtype [since 0.11] | FACT
    cpu_offload_gb [until 0.18] | OFFLOADED
OffloadConfig @ vllm.config.offload:OffloadConfig [since 0.18]
    uva prefetch | OFFLOADED
UVAOffloadConfig @ vllm.config.offload:UVAOffloadConfig [since 0.18]
    cpu_offload_gb | OFFLOADED
PrefetchOffloadConfig @ vllm.config.offload:PrefetchOffloadConfig [since 0.18]
    offload_group_size | OFFLOADED
SpeculativeConfig @ vllm.config.speculative:SpeculativeConfig
    @ vllm.config:SpeculativeConfig
    method | FACT
SchedulerOutput @ vllm.v1.core.sched.output:SchedulerOutput | ROWS
    scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens | ROWS
    finished_req_ids | finished requests are never forgotten
    scheduled_spec_decode_tokens | rows of drafts would be taken for tokens
    scheduled_encoder_inputs | IMAGES
    kv_cache_block_copies [since 0.26] | MOVED
NewRequestData @ vllm.v1.core.sched.output:NewRequestData | ROWS
    req_id prompt_token_ids num_computed_tokens | ROWS
    mm_features | IMAGES
    sampling_params | FORCED
    prompt_is_token_ids [since 0.21] | a prompt of tokens and embeddings is not distinguished from one of embeddings
    prompt_embeds [since 0.13] | the length of a prompt that came as embeddings is not known
    block_ids | BLOCKS
    lora_request | ADAPTER
CachedRequestData @ vllm.v1.core.sched.output:CachedRequestData | ROWS
    req_ids num_computed_tokens | ROWS
    new_block_ids | BLOCKS
    resumed_req_ids/resumed_from_preemption | PREEMPTED
GrammarOutput @ vllm.v1.core.sched.output:GrammarOutput
    @ vllm.v1.core.sched.output:SchedulerOutput
    structured_output_request_ids grammar_bitmask | logits masked by a grammar are not known
SamplingParams @ vllm.sampling_params:SamplingParams
    extra_args | FORCED
MultiModalFeatureSpec @ vllm.multimodal.inputs:MultiModalFeatureSpec
    mm_position modality data | IMAGES
    mm_hash/identifier identifier | CONTENT
PlaceholderRange @ vllm.multimodal.inputs:PlaceholderRange
    offset length | IMAGES
    get_num_embeds | rows of an image with other tokens between have no names: skipped
the engine's core @ vllm.v1.engine.core:EngineCore
    step step_with_batch_queue scheduler | ARMED
a request of the scheduler @ vllm.v1.request:Request
    cache_salt | prefixes that requests with different cache salts share are not seen
the scheduler @ vllm.v1.core.sched.scheduler:Scheduler
    schedule | ARMED
the end of processes @ vllm.v1.engine.utils
    shutdown(procs) | a dump that takes more than five seconds to close is cut
    shutdown(procs,*,timeout) [since 0.18] | the front end's patience is not known
the end of workers @ vllm.v1.executor.multiproc_executor:MultiprocExecutor
    _ensure_worker_termination | a worker's dump that takes more than nine seconds to close is cut
process groups @ vllm.distributed.parallel_state
    get_tp_group get_pp_group get_dp_group get_ep_group | GROUP
a process group @ vllm.distributed.parallel_state:GroupCoordinator
    rank_in_group world_size | GROUP
the forward's context @ vllm.forward_context
    get_forward_context | GRAPH
ForwardContext @ vllm.forward_context:ForwardContext
    cudagraph_runtime_mode batch_descriptor | GRAPH
    attn_metadata | the ledger of states does not see what attention gets
    slot_mapping [since 0.15] | the ledger of states does not see which slots are written
BatchDescriptor @ vllm.forward_context:BatchDescriptor
    num_tokens | GRAPH
the platform @ vllm.platforms
    current_platform | FACT

# a worker: its runner of either generation, the batch that it keeps, its sampler; vendors copy these
the worker's wrapper @ vllm.v1.worker.worker_base:WorkerWrapperBase | NOTHING
    @ vllm.worker.worker_base:WorkerWrapperBase
    init_device | NOTHING
    shutdown | the dump is closed when the process ends only
    worker vllm_config | NOTHING
the worker @ vllm.v1.worker.gpu_worker:Worker [worker]
    model_runner | NOTHING
    determine_available_memory initialize_from_config compile_or_warm_up_model execute_dummy_batch | QUIET
the V1 runner @ vllm.v1.worker.gpu_model_runner:GPUModelRunner [V1] | NOTHING
    load_model! execute_model(scheduler_output)! get_model | NOTHING
    input_batch requests | ROWS
    positions input_ids | BUFFERS
    device vllm_config | NOTHING
    _update_states(scheduler_output)! | drafts that the runner takes back would count as rows
    sample_tokens! [since 0.13] | UNSEEN
    _sample/sampler | TOKENS
    _sample! | tokens are the sampler's; those of a step with drafts are skipped
    propose_draft_token_ids | DRAFTS
    sampler | TOKENS
    drafter | a draft model is compiled in the look at a compiled engine
    kv_caches | KV
    _dummy_run(num_tokens) | GRAPHS
    _model_forward! [since 0.13] | a compiled forward that is replayed as a whole is not seen: skipped
V1's batch @ vllm.v1.worker.gpu_input_batch:InputBatch [of the V1 runner: input_batch]
    req_ids | ROWS
    sampling_metadata has_allowed_token_ids frequency_penalties_reqs presence_penalties_reqs | MASKS
    repetition_penalties_reqs | MASKS
V1's request @ vllm.v1.worker.gpu_input_batch:CachedRequestState
    num_tokens | ROWS
    mm_features | IMAGES
SamplingMetadata @ vllm.v1.sample.metadata:SamplingMetadata
    all_greedy temperature top_k top_p no_penalties repetition_penalties presence_penalties frequency_penalties | SET
    bad_words_token_ids logitsprocs | MASKS
    thinking_budget_state_holder [since 0.21] | MASKS
logits processors @ vllm.v1.sample.logits_processor.state:LogitsProcessors
    non_argmax_invariant | MASKS
    argmax_invariant | SET
MinPLogitsProcessor @ vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor
    min_p min_p_count | SET
SamplingParams @ vllm.sampling_params:SamplingParams
    allowed_token_ids all_stop_token_ids bad_words_token_ids structured_outputs/guided_decoding | REQUESTED
    thinking_token_budget [since 0.21] | REQUESTED
    trace_decode_token_ids watermarking [since 0.32] | REQUESTED
MinTokensLogitsProcessor @ vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor
    min_toks | MASKS
LogitBiasLogitsProcessor @ vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor
    biases | MASKS
ThinkingBudgetStateHolder @ vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder [since 0.21]
    has_tracked_requests | MASKS
V1's sampler @ vllm.v1.sample.sampler:Sampler [of the V1 runner: sampler]
    sample(logits)! | FORCED
    topk_topp_sampler | NOISE
V1's draw @ vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler
    use_fp64_gumbel [since 0.32] | NOISE
SamplerOutput @ vllm.v1.outputs:SamplerOutput
    sampled_token_ids | TOKENS
a pair of buffers @ vllm.v1.utils:CpuGpuBuffer
    cpu gpu np | BUFFERS
the V2 runner @ vllm.v1.worker.gpu.model_runner:GPUModelRunner [V2, since 0.13]
    load_model! execute_model(scheduler_output,*,dummy_run)! | NOTHING
    prepare_inputs(scheduler_output)! | ROWS
    sample_tokens! | UNSEEN
    sample! | TOKENS
    get_model | NOTHING
    req_states | ROWS
    device vllm_config | NOTHING
    sampler | TOKENS
    kv_caches | KV
    speculator [since 0.13] | DRAFTS
    encoder_cache [since 0.18] | IMAGES
    cudagraph_manager | GRAPHS
    pool! [since 0.18] | a pooling model's step does not end with its answer
    _dummy_run(num_tokens) | GRAPHS
V2's batch @ vllm.v1.worker.gpu.input_batch:InputBatch [since 0.13] | ROWS
    req_ids num_scheduled_tokens num_tokens num_tokens_after_padding idx_mapping_np input_ids positions | ROWS
    prefill_len_np [since 0.23] | ROWS
V2's request states @ vllm.v1.worker.gpu.states:RequestState [of the V2 runner: req_states, since 0.13, until 0.23]
    prefill_len | ROWS
V2's encoder cache @ vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache [since 0.18]
    mm_features | IMAGES
V2's speculator @ vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator [since 0.13]
    @ vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator
    @ vllm.v1.worker.gpu.spec_decode.eagle:EagleSpeculator
    propose | DRAFTS
V2's sampler @ vllm.v1.worker.gpu.sample.sampler:Sampler [of the V2 runner: sampler, since 0.13]
    apply_sampling_params/sample | MASKS
    sample(logits)! | FORCED
V2's states of the sampler @ vllm.v1.worker.gpu.sample.sampler:Sampler [of the V2 runner: sampler, since 0.18]
    penalties_state | MASKS
    logit_bias_state bad_words_state [until 0.29] | MASKS
    logits_processors/logit_bias_state | MASKS
    logits_processors [since 0.32] | MASKS
    trace_replay_state [since 0.32] | replayed tokens are not distinguished from sampled ones
V2's penalties @ vllm.v1.worker.gpu.sample.penalties:PenaltiesState [since 0.18]
    use_penalty | MASKS
V2's biases @ vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState [since 0.18]
    num_allowed_token_ids num_logit_bias num_stop_token_ids | MASKS
V2's bad words @ vllm.v1.worker.gpu.sample.bad_words:BadWordsState [since 0.18]
    num_bad_words | MASKS
V2's host-backed arrays @ vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor [since 0.18]
    np | MASKS
V2's graphs @ vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager [since 0.18]
    @ vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager
    run_fullgraph | GRAPHS
    run_pw_graph [since 0.23] | GRAPHS
a replay of V2 @ vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor [since 0.19]
    cg_mode num_tokens | GRAPHS

# a model: how layers are cut, when their weights are packed, who deals images out
loading @ vllm.model_executor.model_loader.base_loader | PACKED
    process_weights_after_loading | PACKED
packing @ vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase
    process_weights_after_loading(layer) | PACKED
    apply(layer) | a head that is called through its method is not seen
linear layers @ vllm.model_executor.layers.linear:LinearBase
    tp_size | CUT
    quant_method | PACKED
column-parallel layers @ vllm.model_executor.layers.linear:ColumnParallelLinear
    gather_output output_partition_sizes input_size_per_partition | CUT
row-parallel layers @ vllm.model_executor.layers.linear:RowParallelLinear
    input_is_parallel reduce_results input_size_per_partition | CUT
QKV layers @ vllm.model_executor.layers.linear:QKVParallelLinear
    head_size num_heads num_kv_heads num_kv_head_replicas | CUT
    v_head_size [since 0.15] | CUT
norms over ranks @ vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp:MiniMaxText01RMSNormTP [since 0.32]
    weight tp_world weight_shard_world | CUT
    forward_qkv | norms of queries and keys that are computed past their modules are not seen
vocabulary layers @ vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding
    num_embeddings_per_partition org_vocab_size tp_size | CUT
expert layers @ vllm.model_executor.layers.fused_moe.layer:FusedMoE
    @ vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts
    local_num_experts global_num_experts moe_config intermediate_size_per_partition | CUT
    expert_map_manager/expert_placement_strategy [since 0.12] | CUT
    expert_map_manager [since 0.23] | CUT
    enable_eplb [until 0.15] | CUT
    reduce_results [until 0.20] | sums that come later are taken for finished ones
expert parallelism @ vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig
    use_ep ep_size ep_rank | CUT
    enable_eplb [since 0.15] | CUT
the experts' configuration @ vllm.model_executor.layers.fused_moe.config:FusedMoEConfig
    moe_parallel_config | CUT
where experts lie @ vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager [since 0.23]
    placement_strategy | CUT
latent attention @ vllm.model_executor.models.deepseek_v2:DeepseekV2MLAAttention
    num_local_heads kv_lora_rank | CUT
operators with several forwards @ vllm.model_executor.custom_op:CustomOp
    _forward_method forward_native | an operator's arguments have numbers instead of names
attention's kernel @ vllm.v1.attention.backends.flash_attn:FlashAttentionImpl
    scale alibi_slopes sinks logits_soft_cap sliding_window kv_cache_dtype | TOLD
a pipeline's tensors @ vllm.sequence:IntermediateTensors
    tensors | what a pipeline's ranks hand on is not captured
images dealt out @ vllm.model_executor.models.vision
    run_dp_sharded_mrope_vision_model(vision_model,pixel_values,grid_thw_list) | DEALT
    run_dp_sharded_vision_model(image_input,vision_model) get_load_balance_assignment(sizes,num_gpus) | DEALT
    get_tensor_model_parallel_rank get_tensor_model_parallel_world_size | DEALT
models @ vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration
    compute_logits(hidden_states) | logits are not captured: skipped
embedding of tokens @ vllm.model_executor.models.interfaces_base:VllmModel
    embed_input_ids [since 0.13] | tokens embedded beside prompts of embeddings may get other rows
models of images @ vllm.model_executor.models.interfaces:SupportsMultiModal
    get_language_model | the language model inside is looked for by its attribute
compiled modules @ vllm.compilation.decorators
    do_not_compile | which modules run no Python is not known

# LoRA: who asks for which adapter, and who reads an adapter's files
an adapter's request @ vllm.lora.request:LoRARequest
    lora_name lora_int_id | ADAPTER
runners with adapters @ vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin
    lora_manager | WEIGHTS
who loads adapters @ vllm.lora.worker_manager:WorkerLoRAManager
    _load_adapter(lora_request) | WEIGHTS
a loaded adapter @ vllm.lora.lora_model:LoRAModel
    @ vllm.lora.models:LoRAModel
    loras | WEIGHTS
an adapter of one layer @ vllm.lora.lora_weights:LoRALayerWeights
    lora_a lora_b scaling | WEIGHTS

# where weights change: calls of runners, workers, models and adapters' managers
the V1 runner's weights @ vllm.v1.worker.gpu_model_runner:GPUModelRunner [V1]
    reload_weights | RELOADS
the V2 runner's weights @ vllm.v1.worker.gpu.model_runner:GPUModelRunner [V2, since 0.22]
    reload_weights | RELOADS
the worker's weights @ vllm.v1.worker.gpu_worker:Worker [worker]
    sleep(level) wake_up(tags) | SLEEPS
weight transfer @ vllm.v1.worker.gpu_worker:Worker [since 0.18]
    update_weights | TRANSFERS
    start_weight_update finish_weight_update [since 0.21] | TRANSFERS
a model's weights @ vllm.model_executor.models.llama:LlamaForCausalLM
    load_weights(weights) | weights that are passed to the live model are not checked
who keeps adapters @ vllm.lora.worker_manager:WorkerLoRAManager
    _adapter_manager | SLOTS
adapters' slots @ vllm.lora.model_manager:LoRAModelManager
    @ vllm.lora.models:LoRAModelManager
    activate_adapter lora_index_to_id _registered_adapters | SLOTS
    _get_lora_layer_weights | what an adapter was to put into its slot is not known
an adapter's layer @ vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA
    base_layer | a layer under an adapter's is checked twice
    lora_a_stacked lora_b_stacked | SLOTS

# the ledger of states: where caches lie, who writes them, what metadata say of slots and states
the V1 runner's caches @ vllm.v1.worker.gpu_model_runner:GPUModelRunner [V1]
    kv_cache_config | CACHES
the V2 runner's caches @ vllm.v1.worker.gpu.model_runner:GPUModelRunner [V2, since 0.13]
    kv_cache_config | CACHES
the caches' configuration @ vllm.v1.kv_cache_interface:KVCacheConfig
    num_blocks kv_cache_groups | CACHES
a group of caches @ vllm.v1.kv_cache_interface:KVCacheGroupSpec
    layer_names kv_cache_spec | CACHES
full attention's cache @ vllm.v1.kv_cache_interface:FullAttentionSpec
    block_size | CACHES
a window's cache @ vllm.v1.kv_cache_interface:SlidingWindowSpec
    sliding_window | LAYER
chunked attention's cache @ vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec
    attention_chunk_size | LAYER
caches of several sizes @ vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs
    kv_cache_specs | LAYER
a recurrent layer's cache @ vllm.v1.kv_cache_interface:MambaSpec
    shapes dtypes num_speculative_blocks | LAYER
Mamba's way of caching @ vllm.config.cache:CacheConfig [since 0.15]
    mamba_cache_mode | LAYER
layers by name @ vllm.config.compilation:CompilationConfig
    static_forward_context | CACHES
transfers @ vllm.config.vllm:VllmConfig
    @ vllm.config:VllmConfig
    kv_transfer_config | the ledger of states takes blocks that a connector brings for unwritten ones
drafts in a step @ vllm.config.speculative:SpeculativeConfig
    @ vllm.config:SpeculativeConfig
    num_speculative_tokens | the ledger of states does not know how far the schedule may be ahead
attention layers @ vllm.model_executor.layers.attention.attention:Attention
    @ vllm.attention.layer:Attention
    kv_cache impl kv_sharing_target_layer_name | LAYER
    attn_backend | MOMENT
attention's backend @ vllm.v1.attention.backend:AttentionBackend [since 0.15]
    forward_includes_kv_cache_update | MOMENT
attention's write @ vllm.v1.attention.backends.flash_attn:FlashAttentionImpl
    forward | MOMENT
    do_kv_cache_update [since 0.15] | MOMENT
latent attention's kernel @ vllm.v1.attention.backend:MLAAttentionImpl [since 0.18]
    forward_mqa forward_mha do_kv_cache_update | MOMENT
attention's metadata @ vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata
    slot_mapping seq_lens query_start_loc block_table | METADATA
metadata of all backends @ vllm.v1.attention.backend:CommonAttentionMetadata
    @ vllm.v1.attention.backends.utils:CommonAttentionMetadata
    block_table_tensor | METADATA
latent attention's metadata @ vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata [since 0.13]
    @ vllm.v1.attention.backends.mla.flashmla_sparse:FlashMLASparseMetadata
    block_table | METADATA
Mamba's metadata @ vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata
    @ vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadata
    has_initial_states_p | STATES
    state_indices_tensor [until 0.18] | STATES
    state_indices_tensor_d state_indices_tensor_p num_accepted_tokens [since 0.18] | STATES
Mamba1's metadata @ vllm.v1.attention.backends.mamba1_attn:Mamba1AttentionMetadata
    has_initial_states [until 0.13] | STATES
linear attention's metadata @ vllm.v1.attention.backends.linear_attn:LinearAttentionMetadata
    state_indices_tensor | STATES
the delta rule's metadata @ vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata
    has_initial_state num_accepted_tokens spec_sequence_masks spec_state_indices_tensor | STATES
    non_spec_state_indices_tensor | STATES
    spec_sequence_masks_cpu [since 0.32] | STATES
"""
"""A place: ``name @ module:Class [kind, of PLACE: ATTRIBUTE, since 0.13, until 0.23] | loss``, then its other modules,
then a line for each loss: names with spaces between them, ``mode/level`` for two spellings, in brackets the first
parameters (behind ``*`` keywords), ``!`` for what capture wraps."""
_PLACE = re.compile(r"(?P<name>[^@]+) @ (?P<at>\S+)(?: \[(?P<about>.+)\])?(?: \| (?P<loss>.+))?")
_NEEDS = re.compile(r"    (?P<names>[^\[|]+?)(?: \[(?P<about>.+)\])? \| (?P<loss>.+)")
_NAME = re.compile(r"(?P<names>[\w/]+)(?:\((?P<takes>[^)]+)\))?(?P<called>!?)")


def _release(text: str | None) -> Release | None:
    return None if text is None else tuple(map(int, text.split(".")))


def _needs(line: re.Match[str], loss: str, since: Release | None, until: Release | None) -> Iterator[Need]:
    for one in _NAME.finditer(line["names"]):
        takes, _, keywords = (one["takes"] or "").partition("*")
        yield Need(
            tuple(one["names"].split("/")), loss, tuple(filter(None, takes.split(","))),
            tuple(filter(None, keywords.split(","))), since, until, bool(one["called"]),
        )  # fmt: skip


def _places() -> Iterator[VllmPlace]:
    losses = dict(line.split(" = ", 1) for line in _LOSSES.strip().splitlines())
    place: VllmPlace | None = None
    for text in _TABLE.splitlines():
        if not text or text.startswith("#"):
            continue
        if place is not None and text.startswith("    @ "):
            place = replace(place, at=(*place.at, text[6:]))
            continue
        line = (_NEEDS if text.startswith(" ") else _PLACE).fullmatch(text)
        assert line is not None, text
        words = [word.partition(" ") for word in (line["about"] or "").split(", ") if word]
        about = {first: rest for first, _, rest in words}
        since, until = _release(about.get("since")), _release(about.get("until"))
        loss = losses.get(line["loss"] or "", line["loss"] or "")
        if place is not None and text.startswith(" "):
            place = replace(place, needs=(*place.needs, *_needs(line, loss, since, until)))
            continue
        if place is not None:
            yield place
        owner, _, attribute = about.get("of", "").partition(": ")
        of = (owner, attribute) if owner else None
        kind = next((kind for kind in (V1, V2, WORKER) if kind in about), "")
        place = VllmPlace(line["name"], (line["at"],), (), loss, of, kind, since, until)
    assert place is not None
    yield place


PLACES = tuple(_places())
"""In the order in which a report names them."""


REFUSED, SKIPPED, WORKS = "refused", "skipped", "works"


@dataclass(frozen=True)
class Mode:
    """name: in a few words. fate: REFUSED, SKIPPED or WORKS. says: the line, or what is done. marks: ``file:text``,
    where a source shows that it has the mode: the file's end, and what stands in a line of it. on: whether a runner is
    in it, None where no runner has to be examined."""

    name: str
    fate: str
    says: str
    marks: tuple[str, ...]
    on: Callable[[Any], bool] | None = None


def _parallel(runner: Any) -> Any:
    return getattr(getattr(runner, "vllm_config", None), "parallel_config", None)


def _pieces(runner: Any) -> bool:
    config = _parallel(runner)
    return bool(getattr(config, "enable_dbo", False)) or int(getattr(config, "ubatch_size", 0) or 0) > 1


def _flash(runner: Any) -> bool:
    """As the vendor's own functions say it, which read settings of several names."""
    utils = sys.modules.get("vllm_ascend.utils")
    if utils is None or not any(kind.__module__.startswith("vllm_ascend.") for kind in type(runner).__mro__):
        return False
    config = getattr(runner, "vllm_config", None)
    enabled, second = getattr(utils, "enable_sp", None), getattr(utils, "flashcomm2_enable", None)
    return bool(enabled is not None and enabled(config)) or bool(second is not None and second())


def _several(runner: Any) -> bool:
    count = getattr(getattr(runner, "model_state", None), "num_new_sampled_tokens_per_step", 1)
    return isinstance(count, int) and count != 1


SHARDED = Mode(
    "batch-sharded sampling", SKIPPED, "batch-sharded sampling: each rank has other rows of the logits",
    ("worker/gpu/model_runner.py:if self.batch_sharder is not None",),
    lambda runner: getattr(runner, "batch_sharder", None) is not None,
)  # fmt: skip
SEVERAL = Mode(
    "several tokens a step", SKIPPED, "this model samples several tokens of a request in a step",
    ("worker/gpu/model_runner.py:num_new_sampled_tokens_per_step",), _several,
)  # fmt: skip
VERIFIED = Mode(
    "drafts admitted on the device", SKIPPED, "which drafts of a step are verified is decided on the device (dspark)",
    ("worker/gpu/model_runner.py:if adaptive_verification is not None",),
    lambda runner: getattr(runner, "adaptive_verification", None) is not None,
)  # fmt: skip

MODES = (
    Mode(
        "prefill context parallelism", REFUSED, "prefill context parallelism deals a prompt's rows to several ranks",
        ("config/parallel.py:prefill_context_parallel_size",),
        lambda runner: int(getattr(_parallel(runner), "prefill_context_parallel_size", 1) or 1) > 1,
    ),
    Mode(
        "dual-batch overlap", REFUSED, "dual-batch overlap (--enable-dbo) runs a batch in pieces, on two threads",
        ("config/parallel.py:enable_dbo:",), _pieces,
    ),
    Mode(
        "sequence parallelism of experts", REFUSED,
        "expert, tensor and data parallelism together deal the rows of expert blocks to several ranks",
        ("config/parallel.py:def use_sequence_parallel_moe",),
        lambda runner: getattr(_parallel(runner), "use_sequence_parallel_moe", False) is True,
    ),
    Mode(
        "xlite", REFUSED,
        "xlite runs the model without Python, and no module is seen: start without xlite_graph_config",
        ("xlite/xlite_model_runner.py:class XliteModelRunner",),
        lambda runner: any(kind.__name__ == "XliteModelRunner" for kind in type(runner).__mro__),
    ),
    Mode(
        "FlashComm and sequence parallelism", REFUSED,
        "FlashComm or sequence parallelism deals rows to several ranks: start with VLLM_ASCEND_ENABLE_FLASHCOMM1=0, "
        "VLLM_ASCEND_ENABLE_FLASHCOMM=0 and VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE=0, without enable_shared_expert_dp",
        ("vllm_ascend/platform.py:if enable_sp(", "vllm_ascend/utils.py:def enable_sp("), _flash,
    ),
    SHARDED, SEVERAL, VERIFIED,
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
"""In the order in which a report names them."""


def refused(runner: Any) -> str:
    """Why this runner cannot be observed at all, "" where it can."""
    return next((mode.says for mode in MODES if mode.fate == REFUSED and mode.on is not None and mode.on(runner)), "")


def unsampled(runner: Any) -> str:
    """Why what this runner samples cannot be determined by rows, "" where it can. Known once its model is loaded."""
    return next((mode.says for mode in (SHARDED, SEVERAL) if mode.on is not None and mode.on(runner)), "")


def unplaced(runner: Any, out: Any) -> str:
    """Why the rows of this step cannot be determined, "" where they can. out: the scheduler's output."""
    drafts = getattr(out, "scheduled_spec_decode_tokens", None)
    return VERIFIED.says if drafts and VERIFIED.on is not None and VERIFIED.on(runner) else ""


def in_graphs(vllm_config: Any) -> str:
    """Why taps inside compiled graphs would see rows of one rank only, "" where they see all."""
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    if getattr(passes, "enable_sp", False) is True or getattr(passes, "enable_sequence_parallelism", False) is True:
        return "sequence parallelism in compiled graphs deals rows to several ranks"
    return ""
