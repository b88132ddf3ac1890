"""Memory for copies that are on their way from a device to the host, used in turn.

The problem: what is copied must not be written over before it has been used, and memory for it must not grow. The idea:
one block of (pinned) host memory from which places are taken and given back in the same order, and, where a device's
memory was set aside for it, a block of the same size there: a tensor is first copied to its place on the device, which
the model's own stream orders before whatever the model writes next, and from there to the same place on the host. A
place is only given back when nobody reads it on either side. Who finds no place waits, or asks before. Not here:
streams and events (device_staging.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

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
        """Nobody reads these any more, the oldest that were taken."""
        with self._changed:
            for place in places:
                self._used -= place.taken
                self._outside -= place.outside
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nothing will be given back in time; nobody waits any more."""
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
