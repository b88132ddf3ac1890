"""The sentence about an error's shape: each kind that a kernel team asks for, on dumps with a planted fault."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import HEAD, HEADS, VOCAB, capture, scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.judge.error_pattern import RowFacts, sentence
from vllm_accprobe.kernels.structure import structure

LONG = {"a": [(7 * i) % 60 for i in range(40)], "b": [(5 * i + 3) % 60 for i in range(26)]}


@pytest.fixture(scope="module")
def golden():
    return capture(prompts=LONG, together=False)


def on(columns, factor):
    def fault(values, positions, decode):
        values[:, columns] *= factor
        return values

    return fault


@pytest.mark.parametrize(
    ("tap", "fault", "said"),
    [
        ("model.layers.1.mlp.gate_up_proj", on([17], 1.3), "column 17 of 96, all rows, scale 1.3"),
        ("logits_processor", on(slice(52, VOCAB), 1.2), "columns 52–63 of 64 (the vocabulary's tail)"),
        ("model.layers.1.self_attn.attn", on(slice(2 * HEAD, 3 * HEAD), 1.2), f"head 2 of {HEADS}, all rows"),
        ("model.layers.0.self_attn.o_proj", scaled(1.1, lambda at, d: at == 9), "only position 9, scale 1.1"),
        ("model.layers.0.mlp.down_proj", scaled(1.1, lambda at, d: at >= 20), "only positions ≥ 20, scale 1.1"),
        ("model.layers.2.mlp.down_proj", scaled(1.1, lambda at, d: d), "only decode, scale 1.1"),
    ],
)
def test_said_of_a_planted_fault(golden, tap, fault, said):
    mine = capture(prompts=LONG, faults={tap: fault}, tokens=4)
    for modules in mine.modules.values():
        modules[:] = [replace(m, attrs={"head_size": HEAD} if m.tap.endswith("attn") else {}) for m in modules]
    origin = compare(golden, mine).origins[0]
    assert origin["module"] == tap
    assert origin["shape"].startswith(said), origin["shape"]


def batches(**facts):
    n = 24
    base = {
        "made": np.full(n, 0.001), "gain": np.zeros(n), "position": np.arange(n) * 7 % 23, "request": np.arange(n) % 5,
        "decode": np.zeros(n, bool), "batch": np.full(n, -1), "tokens": np.full(n, -1), "chunk": np.ones(n, int),
    }  # fmt: skip
    return RowFacts(**(base | facts))


def test_batch_sizes_chunks_experts_and_requests():
    bad = np.zeros(24, bool)
    bad[[1, 5, 6, 13, 20]] = True
    made = np.where(bad, 0.05, 0.001)
    assert sentence(batches(made=made, batch=np.where(bad, 1, 4)), None, {}) == "only rows of batch size 1"
    sizes = np.where(bad, 4 + np.arange(24) % 3, 1 + np.arange(24) % 3)
    assert sentence(batches(made=made, batch=sizes), None, {}) == "only rows of batch size ≥ 4"
    assert sentence(batches(made=made, chunk=1 + bad), None, {}) == "only the second chunk of a prompt"
    experts = np.stack([np.where(bad, 5, 2), np.arange(24) % 5 + 10], axis=1)
    assert sentence(batches(made=made, experts=experts), None, {}) == "only rows of expert 5"
    who = batches(made=made, request=np.where(bad, 3, 1), names={3: "x"})
    assert sentence(who, None, {}) == "only request 'x'"


def test_what_fits_no_condition_is_counted():
    made = np.full(24, 0.001)
    made[[2, 3, 11]] = 0.1
    assert sentence(batches(made=made), None, {}) == "3 of 24 rows (positions 8, 14, 21)"


def test_nan_and_zero_and_noise():
    made = np.full(24, 0.001)
    made[4] = np.inf
    assert sentence(batches(made=made), None, {}) == "only position 5, NaN or infinity on one side"
    dead = batches(made=np.ones(24), gain=-np.ones(24))
    assert sentence(dead, None, {}) == "all rows, zero in mine"
    random = np.random.default_rng(1)
    g = random.standard_normal((24, 64))
    assert sentence(batches(), structure(g, g + 0.01 * random.standard_normal(g.shape)), {}) == "all rows"


def test_parts_of_a_fused_projection():
    g = np.random.default_rng(2).standard_normal((24, 64))  # 4 heads of q, 2 of k, 2 of v, 8 columns each
    m = g.copy()
    m[:, 40:48] *= 1.5
    attrs = {"head_size": 8, "num_heads": 4, "num_kv_heads": 2}
    assert sentence(None, structure(g, m), attrs) == "k head 1 of 2, scale 1.5"
    m[:, 32:40] *= 1.5
    assert sentence(None, structure(g, m), attrs) == "all of k (columns 32–47 of 64), scale 1.5"
