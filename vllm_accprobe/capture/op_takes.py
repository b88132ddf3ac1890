"""What is stored of one tensor of an operator's call, and what is only said of it.

The problem: arguments of operators are activations, which module taps have stored already; weights, the same in every
step; caches of gigabytes that hold other people's tokens; and memory that nobody has written to. The idea: each tensor
is put into one of these kinds by the memory it lies in. Activations go the way of all tensors, where the same bytes are
stored once per step; a weight is hashed and stored once per run, and later lines repeat what the first one said; the
rest is skipped by name, with its shape. Not here: the VALUE that says it (op_values.py), when a call is taken (ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm_accprobe.capture.memory import DTYPE_NAMES
from vllm_accprobe.capture.sink import Sink, Ticket
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.dump.stats import StatsCell

CACHE = "the KV cache"
FINGERPRINT = "a parameter, kept as a fingerprint"
_CARRIED = ("hash", "stats", "seg", "off", "nbytes", "shape", "dtype")
Event = dict[str, Any]


class Memory:
    """Whose memory a tensor lies in, by the address of its storage. ``look`` is called once per step.

    named: gives (module path, name, tensor) of all parameters and buffers. caches: gives the KV cache's tensors.
    keep_parameters: whether payloads of parameters are in the dump.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, str, torch.Tensor]]],
        caches: Callable[[], Iterable[torch.Tensor]],
        keep_parameters: bool,
    ):
        self._named = named
        self._caches = caches
        self.keep_parameters = keep_parameters
        self.parameters: dict[int, str] = {}
        self.cached: set[int] = set()
        self.fresh: set[int] = set()
        """Storages that were allocated in this step and that no operator has written to since."""

    def look(self) -> None:
        """Reads the addresses anew: weights and caches may have moved (sleep mode, reloading)."""
        self.fresh.clear()
        self.cached = {address(t) for t in self._caches()} - {0}
        self.parameters = {
            where: f"{path or ROOT_TAP}/param.{name}"
            for path, name, tensor in self._named()
            if (where := address(tensor)) and where not in self.cached
        }


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 for one that has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class Takes:
    """Stores tensors of operator calls in ``sink``, or only looks at them (``keep`` False)."""

    def __init__(self, sink: Sink, memory: Memory, max_bytes: int):
        self._sink = sink
        self._memory = memory
        self._max_bytes = max_bytes
        self._weights: dict[tuple[Any, ...], Event] = {}

    def forget_weights(self) -> None:
        """After weights were loaded anew."""
        self._weights.clear()

    def refuses(self, tensor: torch.Tensor) -> str | None:
        """Why a tensor's values are not looked at, or None."""
        if DTYPE_NAMES.get(tensor.dtype) is None or tensor.layout is not torch.strided or tensor.is_quantized:
            return f"not a plain tensor ({tensor.layout}, {tensor.dtype})".replace("torch.", "")
        if tensor.device.type == "meta":
            return "without values (meta)"
        where = address(tensor)
        if where and where in self._memory.cached:
            return CACHE
        if tensor.nbytes > self._max_bytes and where not in self._memory.parameters:
            return f"larger than {self._max_bytes / 1e6:g} MB"
        if not self._memory.keep_parameters and where in self._memory.parameters:
            return FINGERPRINT
        return None

    def take(self, event: Event, tensor: torch.Tensor, keep: bool, written: bool) -> Ticket:
        """Takes ``tensor`` as it is now. ``event``: its line, which gets hash and statistics. ``written``: the operator
        may write to it. The ticket gets its hash."""
        ticket = Ticket()
        if not written and address(tensor) in self._memory.parameters:
            self._weight(event, tensor, keep, ticket)
        elif keep:
            self._sink.tensor(event, tensor, None, 0, ticket)
        else:
            self._sink.look(event, tensor, ticket)
        return ticket

    def _weight(self, event: Event, tensor: torch.Tensor, keep: bool, ticket: Ticket) -> None:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), keep)
        first = self._weights.get(key)
        if first is None:
            self._weights[key] = event
            if keep:
                self._sink.tensor(event, tensor, None, 0, ticket)
            else:
                self._sink.look(event, tensor, ticket)
            return
        if not keep:
            event["like"] = first
            return

        def line() -> Event:
            event.update({name: first[name] for name in _CARRIED if name in first})
            return event

        self._sink.tensors += 1
        self._sink.line(line)


def said(event: Event, about: dict[str, Any]) -> None:
    """Adds what the line of a tensor says by now to its description in the call's line."""
    event = event.get("like", event)
    stats = event.get("stats")
    if isinstance(stats, StatsCell):
        stats = stats.value
    if stats is not None:
        for name in ("count", "min", "max", "mean", "l2", "nan", "inf"):
            about[name] = getattr(stats, name)
    if isinstance(event.get("hash"), str):
        about["hash"] = event["hash"]
