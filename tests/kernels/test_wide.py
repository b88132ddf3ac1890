"""One long row in segments is the same row."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.kernels import definition, rows

ONE = np.zeros(1, np.int64)


def both(golden, g_dtype, mine, m_dtype):
    """(in segments, at once, elements of either)"""
    elements = np.zeros((2, len(definition.ELEMENT_FIELDS)))
    cut = rows.wide_rows(golden, g_dtype, ONE, mine, m_dtype, ONE, widen, elements=elements[0])
    once = rows.rows(golden, g_dtype, ONE, mine, m_dtype, ONE, widen, elements=elements[1])
    return cut, once, elements


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "float64"])
@pytest.mark.parametrize("width", [1, 128, 129, 640, 1000])
def test_a_row_in_segments_is_the_row(monkeypatch, dtype, width):
    monkeypatch.setattr(rows, "SEGMENT", 64)
    monkeypatch.setattr(rows, "LONGEST", 64)
    r = np.random.default_rng(width)
    storage = DTYPES[dtype].storage
    for _ in range(20):
        if storage.kind == "f" or dtype == "int32":
            g = (r.standard_normal((1, width)) * 10.0 ** r.integers(0, 3)).astype(storage)
            m = (g * (1 + r.standard_normal((1, width)) * 0.01)).astype(storage)
        else:
            g = (r.standard_normal((1, width)).astype(np.float32).view(np.uint32) >> 16).astype(storage)
            m = g + r.integers(0, 3, (1, width)).astype(storage)
        spoilt = r.random((1, width)) < 0.02
        if storage.kind == "f":
            m[spoilt] = r.choice([np.nan, np.inf, 0.0])
            g[r.random((1, width)) < 0.02] = 0
        cut, once, elements = both(g, dtype, m, dtype)
        np.testing.assert_allclose(cut, once, rtol=1e-12)
        np.testing.assert_allclose(elements[0], elements[1], rtol=1e-12)


def test_the_peak_of_another_segment_than_the_largest_error(monkeypatch):
    """An error of 2 at a value of 100 is less of a peak than one of 1 where there is nearly nothing."""
    monkeypatch.setattr(rows, "SEGMENT", 4)
    monkeypatch.setattr(rows, "LONGEST", 4)
    g = np.full((1, 16), 0.01, np.float32)
    g[0, 0] = 100.0
    m = g.copy()
    m[0, 0] += 8.0
    m[0, 13] += 4.0
    cut, once, _ = both(g, "float32", m, "float32")
    assert cut[0, definition.MAX_D] == 8.0
    assert cut[0, definition.PEAK] == pytest.approx(once[0, definition.PEAK], rel=1e-12)
    assert cut[0, definition.PEAK] > 8.0 / 100.0


def test_nothing_of_the_row_is_finite(monkeypatch):
    monkeypatch.setattr(rows, "SEGMENT", 4)
    monkeypatch.setattr(rows, "LONGEST", 4)
    g = np.full((1, 10), np.nan, np.float32)
    m = np.full((1, 10), np.inf, np.float32)
    cut, once, _ = both(g, "float32", m, "float32")
    np.testing.assert_array_equal(cut, once)


def test_several_wide_rows(monkeypatch):
    """Each is cut by itself, and the elements of all add up; rows that are not asked for are not read."""
    monkeypatch.setattr(rows, "SEGMENT", 4)
    monkeypatch.setattr(rows, "LONGEST", 4)
    r = np.random.default_rng(0)
    g, m = (r.standard_normal((3, 11)).astype(np.float32) for _ in range(2))
    at, to = np.array([2, 0]), np.array([1, 0])
    elements = np.zeros((2, len(definition.ELEMENT_FIELDS)))
    cut = rows.wide_rows(g, "float32", at, m, "float32", to, widen, elements=elements[0])
    once = rows.rows(g, "float32", at, m, "float32", to, widen, elements=elements[1])
    np.testing.assert_allclose(cut, once, rtol=1e-12)
    np.testing.assert_allclose(elements[0], elements[1], rtol=1e-12)
    assert rows.wide_rows(g, "float32", at[:0], m, "float32", to[:0], widen).shape == (0, len(definition.ROW_FIELDS))
