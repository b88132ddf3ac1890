"""What follows from bytes that are not those that were written."""

import numpy as np
import pytest

from vllm_accprobe.capture.states.ledger import GroupLedger, picked
from vllm_accprobe.dump.journal import CHANGED, OTHER, STALE


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def filled() -> GroupLedger:
    """Two layers, blocks 3 and 5 written twice by requests 0 and 1."""
    ledger = GroupLedger(2, 8)
    for i in range(2):
        ledger.wrote(0, np.array([3, 5]), numbers(30 + i, 50 + i))
        ledger.written_by(np.array([3]), 0, i, 0, 4)
        ledger.written_by(np.array([5]), 1, i, 0, 4)
    return ledger


@pytest.mark.parametrize(
    ("number", "kind"), [(30, STALE), (51, OTHER), (99, CHANGED)], ids=["older", "another block's", "nobody's"]
)
def test_cases_are_told_apart(number: int, kind: str) -> None:
    ledger = filled()
    assert ledger.read(0, np.array([3]), numbers(number)) == [0]
    found = ledger.explain(0, 3, number)
    assert (found.kind, found.block) == (kind, 3)
    assert found.other == (5 if kind == OTHER else -1)
    assert ledger.read(0, np.array([3]), numbers(number)) == []  # said once


def test_each_block_has_its_turn() -> None:
    blocks = np.arange(100)
    turns = [picked(blocks, step, 2, 16) for step in range(16)]
    assert sorted(np.concatenate(turns).tolist()) == blocks.tolist()
    assert picked(blocks, 0, 3, 16).tolist() == turns[1].tolist()  # layers take different ones


def test_events_are_the_last_ones_since_a_write() -> None:
    ledger = filled()
    for step in range(9):
        ledger.happened([3], step, "prefix hit")
    assert [step for step, _ in ledger.events[3]] == list(range(3, 9))
    ledger.written_by(np.array([3]), 0, 9, 5, 5)
    assert 3 not in ledger.events
