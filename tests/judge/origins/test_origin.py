"""Whose an error is that lies between modules. Blame as a whole: tests/comparison and the e2e tests."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.origins.origin import owner
from vllm_accprobe.judge.origins.row_errors import INPUT, OUTPUT, Trace

ROWS = np.arange(3)
ATTENTION, LAYER = "model.layers.2.self_attn.attn", "model.layers.2"


def trace(tap: str, kind: str) -> Trace:
    return Trace(tap, f"{kind}.0", 0, kind, 0, 1.0, RowSet(ROWS), ROWS, np.ones(3))


@pytest.mark.parametrize(
    ("tap", "sink", "kind", "whose"),
    [
        (ROOT_TAP, ATTENTION, INPUT, "model.layers.2.self_attn"),  # nobody saw self_attn's own tensors
        ("model", ATTENTION, INPUT, "model.layers.2.self_attn"),
        ("model.layers.2.self_attn", ATTENTION, INPUT, "model.layers.2.self_attn"),
        ("model", LAYER, INPUT, "model"),  # model.layers is a list and computes nothing
        (ROOT_TAP, "norm", INPUT, ROOT_TAP),
        ("logits_processor", "lm_head", INPUT, "logits_processor"),  # called by a neighbour
        (ATTENTION, ATTENTION, OUTPUT, ATTENTION),
        (LAYER, LAYER, OUTPUT, LAYER),
    ],
)
def test_the_body_that_an_error_lies_in(tap: str, sink: str, kind: str, whose: str) -> None:
    assert owner(tap, trace(sink, kind)) == whose
