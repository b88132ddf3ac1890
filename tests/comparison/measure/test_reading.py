"""Column sums that a tap carries, rows in stretches, and what statistics alone say."""

import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import capture, write

from vllm_accprobe.align.derived import join_stats
from vllm_accprobe.comparison.engine import compare, open_both
from vllm_accprobe.comparison.measure import read
from vllm_accprobe.comparison.measure.by_lines import ByLines
from vllm_accprobe.comparison.measure.measurer import UNKNOWN_DTYPE, UnitMeasurer, _few
from vllm_accprobe.comparison.measure.read import RowBlock, Stretch, common, figures, figures_text, statistics_error
from vllm_accprobe.comparison.plan.units import Indices, make_plan
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
INFINITE = (math.inf, 0.0)


@pytest.mark.parametrize(
    ("mine", "error"),
    [
        (BASE, (0.0, 0.0)),
        (Stats(4, -2.0, 2.0, 0.5, 5.0, 0, 0), (0.25, 0.0)),  # |5 - 4| / 4
        (Stats(4, -2.0, 2.0, 1.5, 4.0, 0, 0), (0.5, 0.0)),  # |1.5 - 0.5| / 2
        (Stats(4, -2.0, 3.0, 0.5, 4.0, 0, 0), (0.0, 0.5)),  # |3 - 2| / max(2, 2)
        (Stats(4, None, None, None, 4.0, 0, 0), (0.0, 0.0)),  # a figure that one side lacks says nothing
        (Stats(5, -2.0, 2.0, 0.5, 4.0, 0, 0), INFINITE),
        (Stats(4, -2.0, 2.0, 0.5, 4.0, 1, 0), INFINITE),
    ],
)
def test_lower_bounds(mine, error):
    assert statistics_error(BASE, mine) == error


def test_counts_of_tools_that_only_say_whether_there_is_any():
    many = Stats(4, -2.0, 2.0, 0.5, 4.0, 3, 0)
    assert statistics_error(many, Stats(4, -2.0, 2.0, 0.5, 4.0, 1, 0)) == (0.0, 0.0)
    assert statistics_error(many, Stats(4, -2.0, 2.0, 0.5, 4.0, 2, 0)) == INFINITE


def test_zeros():
    zero = Stats(4, 0.0, 0.0, 0.0, 0.0, 0, 0)
    assert statistics_error(zero, zero) == (0.0, 0.0)
    assert statistics_error(zero, BASE) == INFINITE


def test_numbers_of_any_size(recwarn):
    """float64 has room for what a square or a difference has none for."""
    far = Stats(4, -1e308, 1e200, 0.0, 1e200, 0, 0)
    assert statistics_error(far, Stats(4, 1e308, 1e200, 0.0, 1e200, 0, 0)) == (0.0, math.inf)
    assert statistics_error(Stats(4, -1.0, 1.0, 0.0, 1e-320, 0, 0), BASE) == (math.inf, 1.0)
    joined = join_stats([far, far])
    assert joined.l2 == pytest.approx(2**0.5 * 1e200)
    assert join_stats([far, Stats(4, 0.0, 0.0, 0.0, 0.0, 8, 0)]) is None  # counts that no tensor has
    assert not recwarn


def test_complex_numbers_of_golden_alone_are_not_compared(tmp_path):
    golden, mine = capture(together=False), capture(together=False)
    for i, r in enumerate(golden.records):
        if r.tap == "model.norm" and r.role == "output.0":
            values = golden.data[r.payload.off]
            golden.data[r.payload.off] = (values + 1j).astype(np.complex64)
            golden.records[i] = replace(r, dtype="complex64", hash="other")
    found = [p for p in compare(golden, mine).pairs if p.tap == "model.norm" and p.role == "output.0"]
    assert {(p.status, p.message) for p in found} == {("skip", UNKNOWN_DTYPE)}


def test_words():
    part = Stats(4, None, 2.0, None, None, 0, 0)
    both = figures_text((figures(BASE), figures(part)))
    assert both == "golden | mine: max 2 | 2, min -2 | -, mean 0.5 | -, norm 4 | -"
    none = Stats(4, None, None, None, None, 0, 0)
    assert figures_text((figures(none), figures(none))) == ""
    assert (common(BASE, part), common(BASE, none)) == (True, False)


def by_hand(g, m):
    """`statistics_error`, figure by figure."""
    counts = (g.nan, m.nan), (g.inf, m.inf)
    if g.count != m.count or any(bool(a) != bool(b) or (a != b and min(a, b) > 1) for a, b in counts):
        return math.inf, 0.0
    ends = [(a, b) for a, b in ((g.min, m.min), (g.max, m.max)) if a is not None and b is not None]
    rms = (
        g.l2 / max(g.count - g.nan - g.inf, 1) ** 0.5 if g.l2 is not None else max((abs(a) for a, _ in ends), default=0)
    )
    pairs = [*ends, *((a, b) for a, b in ((g.mean, m.mean), (g.l2, m.l2)) if a is not None and b is not None)]
    if not rms:
        return (0.0, 0.0) if all(a == b for a, b in pairs) else (math.inf, 0.0)
    parts = [0.0]
    if g.l2 is not None and m.l2 is not None and g.l2:
        parts.append(abs(m.l2 - g.l2) / g.l2)
    if g.mean is not None and m.mean is not None:
        parts.append(abs(m.mean - g.mean) / rms)
    return max(parts), max([0.0, *(abs(b - a) / max(abs(a), rms) for a, b in ends)])


def test_statistics_of_many_pairs_are_those_of_each():
    rng = np.random.default_rng(5)

    def some():
        figures = [
            None if rng.random() < 0.2 else float(v) for v in rng.choice([0.0, -1.5, 2.0, *rng.normal(size=3)], 3)
        ]
        norm = None if rng.random() < 0.2 else float(rng.choice([0.0, abs(rng.normal())]))
        return Stats(int(rng.choice([4, 64])), *figures, norm, *(int(n) for n in rng.choice([0, 0, 0, 1, 2, 3], 2)))

    pairs = [(some(), some()) for _ in range(3000)]
    expected = [by_hand(g, m) for g, m in pairs]
    assert [statistics_error(g, m) for g, m in pairs] == expected
    names = ("count", "min", "max", "mean", "l2", "nan", "inf")
    sides = [
        {n: np.array([np.nan if getattr(s, n) is None else getattr(s, n) for s in side], float) for n in names}
        for side in zip(*pairs, strict=True)
    ]
    assert list(zip(*(e.tolist() for e in read.statistics_errors(*sides)), strict=True)) == expected
    assert {math.isinf(e) for e, _ in expected} == {True, False}


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
