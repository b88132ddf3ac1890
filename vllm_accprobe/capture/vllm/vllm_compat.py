"""What vLLM's releases and vendors call things, and whether an engine is eager.

The problem: the same fact has other names in 0.11 and 0.33, in V1 and V2, in vendors' copies. ``enforce_eager`` is not
enough for an eager engine: from 0.11 to 0.15 a compilation level or mode that somebody names wins over it, and the
configuration still says eager. The idea: a fact that several files need is one function, with its fallbacks in one
place; batch, sampling, runner and states/observer read further names, and
names_by_release.py declares all. Eager is requested in every word that a release has, and afterwards the modules are
believed.

Not here: who patches the engine's arguments (plugin.py), the order of the rows (batch.py), any wrapping (runner.py).
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core.recording import run_facts
from vllm_accprobe.capture.vllm import names_by_release
from vllm_accprobe.capture.vllm.step_observer import BlockMoves
from vllm_accprobe.config import REPLICAS
from vllm_accprobe.dump.schema import Image, StepGraph

_NAMES = ("level", "mode", "cudagraph_mode")
"""Of vLLM's CompilationConfig: ``level`` to 0.11, ``mode`` from 0.12 on, and the graphs that are captured."""
_STOCK = 1
"""Level or mode in which the runner compiles the whole model, after it has been loaded (``model.compile()``)."""
PIECES = 3
"""Level or mode in which vLLM compiles the model itself, cut into pieces."""


def make_eager(args: Any) -> list[str]:
    """Changes vLLM's EngineArgs ``args`` so that the engine is eager; what was otherwise, in words.

    The compilation configuration is replaced by a copy, since it may be its owner's who builds another engine with it.
    """
    changed = []
    if not getattr(args, "enforce_eager", True):
        args.enforce_eager = True
        changed.append("enforce_eager")
    config = getattr(args, "compilation_config", None)
    for name in _NAMES:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is None or not _number(value):
            continue
        if config is getattr(args, "compilation_config", None):
            config = copy.copy(config)
        none = type(value)(0) if isinstance(value, (int, enum.Enum)) else 0
        if isinstance(config, dict):
            config[name] = none
        else:
            setattr(config, name, none)
        changed.append(f"{name} {getattr(value, 'name', value)}")
    if changed and config is not None:
        args.compilation_config = config
    return changed


def compiles(vllm_config: Any, model: Any) -> bool:
    """Whether the built engine compiles or captures graphs, whatever was requested: what is inside runs no Python.

    ``model``: its modules know (vLLM's ``support_torch_compile`` sets ``do_not_compile`` on each).
    """
    config = vllm_config.compilation_config
    number = level(config)
    if compiled_modules(model) or number == _STOCK:
        return True
    if getattr(vllm_config.model_config, "enforce_eager", False):  # then no release captures a graph
        return False
    return bool(number) or bool(_number(getattr(config, "cudagraph_mode", None)))


def compiled_modules(model: Any) -> list[str]:
    """Paths of the modules that are compiled."""
    return [
        path
        for path, module in model.named_modules()
        if getattr(module, "do_not_compile", None) is False or getattr(module, "_compiled_call_impl", None) is not None
    ]


def facts(vllm_config: Any, model: Any) -> dict[str, Any]:
    """What run.json says of it: ``eager`` as it is, and what was requested."""
    config = vllm_config.compilation_config
    graphs = getattr(config, "cudagraph_mode", None)
    return {
        "eager": not compiles(vllm_config, model),
        "enforce_eager": bool(getattr(vllm_config.model_config, "enforce_eager", False)),
        "compilation_mode": level(config),
        "cudagraph_mode": getattr(graphs, "name", None),
    }


def level(config: Any) -> int:
    """0 none, 1 torch.compile of the whole model, 2 dynamo once, 3 vLLM's own; the same numbers in all releases."""
    mode = getattr(config, "mode", None)
    return int((mode if mode is not None else getattr(config, "level", None)) or 0)


def _number(value: Any) -> Any:
    """A mode's value: 0 is none; some of CUDAGraphMode's are pairs."""
    return getattr(value, "value", value)


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
    return BlockMoves(tables, more, copies)


def _forward_context() -> Any:
    """Of the forward that runs; None where none does."""
    contexts = sys.modules.get("vllm.forward_context")
    try:
        return contexts.get_forward_context()  # type: ignore[union-attr]
    except (AttributeError, AssertionError):
        return None


def metadata_of_layer(layer: str) -> tuple[Any, Any]:
    """(attention metadata, slot mapping) of the layer that the engine calls so, of the forward that runs; None where
    there is none, or several parts of a batch have one each."""
    context = _forward_context()
    metadata, slots = getattr(context, "attn_metadata", None), getattr(context, "slot_mapping", None)
    metadata = metadata.get(layer) if isinstance(metadata, dict) else None
    return metadata, slots.get(layer) if isinstance(slots, dict) else None


_BLOCK_TABLES = ("block_table", "block_table_tensor", "block_tables")
"""What backends call the block table in their metadata."""


def block_table(metadata: Any) -> torch.Tensor | None:
    """The blocks of each request, [requests, blocks], by a backend's metadata; None where it has none. 0.11's backend
    for processors keeps those of prefills, which come first, apart: only together they are as many as requests."""
    table = next((t for n in _BLOCK_TABLES if isinstance(t := getattr(metadata, n, None), torch.Tensor)), None)
    first, begins = (getattr(metadata, name, None) for name in ("prefill_block_tables", "query_start_loc"))
    if table is not None and isinstance(first, torch.Tensor) and isinstance(begins, torch.Tensor):
        table = torch.cat([first, table]) if len(first) + len(table) == len(begins) - 1 else table
    return table if table is not None and table.dim() == 2 else None


@dataclass(frozen=True)
class LayerBatch:
    """Where one attention layer's rows lie in the forward that runs; int64, on the host. slots: of each row, below 0
    for padding, [rows or more]; table: blocks of each request, [requests, blocks]; begins: the first row of each
    request, and one past the last; lengths: positions of each request up to its last row."""

    slots: torch.Tensor
    table: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(request, position) of each row."""
        counts = self.begins.diff()
        requests = torch.repeat_interleave(torch.arange(len(counts)), counts)
        place = torch.arange(int(self.begins[-1])) - self.begins[:-1][requests]
        return requests, (self.lengths - counts)[requests] + place


def batch_of_layer(layer: str) -> LayerBatch | None:
    """Of the layer that the engine calls so, in the forward that runs; None where its metadata does not say."""
    metadata, slots = metadata_of_layer(layer)
    slots = slots if isinstance(slots, torch.Tensor) else getattr(metadata, "slot_mapping", None)
    table = block_table(metadata)
    begins, lengths = (getattr(metadata, name, None) for name in ("query_start_loc", "seq_lens"))
    found = slots, table, begins, lengths
    if not all(isinstance(t, torch.Tensor) for t in found) or table is None:
        return None
    slots, table, begins, lengths = (t.detach().cpu().long() for t in found if t is not None)
    n = min(len(begins) - 1, len(lengths), len(table))
    return LayerBatch(slots, table[:n], begins[: n + 1], lengths[:n])


def _ids(groups: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids) for ids in groups)


def step_graph() -> StepGraph | None:
    """The captured graph that the model's forward, which must be running, is dispatched to; None where it is none."""
    context = _forward_context()
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
    """Why the rows of this runner's tensors cannot be distinguished, in a few words; "" where they can."""
    why = names_by_release.refused(runner)
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

    An engine of a dense model knows nothing of its siblings from 0.14.1 on: rank 0 of 1 in each. Only
    ``data_parallel_index`` stays, and the front end knows the number (plugin.py)."""
    if getattr(config, "distributed_executor_backend", None) == "external_launcher":
        return 0, 1  # ranks and world_size are those of all replicas already
    index = getattr(config, "data_parallel_index", None)
    if index is None:
        index = getattr(config, "data_parallel_rank", 0)
    index = int(index or 0)
    replicas = os.environ.get(REPLICAS, "")
    size = max(int(getattr(config, "data_parallel_size", 1) or 1), int(replicas) if replicas.isdecimal() else 1)
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


def device_name(device: torch.device) -> str:
    """What the device calls itself, else its type."""
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except Exception:
        return device.type


_MOST_CONFIG = 1 << 18


def requested_model(model_config: Any) -> dict[str, Any]:
    """``config``: the model's config.json as it lies beside the weights, plain values, at most 256 KiB of them;
    ``overrides``: the names that this run was started with other values of. {} for a model that is no folder here."""
    with contextlib.suppress(Exception):
        path = Path(str(getattr(model_config, "model", ""))) / "config.json"
        if not path.is_file() or path.stat().st_size > _MOST_CONFIG:
            return {}
        config = json.loads(path.read_text(encoding="utf-8"))
        changed = getattr(model_config, "hf_overrides", None)
        names = sorted(map(str, changed)) if isinstance(changed, dict) else ["*"] if callable(changed) else []
        if isinstance(config, dict):
            return {"config": config} | ({"overrides": names} if names else {})
    return {}


def run_info(
    runner: Any, model: Any, device: torch.device, parallel: dict[str, Any], probe: dict[str, Any]
) -> dict[str, Any]:
    """run.json of a vLLM engine."""
    import vllm
    from vllm.platforms import current_platform

    config = runner.vllm_config
    model_config = config.model_config
    return run_facts(
        probe,
        versions={"vllm": str(getattr(vllm, "__version__", "unknown"))},
        system={"vllm": type(current_platform).__name__},  # a vendor's, perhaps
        device={"type": device.type, "name": device_name(device)},
        model={
            "path": str(getattr(model_config, "model", "")),
            "class": type(model).__name__,
            "dtype": str(getattr(model_config, "dtype", "")).replace("torch.", ""),
            "quantization": getattr(model_config, "quantization", None),
            "max_model_len": getattr(model_config, "max_model_len", None),
        }
        | requested_model(model_config),
        parallel={k: v for k, v in parallel.items() if k != "rank"},
        engine={
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            **facts(config, model),
            "block_size": getattr(config.cache_config, "block_size", None),
            "max_num_batched_tokens": getattr(config.scheduler_config, "max_num_batched_tokens", None),
            "async_scheduling": getattr(config.scheduler_config, "async_scheduling", None),
            "prefix_caching": getattr(config.cache_config, "enable_prefix_caching", None),
            "speculative": getattr(getattr(config, "speculative_config", None), "method", None),
            "state_dtype": getattr(config.cache_config, "mamba_ssm_cache_dtype", None),
        },
        seed=getattr(model_config, "seed", None),
    )
