"""What capture relies on around the engine: arguments, configuration, the scheduler's output, processes and groups.

The problem, the words and who reads this: need.py. Not here: runners and samplers (runners.py), layers
(layer_names.py), adapters (lora.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names.need import Need, VllmPlace, each, one_of

_ROWS = "the rows of a step cannot be told: refused"
_EAGER = "the engine is not made eager: start it with --enforce-eager"
_FACT = "run.json does not say it"
_BLOCKS = "the ledger of states does not know which blocks a request has"
_MOVED = "the ledger of states takes copied or zeroed blocks for bytes that nobody wrote"
_PREEMPTED = "the ledger of states does not know that a request was resumed"
_IMAGES = "rows of images have no names: skipped"

PLACES = (
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
