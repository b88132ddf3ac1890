"""From a device to the host without stopping the device: pinned ring, side stream, a thread that waits.

The problem: a tap must not synchronise, yet the bytes have to reach the disk, and the model overwrites its tensors
in place. The idea: on the model's stream the tensor is cloned (cheap, ordered before whatever comes next), a side
stream copies the clone into a ring of pinned memory, and a thread waits for the copy's event before it hands the
bytes on. The ring's size is the back-pressure: when the disk is slower than the model, the forward waits for room,
on the host. torch.accelerator names streams and events for CUDA, NPU and XPU alike; without a device (tests) the
same path runs with plain copies. Not here: what the bytes mean (sink.py), the ring (staging_ring.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_accprobe.capture.core.staging_ring import RingPlace, StagingRing

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
        self._device = device
        self._ring = StagingRing(capacity, pin=device.type != "cpu")
        self._queue: queue.SimpleQueue[tuple[Any, StagingRing, list[RingPlace], Callback] | None] = queue.SimpleQueue()
        self._failed = failed
        self._broken = False
        self._thread = threading.Thread(target=self._drain, name="accprobe-staging", daemon=True)
        self._thread.start()

    def stage(self, tensors: Sequence[torch.Tensor], callback: Callback) -> None:
        """Queues a snapshot of ``tensors`` as they are now; ``callback`` gets contiguous host copies, in call order.

        The copies are valid only during the callback. Blocks while the ring is full: all tensors of a call together are
        less than half of it, or one. Tensors of any device and stride.
        """
        if self._broken:
            return
        ring = self._ring
        places = [ring.take(tensor) for tensor in tensors]
        copies = [_copied(tensor, place.near) for tensor, place in zip(tensors, places, strict=True)]
        if copies:
            self._streams.fork()
        with self._streams.on_side():
            for copy, place in zip(copies, places, strict=True):
                place.host.copy_(copy, non_blocking=True)
                if place.near is None and copy.device.type != "cpu":
                    self._streams.keep(copy)
            done = self._streams.done() if copies else None
        self._queue.put((done, ring, places, callback))

    def reserve(self, nbytes: int) -> None:
        """From now on ``nbytes`` of the device's memory, taken now, and as many of pinned memory are what may be in
        flight: no copy takes memory of the device that the engine may need by then."""
        self._ring = StagingRing(nbytes, pin=self._device.type != "cpu", near=self._device)

    def room(self, sizes: Sequence[int]) -> bool:
        """Whether tensors of so many bytes can be staged now without waiting."""
        return self._broken or self._ring.room(sizes)

    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._ring.idle()

    def close(self, timeout: float = 30.0) -> None:
        """Waits until everything queued has been delivered."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _drain(self) -> None:
        while (item := self._queue.get()) is not None:
            done, ring, places, callback = item
            try:
                if done is not None:
                    done.synchronize()
                if not self._broken:
                    callback([place.host for place in places])
            except BaseException as error:
                self._broken = True
                self._ring.give_up()
                self._failed(error)
            finally:
                ring.give_back(places)


def _copied(tensor: torch.Tensor, near: torch.Tensor | None) -> torch.Tensor:
    """A contiguous copy of ``tensor`` as it is now, on its own device: in ``near``, or in memory of its own."""
    if near is not None:
        return near.copy_(tensor)
    copy = tensor.contiguous()  # a strided tensor's is a copy already; only a dense one needs its own clone
    return copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
