"""Runs whose first request has a picture, prepared in one way or another."""

from dataclasses import replace

import numpy as np
from synthetic_model import MemoryDump, capture

from vllm_accprobe.dump.schema import Image, RowSpace, Segment

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
