"""Operator taps: every call of ``torch.ops.*`` in armed steps, by dispatch.

The problem: below modules lie the operators, of PyTorch, of vLLM and of a vendor's library, and only PyTorch's
dispatcher sees them all. The idea: a TorchDispatchMode that is entered around armed forwards and nowhere else. For each
call it writes what went in and what came out as tensor lines, and one ``op`` line that says how to call it again. Which
arguments a call writes to is in the operator's schema; what they were is taken before, and what they became is compared
by hash. Operators that are implemented in Python (vLLM's opaque attention, say) are opened: what they call is captured
too. Whatever goes wrong here ends the capture and never the call. Not here: what is known of an operator (kinds.py),
which calls (choice.py), what is stored of a tensor (op_tensors.py), code outside a probed model (begin_end.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.core.step_state import StepState
from vllm_accprobe.capture.ops.choice import DEDUP, VIEW, Choice
from vllm_accprobe.capture.ops.kinds import Operator, shares_memory, tensors_in
from vllm_accprobe.capture.ops.op_tensors import CACHE, Memory, Takes, address
from vllm_accprobe.capture.ops.op_values import Found, inputs, outputs
from vllm_accprobe.capture.ops.open_call import OpenCall
from vllm_accprobe.capture.ops.touched import SMALL, TOO_MANY, Touched, touched, writes_unsaid

_UNLISTED = "not selected by VLLM_ACCPROBE_OPS_LIST"


class Operators(TorchDispatchMode):
    """The operator tap of one session: ``with session.operators(): forward()``.

    chosen: names of the tapped modules whose operators are wanted; None for all and those outside any module.
    Steps of which only a part is wanted are left out.
    """

    supports_higher_order_operators = True  # else PyTorch refuses them under any mode

    def __init__(self, session: Session, memory: Memory, chosen: frozenset[str] | None = None):
        super().__init__()
        self._session = session
        self._memory = memory
        self._choice = Choice(session.config)
        self._takes = Takes(session.sink, memory, int(session.config.ops_max_mb * 1e6))
        self._all = self._chosen = chosen
        self._operators: dict[Any, Operator] = {}
        self._step: StepState | None = None
        self._inside: list[str] = []
        self.calls = 0
        self.asides = 0
        """Of other probes that are at work right now (aside.py)."""

    def forget_weights(self) -> None:
        """Memory that held weights may hold others now: they are looked at anew."""
        self._takes.forget_weights()

    def narrow(self, chosen: frozenset[str] | None) -> None:
        """Of these modules alone calls are taken from now on; None: of all that the settings choose."""
        self._chosen = self._all if chosen is None else chosen

    def forget_calls(self) -> None:
        """Samples and counts of equal calls begin anew."""
        self._choice = Choice(self._session.config)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self._session
        state = session.state
        if state is None or state.taking or self.asides:
            return func(*args, **kwargs)
        call = operator = None
        try:
            operator = self._operators.get(func)
            if operator is None:
                operator = self._operators[func] = Operator(func, self._choice)
            if state is not self._step:
                self._step = state
                self._memory.look()
            if not operator.view:
                call = self._before(state, operator, args, kwargs)
        except Exception as error:
            session.fail(f"operator {func}", error)
        result = func(*args, **kwargs) if operator is None else self._run(operator, func, args, kwargs)
        if operator is None or session.state is not state:
            return result
        try:
            if operator.view:
                if shares_memory(result, args):
                    session.sink.skip(operator.skip_tap, operator.denied or VIEW)
                    return result
                call = self._before(state, operator, args, kwargs)
            self._note_memory(operator, args, kwargs, result)
            if call is not None:
                self._after(state, operator, call, result)
        except Exception as error:
            session.fail(f"operator {func}", error)
        return result

    def _run(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator; one whose kernel is Python with this mode on, so that what it calls is seen."""
        key = operator.kernel(func, args, kwargs) if operator.kernels else None
        if key is None:
            return func(*args, **kwargs)
        self._inside.append(operator.name)
        try:
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._inside.pop()

    def _before(
        self, state: StepState, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> OpenCall | None:
        """Decides about a call, and takes what goes in."""
        sink = self._session.sink
        if operator.denied is not None:
            sink.skip(operator.skip_tap, operator.denied)
            return None
        module = state.stack[-1] if state.stack else None
        place = operator.taps.get(module)
        if place is None:
            tap = f"{module or ''}::{operator.name}"
            place = operator.taps[module] = tap, self._choice.wanted_at(tap)
        tap, wanted = place
        reason = self._unwanted(state, module, wanted)
        if reason is not None:
            sink.skip(operator.skip_tap, reason)
            return None
        number = state.calls.get(tap, 0)
        state.calls[tap] = number + 1
        found: Found = []
        values, named = inputs(args, kwargs, found)
        if self._choice.mode == DEDUP and self._choice.seen(_signature(operator.name, found)):
            sink.skip(operator.skip_tap, "same shapes and dtypes as an earlier call")
            return None
        keep, slot = self._choice.keeps(operator.name)
        where = {
            "step": state.number, "op": operator.name, "seq": state.seq, "module": module, "slot": slot,
            "module_call": None if module is None else max(state.calls.get(module, 1) - 1, 0),
            "inside": self._inside[-1] if self._inside else None,
        }  # fmt: skip
        state.seq += 1
        call = OpenCall(tap, number, keep, values, named, where)
        if self._memory.cached and self._session.everybodys:
            call.touched = self._touched(operator, found, args, kwargs)
        for role, tensor, about in found:
            self._input(state, operator, call, role, tensor, about)
        self.calls += 1
        return call

    def _touched(
        self, operator: Operator, found: Found, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Touched | None]:
        """What a call touches of the caches among its arguments; of small views nothing but they themselves."""
        cached = self._memory.cached
        caches = [(role, t) for role, t, _ in found if address(t) in cached]
        if not caches:
            return {}
        tensors = [(role, t) for role, t, _ in found]
        sizes = operator.integers_of(args, kwargs)
        return touched(operator.name, operator.names_of(tensors), tensors, caches, self._takes.max_bytes, sizes)

    def _unwanted(self, state: StepState, module: str | None, wanted: bool) -> str | None:
        if not wanted:
            return _UNLISTED
        if self._chosen is not None and module not in self._chosen:
            return "its module is not selected by VLLM_ACCPROBE_MODULES"
        # Outside any module nobody may ask for the rows yet: the runner is still preparing them.
        if not self._session.everybodys and (module is None or not self._session.whole_step(state)):
            return "its rows cannot be told apart, and not all requests are selected"
        return None

    def _input(
        self,
        state: StepState,
        operator: Operator,
        call: OpenCall,
        role: str,
        tensor: torch.Tensor,
        about: dict[str, Any],
    ) -> None:
        written = operator.written(role)
        where, name = self._named(tensor, about)
        if written:
            about["written"] = True
        blocks = call.touched.get(role)
        if blocks is not None:
            self._blocks(state, operator, call, role, blocks, about, written or writes_unsaid(operator.name))
            return
        if self._refused(call, role, tensor, where, about):
            return
        if written and where in self._memory.fresh:
            about["fresh"] = True
            if operator.overwrites:
                call.before.append((role, tensor, None, about))
                return
        weight = name is not None and not written
        taken = self._takes.take(state, call.tap, operator.name, role, call.number, tensor, call.keep, weight)
        call.taken.append((taken, about))
        if written:
            call.before.append((role, tensor, taken, about))

    def _blocks(
        self,
        state: StepState,
        operator: Operator,
        call: OpenCall,
        role: str,
        blocks: Touched,
        about: dict[str, Any],
        written: bool,
    ) -> None:
        """Takes the blocks of a cache that the call touches, and their numbers."""
        take = functools.partial(self._takes.take, state, call.tap, operator.name)
        about["blocks"] = {"ids": f"{role}.blocks", "by": blocks.by}
        take(f"{role}.blocks", call.number, blocks.ids, call.keep, False)
        taken = take(role, call.number, blocks.now(), call.keep, False)
        call.taken.append((taken, about))
        if written:
            call.before.append((role, blocks, taken, about))

    def _named(self, tensor: torch.Tensor, about: dict[str, Any]) -> tuple[int, str | None]:
        """Where the tensor's storage begins, and which parameter it is part of, which is said in ``about``."""
        where = address(tensor)
        name = self._memory.parameters.get(where)
        if name is not None:
            about["param"] = name
        return where, name

    def _refused(self, call: OpenCall, role: str, tensor: torch.Tensor, where: int, about: dict[str, Any]) -> bool:
        reason = self._takes.refuses(tensor, where)
        if reason == CACHE and self._session.everybodys:
            # a view of one request's state is any tensor; the cache itself is not
            reason = None if tensor.nbytes <= SMALL else TOO_MANY if role in call.touched else reason
        if reason is None:
            return False
        about["skipped"] = reason
        call.refused = True
        self._session.sink.skip(call.tap, f"a tensor of an operator: {reason}", role)
        return True

    def _note_memory(self, operator: Operator, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the account of memory that nobody has written to."""
        fresh = self._memory.fresh
        if operator.fresh:
            fresh.update(address(tensor) for tensor in tensors_in(result))
        elif fresh and not operator.view:
            fresh.difference_update(address(tensor) for tensor in tensors_in(result))
            if operator.writes:
                found: Found = []
                inputs(args, kwargs, found)
                fresh.difference_update(address(tensor) for role, tensor, _ in found if operator.written(role))

    def _after(self, state: StepState, operator: Operator, call: OpenCall, result: Any) -> None:
        """Takes what was changed in place and what came out, and queues the call's line."""
        mutates = call.mutates
        tap, op, number, keep = call.tap, operator.name, call.number, call.keep
        for role, source, before, about in call.before:
            tensor = source.now() if isinstance(source, Touched) else source
            if before is None:  # nothing was there before: whatever it is, it is new
                taken = self._takes.take(state, tap, op, f"inplace.{role}", number, tensor, keep, False)
                mutates.append(role)
            else:
                changed = functools.partial(mutates.append, role)
                taken = self._takes.take_changed(state, tap, op, role, number, tensor, keep, before, changed)
            call.after.append((role, taken, about))
        found: Found = []
        call.outputs = outputs(result, found)
        for role, tensor, about in found:
            where, _ = self._named(tensor, about)
            of = next((r for r, b in call.touched.items() if b is not None and b.is_it(tensor)), None)
            blocks = None if of is None else call.touched[of]
            if blocks is not None:  # the cache itself is handed back
                about["blocks"] = {"ids": f"{of}.blocks", "by": blocks.by}
                taken = self._takes.take(state, tap, op, role, number, blocks.now(), keep, False)
                call.taken.append((taken, about))
            elif not self._refused(call, role, tensor, where, about):
                taken = self._takes.take(state, tap, op, role, number, tensor, keep, False)
                call.taken.append((taken, about))
        self._session.sink.line(call.line)


def _signature(name: str, found: Found) -> tuple[Any, ...]:
    return (name, *((role, about["dtype"], about["device"], *about["shape"]) for role, _, about in found))
