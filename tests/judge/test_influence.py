"""Which rows reach which: against a definition that looks at every pair of rows."""

import numpy as np
import pytest

from vllm_accprobe.align.tokens import RowSet, make_key
from vllm_accprobe.judge.tensor_errors import TensorErrors
from vllm_accprobe.judge.upstream import Influence


def trace(seen, rows, err, vision=False, everywhere=0.0):
    return TensorErrors("t", "output.0", 0, "output", 0, 0.0, RowSet(seen), rows, err, everywhere, vision)


def earlier_rows(source, keys):
    """The definition: the largest error of the same request at or before each key."""
    pairs = list(zip(source.keys.tolist(), source.err.tolist(), strict=True))
    return [max([e for k, e in pairs if k >> 32 == key >> 32 and k <= key], default=0.0) for key in keys.tolist()]


@pytest.mark.parametrize("seed", range(8))
def test_earlier_rows_of_the_same_request(seed):
    random = np.random.default_rng(seed)
    seen = np.array([make_key(who, at) for who in range(4) for at in range(random.integers(1, 30))])
    rows = np.sort(random.choice(seen, max(len(seen) // 2, 1), replace=False))
    source = trace(seen, rows, random.random(len(rows)))
    keys = np.sort(random.choice(seen, max(len(seen) // 3, 1), replace=False))
    found = Influence({}).of(source, source.err, False, RowSet(keys), True)
    assert found.tolist() == earlier_rows(source, keys)
    alone = Influence({}).of(source, source.err, False, RowSet(keys), False)
    at = dict(zip(rows.tolist(), source.err.tolist(), strict=True))
    assert alone.tolist() == [at.get(k, 0.0) for k in keys.tolist()]


def test_a_prefix_computed_for_another_request_counts():
    """Request 1 has rows from position 2 on: what stands before was computed for request 0."""
    seen = np.array([make_key(0, p) for p in range(3)] + [make_key(1, p) for p in (2, 3)])
    source = trace(seen, seen, np.array([5.0, 1.0, 9.0, 2.0, 3.0]))
    found = Influence({}).of(source, source.err, False, RowSet(seen), True)
    assert found.tolist() == [5.0, 5.0, 9.0, 5.0, 5.0]  # request 0's own row at position 2 is not request 1's


def test_an_image_reaches_the_text_it_fills_and_what_follows():
    image = np.array([make_key(7, 0), make_key(7, 1)])
    source = trace(image, image, np.array([0.25, 0.5]), vision=True)
    text = np.array([make_key(0, p) for p in range(4)])
    influence = Influence({7: [(0, 1, 2)]})
    assert influence.of(source, source.err, False, RowSet(text), False).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert influence.of(source, source.err, True, RowSet(image), True).tolist() == [0.5, 0.5]
    assert Influence({}).of(source, source.err, False, RowSet(text), False).tolist() == [0.0] * 4
    back = trace(text, text, np.ones(4))
    assert influence.of(back, back.err, True, RowSet(image), True).tolist() == [0.0, 0.0]


def test_a_parameter_reaches_everything():
    none = np.zeros(0, np.int64)
    source = trace(none, none, np.zeros(0), everywhere=2.0)
    assert Influence({}).of(source, source.err, False, RowSet(np.arange(3)), True).tolist() == [2.0] * 3


def test_what_is_remembered_stays_within_its_bound():
    rows = RowSet(np.arange(1000))
    sources = [trace(rows.keys, rows.keys, np.full(1000, float(i))) for i in range(20)]
    influence = Influence({}, kept=20_000)
    for _ in range(2):
        for i, source in enumerate(sources):
            assert influence.again(source, "rel", source.err, False, rows, True).max() == i
    assert influence._bytes <= 20_000
    assert len(influence._found) == 2
