"""Attention, element by element in numpy, for the tests of references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def attended(
    q: Any, k: Any, v: Any, scale: float, *, causal: bool = True, left: int = -1, cap: float = 0.0, sinks: Any = None,
    seen: Any = None, fault: str = "",
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out [n, heads, e], log2 of the sum of exponentials [n, heads]) of one request, plain loops."""
    n, heads, m, kv = len(q), q.shape[1], len(k), k.shape[1]
    out, logs = np.zeros((n, heads, v.shape[-1])), np.full((n, heads), -np.inf)
    for r in range(n):
        at = r if fault == "queries at the front" else m - n + r
        for h in range(heads):
            g = h % kv if fault == "heads interleaved" else h // (heads // kv)
            scored = []
            for j in range(m):
                if seen is not None and not seen[r][j]:
                    continue
                if seen is None and causal and j > at:
                    continue
                if left >= 0 and j < at - left + (1 if fault == "window off by one" else 0):
                    continue
                s = scale * sum(float(q[r, h, c]) * float(k[j, g, c]) for c in range(q.shape[2]))
                if cap and fault != "no soft cap":
                    s = cap * math.tanh(s / cap)
                scored.append((s, j))
            total = sum(math.exp(s) for s, _ in scored)
            if sinks is not None and fault != "no sink":
                total += math.exp(float(sinks[h]))
            if not scored:
                continue
            logs[r, h] = math.log(total) if fault == "natural logarithm" else math.log2(total)
            for s, j in scored:
                out[r, h] += math.exp(s) / total * v[j, g]
    return out, logs
