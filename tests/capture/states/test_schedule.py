"""The schedule's own ledger: what is read, written, lost, and strange."""

import numpy as np
import pytest

from vllm_accprobe.capture.states.schedule import HIT, KV, LOADED, MORE, RECENT, RESUMED, STATE, CacheGroup, Schedule
from vllm_accprobe.capture.vllm.step_observer import BlockMoves, NewRequest
from vllm_accprobe.dump.journal import FOREIGN, FREED, STALE, STRANGE
from vllm_accprobe.dump.schema import Image

PAGED = CacheGroup(KV, 4)


def begun(
    schedule: Schedule, step: int, tables=None, more=None, counts=None, starts=None, prompts=None, new=(), **moves
):  # fmt: skip
    named = {name: NewRequest(name, ids, len(ids), ()) for name, ids in (prompts or {}).items()}
    named |= {one.name: one for one in new}
    return schedule.begin(step, BlockMoves(tables or {}, more or {}, **moves), counts or {}, starts or {}, named)


def test_rows_go_to_the_slots_of_their_positions() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    one = schedule.requests["a"]
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
    one = schedule.requests["a"]
    assert schedule.reads(0, one).tolist() == [2, 3]  # positions 9 to 12
    assert schedule.reads(1, one).tolist() == [2, 3]  # from position 8 on


def test_null_blocks_are_never_read() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[0, 0, 3]]}, counts={"a": 2}, starts={"a": 10})
    assert schedule.reads(0, schedule.requests["a"]).tolist() == [2]


def test_a_block_given_to_somebody_else_is_lost_once() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    begun(schedule, 4, {"b": [[7]]}, counts={"a": 1, "b": 3}, starts={"a": 6})
    one = schedule.requests["a"]
    (found,) = schedule.lost(0, one, schedule.reads(0, one))
    assert (found.kind, found.block, found.column, found.taken_step) == (FREED, 7, 1, 4)
    assert schedule.names[found.taken] == "b"
    assert schedule.lost(0, one, schedule.reads(0, one)) == []


def test_a_shared_prefix_is_nobodys_loss() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    schedule.filled(0, schedule.requests["a"])
    arrivals, fresh = begun(schedule, 1, {"b": [[3, 8]]}, counts={"b": 2, "a": 1}, starts={"b": 4, "a": 6},
                            prompts={"b": range(6)})  # fmt: skip
    assert [(a.event, a.columns.tolist()) for a in arrivals] == [(HIT, [0])]
    assert fresh.tolist() == [8]
    assert schedule.unexpected(arrivals[0]) == []
    for one in schedule.requests.values():
        assert schedule.lost(0, one, schedule.reads(0, one)) == []


def test_a_hit_of_other_tokens_is_strange() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(6)})
    schedule.filled(0, schedule.requests["a"])
    arrivals, _ = begun(
        schedule, 1, {"b": [[3, 8]]}, counts={"b": 2}, starts={"b": 4}, prompts={"b": [9, 1, 2, 3, 4, 5]}
    )
    (found,) = schedule.unexpected(arrivals[0])
    assert (found.kind, found.block, found.column) == (STRANGE, 3, 0)


def reads(schedule: Schedule, *of: NewRequest, table: tuple[int, ...] = (3, 8), start: int = 4) -> list[tuple]:
    """(kind, why, columns, who) of what the second of two requests finds when its first blocks are the first one's."""
    first, second = of
    begun(schedule, 0, {first.name: [[3, 7]]}, counts={first.name: 6}, new=[first])
    schedule.filled(0, schedule.requests[first.name])
    arrivals, _ = begun(schedule, 1, {second.name: [list(table)]}, counts={second.name: 2}, starts={second.name: start},
                        new=[second])  # fmt: skip
    found = [one for arrival in arrivals for one in schedule.unexpected(arrival)]
    return [(one.kind, one.why, one.column, one.last, schedule.names[one.taken]) for one in found]


def request(name: str, **more) -> NewRequest:
    return NewRequest(name, range(8), 8, more.pop("images", ()), **more)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"adapter": "a1"}, {"adapter": "a1"}, []),
        ({"adapter": "a1"}, {"adapter": "a2"}, [(FOREIGN, "another adapter", 0, 0, "a")]),
        ({"adapter": "a1"}, {}, [(FOREIGN, "another adapter", 0, 0, "a")]),
        ({"salt": "s"}, {"salt": "s"}, []),
        ({"salt": "s"}, {"salt": "t"}, [(FOREIGN, "another cache salt", 0, 0, "a")]),
        ({"images": (Image("x", 1, 2),)}, {"images": (Image("x", 1, 2),)}, []),
        ({"images": (Image("x", 1, 2),)}, {"images": (Image("y", 1, 2),)}, [(FOREIGN, "another image", 0, 0, "a")]),
        ({"images": (Image("x", 5, 2),)}, {"images": (Image("y", 5, 2),)}, []),  # behind the block
    ],
)
def test_a_prefix_of_another_context_is_foreign(first, second, expected) -> None:
    assert reads(Schedule([PAGED], 10), request("a", **first), request("b", **second)) == expected


def test_a_block_of_other_positions_and_one_that_is_not_filled() -> None:
    shifted = NewRequest("b", [4, 5, 6, 7], 4, ())
    found = reads(Schedule([PAGED], 10), request("a"), shifted, table=(7, 8))
    assert found == [(STRANGE, "other positions", 0, 0, "a")]
    unfilled = reads(Schedule([PAGED], 10), request("a"), request("b"), table=(3, 7), start=7)
    assert unfilled == [(STALE, "nothing yet", 1, 1, "a")]


def keys_of(prompt, images=()) -> tuple[list[int], list[int]]:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3]]}, counts={"a": 1}, new=[NewRequest("a", prompt, len(prompt), images)])
    keys, pictures = schedule.prompt_keys(schedule.requests["a"], 0)
    return keys.tolist(), pictures.tolist()


def test_a_blocks_key_is_that_of_all_tokens_up_to_its_end() -> None:
    keys, pictures = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(keys) == 2  # the third block is not whole
    assert 0 not in keys
    assert pictures == [1, 1]
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8])[0] == keys
    assert keys_of([1, 2, 3, 4, 9, 6, 7, 8])[0][0] == keys[0]
    assert not set(keys_of([0, 2, 3, 4, 5, 6, 7, 8])[0]) & set(keys)  # the second block, too


@pytest.mark.parametrize(("at", "n", "blocks"), [(0, 4, [0]), (3, 2, [0, 1]), (4, 4, [1]), (4, 9, [1, 2]), (2, 1, [0])])
def test_a_blocks_key_of_images_has_those_that_lie_in_it_and_before(at: int, n: int, blocks: list[int]) -> None:
    pictures = [1, *keys_of(range(12), (Image("x", at, n),))[1]]
    assert [i for i in range(3) if pictures[i + 1] != pictures[i]] == blocks
    assert keys_of(range(12), (Image("y", at, n),))[1][-1] != pictures[-1]
    both = keys_of(range(12), (Image("w", 0, 1), Image("x", at, n)))[1]
    assert both[-1] not in (pictures[-1], keys_of(range(12), (Image("v", 0, 1), Image("x", at, n)))[1][-1])


@pytest.mark.parametrize("group", [CacheGroup(STATE, 4, aligned=True), CacheGroup(KV, 4, watched=False)])
def test_of_states_and_of_blocks_that_are_not_understood_nothing_is_concluded(group: CacheGroup) -> None:
    assert reads(Schedule([group], 10), request("a", adapter="a1"), request("b")) == []


def test_neighbouring_blocks_of_one_owner_that_are_wrong_alike_are_one_finding() -> None:
    schedule = Schedule([PAGED], 20)
    for name, blocks in (("a", [1, 2, 3, 4]), ("b", [5, 6])):
        begun(schedule, 0, {name: [blocks]}, counts={name: 4 * len(blocks)},
              new=[NewRequest(name, range(16), 16, (), adapter="a1")])  # fmt: skip
    mine = NewRequest("c", range(32), 32, ())
    arrivals, _ = begun(schedule, 1, {"c": [[1, 2, 5, 6, 0, 4, 7]]}, counts={"c": 4}, starts={"c": 24}, new=[mine])
    found = schedule.unexpected(arrivals[0])
    assert [(f.column, f.last, f.block, schedule.names[f.taken], f.taken_step) for f in found] == [
        (0, 1, 1, "a", 0), (2, 3, 5, "b", 0), (5, 5, 4, "a", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompts", "table", "start", "expected"),
    [
        ((range(8), range(8)), [3, 7], 8, []),
        ((range(8), [*range(7), 9]), [3, 7], 8, [(STRANGE, "other tokens", 1)]),
        ((range(8), range(8)), [5, 3], 8, [(STRANGE, "other positions", 1)]),  # block 5: nobody has computed it
        ((range(8), range(6)), [3, 7], 6, []),  # the second block is not all prompt: of neither
        ((range(6), range(8)), [3, 7], 8, []),
    ],
)
@pytest.mark.parametrize("filled", [False, True])
def test_blocks_of_a_step_before_and_of_the_same_one(prompts, table, start, expected, filled: bool) -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 8}, prompts={"a": prompts[0]})
    if filled:
        schedule.filled(0, schedule.requests["a"])
    arrivals, _ = begun(schedule, 1, {"b": [table]}, counts={"b": 1}, starts={"b": start}, prompts={"b": prompts[1]})
    assert [(f.kind, f.why, f.column) for f in schedule.unexpected(arrivals[0])] == expected


def test_a_name_that_comes_again_is_another_request() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3]]}, counts={"a": 4}, prompts={"a": range(4)})
    schedule.ended(["a"])
    arrivals, _ = begun(schedule, 1, {"a": [[5]], "b": [[3]]}, counts={"a": 4, "b": 1}, starts={"b": 4},
                        prompts={"a": [9] * 4, "b": range(8)})  # fmt: skip
    assert schedule.unexpected(arrivals[0]) == []


def test_a_resumed_request_may_find_its_own_block_anywhere() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 8}, prompts={"a": range(8)})
    arrivals, _ = begun(schedule, 1, {"a": [[7, 8]]}, counts={"a": 1}, starts={"a": 4})
    assert [(a.event, schedule.unexpected(a)) for a in arrivals] == [(RESUMED, [])]


def test_states_and_prompts_that_are_not_known_fill_nothing() -> None:
    schedule = Schedule([PAGED, CacheGroup(STATE, 4, aligned=True)], 10)
    begun(schedule, 0, {"a": [[3], [4]], "b": [[5], [6]]}, counts={"a": 4, "b": 4}, prompts={"a": range(4)})
    for name in "ab":
        for group in (0, 1):
            schedule.filled(group, schedule.requests[name])
    assert [np.flatnonzero(content).tolist() for content in schedule.content] == [[3], []]


def test_only_an_owners_own_rows_fill_its_block() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(8)})
    begun(schedule, 1, {"b": [[7]]}, counts={"b": 4, "a": 2}, starts={"a": 6}, prompts={"b": range(4, 8)})
    a, b = schedule.requests["a"], schedule.requests["b"]
    schedule.filled(0, a)
    assert schedule.content[0][7] == 0
    schedule.filled(0, b)
    assert schedule.content[0][7] == schedule.prompt_keys(b, 0)[0][0]
    assert schedule.pictures[0][7] == 1


def test_a_block_is_filled_when_its_last_row_is_written() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 3}, prompts={"a": range(8)})
    one = schedule.requests["a"]
    for start, n, whole in ((0, 3, []), (3, 1, [3]), (4, 3, [3]), (7, 1, [3, 7])):
        begun(schedule, 1, counts={"a": n}, starts={"a": start})
        schedule.filled(0, one)
        assert np.flatnonzero(schedule.content[0]).tolist() == whole
        assert [schedule._filled_with(0, block) != (0, 0) for block in (3, 7)] == [3 in whole, 7 in whole]


@pytest.mark.parametrize(("done", "start", "stale"), [(3, 4, True), (4, 4, False), (3, 3, False), (2, 3, True)])
def test_a_hit_needs_the_rows_that_it_reads(done: int, start: int, stale: bool) -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3]]}, counts={"a": done}, new=[request("a")])
    arrivals, _ = begun(schedule, 1, {"b": [[3]]}, counts={"b": 1}, starts={"b": start}, new=[request("b")])
    assert [f.why for f in schedule.unexpected(arrivals[0])] == ["nothing yet"] * stale


def test_a_prefix_of_the_same_step_is_known_by_its_owner() -> None:
    schedule = Schedule([PAGED], 10)
    arrivals, _ = begun(
        schedule, 0, {"a": [[3, 7]], "b": [[3, 8]]}, counts={"a": 6, "b": 2}, starts={"b": 4},
        new=[request("a"), NewRequest("b", [9] * 8, 8, ())],
    )  # fmt: skip
    assert [one.why for one in schedule.unexpected(arrivals[0])] == ["other tokens"]
    assert schedule.owners(schedule.requests["b"], 4).tolist() == [0] * 4


def test_owners_are_those_who_computed() -> None:
    schedule = Schedule([PAGED, CacheGroup(KV, 4, watched=False)], 20)
    begun(schedule, 0, {"a": [[3, 7], [9, 10]]}, counts={"a": 6}, new=[request("a")])
    begun(schedule, 1, {"b": [[3, 8, 5], [9, 11, 12]]}, counts={"b": 2}, starts={"b": 6}, new=[request("b")])
    assert schedule.owners(schedule.requests["b"], 6).tolist() == [0, 0, 0, 0, -1, -1]  # block 8: given by nobody


def test_who_may_have_lost_a_block_is_known_without_a_look_at_all() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, new=[request("a")])
    begun(schedule, 1, {"b": [[5]]}, counts={"a": 1, "b": 3}, starts={"a": 6}, new=[request("b")])
    assert schedule.suspects == set()
    begun(schedule, 2, {"c": [[7]]}, counts={"a": 1, "c": 3}, starts={"a": 7}, new=[request("c")])
    assert schedule.suspects == {"a"}
    schedule.ended(["a", "b", "c"])
    assert not schedule.holders.any()


def test_blocks_with_generated_tokens_are_nobodys_prompt() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3]]}, counts={"a": 3}, prompts={"a": range(3)})
    schedule.filled(0, schedule.requests["a"])
    begun(schedule, 1, counts={"a": 1}, starts={"a": 3})
    schedule.filled(0, schedule.requests["a"])
    assert schedule.content[0][3] == 0


def test_resumed_requests_get_new_tables() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 6}, prompts={"a": range(8)})
    arrivals, fresh = begun(schedule, 5, {"a": [[3, 9]]}, counts={"a": 4}, starts={"a": 4})
    assert [a.event for a in arrivals] == [RESUMED]
    assert fresh.tolist() == [9]
    assert schedule.lost(0, schedule.requests["a"], np.array([0, 1])) == []


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
    one = schedule.requests["a"]
    assert [schedule.reads(g, one).tolist() for g in range(3)] == [[], [], []]
    assert [schedule.writes(g, one).tolist() for g in range(3)] == [[0], [1], [0, 1, 2]]
    begun(schedule, 1, counts={"a": 3}, starts={"a": 6})
    assert [schedule.reads(g, one).tolist() for g in range(3)] == [[0], [2], [0, 1, 2]]


def test_accepted_tokens_are_known_of_steps_that_generate() -> None:
    schedule = Schedule([PAGED], 10)
    begun(schedule, 0, {"a": [[3, 7]]}, counts={"a": 3}, prompts={"a": range(3)})
    begun(schedule, 1, counts={"a": 4}, starts={"a": 3})
    assert schedule.requests["a"].accepted is None  # the step before was the prompt's
    begun(schedule, 2, counts={"a": 4}, starts={"a": 5})
    assert schedule.requests["a"].accepted == 2


def test_of_ended_requests_those_stay_that_a_block_may_name() -> None:
    schedule, writer = Schedule([PAGED], 10), np.full(10, -1)
    for number in range(3 * RECENT):
        new = NewRequest(f"r{number}", range(4), 4, (), salt=f"s{number}")
        table = [[1]] if number == 5 else [[2]]
        begun(schedule, number, {new.name: table}, counts={new.name: 4}, new=[new])
        if number == 7:
            writer[2] = 7  # the bytes of block 2 are still its
        if number != 9:
            schedule.ended([new.name])
        schedule.forget([writer])
    assert sorted(set(schedule.names) - set(range(RECENT, 3 * RECENT))) == [5, 7, 9]
    assert schedule.names.keys() == schedule.done.keys() == schedule.req.keys()
    assert len(schedule.names) <= RECENT + MORE + 3
    assert schedule.contexts[schedule.context[1]] == ("", "s5")
    assert len(schedule.contexts) <= RECENT + 3


def test_an_old_request_that_has_just_ended_is_known_while_numbers_of_it_arrive() -> None:
    schedule, writer = Schedule([PAGED], 10), np.full(10, -1)

    def one_more(number: int) -> bool:
        """Whether that was one too many."""
        name = f"r{number}"
        new, known = NewRequest(name, range(4), 4, ()), len(schedule.names)
        begun(schedule, number, {name: [[2]]}, counts={name: 4}, new=[new])
        if number:
            schedule.ended([name])
        schedule.forget([writer])
        return len(schedule.names) < known

    number = next(n for n in range(3 * RECENT) if one_more(n))
    for more in range(number + 1, number + MORE - 1):
        assert not one_more(more)
    schedule.ended(["r0"])  # its block has another owner, and a device has not said yet who wrote it
    assert any(one_more(more) for more in range(number + MORE - 1, number + MORE + 3))
    assert schedule.names[0] == "r0"
