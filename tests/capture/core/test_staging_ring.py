"""The ring: places come back in order, who asks before never waits, and nothing is written over that is still read."""

import threading
from collections import deque

import torch

from vllm_accprobe.capture.core.staging import DeviceStaging, RingPlace, StagingRing

CPU = torch.device("cpu")


def test_who_was_told_that_there_is_room_does_not_wait_and_the_others_would() -> None:
    torch.manual_seed(1)
    ring = StagingRing(1 << 12, near=CPU)
    flying: deque[tuple[list[RingPlace], int]] = deque()
    told = {True: 0, False: 0}
    for number in range(2000):
        sizes = torch.randint(1, 1200, (int(torch.randint(1, 4, ())),)).tolist()
        room = ring.room(sizes)
        assert ring.idle() == (not flying)
        told[room] += 1
        if room:
            places = []
            thread = threading.Thread(target=lambda s=sizes, p=places: p.extend(take(ring, s)), daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
            for place in places:
                assert place.near is not None
                assert place.near.data_ptr() % 64 == place.host.data_ptr() % 64 == 0
                place.host.fill_(number % 251)
                place.near.fill_(number % 251)
            flying.append((places, number % 251))
        if not room or len(flying) > 3:
            places, value = flying.popleft()
            assert all(bool((p.host == value).all() and (p.near == value).all()) for p in places)  # type: ignore[operator]
            ring.give_back(places)
    assert min(told.values()) > 100


def take(ring: StagingRing, sizes: list[int]) -> list[RingPlace]:
    return [ring.take(torch.empty(size, dtype=torch.uint8)) for size in sizes]


def test_large_tensors_have_memory_of_their_own_but_not_any_number_of_them() -> None:
    ring = StagingRing(1 << 10, near=CPU)
    (first,) = take(ring, [4000])
    assert first.near is None
    assert not ring.room([4000])
    assert ring.room([100]), "a small one has its place"
    done = threading.Event()
    threading.Thread(target=lambda: (take(ring, [4000]), done.set()), daemon=True).start()
    assert not done.wait(0.1)
    ring.give_back([first])
    assert done.wait(10)


def test_nobody_waits_for_a_ring_that_is_given_up() -> None:
    ring = StagingRing(1 << 10)
    take(ring, [500, 500])
    done = threading.Event()
    threading.Thread(target=lambda: (take(ring, [500]), done.set()), daemon=True).start()
    assert not done.wait(0.1)
    ring.give_up()
    assert done.wait(10)


def test_each_copy_arrives_whole_and_in_its_order_while_the_ring_is_full_or_changes() -> None:
    """A buffer that is written anew after each call, read by a slow thread; some are larger than the ring, which holds
    four of the others and is made smaller in the middle."""
    seen: list[int] = []
    failures: list[BaseException] = []
    slow = threading.Event()

    def arrived(hosts: object) -> None:
        slow.wait(0.001)
        (host,) = hosts  # type: ignore[misc]
        assert (host == host[0, 0]).all()
        seen.append(int(host[0, 0]))

    staging = DeviceStaging(CPU, failures.append, capacity=1 << 16)
    small, large = (torch.empty(n, n, dtype=torch.int32) for n in (60, 256))
    for number in range(200):
        if number == 50:
            staging.reserve(1 << 15)
        buffer = large if number % 10 == 0 else small
        buffer.fill_(number)
        staging.stage((buffer.t() if number % 2 else buffer,), arrived)
    staging.close()
    assert failures == []
    assert seen == list(range(200))
