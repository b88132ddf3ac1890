"""How values and errors are spread: against numpy.histogram, and with faults that were put in."""

import numpy as np

from vllm_accprobe.comparison.row_table import BINS, histograms, over_columns, over_positions

RNG = np.random.default_rng(5)


def test_histograms_are_numpys_in_the_same_bins_and_count_the_odd_apart():
    golden, mine = RNG.normal(size=(40, 64)), RNG.normal(size=(40, 64)) * 3
    low, high, (g, m) = histograms(golden, mine)
    assert (low, high) == (min(golden.min(), mine.min()), max(golden.max(), mine.max()))
    for counts, x in ((g, golden), (m, mine)):
        assert counts[:BINS].tolist() == np.histogram(x, BINS, (low, high))[0].tolist()
        assert counts.sum() == x.size
    mine[0, :6] = [np.nan, np.nan, np.inf, -np.inf, -np.inf, -np.inf]
    _, _, (g, m) = histograms(golden, mine)
    assert g[BINS:].tolist() == [0, 0, 0]
    assert m[BINS:].tolist() == [2, 1, 3]
    assert m.sum() == mine.size


def test_histograms_of_one_value_of_nothing_finite_and_of_the_whole_range():
    for x in (np.full((2, 2), 3.0), np.full((2, 2), np.nan), np.array([[-1.7e308, 1.7e308]])):
        _, _, (g, m) = histograms(x, x)
        assert g.sum() == m.sum() == x.size
    for near in (np.float32([1.0, np.nextafter(np.float32(1), 2)]), np.full(2, -3.4e38, np.float32), np.full(2, 1e300)):
        _, _, (g, m) = histograms(near[None], near[None])
        assert g[BINS // 2] == m[BINS // 2] == 2  # not as many numbers as bins: an error in numpy


def test_a_wrong_column_is_a_spike_at_its_place_however_wide_the_tensor():
    for width, wrong in ((64, 17), (5_000, 4_321)):
        golden = RNG.normal(size=(30, width))
        mine = golden + RNG.normal(size=golden.shape) * 1e-4
        mine[:, wrong] *= 2
        peaks = over_columns(golden, mine)
        assert len(peaks) == min(width, 256)
        at = int(peaks.argmax())
        assert at == wrong if width == 64 else at * width // 256 <= wrong < (at + 1) * width // 256
        expected = np.sqrt(np.mean(golden[:, wrong] ** 2) / np.mean(golden**2))
        assert abs(peaks[at] / expected - 1) < 1e-2
        assert np.sort(peaks)[-2] < 1e-3


def test_columns_where_one_side_is_not_finite_are_infinite_and_equal_nans_are_no_error():
    golden = np.ones((4, 3))
    mine = golden.copy()
    golden[0, 0] = mine[0, 0] = np.nan
    mine[1, 2] = np.nan
    assert over_columns(golden, mine).tolist() == [0.0, 0.0, np.inf]


def test_wrong_positions_show_at_their_place_and_gaps_stay_gaps():
    positions = np.r_[0:100, 900:1000]
    error = np.where((positions >= 40) & (positions < 60), 0.5, 1e-3)
    error[-1] = np.nan
    first, last, parts = over_positions(positions, error)
    assert (first, last, len(parts)) == (0, 999, 128)
    assert np.flatnonzero(parts == 0.5).tolist() == [p * 128 // 1000 for p in (40, 48, 55)]
    assert (parts[14:114] == -1).all()
    assert parts[-1] == np.inf
    assert over_positions(np.array([7]), np.array([0.25]))[2].tolist() == [0.25]
