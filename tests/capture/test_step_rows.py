"""The order of a step's rows, as runners of both generations and a plain model's call give it.

What real runners do is shown by the engines of tests/e2e; here are the cases that no engine makes on purpose.
"""

from __future__ import annotations

from types import SimpleNamespace as Plain
from typing import Any

import numpy as np
import pytest
import torch

from vllm_accprobe.capture.batch import Batch
from vllm_accprobe.capture.rectangle import Rectangle
from vllm_accprobe.capture.rows import Requests, Scheduled
from vllm_accprobe.capture.session import HEAD, LANGUAGE, VISION
from vllm_accprobe.config import ProbeConfig


def scheduled(total: int = 6, **other: Any) -> Plain:
    """A request of five tokens that begins, and one that goes on with its tenth. The new one is named first."""
    return Plain(
        scheduled_new_reqs=[Plain(req_id="new", num_computed_tokens=0, mm_features=[])],
        scheduled_cached_reqs=Plain(req_ids=["old"], num_computed_tokens=[9]),
        num_scheduled_tokens={"new": 5, "old": 1},
        total_num_scheduled_tokens=total,
        **other,
    )


def begun(runner: Any, out: Any) -> Batch:
    config = ProbeConfig()
    requests = Requests(config)
    requests.add("new", [1, 2, 3, 4, 5], 5, ())
    requests.add("old", [7] * 9, 9, ())
    batch = Batch(config, requests, runner)
    batch.begin(out)
    return batch


def old_runner(**other: Any) -> Plain:
    states = {"new": Plain(num_tokens=5), "old": Plain(num_tokens=10)}
    return Plain(input_batch=Plain(req_ids=["old", "new"]), requests=states, **other)


def test_the_older_runner_orders_rows_by_its_input_batch() -> None:
    batch = begun(old_runner(), scheduled(scheduled_spec_decode_tokens={"old": []}))
    assert batch.rows() == [Scheduled("old", 9, 1, 0, 10), Scheduled("new", 0, 5, 0, 5)]
    space = batch.space(LANGUAGE, 6)
    assert space is not None
    assert [(s.req, s.pos, s.n, s.row, s.phase) for s in space.segments] == [
        (1, 9, 1, 0, "decode"),
        (0, 0, 5, 1, "prefill"),
    ]
    logits = batch.space(HEAD, 2)
    assert logits is not None
    assert [(s.req, s.pos, s.n, s.row) for s in logits.segments] == [(1, 9, 1, 0), (0, 4, 1, 1)]


def test_the_newer_runner_orders_rows_by_what_it_prepared() -> None:
    ids, positions = torch.arange(8), torch.tensor([0, 1, 2, 3, 4, 9, 0, 0])
    batch = begun(Plain(), scheduled())
    batch.prepared(
        Plain(
            req_ids=["new", "old"],
            num_computed_tokens_np=np.array([0, 9, 77]),  # buffers are longer than the batch
            prefill_len_np=np.array([5, 9, 77]),
            num_scheduled_tokens=np.array([5, 1, 77]),
            num_tokens_after_padding=8,
            input_ids=ids,
            positions=positions,
        )
    )
    assert batch.rows() == [Scheduled("new", 0, 5, 0, 5), Scheduled("old", 9, 1, 0, 9)]
    space = batch.space(LANGUAGE, 8)
    assert space is not None
    assert (space.src, space.padded) == (6, 8)
    assert space.ids is not None
    assert space.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert space.positions is not None
    assert space.positions.tolist() == [0, 1, 2, 3, 4, 9]


def test_rows_that_do_not_add_up_are_an_error_with_both_numbers() -> None:
    batch = begun(old_runner(), scheduled(total=7))
    with pytest.raises(RuntimeError, match=r"the runner has 6 rows for \['old', 'new'\], the scheduler 7"):
        batch.rows()


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


def test_a_rectangle_drops_padding_and_knows_its_requests_again() -> None:
    config = ProbeConfig()
    requests = Requests(config)
    rectangle = Rectangle(config, requests, torch.nn.Linear(1, 1))
    ids = torch.tensor([[0, 11, 12], [21, 22, 23]])
    assert rectangle.begin({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])})
    assert rectangle.prompts
    assert [(p.start, p.n) for p in rectangle.batch] == [(0, 2), (0, 3)]
    flat = rectangle.flatten(torch.arange(6).reshape(2, 3, 1))
    assert flat.flatten().tolist() == [1, 2, 3, 4, 5]
    cache = Plain(get_seq_length=lambda: 3)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert rectangle.begin({"input_ids": ids[:, :1], "past_key_values": cache, "attention_mask": mask})
    assert not rectangle.prompts
    assert [(p.internal, p.start, p.n) for p in rectangle.batch] == [("call-0", 2, 1), ("call-1", 3, 1)]
    assert rectangle.space(VISION, 2) is None
    assert not rectangle.begin({"inputs_embeds": torch.zeros(2, 3, 1)})
    assert rectangle.flatten(torch.zeros(2, 3)).shape == (2, 3)
