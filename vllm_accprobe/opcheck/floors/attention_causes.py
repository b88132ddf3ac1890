"""What would make a wrong attention right: a scale, a window, or places of its cache that hold nothing.

The problem: "attention is wrong at position 37" does not tell whom to ask. The idea: an attention that failed is worked
out again under each of a few suppositions, on the rows of the request that is worst off; one under which all of these
rows are right within rounding alone is said as a sentence. The scale is found by Gauss and Newton's steps; a window
by sums that grow from a row's own position back; a key and value that are 0, at one position or in one aligned block,
by what its absence does to the softmax, (Z o - sum e v) / (Z - sum e + n), for all positions at once.
What came out may have been rounded toward zero (rounding.py), which is like a softmax scale 0.2 % too small: where the
numbers show it, each supposition is held against the middles of what they stand for; where the fault hides how they
were rounded, first as rounded to nearest, then so.
A sentence is a supposition that fits, no proof. Not here: the formula itself (references/attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.opcheck.floors.rounding import direction, judge, middles
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references.attention import attend, attention_settings

_ROWS, _NUMBERS = 48, 1 << 23
_BLOCKS = (8, 16, 32, 64, 128, 256)
"""Tokens in a block of the caches that there are."""


@dataclass(frozen=True)
class _Wrong:
    """Rows of one request: queries and what came out [n, heads, ...], positions [n], keys and values [m, kv heads,
    ...], what should have come out with its noise, and `attend`'s settings. nearer: what came out, as a search for
    parameters should see it: of truncated numbers the middles of what they stand for; told: the numbers show how they
    were rounded."""

    q: Any
    mine: Any
    positions: Any
    k: Any
    v: Any
    value: Any
    noise: Any
    settings: dict[str, Any]
    dtype: str
    nearer: Any
    told: bool = False

    def again(self, k: Any | None = None, v: Any | None = None, **changed: Any) -> Any:
        k, v = self.k if k is None else k, self.v if v is None else v
        return attend(self.q, k, v, query_positions=self.positions, **{**self.settings, **changed})[0]

    def fits(self, out: Any) -> bool:
        return _right(out, self.mine, self.noise, self.dtype)


def cause(call: Call, expected: Expected) -> str:
    """For an ``Attention`` call that failed: "as with ...", or "" where nothing fits. Never raises."""
    try:
        wrong = _worst(call, expected)
        ways = [] if wrong is None else [wrong] if wrong.told else [wrong, _truncated(wrong)]
        return next(filter(None, (said for w in ways for said in _suppositions(w))), "")
    except (Declined, RuntimeError, ValueError, KeyError, IndexError):  # a guess must not cost the verdict
        return ""


def _truncated(w: _Wrong) -> _Wrong:
    return replace(w, nearer=middles(w.mine, w.dtype))


def _right(out: Any, mine: Any, noise: Any, dtype: str) -> bool:
    return judge(out.flatten(1), mine.flatten(1), dtype, noise=noise.flatten(1), groups=out.shape[1]).passed


def _worst(call: Call, expected: Expected) -> _Wrong | None:
    """The rows of the request that is furthest off, as many as memory allows; None where none is wrong by itself."""
    heads, kv, head = (int(call.attr(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    settings = attention_settings(call, heads, head)
    if settings["sinks"] is not None or settings["slopes"] is not None or settings["cap"]:
        return None
    given = call.outputs["output.0"]
    dtype = str(given.dtype).removeprefix("torch.")
    rows = given.shape[0]
    mine, value = (t.double().reshape(rows, heads, -1) for t in (given, expected.value))
    noise = torch.zeros_like(value) if expected.noise is None else expected.noise.expand_as(given).reshape(value.shape)
    if not bool(torch.isfinite(mine).all()):
        return None
    q = call.wide("query").reshape(rows, heads, head)
    way = direction(value, mine, dtype)
    found, largest = None, 0.0
    for at, positions, past in call.extra["cache"].requests(True):
        off = float((mine[at] - value[at]).norm() / value[at].norm().clamp(min=1e-30))
        if off > largest and not _right(value[at], mine[at], noise[at], dtype):
            found, largest = (at, positions, past), off
    if found is None:
        return None
    at, positions, past = found
    k, v = (past[n].double().reshape(len(past[n]), kv, -1) for n in ("key", "value"))
    floor = ((call.unit * value[at]).square() + noise[at].square()).flatten(1).sum(1)
    bad = (mine[at] - value[at]).flatten(1).square().sum(1) > 1.5 * floor
    if not bool(bad.any()):
        bad[:] = True
    first = int(positions[bad][0])
    most = max(2, min(_ROWS, _NUMBERS // (heads * len(k))))
    from_first = (positions >= first).nonzero().flatten()
    picked = from_first[torch.linspace(0, len(from_first) - 1, min(most, len(from_first))).long()]
    at, positions = at[picked], positions[picked]
    wrong = _Wrong(q[at], mine[at], positions, k, v, value[at], noise[at], settings, dtype, mine[at],
                   told=way.toward_zero or way.nearest)  # fmt: skip
    return _truncated(wrong) if way.toward_zero else wrong


def _suppositions(w: _Wrong) -> Iterator[str]:
    yield _window(w)
    yield _scale(w)
    yield _zeros(w)


def _window(w: _Wrong) -> str:
    had = w.settings["window"]
    if had and w.fits(w.again(window=None)):
        return "as with no sliding window"
    row = int((w.nearer - w.value).flatten(1).square().sum(1).argmax())
    for size in dict.fromkeys([*([had - 1, had + 1] if had else []), _best_window(w, row)]):
        if size > 0 and size != had and w.fits(w.again(window=size)):
            return f"as with a sliding window of {size}" + (f" instead of {had}" if had else "")
    return ""


def _best_window(w: _Wrong, row: int) -> int:
    """The window with which one row comes closest, 0 for none: sums of e and e v from the row's own position back."""
    seen = int(w.positions[row]) + 1
    share = w.q.shape[1] // w.k.shape[1]
    heads = max(1, min(w.q.shape[1], _NUMBERS // (seen * w.v.shape[-1])))
    k, v = (x[:seen].flip(0).repeat_interleave(share, 1)[:, :heads] for x in (w.k, w.v))
    scores = torch.einsum("hd,mhd->mh", w.q[row, :heads], k) * w.settings["scale"]
    e = torch.exp(scores - scores.amax(0))
    out = (e.unsqueeze(-1) * v).cumsum(0) / e.cumsum(0).clamp(min=1e-300).unsqueeze(-1)
    return 1 + int((out - w.nearer[row, :heads]).square().sum((1, 2)).argmin())


def _scale(w: _Wrong) -> str:
    factor, scale = 1.0, w.settings["scale"]
    for _ in range(4):
        now = w.again(scale=scale * factor)
        slope = (w.again(scale=scale * factor * 1.001) - now) / (0.001 * factor)
        power = float((slope * slope).sum())
        if not power:
            return ""
        factor += float(((w.nearer - now) * slope).sum()) / power
        if not 0.1 < factor < 10:
            return ""
    return f"as with a softmax scale {factor:.3g} times as large" if w.fits(w.again(scale=scale * factor)) else ""


def _zeros(w: _Wrong) -> str:
    share = w.q.shape[1] // w.k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (w.k, w.v))
    scores = torch.einsum("nhd,mhd->hnm", w.q, k) * w.settings["scale"]
    distance = w.positions[:, None] - torch.arange(len(k))[None, :]
    seen = (distance >= 0) & (distance < (w.settings["window"] or math.inf))
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=0.0)
    e, nothing = torch.exp(scores - top), torch.exp(-top) * seen
    total, out, off = e.sum(-1, keepdim=True), w.value.transpose(0, 1), (w.nearer - w.value).transpose(0, 1)
    found = []
    for size in (1, *(b for b in _BLOCKS if b < 2 * len(k))):
        gone, there = _blocks(e, size), _blocks(nothing, size)
        share_of = 1.0 / (total - gone + there).clamp(min=1e-300)
        keep, take = total * share_of - 1.0, share_of
        # |off - (keep out - take lost)|² where lost, the sum of e v over a block, is only needed in products
        lost_off = _blocks(e * torch.einsum("hne,mhe->hnm", off, v), size)
        lost_out = _blocks(e * torch.einsum("hne,mhe->hnm", out, v), size)
        lost_lost = e * e * v.square().sum(-1).T.unsqueeze(1) if size == 1 else _squares(e, v, size)
        change = (
            keep.square() * out.square().sum(-1, keepdim=True)
            - 2 * keep * take * lost_out
            + take.square() * lost_lost
            - 2 * keep * (off * out).sum(-1, keepdim=True)
            + 2 * take * lost_off
        )
        left = change.sum((0, 1))
        best = int(left.argmin())
        found.append((float(left[best]), best * size, min((best + 1) * size, len(k))))
    for _, start, stop in sorted(found):
        k, v = w.k.clone(), w.v.clone()
        k[start:stop], v[start:stop] = 0, 0
        if w.fits(w.again(k, v)):
            if stop - start == 1:
                return f"as if key and value of position {start} were 0 in the cache (written elsewhere, or not at all)"
            return f"as if keys and values of positions {start} to {stop - 1} were 0 in the cache"
    return ""


def _blocks(x: Any, size: int) -> Any:
    """Sums over blocks of the last dimension."""
    if size == 1:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)


def _squares(e: Any, v: Any, size: int) -> Any:
    """|sum over a block of e v|², [heads, n, blocks]."""
    parts = [torch.einsum("hnm,mhe->hne", a, b).square().sum(-1)
             for a, b in zip(e.split(size, -1), v.split(size), strict=True)]  # fmt: skip
    return torch.stack(parts, -1)
