"""Inputs and images that two releases prepare in two ways, and a model that is right all the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import MemoryDump, capture

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.schema import Image, RowSpace, Segment

KIND = "inputs of another kind of number (integers against fractions)"
PIXELS = np.random.default_rng(1).integers(0, 256, (8, 12))


def seen(pixels: np.ndarray, dtype: str, *, hashed: str = "old", role: str = "input.pixels", off: float = 0.0,
         rows: bool = True) -> MemoryDump:  # fmt: skip
    """A run whose first request, "a", has a picture of two placeholders and eight patches. off: an error in it."""
    dump = capture()
    dump.requests[(0, 0)] = replace(dump.requests[(0, 0)], images=(Image(hashed, 2, 2),))
    name = "vision/4" if rows else None
    if rows:
        dump.rows[(0, 0, "vision/4")] = RowSpace(0, "vision/4", 8, (Segment(0, 0, 8, 0, image=0),))
    dump.add(0, 0, "visual", role, pixels, dtype, 0, name)
    dump.add(0, 0, "visual", "output.0", (PIXELS - 128.0) * (1 + off), "float32", 1, name)
    return dump


NORMALISED = (PIXELS - 127.5) / 66.0


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


def test_a_changed_way_of_hashing_is_called_so_where_the_images_agree() -> None:
    golden, mine = seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new")
    golden.run["versions"], mine.run["versions"] = {"vllm": "0.20.2"}, {"vllm": "0.32.0"}
    result = compare(golden, mine)
    assert result.notes == [
        "image hashes differ in all requests that have images (1), and all that was computed of the images agrees: "
        "another way of hashing (vLLM 0.20.2 and 0.32.0)"
    ]


def test_another_image_is_called_so() -> None:
    result = compare(seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new", off=0.5))
    assert "request 'a' has different images" in result.notes
    assert not any("hashing" in note for note in result.notes)
    # nothing of the picture was captured: nobody knows
    bare = [seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new")]
    for side in bare:
        side.records = [r for r in side.records if r.tap != "visual"]
    assert compare(*bare).notes == ["request 'a' has different images"]
