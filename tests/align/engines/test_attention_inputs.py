"""What golden's queries, keys and values are made of: as mine makes its own, and not where that is not known."""

import numpy as np
import pytest
from hand_made import Dump

from vllm_accprobe.align.derived import rope
from vllm_accprobe.align.names import bridge
from vllm_accprobe.dump.schema import Module

GOLDEN = {"engine": {"runner": "accprobe.Probe"}, "versions": {"transformers": "5"}}
MINE = {"versions": {"vllm": "0.32"}}
BLOCK = "model.layers.0.self_attn"
ROWS, SIZE = 6, 8
random = np.random.default_rng(0)
Q = random.standard_normal((ROWS, 2 * SIZE)).astype(np.float32)
ANGLES = np.arange(ROWS)[:, None] * 0.5 ** np.arange(SIZE // 2)
COS, SIN = (np.concatenate([f(ANGLES)] * 2, axis=1).astype(np.float32) for f in (np.cos, np.sin))
NORMED = Q * 3
FORMS = {
    "not turned": (Q, [], Q + 1),
    "halves": (rope(Q, COS, SIN, SIZE), [], rope(Q + 1, COS, SIN, SIZE)),
    "pairs": (rope(Q, COS, SIN, SIZE, 1), [], rope(Q + 1, COS, SIN, SIZE, 1)),
    "normalized behind it": (NORMED, [("query_layernorm", NORMED)], NORMED + 1),
    "unknown": (Q[::-1].copy(), [], None),
}


@pytest.mark.parametrize(("query", "more", "expected"), FORMS.values(), ids=FORMS)
def test_as_mine_makes_its_own(query, more, expected) -> None:
    golden, mine = Dump(run=GOLDEN), Dump(run=MINE)
    mine.modules = {0: [Module(f"{BLOCK}.attn", "Attention", 0, {"head_size": SIZE})]}
    for dump in (golden, mine):
        dump.put(BLOCK, "input.position_embeddings.0", COS)
        dump.put(BLOCK, "input.position_embeddings.1", SIN)
    golden.put(f"{BLOCK}.q_proj", "output.0", Q + 1)
    mine.put(f"{BLOCK}.qkv_proj", "output.0", np.concatenate([Q, Q, Q], axis=1))
    for name, value in more:
        golden.put(f"{BLOCK}.{name}", "output.0", value + 1)
        mine.put(f"{BLOCK}.{name}", "output.0", value)
    mine.put(f"{BLOCK}.attn", "input.query", query)
    both = bridge(golden, mine)
    made = [r for r in both.golden.records if (r.tap, r.role) == (f"{BLOCK}.attn", "input.query")]
    assert len(made) == (expected is not None)
    for record in made:
        assert np.allclose(both.golden.read(record).reshape(ROWS, -1), expected, atol=1e-5)


def made(query, cos=COS, sin=SIN, golden_cos=None, golden_sin=None):
    """Golden's query, of q_proj + 1, where mine's is ``query``."""
    golden, mine = Dump(run=GOLDEN), Dump(run=MINE)
    mine.modules = {0: [Module(f"{BLOCK}.attn", "Attention", 0, {"head_size": SIZE})]}
    for dump, two in ((golden, (golden_cos, golden_sin)), (mine, (cos, sin))):
        for i, value in enumerate(two):
            dump.put(BLOCK, f"input.position_embeddings.{i}", (cos, sin)[i] if value is None else value)
    golden.put(f"{BLOCK}.q_proj", "output.0", Q + 1)
    mine.put(f"{BLOCK}.qkv_proj", "output.0", np.concatenate([Q, Q, Q], axis=1))
    mine.put(f"{BLOCK}.attn", "input.query", query)
    golden = bridge(golden, mine).golden
    return [golden.read(r) for r in golden.records if (r.tap, r.role) == (f"{BLOCK}.attn", "input.query")]


def test_goldens_cosines_say_how_it_turns_where_neighbours_are_alike() -> None:
    two = [np.repeat(v[:, : SIZE // 2], 2, axis=1) for v in (COS, SIN)]
    (found,) = made(rope(Q, COS, SIN, SIZE), COS, SIN, *two)
    assert np.allclose(found, rope(Q + 1, COS, SIN, SIZE, 1), atol=1e-5)
    (found,) = made(rope(Q, *two, SIZE, 1), *two)
    assert np.allclose(found, rope(Q + 1, COS, SIN, SIZE, 1), atol=1e-5)


def test_what_several_forms_give_is_not_compared() -> None:
    still = np.ones_like(COS), np.zeros_like(SIN)  # position 0 alone
    assert made(Q, *still) == []


@pytest.mark.parametrize("shapes", [((ROWS, 7), (ROWS, 7)), ((ROWS, 8), (ROWS, 4))])
def test_cosines_of_any_shape_are_read(shapes) -> None:
    assert made(Q + 100, *(np.ones(shape, np.float32) for shape in shapes)) == []


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("pairs", [0, 1, None])
def test_golden_turns_as_its_own_probabilities_say(pairs, neox) -> None:
    """pairs: golden's form, None: it has no probabilities. neox: mine's form, which may be a wrong setting."""
    golden, mine = Dump(run=GOLDEN), Dump(run=MINE)
    known = {"head_size": SIZE, "is_neox_style": neox}
    mine.modules = {0: [Module(f"{BLOCK}.{name}", "M", i, known) for i, name in enumerate(("attn", "rotary_emb"))]}
    key = random.standard_normal((ROWS, SIZE)).astype(np.float32)
    golden.put(BLOCK, "input.position_embeddings.0", COS)
    golden.put(BLOCK, "input.position_embeddings.1", SIN)
    golden.put(f"{BLOCK}.q_proj", "output.0", Q)
    golden.put(f"{BLOCK}.k_proj", "output.0", key)
    if pairs is not None:
        q, k = (rope(x, COS, SIN, SIZE, pairs).reshape(ROWS, -1, SIZE) for x in (Q, key))
        scores = 0.3 * np.einsum("ihd,jd->ihj", q, k[:, 0])
        shares = np.exp(scores) * np.tri(ROWS)[:, None]
        golden.put(BLOCK, "output.1", (shares / shares.sum(-1, keepdims=True)).astype(np.float32))
    mine.put(f"{BLOCK}.rotary_emb", "input.query", Q)
    mine.put(f"{BLOCK}.rotary_emb", "output.0", rope(Q, COS, SIN, SIZE, int(not neox)))
    both = bridge(golden, mine)
    (made,) = (r for r in both.golden.records if (r.tap, r.role) == (f"{BLOCK}.rotary_emb", "output.0"))
    form = int(not neox) if pairs is None else pairs
    assert np.allclose(both.golden.read(made).reshape(ROWS, -1), rope(Q, COS, SIN, SIZE, form), atol=1e-5)
