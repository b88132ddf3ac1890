"""Runs in a subprocess: imports vLLM and prints, as one JSON line, what only an import can tell.

The problem: importing vLLM may print, hang or crash. The idea: a process whose last line is JSON after a marker; every
question has a value or the error it met. Not here: what the answers mean (checks.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

MARKER = "accprobe-doctor:"

WORKER = ("vllm.v1.worker.worker_base", "vllm.worker.worker_base")
RUNNERS = {
    "V1": (
        "vllm.v1.worker.gpu_model_runner",
        ("load_model", "execute_model", "get_model"),
        ("self.input_batch", "self.requests", "self.positions"),
    ),
    "V2": ("vllm.v1.worker.gpu.model_runner", ("load_model", "execute_model", "prepare_inputs"), ("self.req_states",)),
}
"""Module of each runner's GPUModelRunner, the methods that capture wraps, and what it reads from the instance."""

FIELDS = {
    "SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "scheduled_encoder_inputs", "finished_req_ids",
    ),
    "NewRequestData": ("req_id", "prompt_token_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "num_computed_tokens"),
}  # fmt: skip


def main() -> None:
    """Prints the answers as one line of JSON; for a process of its own, in which vLLM may be imported."""
    answers: dict[str, Any] = {}
    for name, question in (
        ("version", _version),
        ("platform", _platform),
        ("worker", _worker),
        ("runners", _runners),
        ("default_runner", _default_runner),
        ("scheduler", _scheduler),
        ("engine_args", _engine_args),
        ("capture", _capture),
    ):
        answers[name] = _answer(question)
        if name == "version" and "error" in answers[name]:
            break
    print("\n" + MARKER + json.dumps(answers), flush=True)


def _answer(question: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": question()}
    except (Exception, SystemExit) as error:  # whatever vLLM does on import, the other checks still run
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _version() -> str:
    return str(importlib.import_module("vllm.version").__version__)


def _platform() -> dict[str, Any]:
    platform = importlib.import_module("vllm.platforms").current_platform
    kind = type(platform)
    try:
        device = str(platform.get_device_name())
    except Exception:  # many platforms have no names for their devices
        device = ""
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "device_type": str(getattr(platform, "device_type", "") or ""),
        "device": device,
        "own": kind.__module__.startswith("vllm.platforms."),
    }


def _worker() -> str:
    for name in WORKER:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if callable(getattr(getattr(module, "WorkerWrapperBase", None), "init_device", None)):
            return name
    raise LookupError(f"no WorkerWrapperBase.init_device in {' or '.join(WORKER)}")


def _runners() -> dict[str, dict[str, Any]]:
    return {name: _runner(*spec) for name, spec in RUNNERS.items()}


def _runner(module: str, methods: Sequence[str], reads: Sequence[str]) -> dict[str, Any]:
    try:
        if importlib.util.find_spec(module) is None:
            return {"there": False}
    except ImportError:
        return {"there": False}
    try:
        imported = importlib.import_module(module)
        cls = imported.GPUModelRunner
        source = inspect.getsource(cls) if reads else ""
    except Exception as error:
        return {"there": True, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    missing = [m for m in methods if not callable(getattr(cls, m, None))]
    missing += [r for r in reads if r not in source]
    return {"there": True, "missing": missing + ([] if hasattr(cls, "_prepare_inputs") else _batch(imported))}


def _batch(runner: Any) -> list[str]:
    """What V2 runner module ``runner`` lacks to tell its rows: fields of its InputBatch, and prompts' lengths."""
    from vllm_accprobe.capture.vllm.vllm_compat import BATCH_FIELDS, PREFILL, SLOTS

    have = getattr(runner.InputBatch, "__dataclass_fields__", {})
    missing = [f"InputBatch.{name}" for name in BATCH_FIELDS if name not in have]
    states = getattr(runner, "RequestState", None)
    has_slots = SLOTS in have and states is not None and "self.prefill_len" in inspect.getsource(states)
    return missing + ([] if PREFILL in have or has_slots else [f"InputBatch.{PREFILL} and RequestState.prefill_len"])


def _default_runner() -> str:
    """V1 or V2, as far as it can be known without a model's configuration."""
    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if wanted is not None:
        return "V2" if wanted.strip().lower() in ("1", "true") else "V1"
    config = importlib.import_module("vllm.config").VllmConfig
    if not isinstance(getattr(config, "use_v2_model_runner", None), property):
        return "V1"
    triton = importlib.import_module("vllm.triton_utils").HAS_TRITON
    return "V2 or V1, by model" if triton else "V1"


def _scheduler() -> list[str]:
    """Fields that capture reads and this release lacks."""
    module = importlib.import_module("vllm.v1.core.sched.output")
    missing = []
    for cls, names in FIELDS.items():
        have = getattr(getattr(module, cls), "__dataclass_fields__", {})
        missing += [f"{cls}.{name}" for name in names if name not in have]
    return missing


def _engine_args() -> list[str]:
    args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    missing = [] if callable(getattr(args, "create_engine_config", None)) else ["create_engine_config"]
    have = getattr(args, "__dataclass_fields__", {})
    return missing + [name for name in ("enforce_eager", "compilation_config") if name not in have]


def _capture() -> str:
    return str(importlib.import_module("vllm_accprobe.capture.vllm.capturing").__name__)
