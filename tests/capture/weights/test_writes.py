"""Writes are told from torch's own calls, whatever memory they land in; what only looks at memory costs nothing."""

from __future__ import annotations

import pytest
import torch

from vllm_accprobe.capture.weights.history import WriteWatch


def test_rows_that_were_written_are_told_and_memory_that_was_empty() -> None:
    with WriteWatch() as watch:
        made = torch.empty(4, 8)
        part = made.narrow(0, 1, 2)
        part.copy_(torch.ones(2, 8))
        part[0].fill_(2.0)
    assert watch.failed is None
    assert watch.of(made) == (((1, 2, 2), (2, 3, 1)), True)
    assert watch.of(torch.zeros(2, 2)) == ((), False)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_copy_that_its_operator_calls_a_view_is_new_memory(mode: type) -> None:
    """reshape and contiguous may copy: the copy must not go on with the writes of what lay there before."""
    with mode(), WriteWatch() as watch:
        source = torch.ones(4, 8)
        copied = source.t().reshape(4, 8)
        kept = watch._storages.get(copied.untyped_storage().data_ptr())
        assert kept is not None
        assert kept.writes == []
        view = source.view(8, 4)
        view[0].zero_()
    assert watch.of(source) == (((0, 1, 1),), False)
    assert watch.of(copied) == ((), False)


def test_a_watch_that_is_off_knows_nothing() -> None:
    with WriteWatch(on=False) as watch:
        made = torch.empty(4, 8).fill_(1.0)
    assert watch.of(made) == (None, False)
