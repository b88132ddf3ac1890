"""Statistics of raw bytes: hand-computed, compiled against numpy, in pieces against the whole."""

import math
import warnings

import numpy as np
import pytest

from vllm_accprobe.dump import stats as stats_module
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.stats import TensorMoments, moments, tensor_stats, warm_up


def raw(values, dtype):
    return np.array(values, DTYPES[dtype].storage).view(np.uint8).reshape(-1)


def test_by_hand_with_everything_that_is_not_finite():
    s = tensor_stats(np.array([3.0, -4.0, np.nan, np.inf, -np.inf, 0.0], "<f4"), "float32")
    assert (s.count, s.nan, s.inf) == (6, 1, 2)
    assert (s.min, s.max, s.l2) == (-4.0, 3.0, 5.0)
    assert s.mean == pytest.approx(-1 / 3)
    # of 3, -4, 0: mean of squares 25/3, less (1/3)**2
    assert s.std == pytest.approx(math.sqrt(25 / 3 - 1 / 9))


def test_nothing_finite_and_nothing_at_all():
    s = tensor_stats(np.array([np.nan, np.inf], "<f8"), "float64")
    assert (s.count, s.min, s.max, s.mean, s.l2, s.std, s.nan, s.inf) == (2, None, None, None, None, None, 1, 1)
    assert tensor_stats(np.empty((0, 4), "<f4"), "float32") == TensorMoments().stats()


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


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_by_address_equals_by_array(dtype):
    """One piece and many pieces, with NaN, infinities and both zeros where the dtype has them."""
    size = DTYPES[dtype].itemsize
    data = np.random.default_rng(2).integers(0, 256, 3000 * size, dtype=np.uint8)
    if dtype in ("float64", "complex128"):  # sums of random exponents overflow
        data = np.random.default_rng(2).standard_normal(3000 * size // 8).view(np.uint8).copy()
    if dtype in ("float16", "bfloat16", "float32"):
        special = {"float16": [0x7C00, 0xFE00, 0x8000], "bfloat16": [0x7F80, 0xFFC1, 0x8000],
                   "float32": [0x7F800000, 0xFFC00001, 0x80000000]}[dtype]  # fmt: skip
        data[: 3 * size] = np.array(special, f"<u{size}").view(np.uint8)
    found = TensorMoments(*stats_module.moments_at(data.ctypes.data, data.size, dtype)).stats()
    assert found == tensor_stats(data.view(DTYPES[dtype].storage), dtype)
    spans = [(0, size), (size, 900 * size), (900 * size, 900 * size), (900 * size, 3000 * size)]
    pieces = stats_module.moments_within(data.ctypes.data, spans, dtype)
    for (start, stop), piece in zip(spans, pieces, strict=True):
        assert TensorMoments(*piece) == moments(data[start:stop], dtype)
        assert all(type(count) is int for count in (piece[0], piece[5], piece[6]))


def test_a_large_piece_gives_up_the_gil_and_counts_the_same():
    data = np.ones((1 << 19) + 4, "<f4")
    n, low, high, total, *_ = stats_module.moments_at(data.ctypes.data, data.nbytes, "float32")
    assert (n, low, high, total) == (data.size, 1.0, 1.0, float(data.size))
