"""A row in 16 numbers, from which the distance of two rows is estimated.

The problem: a golden has thousands of rows of thousands of elements, and a pack has a few megabytes. The idea: S is a
matrix [16, width] of independent signs over sqrt(16). E |S x|**2 = |x|**2 for every x, with a standard deviation of at
most sqrt(2 / 16) of it [D. Achlioptas, Database-friendly random projections, 2003, lemma 5.1]; S is linear, so that
|S g - S m| estimates |g - m|. For rows of many elements 16 |S x|**2 / |x|**2 is chi-square with 16 degrees of freedom
(the central limit theorem), whose quantiles give the interval. S follows from the pack's seed and the tensor's name
(SHAKE-128, FIPS 202) and is stored nowhere. A row is first turned by a number of columns that its position gives: two
rows of one tensor meet other signs. The 16 numbers are kept as int16 in steps of ``STEP`` row norms, which adds at most
``ROUNDING`` row norms to a distance. Not here: which rows (pack.py), limits (estimated.py).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

NUMBERS = 16
FEW = 2.0**-NUMBERS
"""derived: the chance that 16 numbers hide an error of few elements; see `distances`."""
STEP = 2.0 / 32767
"""derived: a number has the standard deviation 1/4 of the row's norm, and int16 reaches 8 of these."""
ROUNDING = math.sqrt(NUMBERS) * STEP / 2
"""derived: 16 numbers off by half a step each, in row norms: 1.22e-4."""
KIND = {"numbers": NUMBERS, "step": STEP, "signs": "SHAKE-128 of seed|place|width, rows turned by their positions"}
"""What a pack's manifest says of its sketches."""
BYTES = 2 * NUMBERS + 4
"""Of one sketched row: its numbers and its norm."""


@dataclass(frozen=True)
class Sketch:
    """Rows as numbers. norm: float64 [n], NaN where the row holds NaN or infinity; numbers: float64 [n, 16], S times
    the row; rounding: float64 [n], how far |numbers| may be off."""

    norm: np.ndarray
    numbers: np.ndarray
    rounding: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, signs: np.ndarray) -> Sketch:
        """rows: [n, width] numbers; signs: `signs_of`'s for this width."""
        with np.errstate(invalid="ignore", over="ignore"):
            norm = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
            numbers = rows.astype(np.float32, copy=False) @ signs
        return cls(np.where(np.isfinite(norm), norm, np.nan), numbers.astype(np.float64), np.zeros(len(rows)))

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """(norm float32 [n], numbers int16 [n, 16]) as a pack keeps them."""
        norm = self.norm.astype(np.float32)
        usable = np.isfinite(norm) & (norm > 0)
        unit = np.where(usable, norm, 1.0).astype(np.float64)[:, None] * STEP
        steps = np.where(usable[:, None], np.rint(self.numbers / unit), 0.0)
        return norm, np.clip(steps, -32767, 32767).astype(np.int16)

    @classmethod
    def unpacked(cls, norm: np.ndarray, numbers: np.ndarray) -> Sketch:
        """What `packed` made."""
        wide = norm.astype(np.float64)
        return cls(wide, numbers * (wide * STEP)[:, None], wide * ROUNDING)

    def only(self, some: np.ndarray) -> Sketch:
        return Sketch(self.norm[some], self.numbers[some], self.rounding[some])


def signs_of(seed: int, name: str, width: int) -> np.ndarray:
    """S transposed: float32 [width, 16] of plus and minus 1/4, for the tensor ``name``."""
    digest = hashlib.shake_128(f"{seed}|{name}|{width}".encode()).digest(2 * width)
    bits = np.unpackbits(np.frombuffer(digest, np.uint8)).reshape(width, NUMBERS)
    return (bits.astype(np.float32) * 2 - 1) / np.float32(math.sqrt(NUMBERS))


def turns_of(positions: np.ndarray, width: int) -> np.ndarray:
    """int64 [n]: by how many columns rows at these positions are turned. A multiplicative hash [Knuth, The Art of
    Computer Programming, 6.4]."""
    return ((positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) % np.uint64(width)).astype(
        np.int64
    )


def turned(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``rows`` [n, width], each turned to the right by `turns_of` its position."""
    width = rows.shape[1]
    return np.take_along_axis(rows, (np.arange(width) - turns_of(positions, width)[:, None]) % width, 1)


def distances(golden: Sketch, mine: Sketch, chance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(estimate, low, high), float64 [n], of |golden - mine| by row: outside of [low, high] with the probability
    ``chance``, half of it on either side. ``low`` holds for any error. ``high`` may be too small where few elements
    make the error: two equal ones give 16 zeros with the probability `FEW`. That is the worst case: whatever the signs
    of the others, one of the two signs of the largest element ``a`` makes a number a / 4 or more, so that all 16 are
    smaller with at most that probability. ``high`` is never below the difference of the norms."""
    found = np.linalg.norm(golden.numbers - mine.numbers, axis=1)
    off = golden.rounding + mine.rounding
    low = np.maximum(found - off, 0.0) * math.sqrt(NUMBERS / quantile(chance / 2))
    high = (found + off) * math.sqrt(NUMBERS / quantile(1 - chance / 2))
    high = np.maximum(high, np.abs(golden.norm - mine.norm))
    return found, low, high


def quantile(above: float) -> float:
    """The value that chi-square with 16 degrees of freedom exceeds with the probability ``above``."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeds(middle) > above else (low, middle)
    return high


def _exceeds(x: float) -> float:
    """For an even number of degrees of freedom a finite sum [Abramowitz and Stegun, 26.4.21]."""
    term = total = math.exp(-x / 2)
    for j in range(1, NUMBERS // 2):
        term *= x / 2 / j
        total += term
    return total
