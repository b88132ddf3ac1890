"""The schedule's own books: what is read, written, lost, and strange."""

from __future__ import annotations

import numpy as np

from vllm_accprobe.capture.states.schedule import HIT, KV, LOADED, RESUMED, STATE, CacheGroup, Schedule
from vllm_accprobe.capture.vllm.step_observer import BlockMoves
from vllm_accprobe.dump.journal.state_lines import FREED, STRANGE

PAGED = CacheGroup(KV, 4)


def begun(schedule: Schedule, step: int, tables=None, more=None, counts=None, starts=None, prompts=None, **moves):
    return schedule.begin(
        step, BlockMoves(tables or {}, more or {}, **moves), counts or {}, starts or {}, prompts or {}
    )


def test_rows_go_to_the_slots_of_their_positions() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    one = schedule.held["a"]
    assert schedule.slots(0, one).tolist() == [12, 13, 14, 15, 28, 29]
    assert schedule.reads(0, one).tolist() == []
    assert schedule.writes(0, one).tolist() == [0, 1]
    begun(schedule, 1, counts={"a": 1}, starts={"a": 6})
    assert schedule.slots(0, one).tolist() == [30]
    assert schedule.reads(0, one).tolist() == [0, 1]
    assert schedule.writes(0, one).tolist() == [1]
    begun(schedule, 2, more={"a": [[5]]}, counts={"a": 1}, starts={"a": 8})
    assert schedule.slots(0, one).tolist() == [20]
    assert schedule.touched(0, one).tolist() == [0, 1, 2]


def test_windows_are_read_back_to_their_first_position() -> None:
    schedule = Schedule([CacheGroup(KV, 4, window=5), CacheGroup(KV, 4, chunk=8)], 20)
    begun(schedule, 0, {"a": [[1, 2, 3, 4], [5, 6, 7, 8]]}, counts={"a": 1}, starts={"a": 13})
    one = schedule.held["a"]
    assert schedule.reads(0, one).tolist() == [2, 3]  # positions 9 to 12
    assert schedule.reads(1, one).tolist() == [2, 3]  # from position 8 on


def test_null_blocks_are_never_read() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[0, 0, 3]]}, counts={"a": 2}, starts={"a": 10})
    assert schedule.reads(0, schedule.held["a"]).tolist() == [2]


def test_a_block_given_to_somebody_else_is_lost_once() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    begun(schedule, 4, {"b": [[7]]}, counts={"a": 1, "b": 3}, starts={"a": 6})
    one = schedule.held["a"]
    (found,) = schedule.lost(0, one, schedule.reads(0, one))
    assert (found.kind, found.block, found.column, found.taken_step) == (FREED, 7, 1, 4)
    assert schedule.names[found.taken] == "b"
    assert schedule.lost(0, one, schedule.reads(0, one)) == []


def test_a_shared_prefix_is_nobodys_loss() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    schedule.filled(0, schedule.held["a"])
    arrivals, fresh = begun(schedule, 1, {"b": [[3, 8]]}, counts={"b": 2, "a": 1}, starts={"b": 4, "a": 6},
                            prompts={"b": range(6)})  # fmt: skip
    assert [(a.event, a.columns.tolist()) for a in arrivals] == [(HIT, [0])]
    assert fresh.tolist() == [8]
    assert schedule.strangers(arrivals[0]) == []
    for one in schedule.held.values():
        assert schedule.lost(0, one, schedule.reads(0, one)) == []


def test_a_hit_of_other_tokens_is_strange() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    schedule.filled(0, schedule.held["a"])
    arrivals, _ = begun(
        schedule, 1, {"b": [[3, 8]]}, counts={"b": 2}, starts={"b": 4}, prompts={"b": [9, 1, 2, 3, 4, 5]}
    )
    (found,) = schedule.strangers(arrivals[0])
    assert (found.kind, found.block, found.column) == (STRANGE, 3, 0)


def test_blocks_with_generated_tokens_are_nobodys_prompt() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3]]}, counts={"a": 3}, prompts={"a": range(3)})
    schedule.filled(0, schedule.held["a"])
    begun(schedule, 1, counts={"a": 1}, starts={"a": 3})
    schedule.filled(0, schedule.held["a"])
    assert schedule.content[0][3] == 0


def test_resumed_requests_get_new_tables() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(8)})
    arrivals, fresh = begun(schedule, 5, {"a": [[3, 9]]}, counts={"a": 4}, starts={"a": 4})
    assert [a.event for a in arrivals] == [RESUMED]
    assert fresh.tolist() == [9]
    assert schedule.lost(0, schedule.held["a"], np.array([0, 1])) == []


def test_what_a_connector_brings_is_no_hit() -> None:
    schedule = Schedule([PAGED], 10, loads=True)
    arrivals, _ = begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 2}, starts={"a": 4}, prompts={"a": range(6)})
    assert [(a.event, a.columns.tolist()) for a in arrivals] == [(LOADED, [0])]


def test_copied_blocks_are_no_hits() -> None:
    schedule = Schedule([PAGED], 10)
    arrivals, fresh = begun(
        schedule, 0, {"a": [[3, 7]]}, counts={"a": 1}, starts={"a": 6}, prompts={"a": range(7)}, copies=[(2, 7)]
    )
    assert [a.columns.tolist() for a in arrivals] == [[0]]
    assert fresh.tolist() == [7]


def test_states_stay_or_move_on_block_by_block() -> None:
    schedule = Schedule([CacheGroup(STATE, 4), CacheGroup(STATE, 4, aligned=True), CacheGroup(STATE, 4, extra=2)], 20)
    begun(schedule, 0, {"a": [[1], [2, 3, 4], [5, 6, 7]]}, counts={"a": 6})
    one = schedule.held["a"]
    assert [schedule.reads(g, one).tolist() for g in range(3)] == [[], [], []]
    assert [schedule.writes(g, one).tolist() for g in range(3)] == [[0], [1], [0, 1, 2]]
    begun(schedule, 1, counts={"a": 3}, starts={"a": 6})
    assert [schedule.reads(g, one).tolist() for g in range(3)] == [[0], [2], [0, 1, 2]]


def test_accepted_tokens_are_known_of_steps_that_generate() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 3}, prompts={"a": range(3)})
    begun(schedule, 1, counts={"a": 4}, starts={"a": 3})
    assert schedule.held["a"].accepted is None  # the step before was the prompt's
    begun(schedule, 2, counts={"a": 4}, starts={"a": 5})
    assert schedule.held["a"].accepted == 2
