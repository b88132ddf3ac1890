"""In which engines a planted fault is there: faults that need a setting, or two of them together.

The problem: a kernel that is wrong only with prefix caching, or with one block size, is found by varying settings,
and a laboratory for that must plant faults that settings switch on. The idea: conditions over vLLM's configuration,
joined by ``&``, all of which must hold when the model is loaded:

    always  prefix  chunks  async           chunks: a step takes fewer tokens than the longest prompt has
    block<=32  block>=64  tokens<=128       the KV cache's blocks, the tokens of a step
    custom:silu_and_mul                     that custom operator is enabled (vLLM's own kernel, not the native one)
    env:NAME=VALUE                          a variable of the engine's process

Not here: what is done (accprobe_fault_kinds.py), to which rows (accprobe_fault_rows.py).
"""

import os
import re
from typing import Any

_SIZED = re.compile(r"(block|tokens)(<=|>=)(\d+)")


def holds(when: str, config: Any) -> bool:
    """config: a VllmConfig, or None where there is none: then only ``always`` holds. Raises ValueError."""
    return all(_holds(part, config) for part in when.split("&"))


def _holds(part: str, config: Any) -> bool:
    if part in ("", "always"):
        return True
    name, _, rest = part.partition(":")
    sized = _SIZED.fullmatch(part)
    if name not in ("prefix", "chunks", "async", "custom", "env") and not sized:
        raise ValueError(
            f"when {part!r} is none of always, prefix, chunks, async, (block|tokens)(<=|>=)N, custom:, env:"
        )
    if name == "env":
        variable, _, value = rest.partition("=")
        return os.environ.get(variable) == value
    if config is None:
        return False
    cache, scheduler = config.cache_config, config.scheduler_config
    if sized:
        now, limit = cache.block_size if sized[1] == "block" else scheduler.max_num_batched_tokens, int(sized[3])
        return now <= limit if sized[2] == "<=" else now >= limit
    if name == "custom":
        compilation = config.compilation_config
        named = f"+{rest}" in compilation.custom_ops
        return named or ("all" in compilation.custom_ops and f"-{rest}" not in compilation.custom_ops)
    return bool({
        "prefix": cache.enable_prefix_caching,
        "chunks": scheduler.max_num_batched_tokens < config.model_config.max_model_len,
        "async": scheduler.async_scheduling,
    }[name])  # fmt: skip
