"""Errors by row and sampled values that a comparison keeps, on the synthetic model."""

import numpy as np
import pytest
from synthetic_model import capture, scaled

from vllm_accprobe.comparison.engine import compare

TAP = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def result():
    one = {"prompts": {"a": [3, 14, 15, 9, 2], "b": [7, 7, 1]}, "tokens": 3}
    return compare(capture(**one), capture(faults={TAP: scaled(1.25)}, **one))


def test_every_output_row_has_its_error(result):
    rows = result.rows
    sizes = {len(x) for x in (rows.pair, rows.request, rows.position, rows.decode, rows.error, rows.ratio)}
    assert sizes == {len(rows)}
    assert sorted(rows.requests) == ["a", "b"]
    per_pair = np.bincount(rows.pair, minlength=len(result.pairs))
    for i, p in enumerate(result.pairs):
        if p.role.startswith("output") and p.rows and p.status != "skip":
            assert per_pair[i] == p.rows, p.mine


def test_errors_are_those_of_the_pair(result):
    rows, i = result.rows, next(i for i, p in enumerate(result.pairs) if p.tap == TAP and p.status == "fail")
    p, mine = result.pairs[i], result.rows.pair == i
    # A scale of 1.25 is a relative error of 0.25 in every row; the norm ratio may count for more in the row's measure.
    assert rows.error[mine].min() >= 0.24
    assert np.allclose(rows.ratio[mine], rows.error[mine] / np.float32(p.limit))
    worst = np.flatnonzero(mine)[rows.error[mine].argmax()]
    assert (rows.requests[rows.request[worst]], rows.position[worst]) == (p.worst_request, p.worst_position)
    before = [j for j, q in enumerate(result.pairs) if q.tap == "model.layers.0.mlp" and q.role == "output.0"]
    assert not rows.error[np.isin(rows.pair, before)].any()


def test_samples_show_the_scale(result):
    sample = next(s for s in result.samples if result.pairs[s.pair].tap == TAP)
    assert 0 < sample.worst < len(sample.golden) == len(sample.mine)
    seen = np.abs(sample.golden) > 1e-6
    assert np.allclose(sample.mine[seen] / sample.golden[seen], 1.25, rtol=2**-7)
    p = result.pairs[sample.pair]
    assert (sample.request, sample.position) == (p.worst_request, p.worst_position)


def test_what_passes_is_not_sampled():
    one = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    result = compare(capture(**one), capture(chunk=2, **one))
    assert result.verdict == "pass"
    assert result.samples == ()
    assert len(result.rows) == 0  # all agrees to the bit: no row has anything to tell
    noisy = compare(capture(**one), capture(noise=0.001, **one))
    assert len(noisy.rows)
    assert noisy.verdict == "pass"
    assert noisy.samples == ()
    assert not np.nan_to_num(noisy.rows.ratio).max() > 1
