"""Calls that wait to be judged together: how many, and whose crash it is when one is judged."""

from collections.abc import Iterator
from typing import Any

import pytest

from vllm_accprobe.dump.schema import REPLICATED, Record
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.run.check_calls import check_calls
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.result_row import SKIP


def record(*shape: int) -> Record:
    return Record(0, 0, "t", "T", "input.0", 0, 0, "float32", shape, None, 0, None, None, REPLICATED, None)


@pytest.mark.parametrize(("shape", "most"), [((1 << 20,), 4), ((152_000,), 28), ((), 4096)])
def test_few_calls_wait_whatever_they_read_and_however_little_they_give(shape: tuple[int, ...], most: int) -> None:
    calls, read, waited, events = 10_000, 0, 0, []

    def each() -> Iterator[tuple[Captured, Any]]:
        nonlocal read
        for n in range(calls):
            c = Captured("sampler", 0, 0, n, Call("sampler", "Sampler"), {"input.0": record(*shape)})
            read += 1
            events.append("read")
            yield c, [without_verdict(c, "", None, SKIP, "no reference")]

    found = []
    for c, rows in check_calls(None, each(), lambda: events.append("together")):  # type: ignore[arg-type]
        assert len(rows) == 1
        found.append(c.call)
        waited = max(waited, read - len(found))
    assert found == list(range(calls))
    assert most // 2 <= waited <= most


def test_a_crash_while_one_is_judged_is_not_the_next_ones() -> None:
    events: list[str] = []

    def each() -> Iterator[tuple[Captured, Any]]:
        for n in range(3):
            events.append(f"begins {n}")
            c = Captured("t", 0, 0, n, Call("t", "T"), {"input.0": record(1 << 23)})
            yield c, [without_verdict(c, "", None, SKIP, "no reference")]

    for c, _ in check_calls(None, each(), lambda: events.append("together")):  # type: ignore[arg-type]
        events.append(f"judged {c.call}")
    assert events == ["begins 0", "begins 1", "together", "judged 0", "begins 2", "together", "judged 1", "together",
                      "judged 2"]  # fmt: skip
