"""Modes with other rows: a runner that is in one is refused or skipped with its line, another is let through."""

import sys
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch

from vllm_accprobe.capture.vllm import names_by_release
from vllm_accprobe.capture.vllm.modes import (
    AGAIN,
    TOKENS_ONLY,
    OtherRows,
    embeddings_of,
    hash_embeddings,
    record_draft_layer,
)
from vllm_accprobe.capture.vllm.vllm_compat import refusal

CONTEXT, PIECES, EXPERTS, XLITE, FLASH = names_by_release.MODES[:5]


class NPUModelRunner:
    """vllm-ascend's, as far as a mode is told by it."""

    __module__ = "vllm_ascend.worker.model_runner_v1"

    def __init__(self, **parallel: Any) -> None:
        self.vllm_config = Plain(parallel_config=Plain(**parallel))
        self.input_batch = Plain(req_ids=[])


class XliteModelRunner(NPUModelRunner):
    """vllm-ascend 0.18 and 0.23, xlite/xlite_model_runner.py: 25."""


@pytest.mark.parametrize(
    ("runner", "mode"),
    [
        (NPUModelRunner(prefill_context_parallel_size=2), CONTEXT),
        (NPUModelRunner(enable_dbo=True), PIECES),
        (NPUModelRunner(ubatch_size=2), PIECES),
        (NPUModelRunner(use_sequence_parallel_moe=True), EXPERTS),
        (XliteModelRunner(), XLITE),
    ],
)
def test_a_mode_that_deals_rows_out_is_refused(runner: Any, mode: names_by_release.Mode) -> None:
    assert refusal(runner) == mode.says
    assert refusal(NPUModelRunner(prefill_context_parallel_size=1, use_sequence_parallel_moe=False)) == ""


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_flashcomm_is_asked_of_the_vendor(monkeypatch: pytest.MonkeyPatch, first: bool, second: bool) -> None:
    utils = Plain(enable_sp=lambda config: first, flashcomm2_enable=lambda: second)
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    assert refusal(NPUModelRunner()) == (FLASH.says if first or second else "")


def test_sequence_parallelism_in_graphs_has_no_taps() -> None:
    def config(**passes: Any) -> Plain:
        return Plain(compilation_config=Plain(pass_config=Plain(**passes)))

    assert names_by_release.in_graphs(config(enable_sp=True))
    assert names_by_release.in_graphs(config(enable_sequence_parallelism=True))
    assert names_by_release.in_graphs(config(enable_sp=False)) == names_by_release.in_graphs(Plain()) == ""


class Lines:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, int]] = []

    def whole(self, tap: str, name: str, tensor: torch.Tensor) -> None:
        self.said.append((tap, name, tensor.numel()))


def test_a_drafts_head_waits_until_it_has_the_targets() -> None:
    lines: Any = Lines()
    record_draft_layer(lines, "layers.0.proj", torch.nn.Linear(3, 2))
    head = torch.nn.Linear(3, 2)
    head.org_vocab_size = 2  # type: ignore[assignment]
    record_draft_layer(lines, "lm_head", head)
    assert lines.said == [("draft:layers.0.proj", "weight", 6), ("draft:layers.0.proj", "bias", 2)]


ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def test_engines_of_two_dtypes_have_one_name_for_what_a_client_sent() -> None:
    assert hash_embeddings(ROWS) == hash_embeddings(ROWS.to(torch.bfloat16))
    other = ROWS.clone()
    other[3, 2] += 1
    assert len({hash_embeddings(one) for one in (ROWS, other, ROWS[:4], ROWS.reshape(4, 10))}) == 4


def test_the_tokens_among_them_count_and_what_stands_in_for_the_others_does_not() -> None:
    mask = [True, False, False, False, True]
    name = hash_embeddings(ROWS, [7, 0, 0, 0, 9], mask)
    assert name == hash_embeddings(ROWS, [7, 3, 3, 3, 9], mask)
    assert name != hash_embeddings(ROWS, [8, 0, 0, 0, 9], mask)


def test_prompts_of_tokens_have_none() -> None:
    assert embeddings_of(Plain(prompt_token_ids=[1])) is None
    assert embeddings_of(Plain(prompt_embeds=ROWS)) is ROWS


class Model:
    """Writes down whether a step was open while it was called."""

    def __init__(self, session: Any):
        self.session = session
        self.open: list[tuple[str, bool]] = []

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.open.append(("logits", self.session.state is not None))
        return hidden_states

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.open.append(("ids", self.session.state is not None))
        if len(input_ids) == 1:
            raise ValueError("planted")
        return input_ids


def made(total: int) -> tuple[Any, Model, OtherRows, list[tuple[str, int]]]:
    skips: list[tuple[str, int]] = []
    sink = Plain(skip=lambda tap, why, role=None, count=1: skips.append((why, count)))
    session = Plain(state=Plain(calls={}), dead=None, sink=sink)
    model = Model(session)
    return session, model, OtherRows(session, model, Plain(total=total)), skips  # type: ignore[arg-type]


def test_the_heads_second_call_of_a_step_is_of_other_rows() -> None:
    session, model, around, skips = made(5)
    model.compute_logits(torch.zeros(2, 4))
    model.compute_logits(hidden_states=torch.zeros(2, 4))
    session.state = Plain(calls={})
    model.compute_logits(torch.zeros(1, 4))
    assert model.open == [("logits", True), ("logits", False), ("logits", True)]
    assert skips == [(AGAIN, 2)]
    around.close()
    session.state = Plain(calls={"head": 1})
    model.compute_logits(torch.zeros(2, 4))
    assert model.open[-1] == ("logits", True)


def test_fewer_ids_than_rows_are_not_the_steps_and_a_failure_leaves_the_step_open() -> None:
    session, model, _, skips = made(3)
    state = session.state
    model.embed_input_ids(torch.zeros(3, dtype=torch.int64))
    model.embed_input_ids(input_ids=torch.zeros(2, dtype=torch.int64))
    try:
        model.embed_input_ids(torch.zeros(1, dtype=torch.int64))
    except ValueError:
        pass
    assert model.open == [("ids", True), ("ids", False), ("ids", False)]
    assert skips == [(TOKENS_ONLY, 2), (TOKENS_ONLY, 1)]
    assert session.state is state
    session.state = None  # between steps
    model.embed_input_ids(torch.zeros(2, dtype=torch.int64))
    assert len(skips) == 2
