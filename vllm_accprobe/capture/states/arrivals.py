"""Numbers of a device arrive later; the books are kept in order all the same.

The problem: a ledger's entries depend on each other (a read is held against the last write), and on a device none of
their numbers is known when the kernels that make them are launched; waiting would stop the model. The idea: everything
that touches the books is a small function. In host memory it is called at once. With a device it is put into a queue
behind the copy that it needs, into memory that is used again, and the queue is worked off in order when that step's
copies have arrived: the books are the same, some steps later. Not here: what the functions do (observer.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.states.pages import Pages

_SLOTS = 1 << 16
"""Numbers of one step that may be on their way, 8 bytes each; what does not fit is counted and not looked at."""
_STEPS = 4
"""Steps that may be on their way before one is waited for."""


class Arrivals:
    """The queue of one engine. device: where its caches are; None or a CPU: nothing is queued."""

    def __init__(self, device: torch.device | None = None, staged: bool = False):
        self.direct = not staged and (device is None or device.type == "cpu")
        self.lost = 0
        self._device = device or torch.device("cpu")
        self._now: list[Callable[[], None]] = []
        self._waiting: deque[tuple[Any, list[Callable[[], None]]]] = deque()
        self._rings: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turn = self._used = 0

    def do(self, what: Callable[[], None]) -> None:
        """Calls ``what`` when everything before it has been done."""
        if self.direct:
            what()
        else:
            self._now.append(what)

    def hashes(self, pages: Pages, blocks: np.ndarray, take: Callable[[np.ndarray], None]) -> None:
        """Gives ``take`` the number of each of ``blocks`` as they are now, uint64 [n]."""
        if self.direct:
            take(pages.hashes(blocks))
            return
        n = len(blocks)
        if self._used + n > _SLOTS:
            self.lost += n
            return
        numbers, host = self._ring()
        part = slice(self._used, self._used + n)
        self._used += n
        at = torch.from_numpy(np.ascontiguousarray(blocks, np.int64))
        if self._device.type != "cpu":
            at = at.pin_memory().to(self._device, non_blocking=True)
        pages.sums(at, numbers[part])
        self._now.append(lambda: take(host[part].numpy().view(np.uint64)))

    def bring(self, tensors: Sequence[torch.Tensor], take: Callable[[Sequence[np.ndarray]], None]) -> None:
        """Gives ``take`` small integer tensors as they are now."""
        if self.direct or all(one.device.type == "cpu" for one in tensors):
            take([one.numpy() for one in tensors]) if self.direct else self._keep(tensors, take)
            return
        hosts = [one.detach().clone().to("cpu", non_blocking=True) for one in tensors]
        self._now.append(lambda: take([one.numpy() for one in hosts]))

    def _keep(self, tensors: Sequence[torch.Tensor], take: Callable[[Sequence[np.ndarray]], None]) -> None:
        kept = [one.numpy().copy() for one in tensors]
        self._now.append(lambda: take(kept))

    def _ring(self) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._rings) <= self._turn:
            pinned = self._device.type != "cpu"
            here = torch.zeros(_SLOTS, dtype=torch.int64, device=self._device)
            self._rings.append((here, torch.zeros(_SLOTS, dtype=torch.int64, pin_memory=pinned)))
        return self._rings[self._turn]

    # --- steps -------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """What this step has queued is copied; earlier steps that have arrived are worked off."""
        if self.direct:
            return
        if self._now:
            event = None
            if self._used:
                numbers, host = self._ring()
                host[: self._used].copy_(numbers[: self._used], non_blocking=True)
            if self._device.type != "cpu":
                event = torch.get_device_module(self._device).Event()
                event.record()
            self._waiting.append((event, self._now))
            self._now, self._used = [], 0
            self._turn = (self._turn + 1) % (_STEPS + 1)
        while self._waiting and (len(self._waiting) > _STEPS or self._arrived(self._waiting[0][0])):
            self._work_off()

    def close(self) -> None:
        """Waits for what is on its way."""
        self.end_step()
        while self._waiting:
            self._work_off()

    @staticmethod
    def _arrived(event: Any) -> bool:
        return event is None or bool(event.query())

    def _work_off(self) -> None:
        event, todo = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        for what in todo:
            what()
