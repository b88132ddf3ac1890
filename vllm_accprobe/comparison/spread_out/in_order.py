"""Batches of units, done somewhere else by workers that may die, in the order of the plan.

The problem: a worker is killed (no memory, a machine that goes away), and neither that nor the order in which workers
end may change the outcome, nor may what is ready early pile up behind one slow batch. The idea: a `Crew` only starts a
task and tells which one ended; here is kept which tasks wait, how often one was lost (LOST times more it is done again)
and what is ready but not yet due; no task begins that is further ahead than a fixed number.
Not here: workers (processes.py, cluster.py), what they do (worker.py).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from vllm_accprobe.comparison.result import CompareError

LOST = 2
"""How often a task whose worker died is done again: who dies of the same task three times dies of the task."""
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True)
class Died:
    """In place of an answer: the worker has gone. why: how, as the end of a sentence."""

    why: str


class Crew(Protocol[T_contra]):
    """Workers. who: what a message calls them. ahead: so many tasks may be begun or ready before the first that is due
    has ended."""

    who: str

    @property
    def ahead(self) -> int: ...

    def start(self, number: int, task: T_contra) -> bool:
        """False where no worker that could do it is free. Raises CompareError where none ever will be."""

    def ended(self) -> tuple[int, bytes | Died]:
        """Waits for a task that was started: its number and answer. Raises CompareError for what no second attempt
        mends."""


def in_order(crew: Crew[T], tasks: Sequence[T]) -> Iterator[bytes]:
    """The answers to ``tasks``, in their order. Raises CompareError."""
    waiting = list(range(len(tasks)))
    lost = [0] * len(tasks)
    ready: dict[int, bytes] = {}
    due = 0
    while due < len(tasks):
        begun = [i for i in _within(waiting, due + crew.ahead) if crew.start(i, tasks[i])]
        for i in begun:
            waiting.remove(i)
        number, answer = crew.ended()
        if isinstance(answer, Died):
            lost[number] += 1
            if lost[number] > LOST:
                raise CompareError(f"{crew.who} died {lost[number]} times over one task; the last one {answer.why}")
            insort(waiting, number)
        else:
            ready[number] = answer
        while due in ready:
            yield ready.pop(due)
            due += 1


def _within(waiting: list[int], end: int) -> list[int]:
    return [i for i in waiting if i < end]
