"""Inputs that two releases prepare in two ways, and a model that is right all the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from picture_runs import NORMALISED, PIXELS, seen

from vllm_accprobe.comparison.engine import compare

KIND = "inputs of another kind of number (integers against fractions)"


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("other_way", [False, True])
def test_pixels_of_eight_bits_against_normalised_ones_are_left_out(rows: bool, other_way: bool) -> None:
    sides = [seen(PIXELS, "uint8", rows=rows), seen(NORMALISED, "bfloat16", rows=rows)]
    result = compare(*reversed(sides)) if other_way else compare(*sides)
    assert result.verdict == "pass"
    assert result.coverage["skipped"][KIND] == 1
    (pair,) = [p for p in result.pairs if p.status == "skip"]
    assert (pair.tap, pair.role, pair.message) == ("visual", "input.pixels", KIND)


def test_ids_that_are_written_as_floating_point_are_compared() -> None:
    assert compare(seen(PIXELS, "uint8"), seen(PIXELS, "float32")).verdict == "pass"
    wrong = PIXELS.copy()
    wrong[3, 3] += 1
    result = compare(seen(PIXELS, "uint8"), seen(wrong, "float32"))
    assert result.verdict == "fail"
    assert KIND not in result.coverage["skipped"]


@pytest.mark.parametrize("forbidden", [-np.inf, np.finfo(np.float32).min])
def test_a_mask_of_booleans_against_one_that_is_added(forbidden: float) -> None:
    allowed = PIXELS > 99
    added = np.where(allowed, 0.0, forbidden).astype(np.float32)
    result = compare(seen(allowed, "bool"), seen(added, "float32"))
    assert result.verdict == "pass"
    assert result.coverage["skipped"][KIND] == 1
    assert compare(seen(allowed, "bool"), seen(allowed, "float32")).verdict == "pass"


def test_an_output_of_another_kind_is_still_wrong() -> None:
    role = "output.1"
    assert compare(seen(PIXELS, "uint8", role=role), seen(NORMALISED, "bfloat16", role=role)).verdict == "fail"


def test_statistics_alone_tell_the_kind_too() -> None:
    sides = [seen(PIXELS, "uint8"), seen(NORMALISED, "bfloat16")]
    for side in sides:
        side.records = [replace(r, payload=None) if r.role == "input.pixels" else r for r in side.records]
    assert compare(*sides).coverage["skipped"][KIND] == 1
