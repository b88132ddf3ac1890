"""Routers, experts and projections of transformers whose outputs, names or rows are in another order than vLLM's."""

import numpy as np
import pytest
from hand_made import Dump, f32

from vllm_accprobe.align.names import bridge
from vllm_accprobe.dump.dtypes import round_to_bfloat16
from vllm_accprobe.dump.schema import Module

TRANSFORMERS = {"engine": {"runner": "accprobe.Probe"}, "versions": {"transformers": "5"}}
VLLM = {"versions": {"vllm": "0.32"}}
BLOCK = "model.layers.1.mlp"
RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(5, 16)).astype(np.float32), RNG.normal(size=(4, 16)).astype(np.float32)
LOGITS = X @ W.T
IDS = np.argsort(-LOGITS, axis=1)[:, :2]
WEIGHTS = np.take_along_axis(LOGITS, IDS, 1)
SCORES = 1 / (1 + np.exp(-LOGITS))


def pair(outputs, weight=W, router="router"):
    golden, mine = Dump(run=TRANSFORMERS), Dump(run=VLLM)
    golden.put(f"{BLOCK}.{router}", "param.weight", weight)
    golden.put(f"{BLOCK}.{router}", "input.hidden_states", X)
    for i, value in enumerate(outputs):
        golden.put(f"{BLOCK}.{router}", f"output.{i}", value)
    golden.put(f"{BLOCK}.experts", "input.hidden_states", X)
    golden.put(f"{BLOCK}.experts", "input.router_indices", IDS)
    golden.put(f"{BLOCK}.experts", "input.routing_weights", WEIGHTS)
    mine.put(f"{BLOCK}.gate", "param.weight", weight)
    mine.put(f"{BLOCK}.gate", "output.0", LOGITS)
    mine.put(f"{BLOCK}.experts", "input.router_logits", LOGITS)
    inner = f"{BLOCK}.experts.routed_experts.quant_method"
    mine.put(inner, "input.topk_ids", IDS)
    mine.put(inner, "input.topk_weights", WEIGHTS)
    return bridge(golden, mine), inner


@pytest.mark.parametrize("outputs", [(LOGITS, WEIGHTS, IDS), (IDS, WEIGHTS, LOGITS), (SCORES, LOGITS)])
def test_logits_are_what_the_routers_input_and_weight_give(outputs):
    both, inner = pair(outputs)
    made = {(r.tap, r.role): both.golden.read(r) for r in both.golden.records}
    assert np.array_equal(made[(f"{BLOCK}.gate", "output.0")], LOGITS)
    assert np.array_equal(made[(f"{BLOCK}.experts", "input.router_logits")], LOGITS)
    assert np.array_equal(made[(inner, "input.topk_ids")], IDS)
    assert np.array_equal(made[(inner, "input.topk_weights")], WEIGHTS)


def test_a_router_whose_logits_are_not_shown_stays_as_it_is():
    both, _ = pair((SCORES, SCORES * 2))
    made = {(r.tap, r.role): both.golden.read(r) for r in both.golden.records}
    assert np.array_equal(made[(f"{BLOCK}.gate", "output.0")], SCORES)


def projections(change=lambda rows: rows, cosines=()):
    """Two heads of 4 of q, one of k; mine has pairs as halves, and then ``change``. cosines: a place of golden's."""
    golden, mine = Dump(run=TRANSFORMERS), Dump(run=VLLM)
    attention = "model.layers.0.self_attn"
    if cosines:
        golden.put(*cosines, X)
    wide = {name: RNG.normal(size=(n, 16)).astype(np.float32) for name, n in (("q", 8), ("k", 4), ("v", 4))}
    for name, value in wide.items():
        golden.put(f"{attention}.{name}_proj", "param.weight", value)
        golden.put(f"{attention}.{name}_proj", "output.0", X @ value.T)
    order = [0, 2, 1, 3]
    q, k = wide["q"].reshape(2, 4, 16)[:, order].reshape(8, 16), wide["k"][order]
    stored = change(np.concatenate([q, k, wide["v"]]))
    mine.put(f"{attention}.qkv_proj", "param.weight", round_to_bfloat16(stored), dtype="bfloat16")
    mine.put(f"{attention}.qkv_proj", "output.0", round_to_bfloat16(X @ stored.T), dtype="bfloat16")
    attrs = {"head_size": 4, "num_heads": 2, "num_kv_heads": 1}
    mine.modules = {0: [Module(f"{attention}.qkv_proj", "QKVParallelLinear", 0, attrs)]}
    both = bridge(golden, mine)
    made = {(r.tap, r.role): r for r in both.golden.records}
    plain = np.concatenate([*wide.values()])
    return stored, plain, both.golden.read(made[(f"{attention}.qkv_proj", "param.weight")]), both.golden.read(
        made[(f"{attention}.qkv_proj", "output.0")])  # fmt: skip


def test_pairs_of_a_head_that_a_loader_puts_half_a_head_apart():
    stored, _, weight, output = projections()
    assert np.array_equal(weight, stored)
    np.testing.assert_allclose(output, X @ stored.T, rtol=1e-5)


@pytest.mark.parametrize("place", [("model.layers.0.self_attn", "input.position_embeddings.1"),
                                   ("model.rotary_emb", "output.1")])  # fmt: skip
def test_where_golden_turns_by_a_cosine_and_a_sine_other_rows_are_other_weights(place):
    _, plain, weight, _ = projections(cosines=place)
    assert np.array_equal(weight, plain)


@pytest.mark.parametrize("shape", [(), (4,), (4, 16, 1)])
def test_a_router_with_weights_of_any_shape_is_read(shape):
    pair((SCORES, LOGITS), weight=np.zeros(shape, np.float32))


def test_rows_in_any_other_order_are_other_weights():
    other = [3, 2, 1, 0, *range(4, 8), 8, 9, 11, 10, *range(12, 16)]
    _, plain, weight, _ = projections(lambda rows: rows[other])
    assert np.array_equal(weight, plain)


def test_one_wrong_row_beyond_the_first_head_stays_a_difference():
    stored, _, weight, _ = projections(lambda rows: np.concatenate([rows[:5], -rows[5:6], rows[6:]]))
    assert np.array_equal((weight == stored).all(1), [i != 5 for i in range(16)])


def test_what_the_models_code_holds_may_be_the_routers_bias():
    golden, mine = Dump(run=TRANSFORMERS), Dump(run=VLLM)
    golden.put(f"{BLOCK}.gate", "param.e_score_correction_bias", f32(1, 2))
    mine.put(BLOCK, "param.e_score_correction_bias", f32(1, 2))
    assert (BLOCK, "param.e_score_correction_bias") in {(r.tap, r.role) for r in bridge(golden, mine).golden.records}
