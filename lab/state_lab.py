"""Engines whose cache is spoilt on purpose, in this process: what the ledger of states is tried with.

The problem: a wrong state must be told as what it is in a real engine, with its scheduler, runner and kernels. The
idea: one process builds tiny engines one after another (VLLM_ENABLE_V1_MULTIPROCESSING=0), sends requests step by step,
and plants one fault at a time where the real reports had theirs: in the scheduler's pool, in the runner's slots, in the
attention's metadata, in a copy. Used by scripts/state_cases.py and tests/e2e/test_states_engine.py. Not here: the
ledger (capture/states/), what is expected of each case (the script).
"""

import contextlib
import dataclasses
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINE: dict[str, Any] = {
    "enforce_eager": True, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
    "block_size": 32, "disable_log_stats": False, "dtype": "bfloat16", "seed": 0,
}  # fmt: skip
COMMON = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "torch_dtype": "bfloat16",
          "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba2": COMMON | {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "state_size": 16, "num_heads": 8,
        "head_dim": 32, "expand": 2, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32, "norm_before_gate": False,
    },
    "falcon-h1": COMMON | {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8,
        "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 32, "mamba_rms_norm": True, "max_position_embeddings": 1024, "rope_theta": 10000.0,
    },
    "qwen3-next": COMMON | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "full_attention_interval": 4, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 1024, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "mlp_only_layers": [],
    },
    "lfm2": COMMON | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_attention_heads": 4, "num_key_value_heads": 2,
        "block_ff_dim": 256, "block_dim": 128, "conv_dim": 128, "conv_L_cache": 3, "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False, "block_multiple_of": 32, "intermediate_size": 256,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
"""Recurrent and hybrid models, random weights (load_format="dummy"): a configuration is all they need."""


def prompt(n: int, seed: int) -> list[int]:
    """``n`` token ids, none of them special."""
    return [2 + (seed * 7919 + i * i * 31 + i * 17) % 509 for i in range(n)]


@dataclass
class Ask:
    """One request. after: it joins when so many steps are done. lora: (number, directory of an adapter); salt: of its
    cache; sampling: of its SamplingParams, what is not greedy; ``bad_word_ids``: its bad words as token ids, for
    engines without a tokenizer. image: seed of a picture that it asks about, ``ids`` are then not sent."""

    name: str
    ids: Sequence[int]
    max_tokens: int = 8
    after: int = 0
    lora: tuple[int, Path] | None = None
    salt: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    image: int | None = None


@dataclass
class Ran:
    """What one engine left: its dump, and counters of vLLM."""

    dump: Path
    tokens: dict[str, list[int]]
    metrics: dict[str, float] = field(default_factory=dict)


Plant = Callable[[Any], "Callable[[int], None] | None"]
"""Spoils the engine that it is given, before the first request; what it returns is called before each step."""


def hybrid(name: str, root: Path) -> Path:
    """The directory of a model of HYBRIDS."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(HYBRIDS[name]))
    return root


def prepare() -> None:
    """Before vLLM is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false",
                   "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
                   "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # fmt: skip


@contextlib.contextmanager
def engine(
    model: Path, out: Path | None, mode: str = "sample", env: dict[str, str] | None = None, **args: Any
) -> Iterator[Any]:
    """An LLM of ``model`` with a ledger (mode "": none, ``env`` says what else) whose dump is ``out``; None: a bare
    engine."""
    from support.engine_worker import spare_the_imports
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE")]:
        del os.environ[name]
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
        os.environ |= {"VLLM_ACCPROBE_DIR": str(out)} | ({"VLLM_ACCPROBE_STATES": mode} if mode else {}) | (env or {})
        from vllm_accprobe.plugin import register

        register()
    registry._run_in_subprocess = lambda inspect: inspect()
    if not (model / "model.safetensors").exists():
        args = {"load_format": "dummy", "skip_tokenizer_init": True} | args
    spare_the_imports()
    llm = LLM(model=str(model), **(ENGINE | args))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        current_platform.register_triton_kernel_overrides = lambda: None


def picture(seed: int) -> dict[str, Any]:
    """A prompt for the tiny Qwen2.5-VL: 48 placeholders from position 4 on."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(seed).integers(0, 255, (168, 224, 3), dtype=np.uint8)
    text = "see <|vision_start|><|image_pad|><|vision_end|> what is it, and where are the others"
    return {"prompt": text, "multi_modal_data": {"image": Image.fromarray(drawn)}}


def serve(
    llm: Any, asks: Sequence[Ask], before: Callable[[int], None] | None = None, most: int = 400
) -> dict[str, list[int]]:
    """Sends ``asks`` step by step; the tokens of each."""
    from vllm import SamplingParams

    waiting, done, steps, core = list(asks), {}, 0, llm.llm_engine
    while (waiting or core.has_unfinished_requests()) and steps < most:
        for ask in [one for one in waiting if one.after <= steps]:
            usual = {"temperature": 0.0, "max_tokens": ask.max_tokens, "ignore_eos": True, "detokenize": False}
            own = dict(ask.sampling)
            words = own.pop("bad_word_ids", None)
            sampling = SamplingParams(**(usual | own))
            sampling._bad_words_token_ids = words
            said: dict[str, Any] = {"prompt_token_ids": list(ask.ids)}
            if ask.image is not None:
                said = picture(ask.image)
            if ask.salt:
                said["cache_salt"] = ask.salt
            more: dict[str, Any] = {}
            if ask.lora is not None:
                from vllm.lora.request import LoRARequest

                more["lora_request"] = LoRARequest(ask.lora[1].name, ask.lora[0], str(ask.lora[1]))
            core.add_request(ask.name, said, sampling, **more)
            waiting.remove(ask)
        if before is not None:
            before(steps)
        for output in core.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return done


def run(
    model: Path, out: Path | None, asks: Sequence[Ask], plant: Plant | None = None, mode: str = "sample",
    rounds: int = 1, between: Callable[[Any], None] | None = None, env: dict[str, str] | None = None, **args: Any,
) -> Ran:  # fmt: skip
    """One engine, its requests (``rounds`` times, under new names), its end. between: called with it after a round."""
    from support.engine_worker import counters

    with engine(model, out, mode, env, **args) as llm:
        before = plant(llm) if plant is not None else None
        tokens: dict[str, list[int]] = {}
        for i in range(rounds):
            named = [dataclasses.replace(a, name=f"{a.name}{'' if not i else f'-{i}'}") for a in asks]
            tokens |= serve(llm, named, before)
            if between is not None:
                between(llm)
        found = counters(llm)
    return Ran(out or Path(), tokens, found)


# --- where things are ------------------------------------------------------------------------------------------------


def runner_of(llm: Any) -> Any:
    """The model runner."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: Any) -> Any:
    """The scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Puts ``change`` in the place of a method of one object, or of a module's function. change: (the method, its
    arguments) → what it gives."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def named(held: Any, name: str) -> str:
    """vLLM's own id of the request ``name``."""
    return next(one for one in held if one.partition("-")[0] == name)
