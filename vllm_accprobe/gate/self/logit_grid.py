"""How coarse the numbers are from which a server took its log-probabilities.

The problem: two ways of computing one answer may differ by rounding, and how much rounding is depends on the dtype of
the logits, which no server tells. The idea: it shows. Log-probabilities of one token's candidates are logits less one
constant, so their differences are differences of logits, and of logits in bfloat16 these are all multiples of one power
of two. Where there is no such grid (logits in float32, or capped afterwards), the step is 0.
Not here: what is made of it (odd_one.py).
"""

from __future__ import annotations

from collections.abc import Sequence

_FINE = 12
"""Chosen: steps down to 2^-12; the spacing of float16 logits around 4 is 2^-8, of bfloat16 2^-5."""
_OFF = 4e-6
"""Derived: log-probabilities of size 16 to 32 in float32 are 2^-19 apart (1.9e-6), and two are subtracted."""
_LEAST = 4
"""Derived: a value lies by chance so close to the grid of 2^-12 with 2 * 4e-6 / 2.4e-4 = 0.03; four with 1e-6."""


def step(values: Sequence[float]) -> float:
    """The largest power of two, at most 1, of which all differences of ``values`` (log-probabilities, nats) are
    multiples; 0.0 where there is none down to 2^-12, or where fewer than 5 values differ."""
    offs = sorted({values[0] - v for v in values} - {0.0}) if values else []
    if len(offs) < _LEAST:
        return 0.0
    for k in range(_FINE + 1):
        grid = 2.0**-k
        if all(abs(off - round(off / grid) * grid) <= _OFF for off in offs):
            return grid
    return 0.0
