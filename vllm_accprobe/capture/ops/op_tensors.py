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
from vllm_accprobe.capture.core.sink import Sink
from vllm_accprobe.capture.core.step_state import StepState, Ticket
from vllm_accprobe.capture.taps.fast_path import Express, Sites
from vllm_accprobe.dump.journal.tensor_lines import TensorHead, last, told
from vllm_accprobe.dump.opcalls import about_bytes
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.dump.stats import StatsCell

CACHE = "the KV cache"
FINGERPRINT = "a parameter, kept as a fingerprint"
_SMALL = 1 << 18
"""Weights of so many bytes are hashed as often as they are seen: that is quicker than a sample."""
_ALIKE = 32
"""How many calls of an operator in one module and step are told apart when it comes to what is known of them."""


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
    """A tensor that was taken. ``cell``: of its bytes, for a device's tensor later; ``after``: called then."""

    __slots__ = ("_after", "cell")

    def __init__(self, cell: StatsCell | None = None, after: Callable[[StatsCell], None] | None = None) -> None:
        self.digest = None if cell is None else cell.hash
        self.cell = cell
        self._after = after

    def told(self, cell: StatsCell) -> None:
        """The cell of its bytes is known."""
        self.digest, self.cell = cell.hash, cell
        if self._after is not None:
            self._after(cell)

    def add_to(self, about: dict[str, Any]) -> None:
        """Adds what is known by now to the tensor's description in the call's line."""
        if self.cell is not None:
            about |= about_bytes(self.cell)


class Takes:
    """Stores tensors of operator calls in ``sink``. ``max_bytes``: larger ones are refused, weights excepted."""

    def __init__(self, sink: Sink, memory: Memory, max_bytes: int):
        self._sink = sink
        self._memory = memory
        self.max_bytes = max_bytes
        self._weights: dict[tuple[Any, ...], tuple[str, TakenTensor]] = {}
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
        if tensor.nbytes > self.max_bytes and where not in self._memory.parameters:
            return f"larger than {self.max_bytes / 1e6:g} MB"
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
                return TakenTensor(cell)
        return self._general(self._head(state, tap, op, role, call), tensor, keep, weight)

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
                return TakenTensor(self._sink.seen[digest + DTYPE_NAMES[tensor.dtype]])
        head = self._head(state, tap, op, role, call, mutated=True)
        if not keep:
            taken = TakenTensor(None, lambda cell: changed() if cell.hash != before.digest else None)
            self._sink.look(head, tensor, taken)
            return taken
        taken = TakenTensor()
        self._sink.after(head, tensor, None, before, lambda different: changed() if different else None, taken)
        return taken

    def _sites_of(self, tap: str, call: int) -> Sites:
        """What is known of the tensors of this call: one module's calls of an operator differ, steps are alike."""
        key = tap, call % _ALIKE
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = {}
        return found

    @staticmethod
    def _head(state: StepState, tap: str, op: str, role: str, call: int, mutated: bool = False) -> TensorHead:
        seq = state.seq
        state.seq = seq + 1
        return TensorHead(state.number, tap, op, role, call, seq, mutated=mutated)

    def _general(self, head: TensorHead, tensor: torch.Tensor, keep: bool, lasting: bool) -> TakenTensor:
        taken = TakenTensor()
        if keep:
            self._sink.tensor(head, tensor, None, taken, lasting)
        else:
            self._sink.look(head, tensor, taken)
        return taken

    def _weight(
        self, state: StepState, tap: str, op: str, role: str, call: int, tensor: torch.Tensor, keep: bool
    ) -> TakenTensor:
        """A large weight: what is known of it, while it is the same memory and a sample of it the same bytes."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), keep)
        sample = _sample(tensor)
        known = self._weights.get(key)
        if known is None or known[0] != sample:
            taken = self._general(self._head(state, tap, op, role, call), tensor, keep, True)
            self._weights[key] = sample, taken
            return taken
        taken = known[1]
        if keep:
            event = self._head(state, tap, op, role, call).line(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            self._sink.tensors += 1
            self._sink.line(lambda: None if taken.cell is None else last(event | told(taken.cell), "shape", "dtype"))
        return taken


def _sample(tensor: torch.Tensor) -> str:
    """A fixed sample of a host tensor's elements, as bytes; "" where the tensor is on a device, which would wait."""
    if tensor.device.type != "cpu":
        return ""
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat[:: max(1, flat.numel() // 1024)].contiguous().view(torch.uint8).numpy().tobytes().hex()
