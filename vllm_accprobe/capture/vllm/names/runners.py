"""What capture relies on in a worker: its runner of either generation, the batch that it keeps, its sampler.

The problem, the words and who reads this: need.py. These are the places that vendors derive from or copy. Not here: the
engine (engine_names.py), layers (layer_names.py).
"""

from __future__ import annotations

from vllm_accprobe.capture.vllm.names.need import V1, V2, WORKER, Need, VllmPlace, each, one_of

_ROWS = "the rows of a step cannot be told: refused"
_NOTHING = "nothing is captured"
_TOKENS = "sampled tokens are not captured: skipped"
_MASKS = "masked logits are not told from free ones"
_GRAPHS = "no taps in compiled graphs: skipped"
_IMAGES = "rows of images have no names: skipped"
_QUIET = "batches that vLLM invents would be taken for steps"
_DRAFTS = "what a draft model calls would be taken for the model's"
_FORCED = "tokens cannot be forced"
_SET = "what a row was sampled with is not captured"
_ASKED = "what a request asks of the sampler is not captured whole: rows that need it have no reference"
_NOISE = "seeded tokens are not drawn again"

PLACES = (
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
