"""What errcheck does around one call of one watched module.

The problem: the work is done hundreds of times per step, nearly always for nothing. The idea: before the call only
inputs that it is known to change in place are looked at (cloned); after it each floating output is reduced once,
unless a child has handed it on; whatever else may be of interest is put together when something is bad, or, on a
device, held by reference. Not here: the reduction and what follows from it (watch.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.session import HEAD, LANGUAGE
from vllm_accprobe.capture.nan_watch.step import Check, HeldCall, WatchedStep, memory, padded_rows, real_rows
from vllm_accprobe.capture.nan_watch.watch import Watch
from vllm_accprobe.capture.ops.aside import Aside, listened
from vllm_accprobe.capture.taps.arguments import outputs
from vllm_accprobe.capture.taps.calls import Tap

_LEARNING = 2
"""Calls after which it is believed to be known which inputs a module changes in place."""


def watched(watch: Watch, tap: Tap, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with its outputs checked while a step is watched; otherwise one attribute and a branch."""
    is_compiling = torch.compiler.is_compiling
    known = getattr(original, "__accprobe__", None)
    if isinstance(known, Tap):  # a capture's wrapper takes anything: the names are those of what is inside
        tap.inputs = known.inputs
    owner = getattr(original, "__self__", None)
    place = TapWatch(watch, tap, leaf=not (isinstance(owner, torch.nn.Module) and any(True for _ in owner.children())))
    aside = Aside()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        step = watch.now
        if step is None:
            return original(*args, **kwargs)
        try:
            if listened():
                with aside:
                    entered = place.enter(step, args, kwargs)
            else:
                entered = place.enter(step, args, kwargs)
        except Exception as error:
            watch.fail(tap.names[0], error)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        try:
            if listened():
                with aside:
                    place.leave(step, entered, args, kwargs, result)
            else:
                place.leave(step, entered, args, kwargs, result)
        except Exception as error:
            watch.fail(tap.names[0], error)
        return result

    return forward


class TapWatch:
    """The watch's side of one tap: what it has learnt about in-place changes, and the work around a call.

    leaf: the module has no children; others change nothing that a child does not change before them."""

    __slots__ = ("calls", "inplace", "tap", "watch")

    def __init__(self, watch: Watch, tap: Tap, leaf: bool):
        self.watch = watch
        self.tap = tap
        self.calls = 0 if leaf else _LEARNING
        self.inplace: frozenset[str] = frozenset()

    def enter(
        self, step: WatchedStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, int, int, str | None, dict[str, torch.Tensor] | None]:
        tap = self.tap
        name = tap.names[0] if len(tap.names) == 1 else tap.name(step.stack)
        number = step.calls.get(name, 0)
        step.calls[name] = number + 1
        before = step.inside
        if tap.is_root:
            step.inside = LANGUAGE
            step.padded = padded_rows(step.rows, tap.inputs(args, kwargs))
        elif tap.parts[name] == HEAD:
            step.inside = HEAD
        step.stack.append(name)
        copies = None
        if self.inplace:
            found = tap.inputs(args, kwargs)
            copies = {role: tensor.clone() for role, tensor in found if role in self.inplace}
        return name, number, step.order, before, copies

    def leave(
        self,
        step: WatchedStep,
        entered: tuple[str, int, int, str | None, dict[str, torch.Tensor] | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        name, number, begun, before, copies = entered
        tap, watch = self.tap, self.watch
        part = HEAD if step.inside == HEAD else tap.parts[name]
        if step.stack and step.stack[-1] == name:
            step.stack.pop()
        step.inside = before
        if watch.now is not step:  # an alarm inside this call
            return
        results = outputs(result)
        if self.calls < _LEARNING:
            self.calls += 1
            self._learn(args, kwargs, results)
        seen, held, call = step.seen, False, None
        for role, tensor in results:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            number_of = id(tensor)
            known = seen.get(number_of)
            if known is not None and known[0]() is not tensor:
                known = None
            if known is not None and known[2] > begun:
                continue
            step.order = order = step.order + 1
            x = tensor if step.padded == step.rows or part != LANGUAGE else real_rows(step, tensor)
            if watch.deferred:
                if not held:
                    held = True
                    if self._may_hold(step, name, results):
                        call = HeldCall(tap, args, kwargs, result, copies, begun)
                watch.defer(step, x, Check(order, name, number, role, part, tap.cls, step.last, call))
            elif watch.is_bad(x, part):
                call = HeldCall(tap, args, kwargs, result, copies, begun)
                watch.raise_alarm(step, Check(order, name, number, role, part, tap.cls, step.last, call))
                if watch.now is not step:
                    return
            if known is None:
                seen[number_of] = (weakref.ref(tensor), order, order)
            else:
                seen[number_of] = (known[0], known[1], order)
            step.last = name

    def _may_hold(self, step: WatchedStep, name: str, results: list[tuple[str, torch.Tensor]]) -> bool:
        """Whether this call may be held until the numbers are there."""
        watch = self.watch
        if watch.armed == name:
            return True
        for _, tensor in results:
            step.held += tensor.nbytes
        return step.held <= watch.hold_bytes

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[tuple[str, torch.Tensor]]) -> None:
        own = {memory(tensor) for _, tensor in results}
        shared = [r for r, t in self.tap.inputs(args, kwargs) if t.is_floating_point() and memory(t) in own]
        if shared:
            self.inplace = self.inplace | frozenset(shared)
