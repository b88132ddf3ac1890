"""The detour of a device's tensors, with plain copies for want of a device: everything arrives, whole and in order."""

from __future__ import annotations

import torch

from vllm_accprobe.capture.core.staging import DeviceStaging


def test_a_ring_smaller_than_the_traffic_gives_every_tensor_whole() -> None:
    """Back-pressure: the ring holds four of these tensors, a hundred pass through, some larger than the ring."""
    seen: list[int] = []

    def arrived(hosts: object) -> None:
        (host,) = hosts  # type: ignore[misc]
        assert (host == host.reshape(-1)[0]).all()
        seen.append(int(host.reshape(-1)[0]))

    failures: list[BaseException] = []
    staging = DeviceStaging(torch.device("cpu"), failures.append, capacity=1 << 16)
    for number in range(100):
        size = (1 << 17) if number % 10 == 0 else 3000 + 64 * number
        staging.stage((torch.full((size,), number, dtype=torch.int32),), arrived)
    staging.close()
    assert failures == []
    assert seen == list(range(100))
