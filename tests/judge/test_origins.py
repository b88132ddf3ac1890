"""Whose an error is that lies between modules. Blame as a whole: tests/comparison and the e2e tests."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_accprobe.align.data_flow import INPUT, OUTPUT, DataFlow, Tree
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.origins import created_over, find_origins, in_all_layers, owner
from vllm_accprobe.judge.siblings import TensorStats
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.standards.limits import Standard

ROWS = np.arange(3)
ATTENTION, LAYER = "model.layers.2.self_attn.attn", "model.layers.2"


def trace(tap: str, kind: str) -> TensorErrors:
    return TensorErrors(tap, f"{kind}.0", 0, kind, 0, 1.0, RowSet(ROWS), ROWS, np.ones(3))


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
    into = TensorErrors("pooler", "input.hidden_states", 0, INPUT, 0, limit, RowSet(KEYS), KEYS[5:], np.array([before]))
    out = TensorErrors("pooler", "output.0", 0, OUTPUT, 1, limit, RowSet(KEYS), KEYS, np.full(6, after),
                shared=np.zeros(6, np.int64) if shared else np.zeros(0, np.int64))  # fmt: skip
    return [c.tap for c in find_origins(DataFlow([into, out], POOLER), Standard(), {})]


def test_a_vector_without_rows_may_have_its_error_of_any_row_of_its_step() -> None:
    assert pooled(before=0.009, after=0.011, shared=True) == []
    assert pooled(before=0.009, after=0.011, shared=False) == ["pooler"]  # rows of its own: the first had no such input
    assert pooled(before=0.009, after=0.5, shared=True) == ["pooler"]
    assert pooled(before=0.0, after=0.011, shared=True) == ["pooler"]


def test_not_a_number_that_a_vector_may_have_of_any_row() -> None:
    bad = np.array([True])
    for broken, blamed in ((bad, []), (~bad, ["pooler"])):
        into = TensorErrors("pooler", "input.0", 0, INPUT, 0, 0.01, RowSet(KEYS), KEYS[5:],
                     np.array([np.inf if broken[0] else 0.1]), broken=broken)  # fmt: skip
        out = TensorErrors("pooler", "output.0", 0, OUTPUT, 1, 0.01, RowSet(KEYS), KEYS, np.full(6, np.inf),
                    broken=np.ones(6, bool), shared=np.zeros(6, np.int64))  # fmt: skip
        assert [c.tap for c in find_origins(DataFlow([into, out], POOLER), Standard(), {}) if c.trace is out] == blamed


RULES = Standard()
LIMIT = 0.01


def over(err, before):
    rows = [np.asarray(x, float) for x in (err, np.zeros(len(err)), before, np.zeros(len(err)))]
    return created_over(TensorStats("t", "output.0", 2**-8, np.arange(len(err)), *rows), LIMIT, RULES)


def test_what_came_in_is_taken_off_in_squares():
    assert over([0.005, 0.001], [0.003, 0.0]) == pytest.approx(0.4)
    assert over([0.003], [0.005]) == 0.0


def test_what_is_beyond_the_limit_is_so_by_the_judges_rule():
    assert over([0.2], [0.0]) == pytest.approx(20.0)
    assert over([0.2], [0.002]) == pytest.approx((0.2 - RULES.amplification * 0.002) / LIMIT)
    behind_a_fault = over([0.25], [0.2])  # what it passes on may grow by so much
    assert behind_a_fault == pytest.approx(max(0.25 - RULES.wild * 0.2, 0.0) / LIMIT)
    assert behind_a_fault < 1


def test_rows_without_a_number_and_exact_places_tell_nothing():
    assert over([np.inf, 0.004, np.nan], [0.0, 0.0, 0.0]) == pytest.approx(0.4)
    assert over([0.1], [np.inf]) == 0.0
    assert over([], []) == 0.0
    assert created_over(TensorStats("t", "o", 0.0, np.arange(1), *[np.ones(1)] * 4), 0.0, RULES) == 0.0


def test_all_layers_or_not():
    ran = [f"model.layers.{i}.{what}" for i in range(3) for what in ("mlp", "attn")] + ["model.norm"]
    named = ["model.layers.0.mlp", "model.norm", "model.layers.2.mlp", "model.layers.0.attn"]
    assert in_all_layers(named, ran) == {}
    assert in_all_layers([*named, "model.layers.1.mlp"], ran) == {
        f"model.layers.{i}.mlp": {"in": 3, "of": 3} for i in (0, 2, 1)
    }
