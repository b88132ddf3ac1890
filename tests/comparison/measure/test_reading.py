"""Column sums that a tap carries, rows in stretches, and what statistics alone say."""

import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import capture, write

from vllm_accprobe.align.derived import join_stats
from vllm_accprobe.comparison.engine import compare, open_both
from vllm_accprobe.comparison.measure import read
from vllm_accprobe.comparison.measure.from_journal import ByLines
from vllm_accprobe.comparison.measure.measurer import UNKNOWN_DTYPE, UnitMeasurer, _few
from vllm_accprobe.comparison.measure.read import RowBlock, Stretch, statistics_error
from vllm_accprobe.comparison.plan.make_plan import Indices, make_plan
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.kernels import structure


def measured(golden, mine, tap, role="output.0"):
    dumps = open_both(golden, mine)
    plan = make_plan(*dumps)
    indices = Indices((plan.tokens.golden, plan.tokens.mine))
    return UnitMeasurer(dumps, indices).measure([next(u for u in plan.units if u.key[:2] == (tap, role))])[0]


def test_one_bad_column_stands_out():
    def column(values, positions, decode):
        values[:, 5] += 1.0
        return values

    golden = capture(together=False)
    found = measured(golden, capture(together=False, faults={"model.norm": column}), "model.norm")
    tables = [p.table for p in found.parts if p.table is not None]
    assert len(tables) > 1
    dd = found.columns[0]
    assert dd.argmax() == 5
    assert np.delete(dd, 5).max() < 0.01 * dd[5]
    every = np.concatenate(tables)
    assert found.columns[4].max() == len(every)  # all rows of all tensors
    np.testing.assert_allclose(dd.sum(), (every[:, 4] / every[:, 1]).sum(), rtol=1e-5)  # of d*d over g*g


def test_equal_tensors_have_none():
    golden = capture(together=False)
    assert measured(golden, capture(together=False), "model.norm").columns is None


def test_many_rows_are_represented_by_some_of_them(monkeypatch):
    """300 rows, of which the last is off in column 3 and all others by a little in column 7."""

    def fault(values, positions, decode):
        values[:, 7] *= 1.01
        values[positions == 299, 3] += 10.0
        return values

    monkeypatch.setattr(structure, "ELEMENTS", 64 * 32)
    structure.chosen.cache_clear()
    prompt = {"a": [int(i) for i in np.arange(300) % 40]}
    golden = capture(prompts=prompt, together=False)
    found = measured(golden, capture(prompts=prompt, together=False, faults={"model.norm": fault}), "model.norm")
    structure.chosen.cache_clear()
    assert len(found.parts[0].rows) == 300
    assert 64 <= found.columns[4].max() < 100  # 64 of the prompt's, and those that were decoded
    assert found.columns[0].argmax() == 3  # the last row is one of them


def stretch(golden, mine):
    rows = np.arange(len(golden))
    blocks = (RowBlock(side.astype(np.float32), "float32", golden.shape[1:]) for side in (golden, mine))
    return Stretch(next(blocks), rows, next(blocks), rows)


def test_pixels_differ_in_few_ways_and_activations_in_many():
    random = np.random.default_rng(0)
    shades = (random.integers(0, 256, (64, 3, 64)) / 255 - 0.4).reshape(64, -1).astype(np.float32)
    values = random.standard_normal(shades.shape).astype(np.float32)

    def coarse(x):
        return (x.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)

    assert _few(stretch(shades, coarse(shades)), np.arange(64))
    assert not _few(stretch(values, coarse(values)), np.arange(64))
    off = coarse(coarse(values) * (1 + 0.004 * random.standard_normal(shades.shape).astype(np.float32)))
    assert not _few(stretch(coarse(values), off), np.arange(64))  # bfloat16 on both sides
    assert not _few(stretch(shades, shades), np.arange(64))


def test_runs_of_whole_rows(monkeypatch):
    monkeypatch.setattr(read, "STRETCH", 100)
    places = np.array([3, 5, 8, 9, 11])
    assert [s.tolist() for s in read.stretches(places, 40)] == [[3, 5], [8, 9], [11]]
    assert [s.tolist() for s in read.stretches(places, 101)] == [[3], [5], [8], [9], [11]]
    assert [s.tolist() for s in read.stretches(places, 0)] == [[3, 5, 8, 9, 11]]
    assert list(read.stretches(places[:0], 40)) == []


BASE = Stats(4, -2.0, 2.0, 0.5, 4.0, 0, 0)  # rms 2
ZERO, FAR = Stats(4, 0.0, 0.0, 0.0, 0.0, 0, 0), Stats(4, -1e308, 1e200, 0.0, 1e200, 0, 0)
INFINITE = (math.inf, 0.0)
BOUNDS = [
    (BASE, BASE, (0.0, 0.0)),
    (BASE, replace(BASE, l2=5.0), (0.25, 0.0)),  # |5 - 4| / 4
    (BASE, replace(BASE, mean=1.5), (0.5, 0.0)),  # |1.5 - 0.5| / 2
    (BASE, replace(BASE, max=3.0), (0.0, 0.5)),  # |3 - 2| / max(2, 2)
    (BASE, Stats(4, None, None, None, 4.0, 0, 0), (0.0, 0.0)),  # a figure that one side lacks says nothing
    (replace(BASE, l2=None), Stats(4, -2.0, 3.0, 1.5, 9.0, 0, 0), (0.5, 0.5)),  # golden's extremes are the scale
    (replace(BASE, nan=3), replace(BASE, mean=1.5, nan=3), (0.25, 0.0)),  # one finite number: rms 4
    (BASE, replace(BASE, count=5), INFINITE), (BASE, replace(BASE, nan=1), INFINITE),
    (BASE, replace(BASE, inf=1), INFINITE),
    # A tool that only says whether there is any says 1.
    (replace(BASE, nan=3), replace(BASE, nan=1), (0.0, 0.0)), (replace(BASE, nan=3), replace(BASE, nan=2), INFINITE),
    (ZERO, ZERO, (0.0, 0.0)), (ZERO, BASE, INFINITE),
    # float64 has room for what a square or a difference has none for.
    (FAR, replace(FAR, min=1e308), (0.0, math.inf)), (Stats(4, -1.0, 1.0, 0.0, 1e-320, 0, 0), BASE, (math.inf, 1.0)),
]  # fmt: skip


def test_lower_bounds_of_one_pair_and_of_many(recwarn):
    assert [statistics_error(g, m) for g, m, _ in BOUNDS] == [error for *_, error in BOUNDS]
    names = ("count", "min", "max", "mean", "l2", "nan", "inf")
    sides = [{n: np.array([np.nan if getattr(s, n) is None else getattr(s, n) for s in side], float) for n in names}
             for side in list(zip(*BOUNDS, strict=True))[:2]]  # fmt: skip
    many = read.statistics_errors(*sides)
    assert list(zip(*(e.tolist() for e in many), strict=True)) == [error for *_, error in BOUNDS]
    assert not recwarn


def test_joined_statistics_of_numbers_of_any_size():
    joined = join_stats([FAR, FAR])
    assert joined.l2 == pytest.approx(2**0.5 * 1e200)
    assert join_stats([FAR, replace(ZERO, nan=8)]) is None  # counts that no tensor has


def test_complex_numbers_of_golden_alone_are_not_compared(tmp_path):
    golden, mine = capture(together=False), capture(together=False)
    for i, r in enumerate(golden.records):
        if r.tap == "model.norm" and r.role == "output.0":
            values = golden.data[r.payload.off]
            golden.data[r.payload.off] = (values + 1j).astype(np.complex64)
            golden.records[i] = replace(r, dtype="complex64", hash="other")
    found = [p for p in compare(golden, mine).pairs if p.tap == "model.norm" and p.role == "output.0"]
    assert {(p.status, p.message) for p in found} == {("skip", UNKNOWN_DTYPE)}


def test_statistics_by_columns_are_those_of_each_pair(tmp_path, monkeypatch):
    """Whatever `ByLines` leaves to the measurer, that one finds alike: here all, in dumps of statistics."""
    golden = write(capture(together=False), tmp_path / "golden", payloads=False)
    mine = write(
        capture(together=False, faults={"model.norm": lambda v, p, d: v * 1.25}), tmp_path / "mine", payloads=False
    )
    found = compare(golden, mine)
    assert {p.status for p in found.pairs} == {"pass", "fail"}
    assert any("statistics differ; golden | mine: max" in p.message for p in found.pairs)
    plain = ByLines.each

    def equal_ones(self, units):
        for at, parts in plain(self, units):
            kept = [(i, p) for i, p in zip(at, parts, strict=True) if p.identical]
            yield np.array([i for i, _ in kept], np.int64), [p for _, p in kept]

    monkeypatch.setattr(ByLines, "each", equal_ones)
    again = compare(golden, mine)
    assert again.pairs == found.pairs
    assert again.origins == found.origins
    assert all(np.array_equal(getattr(again.rows, n), getattr(found.rows, n), equal_nan=n == "ratio")
               for n in ("pair", "request", "position", "decode", "error", "ratio"))  # fmt: skip
