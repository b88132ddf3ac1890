"""What vLLM's releases and vendors call things: plain functions that read its objects, none of which is kept.

The problem: the same fact has other names in 0.11 and 0.33, in V1 and V2, in vendors' copies. The idea: each fact
is one function here, with the fallbacks in one place, so that runner.py reads like the design. Not here: any
wrapping.
"""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from typing import Any

import torch

from vllm_accprobe import __version__
from vllm_accprobe.config import REPLICAS
from vllm_accprobe.dump.schema import Image


def starts(out: Any) -> dict[str, int]:
    """Tokens computed before this step, by request."""
    cached = out.scheduled_cached_reqs
    starts = {new.req_id: int(new.num_computed_tokens) for new in out.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, (int(n) for n in cached.num_computed_tokens), strict=True))
    return starts


def images_of(new: Any) -> tuple[Image, ...]:
    """The multi-modal items of a new request, by content hash and place in its prompt."""
    images = []
    for feature in getattr(new, "mm_features", None) or ():
        position = feature.mm_position
        name = getattr(feature, "mm_hash", None) or getattr(feature, "identifier", "") or ""
        images.append(Image(str(name), int(position.offset), int(position.length)))
    return tuple(images)


def placeholders(feature: Any) -> int:
    """How many rows of the language model one multi-modal item takes."""
    position = feature.mm_position
    count = getattr(position, "get_num_embeds", None)  # a method, a property, or not there: by release
    if callable(count):
        count = count()
    return int(position.length if count is None else count)


def device_buffer(value: Any) -> torch.Tensor | None:
    """A tensor, or the device side of vLLM's host-device buffer pair."""
    if isinstance(value, torch.Tensor):
        return value
    device_side = getattr(value, "gpu", None)
    return device_side if isinstance(device_side, torch.Tensor) else None


def hidden_size(vllm_config: Any) -> int | None:
    """Width of the hidden states, or None where a model has no single one."""
    try:
        return int(vllm_config.model_config.get_hidden_size())
    except Exception:  # pooling and encoder models have no single answer
        return None


def language_prefix(model: torch.nn.Module) -> str:
    """Path of the language model inside a multi-modal one, "" where the model is one."""
    language = None
    if hasattr(model, "get_language_model"):
        try:
            language = model.get_language_model()
        except Exception:
            language = None
    if language is None or language is model:
        language = getattr(model, "language_model", None)
    for path, module in model.named_modules():
        if module is language:
            return path
    return ""


def compiles(vllm_config: Any) -> bool:
    """Whether the engine compiles or captures graphs: modules inside them run no Python."""
    if getattr(vllm_config.model_config, "enforce_eager", False):
        return False
    mode = getattr(vllm_config.compilation_config, "mode", None)
    if mode is None:
        mode = getattr(vllm_config.compilation_config, "level", 0)
    graphs = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return bool(int(mode or 0)) or bool(graphs is not None and getattr(graphs, "value", 0))


def replica_of(config: Any) -> tuple[int, int]:
    """(which data-parallel replica this is, how many there are), of vLLM's parallel configuration.

    An engine of a dense model is told nothing of its siblings from 0.14.1 on: rank 0 of 1 in each. Only
    ``data_parallel_index`` stays, and the front end knows the number (plugin.py)."""
    if getattr(config, "distributed_executor_backend", None) == "external_launcher":
        return 0, 1  # ranks and world_size are those of all replicas already
    index = getattr(config, "data_parallel_index", None)
    if index is None:
        index = getattr(config, "data_parallel_rank", 0)
    index = int(index or 0)
    told = os.environ.get(REPLICAS, "")
    size = max(int(getattr(config, "data_parallel_size", 1) or 1), int(told) if told.isdecimal() else 1)
    return index, max(size, index + 1)


def parallel_of(vllm_config: Any) -> dict[str, Any]:
    """Global rank, ranks in all, and [rank, size] in each group, as far as the process groups exist; of replicas that
    have no group together (dense models), too."""
    from vllm import distributed

    config = vllm_config.parallel_config
    groups: dict[str, list[int]] = {}
    for name in ("tp", "pp", "dp", "ep"):
        try:
            group = getattr(distributed, f"get_{name}_group")()
            groups[name] = [int(group.rank_in_group), int(group.world_size)]
        except Exception:  # not initialised, or not known to this release
            groups[name] = [0, 1]
    world = int(config.world_size)
    replica, replicas = replica_of(config)
    if groups["dp"][1] < replicas:
        groups["dp"] = [replica, replicas]
    return {"rank": int(config.rank) + replica * world, "world_size": world * replicas, **groups}


def platform_name() -> str:
    """Class of vLLM's platform, a vendor's perhaps."""
    from vllm.platforms import current_platform

    return type(current_platform).__name__


def device_name(device: torch.device) -> str:
    """What the device calls itself, else its type."""
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except Exception:
        return device.type


def run_info(
    runner: Any, model: Any, device: torch.device, parallel: dict[str, Any], probe: dict[str, Any]
) -> dict[str, Any]:
    """run.json of a vLLM engine."""
    config = runner.vllm_config
    versions = {"accprobe": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    import vllm

    versions["vllm"] = str(getattr(vllm, "__version__", "unknown"))
    model_config = config.model_config
    return {
        "tool": "accprobe",
        "versions": versions,
        "platform": {"system": platform.platform(), "machine": platform.machine(), "vllm": platform_name()},
        "device": {"type": device.type, "name": device_name(device)},
        "model": {
            "path": str(getattr(model_config, "model", "")),
            "class": type(model).__name__,
            "dtype": str(getattr(model_config, "dtype", "")).replace("torch.", ""),
            "quantization": getattr(model_config, "quantization", None),
            "max_model_len": getattr(model_config, "max_model_len", None),
        },
        "parallel": {k: v for k, v in parallel.items() if k != "rank"},
        "engine": {
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "eager": not compiles(config),
            "block_size": getattr(config.cache_config, "block_size", None),
            "max_num_batched_tokens": getattr(config.scheduler_config, "max_num_batched_tokens", None),
            "async_scheduling": getattr(config.scheduler_config, "async_scheduling", None),
            "prefix_caching": getattr(config.cache_config, "enable_prefix_caching", None),
            "speculative": getattr(getattr(config, "speculative_config", None), "method", None),
        },
        "seed": getattr(model_config, "seed", None),
        "probe": probe,
        "start_time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
