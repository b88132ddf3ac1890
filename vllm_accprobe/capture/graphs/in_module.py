"""The taps of one module: what a compiler traces around its forward.

The problem: what a compiler reads of us becomes part of the graph or a condition of it, and some modules are called
past their hooks. The idea: all that the hooks read are attributes and buffers of the module itself, so that no closure
and no name enters the graph; where a forward is called directly, a bound method stands in its place that does the same.
Not here: which taps there are (placement.py), the operators (tap_op.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.graphs.stats_op import tap_stats, tap_stats_each
from vllm_accprobe.capture.graphs.tap_op import tap, tap_each

_IN, _OUT, _FORWARD = "_accprobe_in", "_accprobe_out", "_accprobe_forward"


@dataclass(frozen=True)
class Spot:
    """One tap: place among inputs or outputs, what it writes to and what it asks. cursor: None where it is called once
    in a forward, and ``buffer`` then holds that call alone. measured: statistics are kept, and no rows."""

    at: int | str
    goes_in: bool
    buffer: torch.Tensor
    select: torch.Tensor
    cursor: torch.Tensor | None = None
    measured: bool = False


class ModuleTaps:
    """The taps of ``module``; ``remove`` takes its hooks off and leaves the buffers, which graphs may know."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._undo: list[Callable[[], None]] = []
        self._n = 0

    def add(self, spot: Spot, bypassed: bool) -> None:
        """Places one tap. bypassed: the module's hooks are never called."""
        module = self._module
        if not self._undo:
            module.__dict__[_IN] = module.__dict__[_OUT] = ()
            self._stand(bypassed)
        names = []
        for kind, tensor in (("tap", spot.buffer), ("select", spot.select), ("cursor", spot.cursor)):
            names.append("" if tensor is None else f"accprobe_{kind}_{self._n}")
            if tensor is not None:
                module.register_buffer(names[-1], tensor, persistent=False)
        side = _IN if spot.goes_in else _OUT
        module.__dict__[side] = (*module.__dict__[side], (spot.at, *names, spot.measured))
        self._n += 1

    def remove(self) -> None:
        """The module calls no tap any more."""
        while self._undo:
            self._undo.pop()()

    def _stand(self, bypassed: bool) -> None:
        module = self._module
        if bypassed:
            module.__dict__[_FORWARD] = module.forward
            self._undo.append(put_over(module, "forward", MethodType(_forward, module)))
        else:
            self._undo.append(module.register_forward_pre_hook(_tap_inputs, with_kwargs=True).remove)
            self._undo.append(module.register_forward_hook(_tap_outputs).remove)


def _forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of a forward that is called directly."""
    _tap_inputs(module, args, kwargs)
    output = getattr(module, _FORWARD)(*args, **kwargs)
    _tap_outputs(module, args, output)
    return output


def _tap_inputs(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook."""
    for at, *names in getattr(module, _IN):
        if isinstance(at, str):
            _tap(module, kwargs.get(at), *names)
        elif at < len(args):
            _tap(module, args[at], *names)


def _tap_outputs(module: torch.nn.Module, args: Any, output: Any) -> None:
    """A forward hook."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    for at, *names in getattr(module, _OUT):
        if at < len(values):
            _tap(module, values[at], *names)


def _tap(module: torch.nn.Module, value: Any, buffer: str, select: str, cursor: str, measured: bool) -> None:
    if isinstance(value, torch.Tensor):
        if cursor:
            each = tap_stats_each if measured else tap_each
            each(value, getattr(module, buffer), getattr(module, cursor), getattr(module, select))
        else:
            once = tap_stats if measured else tap
            once(value, getattr(module, buffer), getattr(module, select))
