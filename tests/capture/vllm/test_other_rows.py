"""The head and the embedding, called with rows that are not the step's: not recorded, and counted."""

from __future__ import annotations

from types import SimpleNamespace as Plain
from typing import Any

import torch

from vllm_accprobe.capture.vllm.modes import AGAIN, TOKENS_ONLY, OtherRows


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
