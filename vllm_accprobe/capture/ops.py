"""Operator taps: every call of ``torch.ops.*`` in armed steps, by dispatch.

The problem: below modules lie the operators, of PyTorch, of vLLM and of a vendor's library, and only PyTorch's
dispatcher sees them all. The idea: a TorchDispatchMode that is entered around armed forwards and nowhere else. For each
call it writes what went in and what came out as tensor lines, and one ``op`` line that says how to call it again. Which
arguments a call writes to is in the operator's schema; what they were is taken before, and what they became is compared
by hash. Operators that are implemented in Python (vLLM's opaque attention, say) are opened: what they call is captured
too. Whatever goes wrong here ends the capture and never the call. Not here: which calls (op_choice.py), what is stored
of a tensor (op_takes.py), code outside a probed model (op_dump.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_accprobe.capture.op_choice import DEDUP, FRESH, VIEW, Choice
from vllm_accprobe.capture.op_takes import Memory, Takes, address, said
from vllm_accprobe.capture.op_values import Found, inputs, outputs

if TYPE_CHECKING:
    from vllm_accprobe.capture.session import Session, StepState

_OVERWRITING = ("aten.copy_.", "aten.fill_.", "aten.zero_.")
"""Operators whose written argument's earlier values do not matter, besides those with an ``out`` argument."""
NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class _Operator:
    """What is known of one operator: its name, why it is left out, which arguments it writes to."""

    __slots__ = ("denied", "fresh", "inner", "name", "overwrites", "taps", "view", "writes")

    def __init__(self, func: Any, choice: Choice):
        self.name = str(func)
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        self.denied = choice.denied(self.name) if schema is not None else "a higher-order operator"
        self.writes: frozenset[str] = frozenset(
            role
            for index, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
            for role in (f"input.{index}", f"input.{a.name}")
        )
        self.overwrites = self.name.startswith(_OVERWRITING) or any(
            a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in arguments
        )
        returns = schema.returns if schema is not None else ()
        self.view = not self.writes and any(r.alias_info is not None for r in returns)
        self.fresh = self.name.startswith(FRESH)
        self.inner = _kernels_in_python(self.name) if schema is not None else frozenset()
        self.taps: dict[str | None, tuple[str, bool]] = {}

    def written(self, role: str) -> bool:
        """Whether the tensor in ``role`` (``input.0``, or ``input.0.1`` in a list) is in a written argument."""
        if not self.writes:
            return False
        return role in self.writes or ".".join(role.split(".")[:2]) in self.writes


def _kernels_in_python(name: str) -> frozenset[str]:
    """Names of the dispatch keys under which an operator's kernel is a Python function."""
    namespace, _, rest = name.partition(".")
    if namespace in ("aten", "prim", "prims"):
        return frozenset()
    base, _, overload = rest.rpartition(".")
    qualified = f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}")
    try:
        lines = torch._C._dispatch_dump(qualified).splitlines()
    except (RuntimeError, AttributeError):
        return frozenset()
    return frozenset(line.partition(":")[0].partition("[")[0] for line in lines[3:] if ".py:" in line)


class _Call:
    """One call on its way: where it is, what was taken of it before it ran."""

    __slots__ = ("before", "event", "keep", "lines", "number", "tap")

    def __init__(self, tap: str, number: int, keep: bool, event: dict[str, Any]):
        self.tap = tap
        self.number = number
        self.keep = keep
        self.event = event
        self.lines: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.before: list[tuple[str, torch.Tensor, Any]] = []


class Operators(TorchDispatchMode):
    """The operator tap of one session: ``with session.operators(): forward()``.

    chosen: names of the tapped modules whose operators are wanted; None for all and those outside any module.
    selective: not all requests are wanted in every step: steps of which only a part is wanted are left out.
    """

    supports_higher_order_operators = True  # else PyTorch refuses them under any mode

    def __init__(self, session: Session, memory: Memory, chosen: frozenset[str] | None = None, selective: bool = False):
        super().__init__()
        config = session.config
        self._session = session
        self._memory = memory
        self._choice = Choice(config)
        self._takes = Takes(session.sink, memory, int(config.ops_max_mb * 1e6))
        self._chosen = chosen
        self._selective = selective
        self._operators: dict[Any, _Operator] = {}
        self._step: StepState | None = None
        self._inside: list[str] = []
        self.calls = 0

    def forget_weights(self) -> None:
        self._takes.forget_weights()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self._session
        state = session.state
        if state is None or state.taking:
            return func(*args, **kwargs)
        call = operator = None
        try:
            operator = self._operator(func)
            if state is not self._step:
                self._step = state
                self._memory.look()
            if not operator.view:
                call = self._before(state, operator, args, kwargs)
        except Exception as error:
            session.fail(f"operator {func}", error)
        result = self._run(operator, func, args, kwargs) if operator is not None else func(*args, **kwargs)
        if operator is None or session.state is not state:
            return result
        try:
            if operator.view:
                if _shares(result, args):
                    session.sink.skip(f"::{operator.name}", operator.denied or VIEW)
                    return result
                call = self._before(state, operator, args, kwargs)
            self._memory_after(operator, args, kwargs, result)
            if call is not None:
                self._after(state, operator, call, result)
        except Exception as error:
            session.fail(f"operator {func}", error)
        return result

    def _operator(self, func: Any) -> _Operator:
        found = self._operators.get(func)
        if found is None:
            found = self._operators[func] = _Operator(func, self._choice)
        return found

    def _run(self, operator: _Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator; one whose kernel is Python with this mode on, so that what it calls is seen."""
        if operator.inner:
            key = _kernel_of(operator, func, args, kwargs)
            if key is not None:
                self._inside.append(operator.name)
                try:
                    with self:
                        return func._op_dk(key, *args, **kwargs)
                finally:
                    self._inside.pop()
        return func(*args, **kwargs)

    def _before(
        self, state: StepState, operator: _Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Call | None:
        """Decides about a call, and takes what goes in."""
        sink = self._session.sink
        if operator.denied is not None:
            sink.skip(f"::{operator.name}", operator.denied)
            return None
        module = state.stack[-1] if state.stack else None
        place = operator.taps.get(module)
        if place is None:
            tap = f"{module or ''}::{operator.name}"
            place = operator.taps[module] = tap, self._choice.wanted_at(tap)
        tap, wanted = place
        reason = self._unwanted(state, module, wanted)
        if reason is not None:
            sink.skip(f"::{operator.name}", reason)
            return None
        number = state.calls.get(tap, 0)
        state.calls[tap] = number + 1
        found: Found = []
        values, named = inputs(args, kwargs, found)
        if self._choice.mode == DEDUP and self._choice.seen(_signature(operator.name, found)):
            sink.skip(f"::{operator.name}", "same shapes and dtypes as an earlier call")
            return None
        keep, slot = self._choice.keeps(operator.name)
        event: dict[str, Any] = {
            "event": "op", "step": state.number, "tap": tap, "op": operator.name, "call": number, "seq": state.seq,
            "module": module, "args": values, "kwargs": named, "mutates": [],
        }  # fmt: skip
        state.seq += 1
        if module is not None:
            event["module_call"] = max(state.calls.get(module, 1) - 1, 0)
        if self._inside:
            event["inside"] = self._inside[-1]
        if slot is not None:
            event["slot"] = slot
        call = _Call(tap, number, keep, event)
        for role, tensor, about in found:
            self._input(state, operator, call, role, tensor, about)
        self.calls += 1
        return call

    def _unwanted(self, state: StepState, module: str | None, wanted: bool) -> str | None:
        if not wanted:
            return "not selected by VLLM_ACCPROBE_OPS_LIST"
        if self._chosen is not None and module not in self._chosen:
            return "its module is not selected by VLLM_ACCPROBE_MODULES"
        # Outside any module nobody may ask for the rows yet: the runner is still preparing them.
        if self._selective and (module is None or not self._session.whole_step(state)):
            return "its rows cannot be told apart, and not all requests are selected"
        return None

    def _input(
        self, state: StepState, operator: _Operator, call: _Call, role: str, tensor: torch.Tensor, about: dict[str, Any]
    ) -> None:
        written = operator.written(role)
        reason = self._takes.refuses(tensor)
        where = address(tensor)
        name = self._memory.parameters.get(where)
        if name is not None:
            about["param"] = name
        if reason is not None:
            about["skipped"] = reason
            if written:
                about["written"] = True
            self._session.sink.skip(call.tap, f"a tensor of an operator: {reason}", role)
            return
        if written and where in self._memory.fresh:
            about["fresh"] = True
            if operator.overwrites:
                call.before.append((role, tensor, None))
                return
        line = self._line(state, call, operator, role)
        ticket = self._takes.take(line, tensor, call.keep, written)
        call.lines.append((line, about))
        if written:
            call.before.append((role, tensor, ticket))

    def _line(self, state: StepState, call: _Call, operator: _Operator, role: str) -> dict[str, Any]:
        seq = state.seq
        state.seq = seq + 1
        return {
            "event": "tensor", "step": state.number, "tap": call.tap, "class": operator.name, "role": role,
            "call": call.number, "seq": seq, "rows": None, "row_dim": 0,
        }  # fmt: skip

    def _memory_after(self, operator: _Operator, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the account of memory that nobody has written to."""
        fresh = self._memory.fresh
        if operator.fresh:
            if isinstance(result, torch.Tensor):
                fresh.add(address(result))
            return
        if not fresh:
            return
        if not operator.view:
            for tensor in _tensors(result):
                fresh.discard(address(tensor))
        if operator.writes:
            found: Found = []
            inputs(args, kwargs, found)
            for role, tensor, _ in found:
                if operator.written(role):
                    fresh.discard(address(tensor))

    def _after(self, state: StepState, operator: _Operator, call: _Call, result: Any) -> None:
        """Takes what came out, what was changed in place, and queues the call's line."""
        event, sink = call.event, self._session.sink
        for role, tensor, ticket in call.before:
            after = self._line(state, call, operator, f"inplace.{role}")
            if ticket is None:  # nothing was there before: whatever it is, it is new
                self._takes.take(after, tensor, call.keep, True)
                event["mutates"].append(role)
            else:
                self._changed(after, tensor, ticket, call, role)
        found: Found = []
        event["outputs"] = outputs(result, found)
        for role, tensor, about in found:
            reason = self._takes.refuses(tensor)
            if reason is not None:
                about["skipped"] = reason
                sink.skip(call.tap, f"a tensor of an operator: {reason}", role)
                continue
            line = self._line(state, call, operator, role)
            self._takes.take(line, tensor, call.keep, False)
            call.lines.append((line, about))

        def line_of_call() -> dict[str, Any]:
            for line, about in call.lines:
                said(line, about)
            event["args"] = [_settled(v) for v in event["args"]]
            event["kwargs"] = {name: _settled(v) for name, v in event["kwargs"].items()}
            event["outputs"] = [_settled(v) for v in event["outputs"]]
            return event

        sink.line(line_of_call)

    def _changed(self, after: dict[str, Any], tensor: torch.Tensor, ticket: Any, call: _Call, role: str) -> None:
        mutates = call.event["mutates"]

        def changed(different: bool) -> None:
            if different:
                mutates.append(role)

        if call.keep:
            self._session.sink.after(after, tensor, None, 0, ticket, changed)
            return
        self._session.sink.look(after, tensor, changed_from(ticket, changed))


def changed_from(before: Any, changed: Any) -> Any:
    """A ticket that, when it gets its hash, tells whether that is another one than ``before`` got."""

    class Comparing:
        @property
        def digest(self) -> str | None:
            return None

        @digest.setter
        def digest(self, value: str) -> None:
            changed(before.digest is not None and value != before.digest)

    return Comparing()


def _settled(value: Any) -> Any:
    """A VALUE as it is written: a tensor that was not looked at becomes ``skipped`` with its shape."""
    if isinstance(value, dict):
        if "tensor" in value and "skipped" in value["tensor"]:
            return value["tensor"]
        if "list" in value:
            return {"list": [_settled(v) for v in value["list"]]}
    return value


def _signature(name: str, found: Found) -> tuple[Any, ...]:
    return (name, *((role, about["dtype"], about["device"], *about["shape"]) for role, _, about in found))


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in _tensors(item)]
    return []


def _shares(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether the first thing that came out lies in the memory of the first tensor that went in."""
    out = _tensors(result)[:1]
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if not out or first is None:
        return True
    where = address(out[0])
    return where == address(first) if where else out[0].numel() == 0


def _kernel_of(operator: _Operator, func: Any, args: Any, kwargs: Any) -> Any:
    """The dispatch key of the Python kernel that PyTorch would choose for these arguments, or None."""
    for tensor in (*args, *kwargs.values()):
        if isinstance(tensor, torch.Tensor):
            name = torch._C._dispatch_key_for_device(tensor.device.type)
            break
    else:
        return None
    for candidate in (name, "CompositeExplicitAutograd"):
        key = getattr(torch._C.DispatchKey, candidate, None)
        if key is not None and func.has_kernel_for_dispatch_key(key):
            return key if candidate in operator.inner else None
    return None
