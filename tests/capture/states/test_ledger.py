"""What follows from bytes that are not those that were written."""

import numpy as np
import pytest

from vllm_accprobe.capture.states.ledger import GroupLedger
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
