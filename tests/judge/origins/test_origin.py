"""Whose an error is that lies between modules. Blame as a whole: tests/comparison and the e2e tests."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.flow import Tree
from vllm_accprobe.judge.origins.origin import find_origins, owner
from vllm_accprobe.judge.origins.row_errors import INPUT, OUTPUT, Trace
from vllm_accprobe.standards.limits import Standard

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


KEYS = np.arange(6)
POOLER = Tree.of(["pooler"], {"pooler": "DispatchPooler"})


def pooled(before: float, after: float, shared: bool) -> list[str]:
    """Taps that are blamed for a vector of one step: its error, beside hidden states whose last row is off; what is
    before that row is exact."""
    limit = 0.01
    into = Trace("pooler", "input.hidden_states", 0, INPUT, 0, limit, RowSet(KEYS), KEYS[5:], np.array([before]))
    out = Trace("pooler", "output.0", 0, OUTPUT, 1, limit, RowSet(KEYS), KEYS, np.full(6, after),
                shared=np.zeros(6, np.int64) if shared else np.zeros(0, np.int64))  # fmt: skip
    return [c.tap for c in find_origins([into, out], POOLER, Standard(), {})]


def test_a_vector_without_rows_may_have_its_error_of_any_row_of_its_step() -> None:
    assert pooled(before=0.009, after=0.011, shared=True) == []
    assert pooled(before=0.009, after=0.011, shared=False) == ["pooler"]  # rows of its own: the first had no such input
    assert pooled(before=0.009, after=0.5, shared=True) == ["pooler"]
    assert pooled(before=0.0, after=0.011, shared=True) == ["pooler"]


def test_not_a_number_that_a_vector_may_have_of_any_row() -> None:
    bad = np.array([True])
    for broken, blamed in ((bad, []), (~bad, ["pooler"])):
        into = Trace("pooler", "input.0", 0, INPUT, 0, 0.01, RowSet(KEYS), KEYS[5:],
                     np.array([np.inf if broken[0] else 0.1]), broken=broken)  # fmt: skip
        out = Trace("pooler", "output.0", 0, OUTPUT, 1, 0.01, RowSet(KEYS), KEYS, np.full(6, np.inf),
                    broken=np.ones(6, bool), shared=np.zeros(6, np.int64))  # fmt: skip
        assert [c.tap for c in find_origins([into, out], POOLER, Standard(), {}) if c.trace is out] == blamed
