"""Where a step's reductions put their numbers on a device, and how these come to the host without anybody waiting.

The problem: one number per operator, read at once, would stop the device at every operator. The idea: a buffer that is
there from the start, a copy into pinned memory at the step's end, and an event that says when it has arrived. Not here:
what the numbers mean (watch.py).
"""

from __future__ import annotations

from typing import Any

import torch


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
