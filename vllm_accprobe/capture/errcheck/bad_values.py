"""What makes a tensor bad (NaN, Inf, values at the end of the dtype's range), and the reductions of a step that find
it.

What makes a tensor bad: NaN, Inf, values at the end of the dtype's range; where, and how many.

The problem: -inf is an error in a hidden state and meant in a mask, and an 8-bit float reaches its maximum on purpose.
The idea: one definition for the exact counts and for the elements, used only once something is known to be wrong:

- NaN, in any floating dtype.
- Overflow: Inf, or a magnitude of at least the dtype's largest finite value. Where rows become logits, only on the
  positive side: tokens are forbidden with large negative numbers.
- 8-bit floats: overflow when more than a twentieth of the elements lie at the maximum, since a dynamic scale puts the
  largest one there.

Where a step's reductions put their numbers on a device, and how these come to the host without anybody waiting.

The problem: one number per operator, read at once, would stop the device at every operator. The idea: a buffer that is
there from the start, a copy into pinned memory at the step's end, and an event that says when it has arrived. Not here:
what the numbers mean (watch.py).

What errcheck knows of a step while it runs, of a call that it holds, and of a call that is bad.

Not here: the fused reduction that notices (watch.py), what is done with it (watch.py).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_accprobe.capture.core.session import HEAD
from vllm_accprobe.capture.taps.hooks import Tap

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
    """The first bad output of a step. outputs: (role, tensor) of the call, empty where it was not held."""

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
        "calls", "checks", "held", "inside", "last", "note", "number", "order", "padded", "rows", "seen",
        "stack",
    )  # fmt: skip

    def __init__(self, number: int, rows: int, note: Any = None):
        self.number = number
        self.rows = rows
        self.note = note
        self.padded = rows
        self.order = 0
        self.held = 0
        self.last = ""
        self.inside: str | None = None
        self.stack: list[str] = []
        self.calls: dict[str, int] = {}
        self.seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        """Checked outputs by identity: the object, and when it was checked first and last."""
        self.checks: dict[torch.dtype, list[Check]] = {}


class HeldCall(NamedTuple):
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
    call: HeldCall | None


@dataclass
class PendingStep:
    step: WatchedStep
    hosts: dict[torch.dtype, torch.Tensor]
    event: Any


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


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
