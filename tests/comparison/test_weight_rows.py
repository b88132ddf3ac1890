"""Wrong weights planted in arrays: where their rows stand, and what their values are, is said in words."""

from collections.abc import Callable

import numpy as np
import pytest

from vllm_accprobe.comparison.weight_places import (
    ADDRESS,
    FACTOR,
    LOADING,
    PRECISION,
    ROUNDS,
    UNKNOWN,
    RowsFound,
    block_factors,
    by_keys,
    by_values,
    numbers,
)
from vllm_accprobe.dump.weight_sums import row_keys

Edit = Callable[[np.ndarray], np.ndarray]


def named(rows: np.ndarray) -> str:
    return f"rows {numbers(rows)}"


def bits(rows: int = 128, width: int = 8, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1 << 15, (rows, width)).astype(np.int16)


def keys_of(mine: Edit, rows: int = 128) -> RowsFound | None:
    right = bits(rows)
    return by_keys(row_keys(right), row_keys(mine(right.copy())), np.arange(rows), named)


def moved(rows: np.ndarray, to: slice, at: slice) -> np.ndarray:
    out = rows.copy()
    out[to] = rows[at]
    return out


def swapped(rows: np.ndarray, a: slice, b: slice) -> np.ndarray:
    out = rows.copy()
    out[a], out[b] = rows[b], rows[a]
    return out


def drawn(rows: np.ndarray) -> np.ndarray:
    out = rows.copy()
    out[10:18] = bits(8, 8, 9)
    return out


ROWS: list[tuple[str, Edit, str, str]] = [
    ("another shard", lambda w: moved(w, slice(64, 128), slice(0, 64)), ADDRESS,
     "rows 64-127 stand at 0-63 of golden's tensor, where 64-127 are due"),
    ("halves exchanged", lambda w: swapped(w, slice(0, 64), slice(64, 128)), ADDRESS,
     "rows 0-63 and rows 64-127 are exchanged"),
    ("two rows exchanged", lambda w: swapped(w, slice(3, 4), slice(17, 18)), ADDRESS,
     "rows 3 and rows 17 are exchanged"),
    ("off by one from a row on", lambda w: moved(w, slice(64, 127), slice(65, 128)), ADDRESS,
     "rows 64-126 stand at 65-127"),
    ("in a circle", lambda w: np.roll(w, 1, 0), ADDRESS, "rows 0-127 are golden's rows 1 before, in a circle"),
    ("one row", lambda w: w[:1].repeat(128, 0), LOADING, "never written: as initialised"),
    ("one row for all", lambda w: moved(w, slice(8, 16), slice(5, 6)), ADDRESS, "rows 8-15 are all copies of row 5"),
    ("interleaved", lambda w: w.reshape(-1, 2, 16, 8).transpose(0, 2, 1, 3).reshape(128, 8), ADDRESS,
     "of each 32 rows the two halves are interleaved"),
    ("taken apart", lambda w: w.reshape(-1, 16, 2, 8).transpose(0, 2, 1, 3).reshape(128, 8), ADDRESS,
     "of each 32 rows the even rows come first"),
    ("reversed", lambda w: w[::-1].copy(), ADDRESS, "rows 0-127 are in reverse order"),
    ("others", drawn, UNKNOWN, "rows 10-17 differ, and no other place in golden has them"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "family", "text"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_rows(edit: Edit, family: str, text: str) -> None:
    found = keys_of(edit)
    assert found is not None
    assert found.family == family
    assert text in found.text
    assert found.cause.keys() == {"family", "text", "parameter", "residual", "chance"}
    assert (found.chance is not None) == (family == ADDRESS)


def test_equal_rows_are_no_finding() -> None:
    assert keys_of(lambda w: w) is None
    same = np.ones((16, 4), np.int16)
    assert by_keys(row_keys(same), row_keys(same), np.arange(16), named) is None


def floats(rows: int = 64, width: int = 64, seed: int = 2) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((rows, width))
    return np.asarray(ROUNDS["bfloat16"](made))


def rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(ROUNDS["bfloat16"](x))


def blocks(x: np.ndarray) -> np.ndarray:
    f = np.random.default_rng(3).uniform(0.5, 1.5, (2, 2))
    return rounded(x * f.repeat(32, 0).repeat(32, 1))


def rows_scaled(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    out[10:18] *= np.linspace(0.5, 2, 8)[:, None]
    return rounded(out)


def of_int8(x: np.ndarray) -> np.ndarray:
    step = np.abs(x).max(1, keepdims=True) / 127
    return np.asarray(np.rint(x / step) * step)


VALUES: list[tuple[str, Edit, str, str]] = [
    ("transposed", lambda x: x.T.copy(), ADDRESS, "transposed"),
    ("never written", np.ones_like, LOADING, "never written: as initialised, every element is 1"),
    ("a factor", lambda x: rounded(x * 1.5), FACTOR, "golden's times 1.5"),
    ("negated", lambda x: -x, FACTOR, "golden's times -1"),
    ("plus one", lambda x: x + 1, FACTOR, "golden's plus one"),
    ("float8", lambda x: np.asarray(ROUNDS["float8_e4m3fn"](x)), PRECISION, "went through float8_e4m3fn"),
    ("int8", of_int8, PRECISION, "went through integers of 8 bits"),
    ("scales of rows", rows_scaled, FACTOR, "rows 10-17 are golden's times a factor of each row"),
    ("scales of blocks", blocks, FACTOR, "as dequantised with other scales"),
]


@pytest.mark.parametrize(("edit", "family", "text"), [v[1:] for v in VALUES], ids=[v[0] for v in VALUES])
def test_values(edit: Edit, family: str, text: str) -> None:
    right = floats()
    found = by_values(right, edit(right), lambda rows: "" if len(rows) == 64 else named(rows), ROUNDS)
    assert found is not None
    assert found.family == family
    assert text in found.text


def test_what_no_formula_explains_is_not_explained() -> None:
    assert by_values(floats(), floats(seed=4), named, ROUNDS) is None
    assert by_values(floats(), floats(), named, ROUNDS) is None
    noisy = floats() * (1 + 0.05 * np.random.default_rng(5).standard_normal((64, 64)))
    assert by_values(floats(), noisy, named, ROUNDS) is None
    assert by_values(floats(), np.nextafter(floats(), np.float32(9)), named, ROUNDS) is None  # rounded otherwise


def test_the_factors_of_blocks() -> None:
    scales = np.random.default_rng(6).uniform(0.5, 2.0, (2, 2))
    exact = floats()
    found = block_factors(exact, rounded(exact * scales.repeat(32, 0).repeat(32, 1)))
    assert found is not None
    assert found[0] == (32, 32)
    assert np.allclose(found[1], scales, rtol=1e-3)


def test_keys_are_those_of_a_print() -> None:
    torch = pytest.importorskip("torch")
    from vllm_accprobe.capture.weights.fingerprint import sums_of

    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        value = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).mul(20).to(dtype)
        ints = {1: torch.int8, 2: torch.int16, 4: torch.int32}[value.element_size()]
        assert (row_keys(value.view(ints).numpy()) == sums_of(value).short).all()
