"""The first NaN, Inf or overflow of a running model, found as it appears, at a cost that lets it stay on.

The problem: a NaN is seen at the end of an answer, and comes from one step of one layer of one rank; storing all
tensors is out of the question, and reading every tensor stops a device at every operator. The idea: each floating
output goes through ONE fused reduction (aminmax shows NaN, Inf and values at the dtype's end), on real rows only. In
host memory the two numbers are read at once, while the call's inputs are at hand. On a device they go into a buffer
that is copied once per step and read one or two steps later; until then the step's calls are kept by reference up to
``keep_bytes``. A tap whose bad call was not kept is ARMED: its calls are kept in all later steps. Inputs that a module
changes in place are cloned before the call, from its third call on. An output that a child has returned already is not
checked again.

Not here: vLLM (observer.py), what is written (findings.py), which modules there are (taps/hooks.py).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, NOTHING, address
from vllm_accprobe.capture.ops.dispatch import Paused, active_modes
from vllm_accprobe.capture.taps.hooks import Tap, innermost, outputs
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.schema import Module

LIMITS = {d: float(torch.finfo(d).max) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
FP8_TOPS = {
    getattr(torch, name): top for name, top in (("float8_e4m3fn", 0x7E), ("float8_e5m2", 0x7B)) if hasattr(torch, name)
}
"""Bits, without the sign, of the largest finite value; above them lie only NaN and Inf."""
FP8_SHARE = 0.05


@dataclass(frozen=True)
class Badness:
    """How many elements of a tensor's real rows are NaN, infinite, or at the end of the dtype's range."""

    nan: int = 0
    inf: int = 0
    saturated: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf or self.saturated)

    @property
    def word(self) -> str:
        return "NaN" if self.nan else "Inf" if self.inf else "saturation"


@dataclass(frozen=True)
class BadnessRule:
    """Which kinds count: ``nan``, ``overflow`` (Inf and saturation)."""

    nan: bool = True
    overflow: bool = True

    def assess(self, x: torch.Tensor, part: str) -> Badness:
        """The exact counts of a tensor of ``part`` of the model. Waits for a device."""
        top = FP8_TOPS.get(x.dtype)
        if top is not None:
            bits = x.contiguous().view(torch.uint8) & 0x7F
            beyond, at = int((bits > top).sum()), int((bits == top).sum())
            many = self.overflow and bits.numel() and (beyond + at) / bits.numel() > FP8_SHARE
            return Badness(beyond if self.nan else 0, 0, at if many else 0)
        limit = LIMITS.get(x.dtype)
        if limit is None:
            return Badness()
        nan = int(x.isnan().sum()) if self.nan else 0
        if not self.overflow:
            return Badness(nan)
        end = x >= limit if part == HEAD else x.abs() >= limit
        inf = end & x.isinf()
        return Badness(nan, int(inf.sum()), int(end.sum()) - int(inf.sum()))

    def elements(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """Which elements ``assess`` counts, as booleans of the tensor's shape."""
        top = FP8_TOPS.get(x.dtype)
        if top is not None:
            return (x.contiguous().view(torch.uint8) & 0x7F) >= top
        nan = x.isnan() if self.nan else torch.zeros_like(x, dtype=torch.bool)
        limit = LIMITS[x.dtype]
        return nan | (x >= limit if part == HEAD else x.abs() >= limit) if self.overflow else nan


def is_mask(role: str) -> bool:
    """Whether an argument of this name may hold -inf by right."""
    return "mask" in role or role.endswith("bias")


def parameters(module: torch.nn.Module) -> list[tuple[str, Badness]]:
    """Parameters of ``module`` itself, and buffers that a checkpoint may hold, that are not finite. Reads each once.

    Other buffers are workspaces, often without a value yet. Saturation is no error here, nor is Inf in a mask or bias.
    """
    found = []
    temporary = module._non_persistent_buffers_set
    buffers = [(name, buffer) for name, buffer in module._buffers.items() if name not in temporary]
    for name, tensor in [*module._parameters.items(), *buffers]:
        if tensor is None or tensor.device.type == "meta" or not tensor.numel():
            continue
        if tensor.dtype in LIMITS and tensor.layout is torch.strided:
            low, high = torch.aminmax(tensor.detach())
            if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
                continue
            bad = Badness(int(tensor.isnan().sum()), 0 if is_mask(name) else int(tensor.isinf().sum()))
            if bad:
                found.append((name, bad))
    return found


class Slots:
    """Per dtype a row of minima and one of maxima on the device, and copies of them on their way.

    Copies and the next step's reductions follow one another on the model's stream, so one device buffer is enough.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pin = device.type != "cpu"
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(
        self, taken: dict[torch.dtype, list[Any]], dtype: torch.dtype, what: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two numbers on the device for the next reduction, which is ``what``; ``taken`` lists those of the step."""
        checks = taken.setdefault(dtype, [])
        views = self._views.get(dtype)
        if views is None or len(checks) >= len(views):
            self._grow(dtype, max(256, 2 * len(checks)))
            views = self._views[dtype]
        checks.append(what)
        return views[len(checks) - 1]

    def _grow(self, dtype: torch.dtype, size: int) -> None:
        old = self._buffers.get(dtype)
        new = torch.zeros((2, size), dtype=dtype, device=self._device)
        if old is not None:
            new[:, : old.shape[1]] = old
        self._buffers[dtype] = new
        self._views[dtype] = [(new[0, i], new[1, i]) for i in range(size)]
        self._free[dtype] = []

    def fetch(self, taken: dict[torch.dtype, list[Any]]) -> tuple[dict[torch.dtype, torch.Tensor], Any]:
        """Starts the copies to the host; the event after them (None for host memory)."""
        hosts = {}
        for dtype in taken:
            buffer, free = self._buffers[dtype], self._free[dtype]
            host = free.pop() if free else torch.empty(buffer.shape, dtype=dtype, pin_memory=self._pin)
            host.copy_(buffer, non_blocking=True)
            hosts[dtype] = host
        if not self._pin or not hosts:
            return hosts, None
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return hosts, event

    def give_back(self, hosts: dict[torch.dtype, torch.Tensor]) -> None:
        for dtype, host in hosts.items():
            if host.shape == self._buffers[dtype].shape:
                self._free[dtype].append(host)


GOOD, BAD, UNKNOWN, UNCHECKED = "good", "bad", "unknown", "not checked"
"""States of an input: ``unknown``: changed in place by the call before anybody looked; ``not checked``: no
floating-point numbers."""


@dataclass(frozen=True)
class Input:
    """One input of a bad call. tensor: as it went in, None where that is not known any more."""

    role: str
    tensor: torch.Tensor | None
    state: str
    bad: Badness = field(default_factory=Badness)


@dataclass(frozen=True)
class Alarm:
    """The first bad output of a step. outputs: (role, tensor) of the call, empty where it was not kept."""

    step: WatchedStep
    order: int
    tap: str
    cls: str
    part: str
    call: int
    role: str
    bad: Badness | None
    outputs: tuple[tuple[str, torch.Tensor], ...]
    inputs: tuple[Input, ...]
    before: str
    """The tap whose output was checked before this one, "" at the step's start."""


class WatchedStep:
    """What is known of a step while it runs. rows: real token rows; padded: rows of the root's input."""

    __slots__ = (
        "calls", "checks", "inside", "kept", "last", "note", "number", "order", "padded", "rows", "seen",
        "stack",
    )  # fmt: skip

    def __init__(self, number: int, rows: int, note: Any = None):
        self.number = number
        self.rows = rows
        self.note = note
        self.padded = rows
        self.order = 0
        self.kept = 0
        self.last = ""
        self.inside: str | None = None
        self.stack: list[str] = []
        self.calls: dict[str, int] = {}
        self.seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        """Checked outputs by identity: the object, and when it was checked first and last."""
        self.checks: dict[torch.dtype, list[Check]] = {}


class KeptCall(NamedTuple):
    """References to what went in and out of one call. copies: inputs that it changes in place, as they were; begun: the
    step's order when it began."""

    tap: Tap
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    copies: dict[str, torch.Tensor] | None
    begun: int


class Check(NamedTuple):
    """One reduction. call: None where the step's memory for references was spent."""

    order: int
    name: str
    number: int
    role: str
    part: str
    cls: str
    before: str
    call: KeptCall | None


PendingStep = tuple[WatchedStep, dict[torch.dtype, torch.Tensor], Any]
"""A step that is over, the numbers of its checks on their way to the host, and the event behind them."""


def real_rows(step: WatchedStep, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the padding rows at its end, where its first dimension has them."""
    if step.padded > step.rows and tensor.dim() and tensor.shape[0] == step.padded:
        return tensor[: step.rows]
    return tensor


def padded_rows(rows: int, inputs: list[tuple[str, torch.Tensor]]) -> int:
    """The rows that the root is called with: those of its token ids or embeddings, or of its positions' last axis."""
    for role, tensor in inputs:
        if role in ("input.input_ids", "input.inputs_embeds") and tensor.dim():
            return max(rows, tensor.shape[0])
    for role, tensor in inputs:
        if role == "input.positions" and tensor.dim():
            return max(rows, tensor.shape[-1])
    return rows


NAN, OVERFLOW = "nan", "overflow"
_BEHIND = 2
"""Steps that may be waiting for their numbers; the device is that far behind before anybody waits for it."""


class Watch:
    """Watches the modules of one model, between ``begin`` and ``end`` of a step; ``found`` gets the step's Alarm.

    Args:
        kinds: of "nan" and "overflow", what is an error.
        say: gets one line when the watch itself breaks.
        device: where the model computes. deferred: read numbers as on a device, also for host memory (tests).
        keep_bytes: how much of a step may be kept by reference (devices only).
    """

    def __init__(
        self,
        kinds: tuple[str, ...],
        found: Callable[[Alarm], None],
        say: Callable[[str], None],
        device: torch.device | None = None,
        deferred: bool = False,
        keep_bytes: int = 1 << 28,
    ):
        device = device or torch.device("cpu")
        self.rule = BadnessRule(NAN in kinds, OVERFLOW in kinds)
        self.now: WatchedStep | None = None
        self.dead: str | None = None
        self.keep_bytes = keep_bytes
        self.armed: str | None = None
        self.waiting: deque[PendingStep] = deque()
        # What makes it a TapOwner (hooks.py):
        self.config = ProbeConfig()
        self.fired: set[str] = set()
        self.modules: dict[str, Module] = {}
        self.skipped: Counter[str] = Counter()
        self._found = found
        self._say = say
        self._device = device
        self.deferred = deferred or device.type != "cpu"
        self._slots: Slots | None = Slots(device) if self.deferred else None

    def module(self, module: Module) -> None:
        self.modules[module.tap] = module

    def skip(self, tap: str, reason: str) -> None:
        self.skipped[reason] += 1

    def begin(self, step: WatchedStep) -> None:
        if self.dead is None:
            self.now = step

    def end(self) -> None:
        """The step's last tap has run (or an alarm has ended it)."""
        step, self.now = self.now, None
        if step is None or self._slots is None or self.dead is not None:
            return
        try:
            self.waiting.append((step, *self._slots.fetch(step.checks)))
            self.poll()
        except Exception as error:
            self.fail("the end of a step", error)

    def poll(self, wait: bool = False) -> None:
        """Reads the numbers of steps that have arrived; with ``wait`` those of all."""
        while self.waiting and self._slots is not None:
            step, hosts, event = self.waiting[0]
            if event is not None:
                if not wait and len(self.waiting) <= _BEHIND and not event.query():
                    return
                event.synchronize()
            self.waiting.popleft()
            try:
                self._read(step, hosts)
            finally:
                self._slots.give_back(hosts)

    def close(self) -> None:
        """Reads what is still on its way."""
        self.end()
        if self.dead is None:
            self.poll(wait=True)

    def fail(self, where: str, error: BaseException) -> None:
        """Ends the watch because it is itself broken. Never raises."""
        self.now = None
        self.waiting.clear()
        if self.dead is None:
            self.dead = f"errcheck failed at {where}: {type(error).__name__}: {error}"
            self._say(f"{self.dead}; it is off, serving goes on")

    def is_bad(self, tensor: torch.Tensor, part: str) -> bool:
        """One reduction, read at once."""
        limit = LIMITS.get(tensor.dtype)
        if limit is None:
            return tensor.dtype in FP8_TOPS and bool(self._fp8(tensor) > 0)
        pair = torch.aminmax(tensor)
        high = pair[1].item()
        if not self.rule.overflow:
            return high != high
        # NaN is in both numbers; comparing with it is false.
        return not (high < limit and (part == HEAD or pair[0].item() > -limit))

    def defer(self, step: WatchedStep, tensor: torch.Tensor, check: Check) -> None:
        """One reduction into the buffer; its numbers are read when the step's have arrived."""
        assert self._slots is not None
        if tensor.dtype in LIMITS:
            if tensor.requires_grad:  # outside of vLLM
                tensor = tensor.detach()
            torch.aminmax(tensor, out=self._slots.take(step.checks, tensor.dtype, check))
        elif tensor.dtype in FP8_TOPS:
            low, high = self._slots.take(step.checks, torch.float32, check)
            low.fill_(0.0)
            high.copy_(self._fp8(tensor))

    def _fp8(self, tensor: torch.Tensor) -> torch.Tensor:
        """Infinity where the tensor is bad, else 0: without waiting for a device."""
        bits = tensor.contiguous().view(torch.uint8) & 0x7F
        top = FP8_TOPS[tensor.dtype]
        bad = (bits > top).any()
        if self.rule.overflow:
            bad = bad | ((bits >= top).float().mean() > FP8_SHARE)
        return torch.where(bad, torch.inf, 0.0)

    def _assess(self, step: WatchedStep, tensor: torch.Tensor, part: str) -> Badness:
        return self.rule.assess(real_rows(step, tensor) if part == LANGUAGE else tensor, part)

    def alarm(self, step: WatchedStep, check: Check) -> Alarm | None:
        """Everything about a bad check; None if its counts say that nothing is wrong after all."""
        call = check.call
        common = (step, check.order, check.name, check.cls, check.part, check.number, check.role)
        if call is None:
            self.armed = check.name
            return Alarm(*common, None, (), (), check.before)
        results = tuple(outputs(call.result))
        bad = self._assess(step, dict(results)[check.role], check.part)
        if not bad:
            return None
        own = {address(tensor) for _, tensor in results}
        inputs = []
        for role, tensor in call.tap.inputs(call.args, call.kwargs):
            found = call.copies.get(role) if call.copies is not None else None
            if found is None and address(tensor) in own:
                inputs.append(Input(role, None, UNKNOWN))
                continue
            tensor = tensor if found is None else found
            if not tensor.is_floating_point():
                inputs.append(Input(role, tensor, UNCHECKED))
                continue
            counts = self._assess(step, tensor, check.part)
            if is_mask(role):  # -inf belongs there
                counts = Badness(counts.nan)
            was = step.seen.get(id(tensor))
            if counts and was is not None and was[1] <= call.begun and was[0]() is tensor:
                # It was good when it was checked as an output, and has been changed in place since (deferred mode).
                inputs.append(Input(role, None, GOOD))
            else:
                inputs.append(Input(role, tensor, BAD if counts else GOOD, counts))
        return Alarm(*common, bad, results, tuple(inputs), check.before)

    def raise_alarm(self, step: WatchedStep, check: Check) -> None:
        """Tells ``found``, and leaves the rest of the step alone: what follows a bad value is bad."""
        alarm = self.alarm(step, check)
        if alarm is None:
            return
        if self.now is step:
            self.now = None
        self._found(alarm)

    def _read(self, step: WatchedStep, hosts: dict[torch.dtype, torch.Tensor]) -> None:
        """Finds the first bad number of a step."""
        first: Check | None = None
        for dtype, numbers in hosts.items():
            limit = LIMITS[dtype]
            checks = step.checks[dtype]
            low, high = numbers[0, : len(checks)], numbers[1, : len(checks)]
            if not len(checks) or (bool(low.min() > -limit) and bool(high.max() < limit)):
                continue
            for check, a, b in zip(checks, low.tolist(), high.tolist(), strict=True):
                if self.rule.overflow:
                    bad = not (b < limit and (check.part == HEAD or a > -limit))
                else:
                    bad = b != b
                if bad and (first is None or check.order < first.order):
                    first = check
        if first is not None:
            self.raise_alarm(step, first)


_Entered = tuple[str, int, int, "str | None", "dict[str, torch.Tensor] | None"]
"""Of a call while it runs: name, number, the step's order, the part that ran before, copies of its inputs."""
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

    def forward(*args: Any, **kwargs: Any) -> Any:
        step = None if is_compiling() else watch.now
        return original(*args, **kwargs) if step is None else place.call(step, original, args, kwargs)

    return forward


class TapWatch:
    """The watch's side of one tap: what it has learnt about in-place changes, and the work before and after a call.

    leaf: the module has no children; others change nothing that a child does not change before them."""

    __slots__ = ("calls", "inplace", "paused", "tap", "watch")

    def __init__(self, watch: Watch, tap: Tap, leaf: bool):
        self.watch = watch
        self.tap = tap
        self.paused = Paused()
        self.calls = 0 if leaf else _LEARNING
        self.inplace: frozenset[str] = frozenset()

    def call(
        self, step: WatchedStep, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``original(*args, **kwargs)``, its outputs checked. A failure of the check ends the watch alone."""
        try:
            with self.paused if active_modes() else NOTHING:
                entered = self._enter(step, args, kwargs)
        except Exception as error:
            self.watch.fail(self.tap.names[0], error)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        try:
            with self.paused if active_modes() else NOTHING:
                self._leave(step, entered, args, kwargs, result)
        except Exception as error:
            self.watch.fail(self.tap.names[0], error)
        return result

    def _enter(self, step: WatchedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entered:
        tap = self.tap
        name = innermost(tap.names, step.stack)
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

    def _leave(
        self, step: WatchedStep, entered: _Entered, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
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
        seen, kept, call = step.seen, False, None
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
                if not kept:
                    kept = True
                    if self._may_keep(step, name, results):
                        call = KeptCall(tap, args, kwargs, result, copies, begun)
                watch.defer(step, x, Check(order, name, number, role, part, tap.cls, step.last, call))
            elif watch.is_bad(x, part):
                call = KeptCall(tap, args, kwargs, result, copies, begun)
                watch.raise_alarm(step, Check(order, name, number, role, part, tap.cls, step.last, call))
                if watch.now is not step:
                    return
            if known is None:
                seen[number_of] = (weakref.ref(tensor), order, order)
            else:
                seen[number_of] = (known[0], known[1], order)
            step.last = name

    def _may_keep(self, step: WatchedStep, name: str, results: list[tuple[str, torch.Tensor]]) -> bool:
        """Whether this call may be kept until the numbers are there."""
        watch = self.watch
        if watch.armed == name:
            return True
        for _, tensor in results:
            step.kept += tensor.nbytes
        return step.kept <= watch.keep_bytes

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[tuple[str, torch.Tensor]]) -> None:
        own = {address(tensor) for _, tensor in results}
        shared = [r for r, t in self.tap.inputs(args, kwargs) if t.is_floating_point() and address(t) in own]
        if shared:
            self.inplace = self.inplace | frozenset(shared)
