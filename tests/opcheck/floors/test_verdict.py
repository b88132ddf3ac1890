"""Honest rounding passes, small defects do not, whatever the dtype; NaN never."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_accprobe.opcheck.floors import verdict

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def judge(reference: np.ndarray, mine: np.ndarray, dtype: str, **more) -> verdict.Verdict:
    if "noise" in more:
        more["noise"] = torch.from_numpy(more["noise"])
    return verdict.judge(torch.from_numpy(reference), torch.from_numpy(mine), dtype, **more)


def exact(rows: int = 64, width: int = 128, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)) * 10.0


def rounded(y: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(torch.from_numpy(y).to(DTYPES[dtype]).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 128), (500, 16), (2, 4096)])
def test_rounding_once_passes_with_room(dtype: str, shape: tuple[int, int]) -> None:
    for seed in range(20):
        y = exact(*shape, seed=seed)
        v = judge(y, rounded(y, dtype), dtype)
        assert v.passed
        assert v.severity < 0.9


def unit(dtype: str) -> float:
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_defects_of_a_few_roundings_are_seen(dtype: str) -> None:
    y, u = exact(), unit(dtype)
    scaled = y * (1 + 1.5 * u)
    column, element, row = y.copy(), y.copy(), y.copy()
    column[:, 9] *= 1 + 5 * u
    element[3, 4] += 8 * u * abs(y).mean()
    row[11] += 4 * u * np.random.default_rng(1).standard_normal(128) * 10
    for wrong, measure, place in (
        (scaled, "gain", None), (column, "column", (-1, 9)), (element, "element", (3, 4)), (row, None, None),
    ):  # fmt: skip
        v = judge(y, rounded(wrong, dtype), dtype)
        assert not v.passed
        assert measure in (None, v.measure)
        assert place in (None, (v.row, v.column))
    assert judge(y, rounded(row, dtype), dtype).row == 11


def test_coarser_rounding_is_seen() -> None:
    """Six bits instead of eight."""
    y = exact()
    mantissa, exponent = np.frexp(y)
    assert not judge(y, np.ldexp(np.round(mantissa * 64) / 64, exponent), "bfloat16").passed


def test_noise_allows_what_the_reference_says_and_no_more() -> None:
    y = exact()
    noise = np.full_like(y, 0.5)
    wrong = y + 0.5 * np.random.default_rng(2).standard_normal(y.shape)
    assert not judge(y, rounded(wrong, "bfloat16"), "bfloat16").passed
    assert judge(y, rounded(wrong, "bfloat16"), "bfloat16", noise=noise).passed
    assert not judge(y, rounded(y + 3 * (wrong - y), "bfloat16"), "bfloat16", noise=noise).passed


def test_a_shared_error_is_allowed_only_where_it_is_said() -> None:
    y = exact()
    wrong = rounded(y * (1 + 1.5 * unit("bfloat16")), "bfloat16")
    assert judge(y, wrong, "bfloat16", common=2 * unit("bfloat16")).passed
    assert not judge(y, wrong, "bfloat16").passed


def test_nan_never_passes_and_equal_ones_do() -> None:
    y = exact()
    y[0, 0] = math.nan
    assert judge(y, y, "bfloat16").passed
    mine = exact()
    v = judge(exact(), np.where(np.arange(128) == 5, np.nan, mine), "bfloat16")
    assert (v.passed, v.measure, v.value) == (False, "nonfinite", 64.0)
    assert not judge(y, exact(), "bfloat16").passed


def test_integers_and_what_is_handed_on_must_be_equal() -> None:
    ids = np.arange(12).reshape(3, 4)
    assert judge(ids, ids, "int32").passed
    other = ids.copy()
    other[1, 2] += 1
    v = judge(ids, other, "int32")
    assert (v.passed, v.row, v.column, v.value) == (False, 1, 2, 1.0)
    y = exact()
    assert not judge(y, y * (1 + 2**-40), "float32", last=0.0).passed


def test_empty_and_zero_rows() -> None:
    assert judge(np.zeros((0, 4)), np.zeros((0, 4)), "bfloat16").passed
    assert judge(np.zeros((3, 4)), np.zeros((3, 4)), "bfloat16").passed
    assert not judge(np.zeros((3, 4)), np.full((3, 4), 1e-3), "bfloat16").passed
