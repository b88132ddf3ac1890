"""What vLLM's releases and vendors call things: plain functions that read its objects, none of which is kept.

The problem: the same fact has other names in 0.11 and 0.33, in V1 and V2, in vendors' copies. The idea: each fact
is one function here, with the fallbacks in one place, so that runner.py reads like the design. Not here: any
wrapping.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch

from vllm_accprobe.capture.core.recording import run_facts
from vllm_accprobe.capture.vllm.eager import facts
from vllm_accprobe.capture.vllm.names import modes
from vllm_accprobe.capture.vllm.step_observer import BlockMoves
from vllm_accprobe.config import REPLICAS
from vllm_accprobe.dump.schema import Image, StepGraph

BATCH_FIELDS = (
    "req_ids", "num_scheduled_tokens", "num_tokens", "num_tokens_after_padding", "input_ids", "positions",
)  # fmt: skip
"""What capture reads of V2's InputBatch in every release. How long a prompt is, it has from 0.23 on (``PREFILL``);
before, the runner's request states have it (``SLOTS`` says where)."""
PREFILL, SLOTS = "prefill_len_np", "idx_mapping_np"


def starts(out: Any) -> dict[str, int]:
    """Tokens computed before this step, by request."""
    cached = out.scheduled_cached_reqs
    starts = {new.req_id: int(new.num_computed_tokens) for new in out.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, (int(n) for n in cached.num_computed_tokens), strict=True))
    return starts


def moves_of(out: Any) -> BlockMoves:
    """What the scheduler did with blocks before this step. Lists are copied: the runner goes on adding to its own."""
    cached = out.scheduled_cached_reqs
    more: dict[str, tuple[tuple[int, ...], ...]] = {}
    tables = {new.req_id: _ids(new.block_ids) for new in out.scheduled_new_reqs}
    flags = getattr(cached, "resumed_from_preemption", None)  # 0.11: one for each request
    resumed = getattr(cached, "resumed_req_ids", None)
    for i, (name, ids) in enumerate(zip(cached.req_ids, cached.new_block_ids, strict=True)):
        if ids is not None:
            whole = flags[i] if resumed is None and flags else name in (resumed or ())
            (tables if whole else more)[name] = _ids(ids)
    copies = [(int(copy[0]), int(copy[1])) for copy in getattr(out, "kv_cache_block_copies", None) or ()]
    return BlockMoves(
        tables, more, tuple(getattr(out, "preempted_req_ids", None) or ()), copies,
        tuple(getattr(out, "new_block_ids_to_zero", None) or ()),
    )  # fmt: skip


def given_metadata(layer: str) -> tuple[Any, Any]:
    """(attention metadata, slot mapping) of the layer that the engine calls so, of the forward that runs; None where
    there is none, or several parts of a batch have one each."""
    contexts = sys.modules.get("vllm.forward_context")
    try:
        context = contexts.get_forward_context()  # type: ignore[union-attr]
    except (AttributeError, AssertionError):
        return None, None
    metadata, slots = context.attn_metadata, getattr(context, "slot_mapping", None)
    metadata = metadata.get(layer) if isinstance(metadata, dict) else None
    return metadata, slots.get(layer) if isinstance(slots, dict) else None


def _ids(groups: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids) for ids in groups)


def step_graph() -> StepGraph | None:
    """The captured graph that the model's forward, which must be running, is dispatched to; None where it is none."""
    contexts = sys.modules.get("vllm.forward_context")
    try:
        context = contexts.get_forward_context()  # type: ignore[union-attr]
    except (AttributeError, AssertionError):
        return None
    mode = getattr(context, "cudagraph_runtime_mode", None)  # from 0.11 on
    batch = getattr(context, "batch_descriptor", None)
    name = getattr(mode, "name", "NONE")
    return None if name == "NONE" or batch is None else StepGraph(name, int(batch.num_tokens))


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


def positions_of(source: Any) -> torch.Tensor | None:
    """The positions of this step's rows as the runner computed them: integers, [rows or more]; None where it keeps none
    of one axis.

    A tensor was computed on the device, for every model (V1 from 0.19.1, V2). A pair of host and device memory (V1 of
    0.11 to 0.18, Kunlun 0.11.1, Ascend 0.18) was computed on the host, corrections by speculation included; its device
    side stays zero for models with M-RoPE or XD-RoPE, which copy their own positions instead: the host's is read.
    """
    value = getattr(source, "positions", None)
    if not isinstance(value, torch.Tensor):
        value = getattr(value, "cpu", None)
    return value if isinstance(value, torch.Tensor) and value.dim() == 1 else None


def guesses(vllm_config: Any) -> bool:
    """Whether the scheduler's positions may be too high: with asynchronous scheduling it counts drafts as accepted."""
    return getattr(vllm_config, "speculative_config", None) is not None


def refusal(runner: Any) -> str:
    """Why the rows of this runner's tensors cannot be told apart, in a few words; "" where they can."""
    why = modes.refused(runner)
    if why:
        return why
    kind = type(runner).__name__
    if not hasattr(runner, "prepare_inputs"):
        return "" if hasattr(runner, "input_batch") else f"{kind} has no input_batch: whose rows are whose is unknown"
    fields = _batch_fields(runner)
    missing = [name for name in BATCH_FIELDS if fields and name not in fields]
    if missing:
        return f"the InputBatch of {kind} lacks {', '.join(missing)}"
    if PREFILL in fields:
        return ""
    states = getattr(runner, "req_states", None)
    if states is None:
        return f"{kind} has no req_states: how long its prompts are is unknown"
    return "" if hasattr(getattr(states, "prefill_len", None), "np") else f"{kind} has no req_states.prefill_len.np"


def _batch_fields(runner: Any) -> set[str]:
    """V2: the fields of the class InputBatch that this runner's module, or one that it derives from, works with."""
    for kind in type(runner).__mro__:
        batch: Any = getattr(sys.modules.get(kind.__module__), "InputBatch", None)
        if hasattr(batch, "__dataclass_fields__"):
            return set(batch.__dataclass_fields__)
    return set()


def prefill_lengths(runner: Any, batch: Any) -> list[int]:
    """V2: how many tokens of each row's request were known when it joined, in the order of ``batch.req_ids``.

    V2's batch has them from 0.23 on; before, they stand in the runner's request states, by slot.
    """
    lengths = getattr(batch, PREFILL, None)
    if lengths is None:
        lengths = runner.req_states.prefill_len.np[getattr(batch, SLOTS)[: len(batch.req_ids)]]
    return [int(n) for n in lengths[: len(batch.req_ids)]]


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
    import vllm

    model_config = config.model_config
    return run_facts(
        probe,
        versions={"vllm": str(getattr(vllm, "__version__", "unknown"))},
        system={"vllm": platform_name()},
        device={"type": device.type, "name": device_name(device)},
        model={
            "path": str(getattr(model_config, "model", "")),
            "class": type(model).__name__,
            "dtype": str(getattr(model_config, "dtype", "")).replace("torch.", ""),
            "quantization": getattr(model_config, "quantization", None),
            "max_model_len": getattr(model_config, "max_model_len", None),
        },
        parallel={k: v for k, v in parallel.items() if k != "rank"},
        engine={
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            **facts(config, model),
            "block_size": getattr(config.cache_config, "block_size", None),
            "max_num_batched_tokens": getattr(config.scheduler_config, "max_num_batched_tokens", None),
            "async_scheduling": getattr(config.scheduler_config, "async_scheduling", None),
            "prefix_caching": getattr(config.cache_config, "enable_prefix_caching", None),
            "speculative": getattr(getattr(config, "speculative_config", None), "method", None),
        },
        seed=getattr(model_config, "seed", None),
    )
