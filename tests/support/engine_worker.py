"""The child process of engine.py: builds vLLM engines one after another and answers with what they sampled.

A job is a line of JSON on standard input, an answer a line on standard output; everything that vLLM prints goes to
standard error, which the parent sends to a log file. Requests go in through the engine's own add_request and step, so
that the moment at which each one joins the batch is chosen here. Not here: what is done to vLLM so that it runs in a
way that it refuses on a CPU (engine_ways.py).
"""

import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_freeze = gc.freeze
DEFAULTS: dict[str, Any] = {
    "enforce_eager": True, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
    "disable_log_stats": False, "dtype": "bfloat16", "seed": 0,
}  # fmt: skip


def serve(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.model_executor.models import registry

    for name in [n for n in os.environ if n.startswith("VLLM_ACCPROBE_") or n == "ACCPROBE_FAULT"]:
        del os.environ[name]
    os.environ |= {"VLLM_ACCPROBE_DIR": job["out"]} | job["env"]
    if job["fault"]:
        os.environ["ACCPROBE_FAULT"] = job["fault"]
    if any(os.environ.get(f"VLLM_ACCPROBE{switch}") for switch in ("", "_ERRCHECK", "_FORCE", "_HEAL")):
        # vLLM loads plugins once per process; here every engine is a run of its own.
        from vllm_accprobe.plugin import register

        register()
    spare_the_imports()
    # To leave CUDA alone, vLLM asks each model's class what it can in a child that imports all of vLLM first.
    registry._run_in_subprocess = lambda inspect: inspect()
    if job["engine"].get("load_format") == "drawn":
        import drawn_weights

        drawn_weights.register()
    started = time.monotonic()
    llm = LLM(model=job["model"], **(DEFAULTS | job["engine"]))
    built = time.monotonic()
    engine: Any = llm.llm_engine
    if job.get("sabotage"):
        _sabotage(engine)
    try:
        pools = job["engine"].get("runner") == "pooling"
        drive = _drive if job["how"] != "beams" else functools.partial(_beams, llm)
        answers, likely, steps, widest = drive(engine, job["asks"], job["how"], pools, job["dummies"], job["during"])
        metrics, ahead = counters(llm), _ahead(engine)
    finally:
        _end(llm)
    return {
        "tokens": [] if pools else answers,
        "vectors": answers if pools else [],
        "logprobs": likely,
        "metrics": metrics | {"steps": steps, "widest": widest, "ahead": ahead, "build_s": built - started,
                              "serve_s": time.monotonic() - built},
    }  # fmt: skip


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters that say whether a case was one."""
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics() if hasattr(m, "value")}
    names = {"preemptions": "num_preemptions", "prefix_hits": "prefix_cache_hits",
             "drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}  # fmt: skip
    return {short: float(found.get(f"vllm:{name}", 0)) for short, name in names.items()}


def spare_the_imports() -> None:
    """Takes what is there now, the 700,000 objects that importing vLLM makes, out of garbage collection for good.

    vLLM collects several times per engine, 0.4 s each (measured), which was half a tiny engine's time. It freezes and
    unfreezes on its own at an engine's start and end; that is switched off, or it would bring them back. Before each
    engine anew: the first one imports as much again as vLLM alone.
    """
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _sabotage(engine: Any) -> None:
    """Makes every tap fail from now on, as a defect of the probe would."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted in the probe")

    engine.model_executor.driver_worker._accprobe.observers[0].session.sink.take = broken


def _limit_files(megabytes: str) -> None:
    """No file of this process may grow beyond this: the same error paths as a full disk, also for root."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = int(float(megabytes) * (1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _drive(
    engine: Any, asks: list[dict[str, Any]], how: str, pools: bool, dummies: bool, during: dict[str, list[Any]]
) -> tuple[list[list[Any]], list[list[Any]], int, int]:
    names = [ask["id"] or f"ask-{i}" for i, ask in enumerate(asks)]
    waiting = list(zip(names, asks, strict=True))
    done: dict[str, list[Any]] = {}
    likely: dict[str, list[Any]] = {}
    steps = widest = 0
    while waiting or engine.has_unfinished_requests():
        running = engine.get_num_unfinished_requests()
        if how == "together":
            join = len(waiting)
        elif how == "serial":
            join = int(not running)
        else:
            join = int(steps % 2 == 0 or not running)
        for name, ask in waiting[:join]:
            parameters = _pooling(engine) if pools else _sampling(ask)
            engine.add_request(name, _prompt(ask), parameters, lora_request=_adapter(ask))
        del waiting[:join]
        if str(steps) in during:
            method, *args = during[str(steps)]
            engine.model_executor.collective_rpc(method, args=tuple(args))
        widest = max(widest, engine.get_num_unfinished_requests())
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs.data.tolist() if pools else list(output.outputs[0].token_ids)
                likely[output.request_id] = [] if pools else _likely(output.outputs[0].logprobs)
        if dummies:
            engine.model_executor.collective_rpc("execute_dummy_batch")
        steps += 1
    return [done[name] for name in names], [likely[name] for name in names], steps, widest


def _beams(llm: Any, _: Any, asks: list[dict[str, Any]], *__: Any) -> tuple[list[list[Any]], list[list[Any]], int, int]:
    """Each ask with two beams, which vLLM makes of requests of one token each; the best one's tokens."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=asks[0]["max_tokens"], ignore_eos=True)
    found = llm.beam_search([_prompt(ask) for ask in asks], params)
    best = [output.sequences[0].tokens[len(ask["ids"]) :] for output, ask in zip(found, asks, strict=True)]
    return best, [[] for _ in asks], 0, 2 * len(asks)


def _likely(positions: Any) -> list[list[list[Any]]]:
    """At each position, where log-probabilities were asked for: [token, log-probability] of each candidate."""
    return [[[token, it.logprob] for token, it in position.items()] for position in positions or []]


def _prompt(ask: dict[str, Any]) -> dict[str, Any]:
    if ask["embeds"]:
        import torch

        rows, width, seed = ask["embeds"]
        drawn = torch.randn((rows, width), generator=torch.Generator().manual_seed(seed))
        return {"prompt_embeds": drawn.to(torch.bfloat16)}
    prompt: dict[str, Any] = {"prompt_token_ids": ask["ids"]}
    pictures = [ask["image"], *ask["images"]] if ask["image"] else ask["images"]
    if pictures:
        prompt["multi_modal_data"] = {"image": [_picture(*picture) for picture in pictures]}
    if ask["audio"]:
        import numpy as np

        seconds, seed = ask["audio"]
        noise = np.random.default_rng(seed).normal(0, 0.1, int(seconds * 16000)).astype(np.float32)
        encoder = {"prompt": "", "multi_modal_data": {"audio": (noise, 16000)}}
        return {"encoder_prompt": encoder, "decoder_prompt": prompt}
    return prompt


def _adapter(ask: dict[str, Any]) -> Any:
    if not ask["adapter"]:
        return None
    from vllm.lora.request import LoRARequest

    name, number, path = ask["adapter"]
    return LoRARequest(name, number, path)


def _picture(width: int, height: int, seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _sampling(ask: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    more: dict[str, Any] = dict(ask["sampling"])
    if "logit_bias" in more:  # JSON has made text of its keys
        more["logit_bias"] = {int(token): bias for token, bias in more["logit_bias"].items()}
    if ask["structured"]:
        from vllm.sampling_params import StructuredOutputsParams

        more["structured_outputs"] = StructuredOutputsParams(**ask["structured"])
    usual = {"temperature": 0.0, "max_tokens": ask["max_tokens"], "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(usual | more))


def _pooling(engine: Any) -> Any:
    from vllm import PoolingParams

    tasks = engine.get_supported_tasks() if hasattr(engine, "get_supported_tasks") else ("embed",)
    task = next((t for t in ("embed", "classify", "token_classify") if t in tasks), "token_embed")

    # LLM.embed asks for it; 0.11 and 0.15, given parameters by hand, would not normalise, and later releases would.
    # 0.15 still has the old word and does not look at it.
    normal = "use_activation" if hasattr(PoolingParams, "use_activation") else "normalize"
    return PoolingParams(task=task, **{normal: True})


def _end(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    if os.environ.get("ACCPROBE_TEST_FORK"):
        return  # what comes next was done in the ranks
    # They stay registered for the next engine, and registering again walks over all modules and stumbles over those of
    # llvmlite, which vLLM itself has imported by now (0.32: "'_lib_fn_wrapper' object has no attribute 'get'").
    current_platform.register_triton_kernel_overrides = lambda: None  # type: ignore[method-assign]


def _ahead(engine: Any) -> int:
    """How many steps the engine makes before it knows the tokens of the first one."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    config = engine.vllm_config.scheduler_config
    return core.batch_queue_size if config.async_scheduling and getattr(core, "batch_queue", None) is not None else 1


def main(do: Callable[[dict[str, Any]], dict[str, Any]] = serve) -> None:
    """Answers each job of standard input by ``do``, with what the environment asks to be done to vLLM before."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # whatever path the host was given
    from support import engine_ways  # not where others import this module for its engines

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's prints must not stand between the answers
    if os.environ.get("ACCPROBE_TEST_V2"):
        engine_ways.prepare_v2_runner()
    if os.environ.get("ACCPROBE_TEST_FORK"):
        engine_ways.fork_the_ranks()
    if os.environ.get("ACCPROBE_TEST_PP"):
        engine_ways.make_room_between_stages()
    if os.environ.get("ACCPROBE_TEST_FILE_MB"):
        import vllm  # noqa: F401  # what it compiles and caches at import is not limited

        _limit_files(os.environ["ACCPROBE_TEST_FILE_MB"])
    if os.environ.get("ACCPROBE_TEST_AHEAD"):
        engine_ways.schedule_ahead()
    for line in sys.stdin:
        try:
            answer = do(json.loads(line))
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
