"""Metadata held against the schedule: each number that can be stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_accprobe.capture.states.checks import WrongNumber, metadata_checks
from vllm_accprobe.capture.states.schedule import KV, STATE, CacheGroup, Schedule
from vllm_accprobe.capture.vllm.vllm_compat import BlockMoves, NewRequest
from vllm_accprobe.dump.journal import METADATA, OTHER, STALE


def schedule(group: CacheGroup = CacheGroup(KV, 4)) -> Schedule:  # noqa: B008
    """a: positions 6 and 7 of blocks 3, 7; b: three rows of its prompt in block 5."""
    made = Schedule([group], 12)
    made.begin(0, BlockMoves({"a": [[3, 7]]}, {}), {"a": 6}, {}, {"a": NewRequest("a", range(6), 6, ())})
    made.begin(1, BlockMoves({"b": [[5]]}, {}), {"a": 2, "b": 3}, {"a": 6}, {"b": NewRequest("b", range(3), 3, ())})
    return made


def paged(**changes: Any) -> SimpleNamespace:
    values = {
        "slot_mapping": torch.tensor([30, 31, 20, 21, 22]),
        "seq_lens": torch.tensor([8, 3], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32),
        "block_table": torch.tensor([[3, 7, 0], [5, 0, 0]], dtype=torch.int32),
    }
    return SimpleNamespace(**(values | changes))


def said(made: Schedule, metadata: Any, **how: Any) -> list[WrongNumber]:
    held = list(made.requests.values())
    found, missing = metadata_checks(made, 0, held, metadata, None, **how)
    assert missing == []
    return [wrong for look in found for wrong in look.compare(look.tensor.numpy())]


def test_right_metadata_say_nothing() -> None:
    assert said(schedule(), paged()) == []


def test_a_slot_that_points_elsewhere() -> None:
    (wrong,) = said(schedule(), paged(slot_mapping=torch.tensor([30, 29, 20, 21, 22])), holders=lambda b: f"b{b}'s")
    assert (wrong.kind, wrong.name, wrong.slot, wrong.low, wrong.high) == (STALE, "a", 31, 7, 7)
    assert wrong.how == "its row is written to slot 29 of block 7, b7's; the schedule demands slot 31"


def test_a_slot_that_is_left_out() -> None:
    (wrong,) = said(schedule(), paged(slot_mapping=torch.tensor([30, 31, 20, 21, -1])))
    assert (wrong.name, wrong.low) == ("b", 2)
    assert "written nowhere" in wrong.how


@pytest.mark.parametrize(
    ("changes", "who", "words"),
    [
        ({"seq_lens": torch.tensor([7, 3])}, "a", "its length is given as 7; the schedule demands 8"),
        ({"query_start_loc": torch.tensor([0, 3, 5])}, "b", "row 3 is given as its first; the schedule demands 2"),
        ({"block_table": torch.tensor([[3, 6, 0], [5, 0, 0]])}, "a", "names block 6 in column 1"),
    ],
)
def test_stale_metadata(changes: dict[str, torch.Tensor], who: str, words: str) -> None:
    (wrong,) = said(schedule(), paged(**changes))
    assert (wrong.kind, wrong.name) == (METADATA, who)
    assert words in wrong.how


def test_drafts_that_were_not_accepted_are_no_error_where_nobody_knew() -> None:
    metadata = paged(slot_mapping=torch.tensor([29, 30, 20, 21, 22]), seq_lens=torch.tensor([7, 3]))
    assert said(schedule(), metadata, slack=2) == []
    assert len(said(schedule(), metadata)) == 2
    ahead = paged(slot_mapping=torch.tensor([31, 32, 20, 21, 22]), seq_lens=torch.tensor([9, 3]))
    assert len(said(schedule(), ahead, slack=2)) == 2


def test_kernel_blocks_are_held_against_the_schedulers() -> None:
    table = torch.tensor([[6, 7, 14, 15], [10, 11, 0, 0]])
    assert said(schedule(), paged(block_table=table), split=2) == []
    table[0, 3] = 13
    (wrong,) = said(schedule(), paged(block_table=table), split=2)
    assert wrong.block == 6


def recurrent(**changes: Any) -> SimpleNamespace:
    values = {
        "state_indices_tensor_d": torch.tensor([[3]], dtype=torch.int32),
        "state_indices_tensor_p": torch.tensor([5], dtype=torch.int32),
        "has_initial_states_p": torch.tensor([False]),
    }
    return SimpleNamespace(**(values | changes))


def test_right_states_say_nothing() -> None:
    assert said(schedule(CacheGroup(STATE, 4)), recurrent()) == []


def test_the_state_of_another_request() -> None:
    changed = {"state_indices_tensor_d": torch.tensor([[5]]), "state_indices_tensor_p": torch.tensor([3])}
    wrong = said(schedule(CacheGroup(STATE, 4)), recurrent(**changed), holders=lambda b: f"b{b}'s")
    assert [(one.kind, one.name, one.block) for one in wrong] == [(OTHER, "a", 5), (OTHER, "b", 3)]
    assert wrong[0].how == "its state is taken from block 5, b5's; the schedule demands block 3"


def test_a_state_that_is_none_yet() -> None:
    (wrong,) = said(schedule(CacheGroup(STATE, 4)), recurrent(has_initial_states_p=torch.tensor([True])))
    assert (wrong.kind, wrong.name) == (OTHER, "b")
    assert "begins with whatever its block holds" in wrong.how


def test_states_of_requests_with_drafts() -> None:
    made = schedule(CacheGroup(STATE, 4, extra=1))
    metadata = SimpleNamespace(
        spec_sequence_masks_cpu=torch.tensor([True, False]),
        spec_state_indices_tensor=torch.tensor([[3, 7]]),
        non_spec_state_indices_tensor=torch.tensor([5]),
        num_accepted_tokens=torch.tensor([1]),
    )
    made.requests["a"].accepted = 1
    assert said(made, metadata) == []
    metadata.num_accepted_tokens = torch.tensor([2])  # another request's count (vllm 53912)
    (wrong,) = said(made, metadata)
    assert (wrong.kind, wrong.name) == (OTHER, "a")
    assert "2 tokens are said to be accepted of its last step; it went on by 1" in wrong.how


def test_drafts_that_only_the_device_knows_are_not_guessed() -> None:
    """Before 0.32 the delta rule's mask lies on the device; without it two requests' states would be read as one's."""
    made = schedule(CacheGroup(STATE, 4, extra=1))
    metadata = SimpleNamespace(
        spec_sequence_masks=torch.ones(2, dtype=torch.bool, device="meta"),
        spec_state_indices_tensor=torch.tensor([[3, 7]]),
        non_spec_state_indices_tensor=torch.tensor([5]),
    )
    found, missing = metadata_checks(made, 0, list(made.requests.values()), metadata, None)
    assert found == []
    assert missing == ["states of a step whose drafts only the device knows"]
    metadata.spec_sequence_masks = torch.tensor([True, False])
    assert said(made, metadata) == []


def test_what_metadata_do_not_have_is_said() -> None:
    made = schedule()
    found, missing = metadata_checks(made, 0, list(made.requests.values()), SimpleNamespace(), None)
    assert found == []
    assert missing == ["metadata without a slot mapping", "metadata without a block table"]
    assert np.array_equal(made.slots(0, made.requests["a"]), [30, 31])
