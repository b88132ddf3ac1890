"""Tasks come out in their order whatever becomes of workers: workers here are played."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from vllm_accprobe.comparison.distributed import LOST, Died, in_order
from vllm_accprobe.comparison.result import CompareError


class Played:
    """Ends tasks in a random order; ``deaths``: how often each task's worker dies."""

    who = "workers of the test"
    ahead = 6

    def __init__(self, deaths: dict[int, int], at_once: int = 4, seed: int = 0):
        self.left, self.at_once, self.random = Counter(deaths), at_once, random.Random(seed)
        self.begun: list[int] = []
        self.running: list[int] = []
        self.given = 0
        self.furthest = 0

    def start(self, number: int, task: str) -> bool:
        if len(self.running) >= self.at_once:
            return False
        self.furthest = max(self.furthest, number - self.given)
        self.begun.append(number)
        self.running.append(number)
        return True

    def ended(self) -> tuple[int, bytes | Died]:
        number = self.running.pop(self.random.randrange(len(self.running)))
        if self.left[number]:
            self.left[number] -= 1
            return number, Died("was unplugged")
        return number, f"task {number}".encode()


@pytest.mark.parametrize("seed", range(5))
def test_answers_come_in_the_order_of_tasks_and_none_begins_far_ahead(seed: int) -> None:
    crew = Played({0: LOST, 7: 1}, seed=seed)
    found = []
    for answer in in_order(crew, [str(i) for i in range(30)]):
        found.append(answer.decode())
        crew.given += 1
    assert found == [f"task {i}" for i in range(30)]
    assert Counter(crew.begun) == Counter(range(30)) + Counter({0: LOST, 7: 1})
    assert crew.furthest < crew.ahead


def test_a_task_that_kills_whoever_takes_it_ends_the_matter() -> None:
    crew = Played({3: LOST + 1})
    with pytest.raises(
        CompareError, match=r"^workers of the test died 3 times over one task; the last one was unplugged$"
    ):
        list(in_order(crew, [""] * 9))
    assert crew.begun.count(3) == LOST + 1


def test_nothing_to_do() -> None:
    assert list(in_order(Played({}), [])) == []
