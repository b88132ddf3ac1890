"""The platform class that accprobe_captured.py names; apart from it, because it can only be imported while vLLM is.

Told there. Not here: what is computed.
"""

import gc
from dataclasses import fields
from typing import Any

from vllm.platforms.cpu import CpuPlatform

KEPT = ("mode", "backend", "cudagraph_capture_sizes", "ir_enable_torch_wrap")
"""What CpuPlatform changes in a compilation_config."""


class CapturedPlatform(CpuPlatform):
    """A CPU that can capture. simple_compile_backend: what vLLM compiles by the way, as its sampler's
    log-probabilities; inductor would take ten seconds for them."""

    simple_compile_backend = "eager"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode  # vllm.config is half imported when this class is

        compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
        cache, room = vllm_config.cache_config, vllm_config.cache_config.kv_cache_memory_bytes
        if compilation.mode == CompilationMode.VLLM_COMPILE and compilation.backend != "eager":
            raise ValueError("the captured platform needs the eager backend: it sees no calls in generated code")
        asked = {name: getattr(compilation, name) for name in KEPT}
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "captured_worker.CapturedWorker"
        gc.freeze()  # or half an engine's time is collecting, a dozen times, what importing vLLM has left
        super().check_and_update_config(vllm_config)
        cache.kv_cache_memory_bytes = room or cache.kv_cache_memory_bytes  # the environment's is a GiB at least
        for name, value in asked.items():
            setattr(compilation, name, value)
        for field in fields(compilation.pass_config):
            if field.name.startswith(("fuse_", "enable_")):  # inductor's: the eager backend runs none, a CPU lacks some
                setattr(compilation.pass_config, field.name, False)

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "captured_wrapper.CapturedWrapper"

    @classmethod
    def graph_pool_handle(cls) -> tuple[int, int]:
        return (0, 0)
