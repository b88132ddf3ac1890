"""Which worker is observed, whatever for.

The problem: a capture and errcheck stand on the same worker, each with settings that may leave this rank out, and a
worker of an unknown release may have no model runner. The idea: one function that looks, makes the observer and adds it
to the runner's adapter, which lives as long as vLLM's wrapper does. Not here: what an observer does (capturing.py,
capture/errcheck/observer.py), and which of the two is asked for (plugin.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.vllm_compat import StepObserver, parallel_of
from vllm_accprobe.config import ConfigError, ProbeConfig, in_ranges

Observer = TypeVar("Observer", bound=StepObserver)
ADAPTER = "_accprobe"
"""What vLLM's wrapper keeps the adapter as; plugin.py closes it."""


def observe(
    wrapper: Any,
    make: Callable[[ProbeConfig, RunnerAdapter], Observer],
    without: str,
    failed: str,
    left_out: Callable[[ProbeConfig, RunnerAdapter], StepObserver | None] = lambda config, adapter: None,
) -> Observer | None:
    """Adds ``make(config, adapter)`` to the adapter of the worker inside vLLM's ``wrapper``, and returns it.

    Returns None where this rank is not chosen, which then has what ``left_out`` makes, or the worker has no runner;
    then ``without`` tells what follows. Never raises: where something is wrong the server starts without the probe, and
    ``failed`` is said, which has ``{}`` for the error.
    """
    try:
        return _observe(wrapper, make, without, left_out)
    except ConfigError as error:
        say(str(error))
    except Exception as error:
        say(failed.format(f"{type(error).__name__}: {error}"))
    return None


def _observe(
    wrapper: Any,
    make: Callable[[ProbeConfig, RunnerAdapter], Observer],
    without: str,
    left_out: Callable[[ProbeConfig, RunnerAdapter], StepObserver | None],
) -> Observer | None:
    config = ProbeConfig.from_env()
    worker = getattr(wrapper, "worker", wrapper)
    runner = getattr(worker, "model_runner", None)
    if runner is None:
        say(f"{type(worker).__name__} has no model_runner after init_device: {without}")
        return None
    parallel = parallel_of(getattr(wrapper, "vllm_config", None) or runner.vllm_config)
    adapter = wrapper.__dict__.get(ADAPTER)
    if adapter is None or adapter.runner is not runner:
        adapter = RunnerAdapter(worker, runner, parallel)
    chosen = in_ranges(config.ranks, parallel["rank"])
    observer = make(config, adapter) if chosen else None
    other = observer if chosen else left_out(config, adapter)
    if other is not None:
        wrapper.__dict__[ADAPTER] = adapter
        adapter.add(other)
    return observer
