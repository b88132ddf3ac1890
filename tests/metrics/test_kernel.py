"""The compiled loop against the definition, over dtypes, widths and values that break shortcuts."""

import numpy as np
import pytest

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.metrics import kernel, oracle

pytest.importorskip("numba")
FLOATS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float64"]


def bits(rng, dtype, shape):
    """Random bit patterns: all exponents, NaN, infinities, denormals and zeroes."""
    info = DTYPES[dtype]
    raw = rng.integers(0, 256, (*shape, info.itemsize), dtype=np.uint8).reshape(*shape[:-1], -1).view(info.storage)
    raw[rng.random(shape) < 0.1] = 0
    return raw


@pytest.mark.parametrize("gd", FLOATS)
@pytest.mark.parametrize("md", ["bfloat16", "float32", "float8_e4m3fn"])
def test_equals_the_oracle_on_random_bits(gd, md):
    rng = np.random.default_rng(7)
    for width in (1, 3, 64, 1000):
        g, m = bits(rng, gd, (9, width)), bits(rng, md, (11, width))
        gi, mi = rng.integers(0, 9, 20), rng.integers(0, 11, 20)
        got = kernel.rows(g, gd, gi, m, md, mi, widen)
        want = kernel.rows(g, gd, gi, m, md, mi, widen, compiled=False)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equals_the_oracle_on_close_values(dtype):
    rng = np.random.default_rng(3)
    g = (rng.standard_normal((6, 777)) * 10.0 ** rng.integers(-3, 3, (6, 1))).astype(np.float32)
    m = g * (1 + 1e-2 * rng.standard_normal(g.shape).astype(np.float32))
    g[2], m[3], g[4], m[4] = 0, 0, 0, 0
    if dtype == "bfloat16":
        g, m = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (g, m))
    else:
        g, m = g.astype(DTYPES[dtype].storage), m.astype(DTYPES[dtype].storage)
    at = np.arange(6)
    got, want = (kernel.rows(g, dtype, at, m, dtype, at, widen, compiled=c) for c in (True, False))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)
    assert got[4].tolist() == [777, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0]
    assert np.isinf(got[2, oracle.PEAK])


def test_integers_go_to_the_oracle():
    g, m = np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 6]])
    table = kernel.rows(g, "int64", np.array([0, 1]), m, "int64", np.array([0, 1]), widen)
    assert table[:, oracle.MAX_D].tolist() == [0.0, 2.0]


def test_bad_indices_are_refused():
    g = np.zeros((2, 4), np.uint16)
    with pytest.raises(IndexError, match="outside an array of 2 rows"):
        kernel.rows(g, "bfloat16", np.array([2]), g, "bfloat16", np.array([0]), widen)
    with pytest.raises(ValueError, match="different width"):
        kernel.rows(g, "bfloat16", np.array([0]), g[:, :2], "bfloat16", np.array([0]), widen)
