"""Pairs of tensors that a program labels itself: ``set_label``, ``gen_id``, ``set_task_id``.

The problem: a model whose layers were replaced by an accelerator's own has two results for one thing, PyTorch's ("pta",
the reference) and the accelerator's ("acl"), and only the program knows which belong together; the calls stay in its
source, also in production. The idea: the same id makes a pair; while nothing captures, a call is one look at a global
and a branch; what captures (a vLLM worker with the probe, a `Probe`, or `set_task_id` in a plain script) hands its
taker to `bind`. Calls that torch.compile traces break no graph.
Not here: what happens to a labelled tensor (capture/labels.py), the comparison (compare/labels.py).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

__all__ = ["close", "gen_id", "set_label", "set_task_id"]

TASK_ENV = "AIT_CMP_TASK_ID"
"""Accelerator libraries read it, and write their files into a directory of this name."""
_OFF = ("0", "false", "no", "off")
_COMPILED = "data_compiled"
Taker = Callable[[str, str, Any, "str | None"], None]

_taker: Taker | None = None  # the one thing that a call looks at while nothing captures
_takers: list[Taker] = []
_numbers = itertools.count()
_tasks = itertools.count()
_plain: Any = None


def set_label(data_src: str, data_id: str, data_val: Any = None, tensor_path: str | None = None) -> None:
    """Labels one side of a pair.

    Args:
        data_src: "pta", the reference, or "acl", the accelerator's own.
        data_id: what `gen_id` gave; the same for both sides.
        data_val: the tensor, any dtype and shape; both sides need as many elements. Its rows are known inside vLLM.
        tensor_path: instead of a value: the file that the accelerator's library writes, now or later, or the end of
            its path. An ATB ``.bin``, or ``.npy``, ``.pt``, ``.pth``, ``.safetensors``.

    Does nothing unless something captures. Never raises; what is wrong is said once and counted in the dump.
    """
    taker = _taker
    if taker is not None:
        taker(data_src, data_id, data_val, tensor_path)


def gen_id(name: str | None = None) -> str:
    """An id for a pair: ``name`` itself, which is then the same on every machine and in every run, or a new one made of
    the time. A name that is used again in the same step is told apart by the order of the calls."""
    if name is not None:
        return name
    if is_compiling():  # the clock would break the graph; labels of one id are told apart by their order
        return _COMPILED
    return f"data_{time.time_ns() / 1e9:.6f}_{next(_numbers)}"


def set_task_id() -> None:
    """Begins a task: call it before each round of a conversation.

    Tells accelerator libraries to write into a directory of this task. In a script that runs neither vLLM nor a
    `Probe`, the first call opens a dump for the labels, in ``VLLM_ACCPROBE_DIR`` or ./accprobe/<UTC time>, and each
    further one begins a step in it. Does nothing with ``VLLM_ACCPROBE=0``.
    """
    global _plain
    if os.environ.get("VLLM_ACCPROBE", "").strip().lower() in _OFF:
        return
    os.environ[TASK_ENV] = f"{os.getpid()}_{next(_tasks)}"
    # The front end of a vLLM with the probe computes no model: its workers' labels are in the engine's dump.
    if _taker is None and _plain is None and not os.environ.get("VLLM_ACCPROBE_RUN_ID"):
        from vllm_accprobe.capture.labels_plain import PlainLabels

        _plain = PlainLabels.start()
    if _plain is not None:
        _plain.begin_task()


def close() -> None:
    """Closes the dump that `set_task_id` opened; otherwise this happens when the process ends."""
    global _plain
    plain, _plain = _plain, None
    if plain is not None:
        plain.close()


def bind(taker: Taker) -> None:
    """From now on labels go to ``taker``, until `unbind`; then to the one before."""
    global _taker
    _takers.append(taker)
    _taker = taker


def unbind(taker: Taker) -> None:
    global _taker
    if taker in _takers:
        _takers.remove(taker)
    _taker = _takers[-1] if _takers else None
