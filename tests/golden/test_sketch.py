import numpy as np
import pytest

from vllm_accprobe.golden.sketch import FEW, ROUNDING, Sketch, distances, quantile, signs_of, turned

KINDS = ("normal", "one element", "one column in ten", "a factor", "heavy tails")


@pytest.mark.parametrize(
    ("above", "value"), [(0.95, 7.9616), (0.5, 15.3385), (0.05, 26.2962), (0.025, 28.8454), (0.001, 39.2524)]
)
def test_quantiles_are_those_of_the_tables(above: float, value: float) -> None:
    """Abramowitz and Stegun, table 26.8, 16 degrees of freedom."""
    assert quantile(above) == pytest.approx(value, abs=6e-5)


def rows_of(kind: str, n: int, width: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    golden = random.standard_normal((n, width)).astype(np.float32)
    error = random.standard_normal((n, width)).astype(np.float32)
    if kind == "one element":
        error *= np.arange(width) == 7
    elif kind == "one column in ten":
        error *= np.arange(width) % 10 == 0
    elif kind == "a factor":
        error = golden
    elif kind == "heavy tails":
        error = error**5
    return golden, golden + np.float32(0.01) * error


@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_holds_the_true_error(kind: str) -> None:
    """60 tensors of each kind, with signs of their own: 95 % of 20 rows of each, with three standard deviations of the
    fraction over tensors, which is what is independent."""
    random = np.random.default_rng(KINDS.index(kind))
    held, squares = [], []
    for number in range(60):
        width = int(random.integers(32, 400))
        golden, mine = rows_of(kind, 20, width, random)
        signs = signs_of(1, f"tap{number}/output.0#0", width)
        sides = Sketch.unpacked(*Sketch.of(golden, signs).packed()), Sketch.of(mine, signs)
        estimate, low, high = distances(*sides, 0.05)
        true = np.linalg.norm(golden - mine, axis=1)
        held.append(((low <= true) & (true <= high)).mean())
        squares.append((estimate**2 / true**2).mean())
    assert np.mean(held) >= 0.95 - 3 * np.std(held) / 60**0.5
    assert np.mean(squares) == pytest.approx(1.0, abs=4 * np.std(squares) / 60**0.5 + 1e-3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bounds_of_an_error_of_two_equal_elements(sign: float) -> None:
    """low, at a chance of 1e-6, is below it under all signs; high is no less than the difference of the norms."""
    random = np.random.default_rng(3)
    golden = random.standard_normal((200, 64)).astype(np.float32)
    mine = golden.copy()
    mine[:, 5] += np.float32(2.0)
    mine[:, 9] += np.float32(2.0 * sign)
    for number in range(60):
        signs = signs_of(1, f"tap{number}/output.0#0", 64)
        _, low, _ = distances(Sketch.unpacked(*Sketch.of(golden, signs).packed()), Sketch.of(mine, signs), 1e-6)
        assert (low <= np.linalg.norm(golden - mine, axis=1)).all()
    zeros = [Sketch(np.array([norm]), np.zeros((1, 16)), np.zeros(1)) for norm in (3.0, 1.0)]
    assert distances(*zeros, 0.05)[2][0] == 2.0


def test_two_rows_of_a_tensor_do_not_hide_the_same_error() -> None:
    """Of two equal elements: signs under which one position's sketch is zero are found, and 40 others see it."""
    errors = np.zeros((41, 64), np.float32)
    errors[:, [5, 9]] = 1.0
    positions = np.arange(7, 48)
    blind = turned(errors, positions)
    hidden = found = 0
    for number in range(300_000):
        signs = signs_of(0, f"{number}", 64)
        if not (blind[0] @ signs).any():
            found += 1
            hidden += int((~(blind @ signs).any(axis=1)).sum()) - 1
            if found == 3:
                break
    assert found == 3
    assert number > 3 / FEW / 20
    assert hidden == 0
    assert np.array_equal(np.sort(blind, axis=1), np.sort(errors, axis=1))


def test_what_is_stored_is_off_by_no_more_than_said() -> None:
    rows = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32) * np.logspace(-6, 6, 50)[:, None]
    rows[3], rows[4, 0], rows[5, 0] = 0.0, np.nan, np.inf
    exact = Sketch.of(rows.astype(np.float32), signs_of(0, "x", 64))
    kept = Sketch.unpacked(*exact.packed())
    good = np.isfinite(rows).all(axis=1)
    assert np.array_equal(np.isfinite(kept.norm), good)
    off = np.linalg.norm(kept.numbers - exact.numbers, axis=1)[good]
    assert (off <= ROUNDING * exact.norm[good] * 1.001).all()
    assert not kept.numbers[3].any()


def test_signs_follow_from_seed_and_name_alone() -> None:
    a = signs_of(0, "a", 64)
    assert np.array_equal(a, signs_of(0, "a", 64))
    assert set(np.unique(np.abs(a))) == {0.25}
    for other in (signs_of(1, "a", 64), signs_of(0, "b", 64)):
        assert 0.4 < (a == other).mean() < 0.6
    assert "".join("+" if x > 0 else "-" for x in a[0]) == "--++++-+-+--++++"
