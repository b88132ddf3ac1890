"""Numbers that come at once, and numbers that come steps later: the same, in the same order."""

import numpy as np
import pytest
import torch
from support.blocks import word_sums

from vllm_accprobe.capture.states.ledger import Arrivals, Pages


@pytest.mark.parametrize("staged", [False, True])
def test_everything_happens_in_its_order(staged: bool) -> None:
    cache = torch.arange(64, dtype=torch.int32).reshape(4, 16)
    pages, arrivals, seen = Pages([cache], 4), Arrivals(staged=staged), []
    for step in range(7):
        arrivals.do(lambda step=step: seen.append(("begin", step)))
        arrivals.hashes(pages, np.array([1, 3]), lambda numbers, step=step: seen.append((step, numbers.tolist())))
        arrivals.bring([cache[0, :2]], lambda hosts, step=step: seen.append((step, hosts[0].tolist())))
        cache += 1
        arrivals.end_step()
    arrivals.close()
    assert [one for one in seen if one[0] == "begin"] == [("begin", step) for step in range(7)]
    assert [one[0] for one in seen if one[0] != "begin"] == [step for step in range(7) for _ in range(2)]
    given = [one[1] for one in seen if one[0] != "begin"][1::2]
    assert given == [[step, step + 1] for step in range(7)]  # as they were, not as they are when they are looked at
    numbers = [one[1] for one in seen if one[0] != "begin"][::2]
    if staged:
        first = np.arange(64, dtype=np.int32).reshape(4, 16)
        assert numbers == [word_sums((first + step)[[1, 3]]).tolist() for step in range(7)]
    else:
        assert len({tuple(one) for one in numbers}) == 7


def test_what_does_not_fit_is_counted() -> None:
    pages, arrivals, seen = Pages([torch.zeros(4, 4, dtype=torch.int32)], 4), Arrivals(staged=True), []
    arrivals.hashes(pages, np.zeros(1 << 16, np.int64), lambda numbers: seen.append(len(numbers)))
    arrivals.hashes(pages, np.array([0]), lambda numbers: seen.append(len(numbers)))
    arrivals.close()
    assert seen == [1 << 16]
    assert arrivals.lost == 1
