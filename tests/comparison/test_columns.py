"""Column sums that a measured tensor carries."""

import numpy as np
from synthetic_model import capture

from vllm_accprobe.comparison.engine import open_both
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.measure.unit import COLUMN_ROWS, Measurer
from vllm_accprobe.comparison.plan.row_index import Indices
from vllm_accprobe.comparison.plan.units import make_plan


def pieces(golden, mine, tap, role="output.0"):
    dumps = open_both(golden, mine)
    plan = make_plan(*dumps)
    indices = Indices((plan.tokens.golden, plan.tokens.mine))
    measurer = Measurer(dumps, (Loader(dumps[0]), Loader(dumps[1])), indices)
    return list(measurer.measure(next(u for u in plan.units if u.key[:2] == (tap, role))))


def test_one_bad_column_stands_out():
    def column(values, positions, decode):
        values[:, 5] += 1.0
        return values

    golden = capture(together=False)
    found = pieces(golden, capture(together=False, faults={"model.norm": column}), "model.norm")
    measured = [p for p in found if p.table is not None]
    assert measured
    for piece in measured:
        dd = piece.columns[0]
        assert dd.argmax() == 5
        assert np.delete(dd, 5).max() < 0.01 * dd[5]
        np.testing.assert_allclose(piece.columns.sum(axis=1), piece.table[:, [4, 1]].sum(axis=0))  # of d*d, of g*g


def test_equal_tensors_have_none():
    golden = capture(together=False)
    assert all(p.columns is None for p in pieces(golden, capture(together=False), "model.norm"))


def test_many_rows_are_represented_by_those_that_are_furthest_apart():
    """300 rows, of which the last is off in column 3 and all others by a little in column 7."""

    def fault(values, positions, decode):
        values[:, 7] *= 1.01
        values[positions == 299, 3] += 10.0
        return values

    prompt = {"a": [int(i) for i in np.arange(300) % 40]}
    golden = capture(prompts=prompt, together=False)
    found = pieces(golden, capture(prompts=prompt, together=False, faults={"model.norm": fault}), "model.norm")
    piece = next(p for p in found if len(p.keys) == 300)
    assert COLUMN_ROWS == 64
    assert piece.columns[0].argmax() == 3
    gg = np.sort(piece.table[:, 1])
    assert gg[:64].sum() <= piece.columns[1].sum() < gg.sum()
