"""The compiled loop against the definition, over dtypes, widths and values that break shortcuts."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.kernels import definition, native, rows

binding = pytest.importorskip("llvmlite.binding")
EXACT = [definition.N, definition.MAX_D, definition.MAX_REL, definition.NONFINITE, definition.MISMATCH]
"""Fields that no order of additions changes."""
FLOATS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float64"]


def bits(rng, dtype, shape):
    """Random bit patterns: all exponents, NaN, infinities, denormals and zeroes."""
    info = DTYPES[dtype]
    raw = rng.integers(0, 256, (*shape, info.itemsize), dtype=np.uint8).reshape(*shape[:-1], -1).view(info.storage)
    raw[rng.random(shape) < 0.1] = 0
    return raw


def compared(g, gd, gi, m, md, mi):
    """The compiled loop's (rows, elements), which are the definition's; the rows' without elements, too."""
    sums = np.zeros((2, len(definition.ELEMENT_FIELDS)))
    got, want = (rows.rows(g, gd, gi, m, md, mi, widen, elements=sums[i], compiled=not i) for i in (0, 1))
    alone = rows.rows(g, gd, gi, m, md, mi, widen)
    np.testing.assert_array_equal(got, alone)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=0)
    np.testing.assert_array_equal(got[:, EXACT], want[:, EXACT])
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-12, atol=0)
    return got, sums[0]


def stored(values, dtype):
    """float32 ``values`` as a dump has them."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype].storage)


@pytest.mark.parametrize("gd", FLOATS)
@pytest.mark.parametrize("md", ["bfloat16", "float32", "float8_e4m3fn"])
def test_equals_the_oracle_on_random_bits(gd, md):
    rng = np.random.default_rng(7)
    for width in (1, 3, 64, 1000):
        g, m = bits(rng, gd, (9, width)), bits(rng, md, (11, width))
        compared(g, gd, rng.integers(0, 9, 20), m, md, rng.integers(0, 11, 20))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equals_the_oracle_on_close_values(dtype):
    rng = np.random.default_rng(3)
    g = (rng.standard_normal((6, 777)) * 10.0 ** rng.integers(-3, 3, (6, 1))).astype(np.float32)
    m = g * (1 + 1e-2 * rng.standard_normal(g.shape).astype(np.float32))
    g[2], m[3], g[4], m[4] = 0, 0, 0, 0
    at = np.arange(6)
    got, sums = compared(stored(g, dtype), dtype, at, stored(m, dtype), dtype, at)
    assert 0 < sums[definition.CLOSE] < sums[definition.WITHIN_1000] < sums[definition.WITHIN_100] < 6 * 777
    assert got[4].tolist() == [777, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0]
    assert np.isinf(got[2, definition.PEAK])


@pytest.mark.parametrize("width", [8, 72, 2048, 2056])
@pytest.mark.parametrize(("gd", "smallest"), [("bfloat16", 2.0**-22), ("float16", 2.0**-22), ("float32", 1.2e-7)])
@pytest.mark.parametrize("tiny", [1.0, 2.0**-23, 0.0])
def test_blocks_with_and_without_magnitudes_that_are_left_out(gd, smallest, tiny, width):
    """Blocks of which all |g| are above TINY run through loops of their own."""
    rng = np.random.default_rng(width)
    g = np.abs(rng.standard_normal((70, width))).astype(np.float32) + np.float32(0.01)
    g[:, ::2] *= -1
    g[:, 5], g[:, 6] = smallest, tiny
    m = g * (1 + 2**-9 * rng.standard_normal(g.shape).astype(np.float32))
    m[:, 6] += 3  # the largest |d| and the largest ratio lie where they are left out, or not
    at = np.arange(70)
    _, sums = compared(stored(g, gd), gd, at, stored(m, gd), gd, at)
    assert (sums[definition.TOP_ABS] < 2) == (tiny <= 2.0**-23)


@pytest.mark.parametrize("width", [8, 72, 2048, 2056])
@pytest.mark.parametrize("md", ["bfloat16", "float32"])
def test_rows_of_whole_vectors(width, md):
    """Rows next to each other, of which some have positions left out, some are 0 on one side or on both."""
    rng = np.random.default_rng(width)
    g = rng.standard_normal((70, width)).astype(np.float32)
    m = g * (1 + 2**-9 * rng.standard_normal(g.shape).astype(np.float32))
    g[3], g[5], m[5], m[9] = 0, 0, 0, 0
    g[11, -1], m[11, 0], m[12], g[13, ::2] = np.nan, np.inf, np.nan, 0
    g[20], m[20] = 1e-9, 1.1e-9  # below what msit looks at
    at = np.arange(70)
    got, _ = compared(g, "float32", at, stored(m, md), md, at)
    assert got[3, definition.MAX_REL] == -1
    assert np.isinf(got[3, definition.PEAK])
    assert got[12, definition.NONFINITE] == width
    assert got[11, definition.N] == width - 2


INTEL, AMD, OLD = "avx512f", "sse4a", "avx2"
"""Loops divide by other instructions on a processor of Intel's with AVX-512, on AMD's, and where vectors are short."""


@pytest.fixture(params=[OLD, *([INTEL, AMD] if binding.get_host_cpu_features().get("avx512f") else [])])
def processor(request, monkeypatch, tmp_path):
    """The loops as another processor gets them, which this one can run, too."""
    has = binding.get_host_cpu_features()
    for name in has:
        has[name] &= not (name.startswith("avx512") and request.param == OLD)
    has["sse4a"] = request.param == AMD
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: has)
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "x86-64-v3")
    loops = native.loops()
    monkeypatch.setattr(rows, "_compiled", lambda: loops)
    return request.param


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 8, 24, 32, 40, 64, 72, 100, 2048, 2056, 2080, 4104]))
def test_largest_ratios_wherever_they_lie(processor, seed, width):
    """Any float32s, and rows whose largest ratio is tied, huge, or lies in the first or last lane."""
    rng = np.random.default_rng(seed)
    g, m = (bits(rng, "float32", (9, width)) for _ in range(2))
    finite = rng.standard_normal((9, width)).astype(np.float32)
    finite[rng.random(finite.shape) < 0.05] = 0
    for r, at in ((0, 0), (1, -1), (2, width // 2), (3, [0, -1])):
        g[r], m[r] = finite[r], finite[r] * np.float32(1 + 2**-9)
        g[r, at] = 2.0 ** int(rng.integers(-149, 100))
        m[r, at] = np.float32(3.0) * g[r, at]
    g[4], m[4] = np.float32(1e-45), bits(rng, "float32", (1, width))[0]
    g[5], m[5] = finite[5], finite[5] + rng.integers(0, 2, width).astype(np.float32) * np.float32(1e-3)
    at = np.arange(9)
    compared(g, "float32", at, m, "float32", at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_quotient_is_rounded_as_a_division(processor, dtype):
    """Rows of 32, each with one number that is not 0, in all vectors: its ratio is the row's largest."""
    rng, at = np.random.default_rng(13), np.arange(40_000)
    g, m = np.zeros((2, 40_000, 32), np.float32)
    g[at, at % 32], m[at, at % 32] = rng.standard_normal((2, 40_000))
    compared(stored(g, dtype), dtype, at, m, "float32", at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_each_processor_on_random_bits(processor, dtype):
    rng = np.random.default_rng(11)
    for width in (8, 64, 2072):
        g, m = (bits(rng, dtype, (40, width)) for _ in range(2))
        compared(g, dtype, rng.permutation(40), m, dtype, np.arange(40))


def test_integers_go_to_the_oracle():
    g, m = np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 6]])
    table = rows.rows(g, "int64", np.array([0, 1]), m, "int64", np.array([0, 1]), widen)
    assert table[:, definition.MAX_D].tolist() == [0.0, 2.0]


def test_bits_of_another_size_are_refused():
    """The loops read as many bytes as the dtype's elements have, whatever the array has."""
    at = np.arange(2)
    right = np.zeros((2, 64), np.float32), "float32", at
    wrong = [(np.zeros((2, 64), kind), dtype, at) for kind in ("u1", "u8") for dtype in ("float32", "bfloat16")]
    for sides in [*((right, w) for w in wrong), *((w, right) for w in wrong)]:
        for function in (rows.rows, rows.structure_sums):
            with pytest.raises(ValueError, match="does not hold the bits of"):
                function(*sides[0], *sides[1], widen)


def test_bad_indices_are_refused():
    g = np.zeros((2, 4), np.uint16)
    with pytest.raises(IndexError, match="outside an array of 2 rows"):
        rows.rows(g, "bfloat16", np.array([2]), g, "bfloat16", np.array([0]), widen)
    with pytest.raises(ValueError, match="different width"):
        rows.rows(g, "bfloat16", np.array([0]), g[:, :2], "bfloat16", np.array([0]), widen)


@pytest.mark.parametrize("width", [64, 2047, 2048, 2049, 5000])
def test_rows_in_order_equal_rows_gathered(width):
    """Neighbouring rows are loaded together; a NaN in one of them must not touch the others."""
    rng = np.random.default_rng(9)
    g = rng.standard_normal((40, width)).astype(np.float32)
    m = (g + 0.01 * rng.standard_normal(g.shape)).astype(np.float32)
    m[7, width // 2], g[20, 0], m[20, 0], g[31, -1] = np.nan, np.inf, np.inf, -np.inf
    at = np.arange(40)
    table = rows.rows(g, "float32", at, m, "float32", at, widen)
    np.testing.assert_allclose(table, definition.row_table(g, m), rtol=1e-12)
    shuffled = rng.permutation(40)
    again = rows.rows(g, "float32", shuffled, m, "float32", shuffled, widen)
    np.testing.assert_array_equal(again[:, definition.MAX_D], table[shuffled, definition.MAX_D])
    np.testing.assert_allclose(again, table[shuffled], rtol=1e-12)
    assert table[:, definition.NONFINITE].nonzero()[0].tolist() == [7, 20, 31]


@pytest.mark.parametrize("gd", FLOATS)
def test_structure_equals_its_definition(gd):
    rng = np.random.default_rng(5)
    for width in (1, 3, 8, 300, 5000):
        g = rng.standard_normal((70, width)).astype(np.float32)
        m = g * (1 + 0.02 * rng.standard_normal(g.shape)).astype(np.float32)
        g[[5, -1]], m[2, 0] = 0, np.nan  # the last one, too: what waits for more rows is summed up
        m = stored(m, "bfloat16")
        if gd.startswith("float8"):
            g = rng.integers(0, 0x40, g.shape).astype(np.uint8)  # small and finite
            g[[5, -1]] = 0
        else:
            g = stored(g, gd)
        at = np.arange(70)
        got, want = (rows.structure_sums(g, gd, at, m, "bfloat16", at, widen, compiled=c) for c in (True, False))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)  # the definition adds up in float32
        assert got[4].tolist() == [67.0] * width


# --- one long row in segments is the same row ---


@pytest.fixture
def short(monkeypatch):
    """Segments of so many elements."""

    def of(n):
        monkeypatch.setattr(rows, "SEGMENT", n)
        monkeypatch.setattr(rows, "LONGEST", n)

    return of


def in_segments(g, gd, gi, m, md, mi):
    """What rows in segments give, which is what they give at once."""
    elements = np.zeros((2, len(definition.ELEMENT_FIELDS)))
    cut = rows.wide_rows(g, gd, gi, m, md, mi, widen, elements=elements[0])
    once = rows.rows(g, gd, gi, m, md, mi, widen, elements=elements[1])
    np.testing.assert_allclose(cut, once, rtol=1e-12)
    np.testing.assert_allclose(elements[0], elements[1], rtol=1e-12)
    return cut


ONE = np.zeros(1, np.int64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "float64"])
@pytest.mark.parametrize("width", [1, 128, 129, 640])
def test_a_row_in_segments_is_the_row(short, dtype, width):
    short(64)
    r = np.random.default_rng(width)
    storage = DTYPES[dtype].storage
    for _ in range(10):
        if storage.kind == "f" or dtype == "int32":
            g = (r.standard_normal((1, width)) * 10.0 ** r.integers(0, 3)).astype(storage)
            m = (g * (1 + r.standard_normal((1, width)) * 0.01)).astype(storage)
        else:
            g = stored(r.standard_normal((1, width)).astype(np.float32), dtype)
            m = g + r.integers(0, 3, (1, width)).astype(storage)
        spoilt = r.random((1, width)) < 0.02
        if storage.kind == "f":
            m[spoilt] = r.choice([np.nan, np.inf, 0.0])
            g[r.random((1, width)) < 0.02] = 0
        in_segments(g, dtype, ONE, m, dtype, ONE)


def test_the_peak_of_another_segment_than_the_largest_error(short):
    """An error of 2 at a value of 100 is less of a peak than one of 1 where there is nearly nothing."""
    short(4)
    g = np.full((1, 16), 0.01, np.float32)
    g[0, 0] = 100.0
    m = g.copy()
    m[0, 0] += 8.0
    m[0, 13] += 4.0
    cut = in_segments(g, "float32", ONE, m, "float32", ONE)
    assert cut[0, definition.MAX_D] == 8.0
    assert cut[0, definition.PEAK] > 8.0 / 100.0


def test_nothing_of_the_row_is_finite(short):
    short(4)
    in_segments(np.full((1, 10), np.nan, "f4"), "float32", ONE, np.full((1, 10), np.inf, "f4"), "float32", ONE)


def test_several_wide_rows(short):
    """Each is cut by itself, and the elements of all add up; rows that are not asked for are not read."""
    short(4)
    r = np.random.default_rng(0)
    g, m = (r.standard_normal((3, 11)).astype(np.float32) for _ in range(2))
    at, to = np.array([2, 0]), np.array([1, 0])
    in_segments(g, "float32", at, m, "float32", to)
    assert rows.wide_rows(g, "float32", at[:0], m, "float32", to[:0], widen).shape == (0, len(definition.ROW_FIELDS))
