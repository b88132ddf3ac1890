"""Which worker gets a probe, whatever the probe is for.

The problem: a capture and errcheck stand on the same worker, each with settings that may leave this rank out, and a
worker of an unknown release may have no model runner. The idea: one function that looks and makes; what it made lives
as long as vLLM's wrapper does. Not here: what a probe does (runner.py, observer.py), and which of the two is
asked for (plugin.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.vllm.vllm_compat import parallel_of
from vllm_accprobe.config import ProbeConfig, in_ranges

Made = TypeVar("Made")


def on_worker(wrapper: Any, make: Callable[..., Made], name: str, without: str) -> Made | None:
    """``make(config, worker, runner, parallel)`` for the worker inside vLLM's ``wrapper``, which keeps it as ``name``.

    Returns None where this rank is not chosen, or the worker has no runner; then ``without`` tells what follows.

    Raises:
        ConfigError: a setting is wrong.
    """
    config = ProbeConfig.from_env()
    worker = getattr(wrapper, "worker", wrapper)
    runner = getattr(worker, "model_runner", None)
    if runner is None:
        say(f"{type(worker).__name__} has no model_runner after init_device: {without}")
        return None
    parallel = parallel_of(getattr(wrapper, "vllm_config", None) or runner.vllm_config)
    if not in_ranges(config.ranks, parallel["rank"]):
        return None
    made = make(config, worker, runner, parallel)
    wrapper.__dict__[name] = made
    return made
