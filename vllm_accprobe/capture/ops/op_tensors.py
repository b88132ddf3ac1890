"""What is stored of one tensor of an operator's call, and what is only said of it.

The problem: arguments of operators are activations, which module taps have stored already; weights, the same in every
step; caches of gigabytes that hold other people's tokens; and memory that nobody has written to. The idea: each tensor
is put into one of these kinds by the memory it lies in. Activations go the way of all tensors, where the same bytes are
stored once per step; a weight's bytes once per run, and a large one is not read again while a sample of it is what it
was; the rest is skipped by name, with its shape. Not here: the VALUE that says it (op_values.py), when a call is taken
(dispatch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.core.sink import Sink, Ticket
from vllm_accprobe.capture.core.step_state import StepState
from vllm_accprobe.capture.taps.fast_path import Express, Sites
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.dump.stats import StatsCell

CACHE = "the KV cache"
FINGERPRINT = "a parameter, kept as a fingerprint"
_CARRIED = ("hash", "stats", "seg", "off", "nbytes", "shape", "dtype")
_SMALL = 1 << 18
"""Weights of so many bytes are hashed as often as they are seen: that is quicker than a sample."""
_ALIKE = 32
"""How many calls of an operator in one module and step are told apart when it comes to what is known of them."""
Event = dict[str, Any]


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 for one that has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class Memory:
    """Whose memory a tensor lies in, by the address of its storage. ``look`` is called once per step.

    named: gives (module path, name, tensor) of all parameters and buffers. caches: gives the KV cache's tensors.
    keep_parameters: whether payloads of parameters are kept.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, str, torch.Tensor]]] = tuple,
        caches: Callable[[], Iterable[torch.Tensor]] = tuple,
        keep_parameters: bool = True,
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


class TakenTensor(Ticket):
    """A tensor that was taken. ``digest``: its hash, for a device's tensor later; ``after``: told about it then."""

    __slots__ = ("_after", "_digest", "event")

    def __init__(self, event: Event | None = None, after: Callable[[str], None] | None = None) -> None:
        self._digest: str | None = None
        self._after = after
        self.event: Event = event if event is not None else {}

    @property
    def digest(self) -> str | None:  # type: ignore[override]
        return self._digest

    @digest.setter
    def digest(self, value: str | None) -> None:
        self._digest = value
        if self._after is not None and value is not None:
            self._after(value)

    def add_to(self, about: dict[str, Any]) -> None:
        """Adds what is known by now to the tensor's description in the call's line."""
        event = self.event
        stats = event.get("stats")
        if isinstance(stats, StatsCell):
            stats = stats.value
        if stats is not None:
            about["count"], about["min"], about["max"] = stats.count, stats.min, stats.max
            about["mean"], about["l2"] = stats.mean, stats.l2
            about["nan"], about["inf"] = stats.nan, stats.inf
        if isinstance(event.get("hash"), str):
            about["hash"] = event["hash"]


class Takes:
    """Stores tensors of operator calls in ``sink``. ``max_bytes``: larger ones are refused, weights excepted."""

    def __init__(self, sink: Sink, memory: Memory, max_bytes: int):
        self._sink = sink
        self._memory = memory
        self._max_bytes = max_bytes
        self._weights: dict[tuple[Any, ...], tuple[str, Event]] = {}
        # Operators' tensors have no rows and no layout; else they are like those of modules.
        self._express = Express(sink, lambda *_: None, lambda *_: (None, 0))
        self._sites: dict[tuple[str, int], Sites] = {}

    def forget_weights(self) -> None:
        """After weights were loaded anew."""
        self._weights.clear()

    def refuses(self, tensor: torch.Tensor, where: int) -> str | None:
        """Why a tensor's values are not looked at, or None. where: its storage's address."""
        if DTYPE_NAMES.get(tensor.dtype) is None or tensor.layout is not torch.strided:
            return f"not a plain tensor ({tensor.layout}, {tensor.dtype})".replace("torch.", "")
        if tensor.is_meta:
            return "without values (meta)"
        if where in self._memory.cached:
            return CACHE
        if tensor.nbytes > self._max_bytes and where not in self._memory.parameters:
            return f"larger than {self._max_bytes / 1e6:g} MB"
        if not self._memory.keep_parameters and where in self._memory.parameters:
            return FINGERPRINT
        return None

    def take(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool, weight: bool
    ) -> TakenTensor:
        """Takes ``tensor`` as it is now. keep: with its payload, else only hash and statistics. weight: it lies in a
        parameter, and nothing writes to it."""
        if weight and tensor.nbytes > _SMALL:
            return self._weight(state, tap, op, role, call, tensor, keep)
        if keep and self._sink.direct:
            digest = self._express.take(state, self._sites_of(tap, call), tap, op, role, call, tensor)
            if digest is not None:
                key = digest + DTYPE_NAMES[tensor.dtype]
                cell = self._sink.seen[key]
                if weight:
                    self._sink.lasting[key] = cell
                taken = TakenTensor({"hash": digest, "stats": cell})
                taken.digest = digest
                return taken
        taken = TakenTensor(self._line(state, tap, op, role, call))
        self._general(taken, tensor, keep, weight)
        return taken

    def take_changed(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool,
        before: Ticket, changed: Callable[[], None],
    ) -> TakenTensor:  # fmt: skip
        """Takes ``tensor`` after the call in role ``inplace.<role>`` if it is no longer what ``before`` saw, and then
        calls ``changed``."""
        role = f"inplace.{role}"
        if keep and self._sink.direct and before.digest is not None:
            digest = self._express.take(state, self._sites_of(tap, call), tap, op, role, call, tensor, before.digest)
            if digest is not None:
                if digest == before.digest:
                    return TakenTensor()
                changed()
                return TakenTensor({"hash": digest, "stats": self._sink.seen[digest + DTYPE_NAMES[tensor.dtype]]})
        event = self._line(state, tap, op, role, call)
        if keep:
            event["mutated"] = True
            self._sink.after(event, tensor, None, 0, before, lambda different: changed() if different else None)
        else:
            self._sink.look(
                event, tensor, TakenTensor(None, lambda digest: changed() if digest != before.digest else None)
            )
        return TakenTensor(event)

    def _sites_of(self, tap: str, call: int) -> Sites:
        """What is known of the tensors of this call: one module's calls of an operator differ, steps are alike."""
        key = tap, call % _ALIKE
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = {}
        return found

    def _line(self, state: StepState, tap: str, op: str, role: str, call: int) -> Event:
        seq = state.seq
        state.seq = seq + 1
        return {
            "event": "tensor", "step": state.number, "tap": tap, "class": op, "role": role, "call": call, "seq": seq,
            "rows": None, "row_dim": 0,
        }  # fmt: skip

    def _general(self, taken: TakenTensor, tensor: torch.Tensor, keep: bool, lasting: bool = False) -> None:
        if keep:
            self._sink.tensor(taken.event, tensor, None, 0, taken, lasting)
        else:
            self._sink.look(taken.event, tensor, taken)

    def _weight(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool
    ) -> TakenTensor:
        """A large weight: what its first line said, while it is the same memory and a sample of it the same bytes."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), keep)
        sample = _sample(tensor)
        known = self._weights.get(key)
        if known is None or known[0] != sample:
            taken = TakenTensor(self._line(state, tap, op, role, call))
            self._weights[key] = sample, taken.event
            self._general(taken, tensor, keep, True)
            return taken
        first = known[1]
        if keep:
            event = self._line(state, tap, op, role, call)
            self._sink.tensors += 1
            self._sink.line(lambda: event | {name: first[name] for name in _CARRIED if name in first})
        return TakenTensor(first)


def _sample(tensor: torch.Tensor) -> str:
    """A fixed sample of a host tensor's elements, as bytes; "" where the tensor is on a device, which would wait."""
    if tensor.device.type != "cpu":
        return ""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat[:: max(1, flat.numel() // 1024)].contiguous().view(torch.uint8).numpy().tobytes().hex()
