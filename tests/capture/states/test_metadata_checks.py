"""Metadata held against the schedule: each number that can be stale."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_accprobe.capture.states.checks import WrongNumber, metadata_checks, must_change, token_tails
from vllm_accprobe.capture.states.schedule import KV, STATE, CacheGroup, Schedule, ScheduledRequest
from vllm_accprobe.capture.vllm.step_observer import BlockMoves, NewRequest
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


@pytest.mark.parametrize(
    ("changes", "wrong", "words"),
    [
        ({}, None, ""),
        ({"slot_mapping": torch.tensor([30, 29, 20, 21, 22])}, (STALE, "a", 31, 7, 7),
         "its row is written to slot 29 of block 7, b7's; the schedule demands slot 31"),
        ({"slot_mapping": torch.tensor([30, 31, 20, 21, -1])}, (STALE, "b", 22, 2, 2), "written nowhere"),
        ({"seq_lens": torch.tensor([7, 3])}, (METADATA, "a", None, 6, 7),
         "its length is 7; the schedule demands 8"),
        ({"query_start_loc": torch.tensor([0, 3, 5])}, (METADATA, "b", None, None, None),
         "row 3 is its first; the schedule demands 2"),
        ({"block_table": torch.tensor([[3, 6, 0], [5, 0, 0]])}, (METADATA, "a", None, 4, 7),
         "names block 6 in column 1"),
    ],
)  # fmt: skip
def test_each_number_that_can_be_stale(changes: dict[str, torch.Tensor], wrong: Any, words: str) -> None:
    found = said(schedule(), paged(**changes), holders=lambda block: f"b{block}'s")
    assert [(one.kind, one.name, one.slot, one.low, one.high) for one in found] == ([wrong] if wrong else [])
    assert all(words in one.how for one in found)


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


def test_prefills_and_decodes_may_have_their_blocks_apart() -> None:
    table = torch.tensor([[3, 7, 0], [5, 0, 0]])
    apart = {"prefill_block_tables": table[:1], "block_tables": table[1:]}
    assert said(schedule(), paged(block_table=None, **apart)) == []
    (wrong,) = said(schedule(), paged(block_table=None, **{**apart, "block_tables": table[1:] + 1}))
    assert (wrong.name, wrong.block) == ("b", 6)
    # A backend whose table has all requests, and that names a part of it beside.
    assert said(schedule(), paged(prefill_block_tables=table[:1])) == []


def recurrent(**changes: Any) -> SimpleNamespace:
    values = {
        "state_indices_tensor_d": torch.tensor([[3]], dtype=torch.int32),
        "state_indices_tensor_p": torch.tensor([5], dtype=torch.int32),
        "has_initial_states_p": torch.tensor([False]),
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "wrong", "words"),
    [
        ({}, [], ""),
        ({"state_indices_tensor_d": torch.tensor([[5]]), "state_indices_tensor_p": torch.tensor([3])},
         [(OTHER, "a", 5), (OTHER, "b", 3)], "its state is taken from block 5, b5's; the schedule demands block 3"),
        ({"has_initial_states_p": torch.tensor([True])}, [(OTHER, "b", 5)], "begins with whatever its block holds"),
    ],
)  # fmt: skip
def test_each_state_that_can_be_another_ones(changes: dict[str, torch.Tensor], wrong: Any, words: str) -> None:
    found = said(schedule(CacheGroup(STATE, 4)), recurrent(**changes), holders=lambda block: f"b{block}'s")
    assert [(one.kind, one.name, one.block) for one in found] == wrong
    assert words in "".join(one.how for one in found[:1])


def test_states_of_requests_with_drafts() -> None:
    made = schedule(CacheGroup(STATE, 4, extra=1))
    metadata = SimpleNamespace(
        spec_sequence_masks_cpu=torch.tensor([True, False]), spec_state_indices_tensor=torch.tensor([[3, 7]]),
        non_spec_state_indices_tensor=torch.tensor([5]), num_accepted_tokens=torch.tensor([1]),
    )  # fmt: skip
    made.requests["a"].accepted = 1
    assert said(made, metadata) == []
    metadata.num_accepted_tokens = torch.tensor([2])  # another request's count (vllm 53912)
    (wrong,) = said(made, metadata)
    assert (wrong.kind, wrong.name) == (OTHER, "a")
    assert "2 tokens were reported as accepted in its last step; it continued by 1" in wrong.how


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


def held(prompt: list[int]) -> ScheduledRequest:
    return ScheduledRequest("a", 0, prompt, [], [])


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_other_tokens_must_change_a_state() -> None:
    one = held([1, 2, 3, 4, 5, 6, 7])
    token_tails([(one, 0, 5)], ids(1, 2, 3, 4, 5))
    assert must_change(token_tails([(one, 5, 2)], ids(6, 7)), 0, 3)
    assert must_change(token_tails([(one, 7, 1)], ids(8)), 0, 3)  # a generated one


def test_text_that_repeats_itself_proves_nothing() -> None:
    one = held([5] * 8)
    token_tails([(one, 0, 6)], ids(*[5] * 6))
    assert not must_change(token_tails([(one, 6, 2)], ids(5, 5)), 0, 3)
    period = held([1, 2] * 6)
    token_tails([(period, 0, 8)], ids(*[1, 2] * 4))
    assert not must_change(token_tails([(period, 8, 2)], ids(1, 2)), 0, 3)
    assert must_change(token_tails([(period, 10, 1)], ids(1)), 0, 3)


def test_what_is_not_known_proves_nothing() -> None:
    one = held([1, 2, 3])
    assert not must_change(token_tails([(one, 0, 3)], ids(1, 2, 3)), 0, 3)  # its first rows
    assert must_change(token_tails([(held([1, 2, 3, 4, 5]), 3, 2)], ids(4, 5)), 0, 3)  # resumed within its prompt
    assert token_tails([(held([1, 2, 3]), 9, 1)], ids(4)) == {}  # resumed behind it
    assert not must_change({}, 0, 3)
    assert not must_change(token_tails([(one, 3, 1)], ids(9)), 0, 0)
