"""Statistics of raw bytes: hand-computed, compiled against numpy, in pieces against the whole."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from vllm_accprobe.dump import stats as stats_module
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.stats import Moments, moments, tensor_stats, warm_up


def raw(values, dtype):
    return np.array(values, DTYPES[dtype].storage).view(np.uint8).reshape(-1)


def test_by_hand_with_everything_that_is_not_finite():
    s = tensor_stats(np.array([3.0, -4.0, np.nan, np.inf, -np.inf, 0.0], "<f4"), "float32")
    assert (s.count, s.nan, s.inf) == (6, 1, 2)
    assert (s.min, s.max, s.l2) == (-4.0, 3.0, 5.0)
    assert s.mean == pytest.approx(-1 / 3)
    # of 3, -4, 0: mean of squares 25/3, less (1/3)**2
    assert s.std == pytest.approx(math.sqrt(25 / 3 - 1 / 9))


def test_bfloat16_by_hand():
    # 1.0, -2.0, smallest subnormal, NaN with another payload
    s = tensor_stats(np.array([0x3F80, 0xC000, 0x0001, 0x7FC1], "<u2"), "bfloat16")
    assert (s.count, s.min, s.max, s.nan, s.inf) == (4, -2.0, 1.0, 1, 0)
    assert s.mean == pytest.approx(-1 / 3)


def test_nothing_finite_and_nothing_at_all():
    s = tensor_stats(np.array([np.nan, np.inf], "<f8"), "float64")
    assert (s.count, s.min, s.max, s.mean, s.l2, s.std, s.nan, s.inf) == (2, None, None, None, None, None, 1, 1)
    assert tensor_stats(np.empty((0, 4), "<f4"), "float32") == Moments().stats()


def test_a_norm_beyond_float64_is_none_and_not_infinity():
    s = tensor_stats(np.array([1e200, -1e200], "<f8"), "float64")
    assert (s.min, s.max, s.mean, s.l2) == (-1e200, 1e200, 0.0, None)


def test_scalars_have_one_element():
    assert tensor_stats(np.array(7, "<i8"), "int64").mean == 7.0


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("n", [1, 2047, 2048, 5003])
def test_compiled_equals_numpy(dtype, n):
    """Random bits: NaN, infinities and subnormals in between. Extrema and counts exactly, sums to rounding."""
    if not warm_up(()):
        pytest.skip("numba is not installed")
    rng = np.random.default_rng(n)
    data = rng.integers(0, 256, n * DTYPES[dtype].itemsize, dtype=np.uint8)
    if dtype in ("float64", "complex128"):  # sums of random exponents overflow; tested by hand above
        data = (rng.standard_normal(data.size // 8) * 1e10).view(np.uint8).copy()
        data[-8:] = raw([np.nan], "float64")
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = moments(data, dtype), stats_module._numpy_moments(data, part)
    assert ours[:3] == theirs[:3]
    assert ours[5:] == theirs[5:]
    scale = math.sqrt(max(theirs.squares, 0) * max(theirs.n, 1))
    assert ours.sum == pytest.approx(theirs.sum, rel=1e-9, abs=1e-12 * scale)
    assert ours.squares == pytest.approx(theirs.squares, rel=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64", "bool", "complex64"])
def test_pieces_add_up(dtype):
    rng = np.random.default_rng(5)
    size = DTYPES[dtype].itemsize
    data = (rng.standard_normal(1000 * size // 4).astype("<f4") if dtype in ("float32", "complex64")
            else rng.integers(0, 120, 1000 * size, dtype=np.uint8)).view(np.uint8)  # fmt: skip
    whole = moments(data, dtype)
    total = sum((moments(data[a * size : (a + 250) * size], dtype) for a in range(0, 1000, 250)), Moments())
    assert total[:3] == whole[:3]
    assert total[5:] == whole[5:]
    assert total.sum == pytest.approx(whole.sum, rel=1e-9, abs=1e-6)
    assert total.squares == pytest.approx(whole.squares, rel=1e-12)


def test_without_numba_the_numbers_are_the_same(monkeypatch):
    data = np.random.default_rng(3).standard_normal(5000).astype("<f2").view(np.uint8)
    compiled = moments(data, "float16")
    monkeypatch.setattr(stats_module, "_kernels", lambda: None)
    assert warm_up() is False
    plain = moments(data, "float16")
    assert plain[:3] == compiled[:3]
    assert plain.squares == pytest.approx(compiled.squares, rel=1e-12)
    values = widen(data.view("<f2"), "float16").astype(np.float64)
    assert plain.sum == pytest.approx(values.sum(), rel=1e-9)
    assert moments(np.array([0, 1, 1], np.uint8), "bool").sum == 2.0
    assert moments(np.array([0x7E, 0x7F], np.uint8), "float8_e4m3fn")[:3] == (1, 448.0, 448.0)
