"""From a label in a model's source to whoever captures: ``set_label``, ``gen_id``, and ``bind`` for those who take.

The problem: labels stay in a model's source, also in production, and in code that torch.compile compiles. The idea:
while nothing captures, a call is one look at a global and a branch; what captures (a vLLM worker with the probe, a
`Probe`, or `set_task_id` in a plain script) hands its taker to `bind`. The global is a small number, because
torch.compile guards numbers and not functions: compiled code notices when labels are turned on or off.
Not here: what happens to a labelled tensor (taker.py), tasks of a plain script (plain_script.py).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

TASK_ENV = "AIT_CMP_TASK_ID"
"""Accelerator libraries read it, and write their files into a directory of this name."""
_COMPILED = "data_compiled"
Taker = Callable[[str, str, Any, "str | None"], None]
Traced = Callable[[str, str], None]
_NOTHING, _CAPTURES, _WHOLE_GRAPHS = 0, 1, 2

_mode = _NOTHING  # the one thing that a call looks at while nothing captures
_takers: list[tuple[Taker, Traced | None]] = []
_take: Any = None  # see _prepare
_note: Any = None
_numbers = itertools.count()


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
    mode = _mode
    if mode:
        if mode == _WHOLE_GRAPHS and is_compiling():
            _note(data_src, data_id)
        else:
            _take(data_src, data_id, data_val, tensor_path)


def gen_id(name: str | None = None) -> str:
    """An id for a pair: ``name`` itself, which is then the same on every machine and in every run, or a new one made of
    the time. A name that is used again in the same step is told apart by the order of the calls."""
    if name is not None:
        return name
    if is_compiling():  # the clock would break the graph; labels of one id are told apart by their order
        return _COMPILED
    if not _mode:
        return f"data_{next(_numbers)}"  # nobody will see it; asking the clock takes five times as long
    return f"data_{time.time_ns() / 1e9:.6f}_{next(_numbers)}"


def taken() -> bool:
    """Whether labels go to anybody."""
    return _mode != _NOTHING


def bind(taker: Taker, traced: Traced | None = None) -> None:
    """From now on labels go to ``taker`` too, until `unbind`: each dump that is open has all of them.

    traced: given where the engine compiles whole graphs, in which no label may break one: it is told, while
    torch.compile traces, of each label that is left out there. Elsewhere a label is an eager part of compiled code.
    """
    global _take
    if traced is not None or "torch._dynamo" in sys.modules:
        _prepare()
    elif _take is None:
        _take = _first_take
    _takers.append((taker, traced))
    _choose()


def others(taker: Taker) -> bool:
    """Whether labels go to somebody else too."""
    return any(one is not taker for one, _ in _takers)


def unbind(taker: Taker) -> None:
    _takers[:] = [pair for pair in _takers if pair[0] is not taker]
    _choose()


def _choose() -> None:
    global _mode
    whole = any(traced is not None for _, traced in _takers)
    _mode = _WHOLE_GRAPHS if whole else _CAPTURES if _takers else _NOTHING


def _prepare() -> None:
    """Makes what compiled code may call. It needs torch._dynamo, whose import takes a second that captures without
    torch.compile can do without."""
    global _take, _note
    if _note is None:
        _take = torch.compiler.disable(_to_taker)
        _note = torch._dynamo.assume_constant_result(_to_traced)  # called while tracing, not by the graph


def _first_take(source: str, name: str, value: Any, path: str | None) -> None:
    if "torch._dynamo" not in sys.modules:
        _to_taker(source, name, value, path)
        return
    _prepare()
    _take(source, name, value, path)


def _to_taker(source: str, name: str, value: Any, path: str | None) -> None:
    for taker, _ in tuple(_takers):
        taker(source, name, value, path)


def _to_traced(source: str, name: str) -> None:
    for _, traced in tuple(_takers):
        if traced is not None:
            traced(source, name)
