"""From a device to the host without stopping the device: pinned ring, side stream, a thread that waits.

The problem: a tap must not synchronise, yet the bytes have to reach the disk, and the model overwrites its tensors
in place. The idea: on the model's stream the tensor is cloned (cheap, ordered before whatever comes next), a side
stream copies the clone into a ring of pinned memory, and a thread waits for the copy's event before it hands the
bytes on. The ring's size is the back-pressure: when the disk is slower than the model, the forward waits for room,
on the host. torch.accelerator names streams and events for CUDA, NPU and XPU alike; without a device (tests) the
same path runs with plain copies. Not here: what the bytes mean (sink.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Callback = Callable[[Sequence[torch.Tensor]], None]


class _NoStream:
    """The stand-in for streams and events where tensors live in host memory: copies are finished when they return."""

    def fork(self) -> None: ...

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def done(self) -> Any:
        return None

    def keep(self, tensor: torch.Tensor) -> None: ...


class _SideStream:
    """One side stream of the accelerator, by the device-independent interface of torch >= 2.6."""

    def __init__(self, device: torch.device):
        self._side = torch.Stream(device=device)
        self._device = device

    def fork(self) -> None:
        """The side stream waits for all that the model's stream has been given so far."""
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        self._side.wait_event(event)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        if hasattr(self._side, "__enter__"):
            return self._side
        return _Switched(self._side)

    def done(self) -> Any:
        event = torch.Event(device=self._device)
        event.record(self._side)
        return event

    def keep(self, tensor: torch.Tensor) -> None:
        """The allocator must not reuse the clone before the side stream has read it."""
        tensor.record_stream(self._side)


class _Switched(contextlib.AbstractContextManager[Any]):
    """``with stream`` for torch versions whose torch.Stream is no context manager."""

    def __init__(self, stream: torch.Stream):
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *exc: object) -> None:
        torch.accelerator.set_stream(self._before)


class DeviceStaging:
    """Copies tensors to the host in order and calls back on its own thread when they have arrived.

    Args:
        device: where the model lives; "cpu" runs the same path without streams.
        capacity: bytes of pinned memory that may be in flight.
        failed: called once with the exception when a callback or a copy fails; everything after is dropped.
    """

    def __init__(self, device: torch.device, failed: Callable[[BaseException], None], capacity: int = 256 << 20):
        self._streams: _NoStream | _SideStream = _NoStream() if device.type == "cpu" else _SideStream(device)
        self._pin = device.type != "cpu"
        self._capacity = capacity
        self._ring = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._pin)
        self._head = 0  # next free byte
        self._used = 0
        self._room = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[Any, list[torch.Tensor], int, Callback] | None] = queue.SimpleQueue()
        self._failed = failed
        self._broken = False
        self._thread = threading.Thread(target=self._drain, name="accprobe-staging", daemon=True)
        self._thread.start()

    def stage(self, tensors: Sequence[torch.Tensor], callback: Callback) -> None:
        """Queues a snapshot of ``tensors`` as they are now; ``callback`` gets contiguous host copies, in call order.

        The copies are valid only during the callback. Blocks while the ring is full. Tensors of any device and stride.
        """
        if self._broken:
            return
        hosts: list[torch.Tensor] = []
        taken = 0
        clones: list[torch.Tensor] = []
        for tensor in tensors:
            # contiguous() copies a strided tensor already; only a dense one needs its own clone.
            clone = tensor.contiguous()
            clones.append(clone.clone() if clone.data_ptr() == tensor.data_ptr() else clone)
        if clones:
            self._streams.fork()
        with self._streams.on_side():
            for clone in clones:
                host, used = self._allocate(clone)
                taken += used
                host.copy_(clone, non_blocking=True)
                if clone.device.type != "cpu":
                    self._streams.keep(clone)
                hosts.append(host)
            done = self._streams.done() if clones else None
        self._queue.put((done, hosts, taken, callback))

    def close(self, timeout: float = 30.0) -> None:
        """Waits until everything queued has been delivered."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _allocate(self, like: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A host tensor for ``like`` in the ring, and how many ring bytes it takes (0: it has memory of its own)."""
        nbytes = like.numel() * like.element_size()
        size = -(-nbytes // 64) * 64
        if size == 0 or size > self._capacity // 2:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pin and size > 0), 0
        with self._room:
            skip = self._capacity - self._head if self._head + size > self._capacity else 0
            while self._used + skip + size > self._capacity and not self._broken:
                self._room.wait(1.0)
            start = 0 if skip else self._head
            self._head = (start + size) % self._capacity
            self._used += skip + size
        view = self._ring[start : start + nbytes].view(like.dtype).view(like.shape)
        return view, skip + size

    def _drain(self) -> None:
        while (item := self._queue.get()) is not None:
            done, hosts, taken, callback = item
            try:
                if done is not None:
                    done.synchronize()
                if not self._broken:
                    callback(hosts)
            except BaseException as error:
                self._broken = True
                self._failed(error)
            finally:
                with self._room:
                    self._used -= taken
                    self._room.notify_all()
