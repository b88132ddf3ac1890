"""From a device to the host without stopping the device: a pinned ring, a side stream, a thread that waits.

The problem: a tap must not synchronise, yet the bytes have to reach the disk, and the model overwrites its tensors in
place. The idea: on the model's stream the tensor is cloned, which is ordered before whatever comes next; a side stream
copies the clone into a ring of pinned memory; a thread waits for the copy's event and hands the bytes on. Places of the
ring are taken and returned in the same order, and where a device's memory was reserved the clone lies at the same place
of a block there. The ring's size is the back-pressure: when the disk is slower than the model, the forward waits for
room, on the host. torch.accelerator names streams and events for CUDA, NPU and XPU alike; without a device (tests) the
same path runs with plain copies.

Not here: what the bytes mean (session.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

_ALIGN = 64


class RingPlace(NamedTuple):
    """Where one tensor's copies lie: ``near`` on its own device, None where none was set aside. taken, outside: bytes
    of the ring, and of memory of its own, to be given back."""

    near: torch.Tensor | None
    host: torch.Tensor
    taken: int
    outside: int


class StagingRing:
    """``capacity`` bytes; larger tensors than half of it get memory of their own, as many bytes again in flight, and
    one tensor more. One thread takes, one gives back.

    pin: the host's memory is page-locked. near: a device on which as many bytes are taken, now.
    """

    def __init__(self, capacity: int, pin: bool = False, near: torch.device | None = None):
        self.capacity = capacity
        self._pin = pin
        self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=pin)
        self._near = None if near is None else torch.empty(capacity, dtype=torch.uint8, device=near)
        self._head = 0  # next free byte
        self._used = 0
        self._outside = 0
        self._given_up = False
        self._changed = threading.Condition()

    def room(self, sizes: Iterable[int]) -> bool:
        """Whether tensors of so many bytes can be taken, one after the other, without waiting."""
        with self._changed:
            head, used, outside = self._head, self._used, self._outside
            for size in map(self._rounded, sizes):
                if self._is_large(size):
                    if outside > self.capacity:
                        return False
                    outside += size
                else:
                    skip = self._skipped(head, size)
                    if used + skip + size > self.capacity:
                        return False
                    head, used = self._after(head, skip, size), used + skip + size
        return True

    def idle(self) -> bool:
        """Whether all places were given back."""
        with self._changed:
            return not self._used and not self._outside

    def take(self, like: torch.Tensor) -> RingPlace:
        """Places for ``like``; waits for them."""
        nbytes = like.numel() * like.element_size()
        size = self._rounded(nbytes)
        if not size or self._is_large(size):
            with self._changed:
                while self._outside > self.capacity and not self._given_up:
                    self._changed.wait(1.0)
                self._outside += size
            host = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pin and size > 0)
            return RingPlace(None, host, 0, size)
        with self._changed:
            skip = self._skipped(self._head, size)
            while self._used + skip + size > self.capacity and not self._given_up:
                self._changed.wait(1.0)
            start = 0 if skip else self._head
            self._head = self._after(self._head, skip, size)
            self._used += skip + size
        host, near = (
            None if block is None else block[start : start + nbytes].view(like.dtype).view(like.shape)
            for block in (self._host, self._near)
        )
        assert host is not None
        return RingPlace(near, host, skip + size, 0)

    def give_back(self, places: Iterable[RingPlace]) -> None:
        """These are no longer read, the oldest that were taken."""
        with self._changed:
            for place in places:
                self._used -= place.taken
                self._outside -= place.outside
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nothing will be given back in time; nothing waits any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    @staticmethod
    def _rounded(nbytes: int) -> int:
        return -(-nbytes // _ALIGN) * _ALIGN

    def _is_large(self, size: int) -> bool:
        return size > self.capacity // 2

    def _skipped(self, head: int, size: int) -> int:
        """Bytes left out at the end of the block, since a tensor lies in one piece."""
        return self.capacity - head if head + size > self.capacity else 0

    def _after(self, head: int, skip: int, size: int) -> int:
        return ((0 if skip else head) + size) % self.capacity


Callback = Callable[[Sequence[torch.Tensor]], object]


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
        self._thread = threading.Thread(target=self._deliver, name="accprobe-staging", daemon=True)
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

    def _deliver(self) -> None:
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
