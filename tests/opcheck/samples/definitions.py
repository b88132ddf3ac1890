"""Formulas that several samples share, in float64 with numpy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: Any = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def fast_gelu(x: Array) -> Array:
    return x * np.exp(0.851 * (x - np.abs(x))) / (1 + np.exp(-1.702 * np.abs(x)))


def rms(x: Array, weight: Array, eps: float = 1e-5, less: int = 0) -> Array:
    """less: what the mean divides by less than the width."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / (x.shape[-1] - less) + eps) * weight


def layer(x: Array, weight: Array = 1.0, bias: Array = 0.0, eps: float = 1e-5) -> Array:
    return rms(x - x.mean(-1, keepdims=True), weight, eps) + bias


def turned(x: Array, cos: Array, sin: Array, parts: int) -> Array:
    """Tables of x's width: each channel with the one half a pair's width away, of ``parts`` halves."""
    at, width = np.arange(x.shape[-1]), x.shape[-1] // parts
    partner = np.where(at // width % 2 == 0, at + width, at - width)
    return x * cos + x[..., partner] * np.where(partner > at, -1, 1) * sin


def attend(
    q: Array, k: Array, v: Array, scale: float, added: Any = 0.0, clamp: tuple[float, float] | None = None,
    cap: float = 0.0, sinks: Array | None = None,
) -> Array:  # fmt: skip
    """q [n, heads, d], k and v [m, kv heads, d]; added broadcasts to [heads, n, m]; sinks: a further score of a head,
    which has no value."""
    added = np.broadcast_to(added, (q.shape[1], len(q), len(k)))
    out = np.zeros((len(q), q.shape[1], v.shape[2]))
    for h in range(q.shape[1]):
        own = h // (q.shape[1] // k.shape[1])
        s = q[:, h] @ k[:, own].T * scale
        s = np.clip(s, *clamp) if clamp else cap * np.tanh(s / cap) if cap else s
        s = s + added[h]
        s = s if sinks is None else np.concatenate((s, np.full((len(s), 1), sinks[h])), 1)
        out[:, h] = softmax(s)[:, : len(k)] @ v[:, own]
    return out


def lower(n: int, m: int, far: float = -np.inf, window: int = 0) -> Array:
    """Added to scores of the last n of m positions, each of which sees itself and those before; window: how many."""
    at, key = np.arange(m - n, m)[:, None], np.arange(m)[None]
    return np.where((key > at) | ((key <= at - window) if window else False), far, 0.0)


def past(cache: Array, table: Sequence[int], n: int) -> Array:
    """The first n rows of a request from blocks [blocks, size, ...]."""
    return np.concatenate([cache[int(b)] for b in table[: -(-n // cache.shape[1])]])[:n]
