"""Puts the operator tap on a model: a served one's runner, or a plain torch model.

The problem: what the tap must know of its surroundings (which memory holds weights and which the KV cache, which
modules are chosen, whether the engine runs Python at all) is known in different places. The idea: two functions that
gather it and hand a session its ``ops``. Not here: the tap itself (dispatch.py), code without a model (begin_end.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.ops.dispatch import Operators
from vllm_accprobe.capture.ops.op_tensors import Memory
from vllm_accprobe.capture.taps.hooks import Taps
from vllm_accprobe.capture.taps.params import named_tensors


def of_runner(session: Session, taps: Taps, model: torch.nn.Module, runner: Any, stored: bool, compiled: bool) -> None:
    """For a model runner of vLLM. ``stored``: parameters' payloads are in the dump. ``compiled``: the engine compiles
    or captures graphs, in which operators are none of Python's."""
    if compiled:
        session.sink.skip("::", "operators inside compiled or captured graphs cannot be seen")
        session.say("operators are not captured: the engine compiles or captures graphs (VLLM_ACCPROBE_GRAPHS=1)")
        return
    offloads = _offloads(getattr(runner, "vllm_config", None))
    _watch(session, taps, model, stored, lambda: _caches(getattr(runner, "kv_caches", None)), moves=offloads)


def of_model(session: Session, taps: Taps, model: torch.nn.Module, stored: bool) -> None:
    """For a plain torch model, which keeps its caches to itself."""
    _watch(session, taps, model, stored, lambda: ())


def _watch(
    session: Session,
    taps: Taps,
    model: torch.nn.Module,
    stored: bool,
    caches: Callable[[], Iterable[torch.Tensor]],
    moves: bool = False,
) -> None:
    """moves: weights of several layers take turns in one piece of memory, so that an address does not tell whose."""

    def named() -> Iterator[tuple[str, str, torch.Tensor]]:
        return ((path, name, t) for path, _, name, t in named_tensors(model) if not moves)

    config = session.config
    chosen = frozenset().union(*(tap.chosen for tap in taps.taps)) if config.modules_left else None
    session.ops = Operators(session, Memory(named, caches, stored), chosen)


def _offloads(vllm_config: Any) -> bool:
    """Whether vLLM keeps weights in host memory and brings them when they are needed."""
    config = getattr(vllm_config, "offload_config", None)
    sizes = [
        getattr(getattr(config, "uva", None), "cpu_offload_gb", 0),
        getattr(getattr(config, "prefetch", None), "offload_group_size", 0),
        getattr(getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0),
    ]
    return any(isinstance(size, (int, float)) and size > 0 for size in sizes)


def _caches(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a runner's ``kv_caches``: a list, per layer a tensor or several."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _caches(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _caches(item)
