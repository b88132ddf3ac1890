"""The order of a step's rows, as runners of both generations give it.

What real runners do is shown by the engines of tests/e2e; here are the cases that no engine makes on purpose.
"""

from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from fake_runners import EarlyV2, HostPositions, LaterV2

from vllm_accprobe.capture.core.rows import Requests, Scheduled
from vllm_accprobe.capture.core.session import HEAD, LANGUAGE
from vllm_accprobe.capture.vllm.batch import ChosenRows, EngineBatch
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal import MASKS
from vllm_accprobe.dump.schema import Mask, Masks


def scheduled(total: int = 6, **other: Any) -> Plain:
    """A request of five tokens that begins, and one that goes on with its tenth. The new one is named first."""
    return Plain(
        scheduled_new_reqs=[Plain(req_id="new", num_computed_tokens=0, mm_features=[])],
        scheduled_cached_reqs=Plain(req_ids=["old"], num_computed_tokens=[9]),
        num_scheduled_tokens={"new": 5, "old": 1}, total_num_scheduled_tokens=total, **other,
    )  # fmt: skip


def begun(runner: Any, out: Any) -> EngineBatch:
    batch = EngineBatch(runner)
    batch.begin(out)
    return batch


def chosen(batch: EngineBatch) -> ChosenRows:
    config = ProbeConfig()
    requests = Requests(config)
    requests.add("new", [1, 2, 3, 4, 5], 5, ())
    requests.add("old", [7] * 9, 9, ())
    return ChosenRows(batch, config, requests)


def old_runner(**other: Any) -> Plain:
    states = {"new": Plain(num_tokens=5), "old": Plain(num_tokens=10)}
    return Plain(input_batch=Plain(req_ids=["old", "new"]), requests=states, **other)


def test_the_older_runner_orders_rows_by_its_input_batch() -> None:
    batch = begun(old_runner(), scheduled(scheduled_spec_decode_tokens={"old": []}))
    assert batch.rows() == [Scheduled("old", 9, 1, 0, 10), Scheduled("new", 0, 5, 0, 5)]
    space = chosen(batch).space(LANGUAGE, 6)
    assert space is not None
    assert [(s.req, s.pos, s.n, s.row, s.phase) for s in space.segments] == [
        (1, 9, 1, 0, "decode"),
        (0, 0, 5, 1, "prefill"),
    ]
    logits = chosen(batch).space(HEAD, 2)
    assert logits is not None
    assert [(s.req, s.pos, s.n, s.row) for s in logits.segments] == [(1, 9, 1, 0), (0, 4, 1, 1)]


def test_what_masks_logits_is_told_by_the_number_of_each_chosen_request() -> None:
    runner = old_runner()
    runner.input_batch.sampling_metadata = Plain(bad_words_token_ids={1: [[3]]})
    batch = begun(runner, scheduled(scheduled_spec_decode_tokens={"old": []}))
    assert chosen(batch).masks({"old": "ab"}) == {1: Mask(("a grammar",), "ab"), 0: Mask(("bad words",))}
    assert MASKS.to_line(Masks(3, chosen(batch).masks({"old": "ab", "else": None}))) == {
        "event": "masks", "step": 3,
        "masked": [{"req": 1, "by": ["a grammar"], "grammar": "ab"}, {"req": 0, "by": ["bad words"]}],
    }  # fmt: skip


@pytest.mark.parametrize("runner_class", [EarlyV2, LaterV2])
def test_the_newer_runner_orders_rows_by_what_it_prepared(runner_class: type[EarlyV2]) -> None:
    """Its own batch has no starts and no prompt lengths before 0.23; both are known all the same."""
    runner = runner_class(slots={"old": 1, "new": 6}, prefill={"old": 9, "new": 8})
    out = scheduled()  # five tokens of the eight that the new request is to be given
    batch = begun(runner, out)
    prepared = runner.prepare_inputs(out)
    prepared.num_tokens_after_padding = 8
    prepared.input_ids, prepared.positions = torch.arange(8), torch.tensor([9, 0, 1, 2, 3, 4, 0, 0])
    batch.prepared(prepared)
    assert batch.rows() == [Scheduled("old", 9, 1, 0, 9), Scheduled("new", 0, 5, 0, 8)]
    space = chosen(batch).space(LANGUAGE, 8)
    assert space is not None
    assert (space.src, space.padded) == (6, 8)
    assert space.ids is not None
    assert space.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert space.positions is not None
    assert space.positions.tolist() == [9, 0, 1, 2, 3, 4]


def test_fewer_rows_than_scheduled_are_an_error() -> None:
    """Adaptive verification (0.32, gpu/input_batch.py): num_scheduled_tokens is an upper bound of what is computed."""
    runner = LaterV2(slots={"old": 1, "new": 6}, prefill={"old": 9, "new": 5})
    batch = begun(runner, out := scheduled())
    prepared = runner.prepare_inputs(out)
    prepared.num_tokens = 4
    batch.prepared(prepared)
    with pytest.raises(RuntimeError, match=r"rows do not add up: the runner has 4 rows for \['old', 'new'\]"):
        batch.rows()


@pytest.mark.parametrize("uses_mrope", [False, True])
def test_positions_are_those_that_the_runner_computed(uses_mrope: bool) -> None:
    """With M-RoPE the device's side of the pair stays zero: it is not what the model was given."""
    runner = HostPositions(["old", "new"], {"old": 10, "new": 5}, uses_mrope)
    batch = begun(runner, out := scheduled())
    runner.prepare({"old": 9, "new": 0}, out.num_scheduled_tokens)
    assert bool(runner.positions.gpu.any()) is not uses_mrope
    space = chosen(batch).space(LANGUAGE, 6)
    assert space is not None
    assert space.positions is not None
    assert space.positions.tolist() == [9, 0, 1, 2, 3, 4]
    assert space.ids is not None
    assert space.ids.tolist() == [100, 101, 102, 103, 104, 105]


def test_rows_that_do_not_add_up_are_an_error_with_both_numbers() -> None:
    batch = begun(old_runner(), scheduled(total=7))
    with pytest.raises(RuntimeError, match=r"the runner has 6 rows for \['old', 'new'\], the scheduler 7"):
        batch.rows()


def test_a_request_of_which_the_scheduler_says_nothing_is_an_error() -> None:
    """Before, it was taken to begin at position 0."""
    out = scheduled()
    out.scheduled_cached_reqs = Plain(req_ids=[], num_computed_tokens=[])
    with pytest.raises(RuntimeError, match="the scheduler does not say where old begins"):
        begun(old_runner(), out).rows()


def test_a_new_step_forgets_the_last_one() -> None:
    runner = old_runner()
    batch = begun(runner, scheduled())
    assert len(batch.rows()) == 2
    runner.input_batch.req_ids = ["old"]
    out = scheduled(total=1)
    out.scheduled_new_reqs, out.num_scheduled_tokens = [], {"old": 1}
    batch.begin(out)
    assert batch.rows() == [Scheduled("old", 9, 1, 0, 10)]


def test_pictures_come_by_kind_and_as_the_encoder_takes_them() -> None:
    def feature(modality: str, n: int, data: Any = 0) -> Plain:
        return Plain(modality=modality, data=data, mm_position=Plain(length=n))

    runner = old_runner()
    runner.requests["new"].mm_features = [feature("video", 4), feature("image", 2)]
    runner.requests["old"].mm_features = [feature("image", 3), feature("image", 5, None)]  # the second is cached
    batch = begun(runner, scheduled(scheduled_encoder_inputs={"new": [0, 1], "old": [0, 1]}))
    assert [(i.internal, i.index, i.modality, i.placeholders) for i in batch.items()] == [
        ("new", 1, "image", 2),
        ("old", 0, "image", 3),
        ("new", 0, "video", 4),
    ]
