"""Operators that another probe calls inside the model's forward are none of the model's.

The problem: errcheck reduces every output where it appears, inside the forward whose operators are captured, so that
its ``aten.aminmax`` looked like the model's. The idea: whoever computes something of its own there says so to the
operator taps that are listening, which are found on torch's stack of dispatch modes; where none is, that is one call
into C. What a session's own taps compute is told by ``StepState.taking``. Not here: the operator tap (dispatch.py).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

listened = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""How many modes there are, nearly always 0: 25 ns, where an ``Aside`` takes 400. Where a torch does not tell, the
stack itself is looked at."""


class Aside:
    """``with aside: ...``, again and again, from one thread at a time; may be nested."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: list[list[Any]] = []

    def __enter__(self) -> None:
        modes = [m for m in _get_current_dispatch_mode_stack() if hasattr(m, "asides")]
        for mode in modes:
            mode.asides += 1
        self._told.append(modes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in self._told.pop():
            mode.asides -= 1
