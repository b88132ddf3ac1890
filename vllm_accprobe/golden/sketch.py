"""A row in 16 numbers, from which the distance of two rows is estimated.

The problem: a golden has thousands of rows of thousands of elements, and a pack has a few megabytes. The idea: S is a
matrix [16, width] of independent signs over sqrt(16). E |S x|**2 = |x|**2 for every x, with a standard deviation of at
most sqrt(2 / 16) of it [D. Achlioptas, Database-friendly random projections, 2003, lemma 5.1]; S is linear, so that
|S g - S m| estimates |g - m|. For rows of many elements 16 |S x|**2 / |x|**2 is chi-square with 16 degrees of freedom
(the central limit theorem), whose quantiles give the interval. S follows from the pack's seed and the tensor's name
(SHAKE-128, FIPS 202) and is stored nowhere. The 16 numbers are kept as int16 in steps of ``STEP`` row norms, which adds
at most ``ROUNDING`` row norms to a distance. Not here: which rows (pack.py), limits (estimated.py).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

NUMBERS = 16
STEP = 2.0 / 32767
"""derived: a number has the standard deviation 1/4 of the row's norm, and int16 reaches 8 of these."""
ROUNDING = math.sqrt(NUMBERS) * STEP / 2
"""derived: 16 numbers off by half a step each, in row norms: 1.22e-4."""
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


def distances(golden: Sketch, mine: Sketch, chance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(estimate, low, high), float64 [n], of |golden - mine| by row: outside of [low, high] with the probability
    ``chance``, half of it on either side. An error of two equal elements gives 16 zeros with the probability 2**-16,
    and is then beyond ``high``, which is never below the difference of the norms; ``low`` holds for any error."""
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
