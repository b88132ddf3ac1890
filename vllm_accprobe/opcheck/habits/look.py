"""One output looked at: which of the ways that a machine may compute in its numbers allow.

The problem: a replay has the exact result y and what the machine made of it, and asks only whether the two are near
enough. The idea: of a sample of numbers, every way of computing (ways.py) and every direction of the last
rounding is a prediction, and it is counted which are right; between them lie the fractions that tell stochastic
rounding, results that are too small for a normal number, and what an approximated function is off by. Where an output
failed, it is judged again with each habit of the closed list allowed for, so that whoever sees all layers can say
whether that habit is the machine's (decided.py). Outputs of some steps are looked at, and those that fail.
Not here: what counts say (evidence.py), functions (functions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_accprobe.kernels.float_formats import FORMATS, LOW, half_step
from vllm_accprobe.opcheck.floors.rounding import steps
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.habits import functions, ways
from vllm_accprobe.opcheck.habits.evidence import BINS, Evidence
from vllm_accprobe.opcheck.habits.ways import SampledRows
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.quantised import weight_of, widened

Tensor = Any
Judge = Callable[[Tensor, "Tensor | None"], Verdict]
"""(reference, further standard error or None) → verdict of the whole output."""
_NUMBERS, _LOW_NUMBERS, _LEAST = 2048, 256, 16
"""Chosen: numbers that are looked at; those of them for sums in fewer bits; below, nothing is told."""
_FITS, _STRAYS = 0.9, 0.97
"""Chosen: a way predicts an output if it has so many numbers rightly (float32 sums leave 99 %); where the best one has
less than the second, fractions are counted, too."""
_SLACK = 2.0**-10
"""Steps: a number so near to the grid was on it before float32 computed it."""
_SMALL = 2.0**-4
"""Steps: what a reference expects before the last rounding, where fractions can tell how that is done."""
_ROUNDED = 0.6
"""Root mean square of one rounding over its largest, half a step: 1 / sqrt(3) at the lower end of a binade, half of
that at its upper; derived: between them, and not below the mean (0.42)."""
_TERMS = 1 << 24
"""Chosen: products of an output that failed, of which all partial sums are made: 50 ms."""
_WANDER = 2.0
"""Chosen: partial sums in one order, over what they are in the mean over all orders; it is
used for large products alone, all of whose partial sums would take too long."""
_LEAST_NORMAL = {name: float(2.0 ** FORMATS[name][1]) for name in (*LOW, "float32")}


def due(step: int | None, role: str, call: Call, passed: bool) -> bool:
    """Whether an output is looked at: all that fail; of the others those of the first two steps, where prompts are, and
    of some later ones (chosen: a quarter of a run of a dozen steps), and what was written in place only where it was
    not handed on as well."""
    if step is None or not (passed and role.startswith("inplace.") and "output.0" in call.outputs):
        return step is not None and (not passed or step < 2 or step % 16 == 8)
    return False


def look(
    call: Call, role: str, y: Tensor, mine: Tensor, dtype: str, *, noise: Tensor | None, rows: Tensor, passed: bool,
    judge: Judge,
) -> Evidence:  # fmt: skip
    """y: exact, float64 [rows, width], before its last rounding; mine: float64, same shape; noise: standard error that
    the reference expects before that; rows: int, which rows of the tensors these are; passed: the output has."""
    if dtype not in _LEAST_NORMAL or not y.is_floating_point() or y.numel() < _LEAST:
        return Evidence()
    kept, flushed = _subnormals(y, mine, dtype)
    would: dict[str, float] = {}
    if not passed and flushed:
        small = y.abs() < _LEAST_NORMAL[dtype]
        would["flush"] = judge(torch.where(small & (mine == 0), 0.0, y), None).severity
    at = _spread(len(y), max(_NUMBERS // max(y.shape[1], 1), 1))
    s, given = SampledRows(y[at], rows[at], dtype, role), mine[at]
    if dtype not in LOW:
        found = functions.of_float32(call, role, s, given, noise[at] if noise is not None else None)
        if not passed:
            would |= functions.would_float32(call, role, y, mine, rows, judge)
        return Evidence(subnormals=(kept, flushed), functions=found, would=would)
    tried = ways.ways(call, s)
    names, values = list(tried), torch.stack(list(tried.values()))
    right, q, told = _predicted(values, given, s)
    best = _best(right)
    share = float(right[best].double().mean()) if right.shape[1] else 1.0
    if share < _FITS and ways.is_product(call.cls):
        more = _low(call, s, given)
        names, right = [*names, *more[0]], more[1] if more[0] else right
        best = _best(right)
    ups: tuple[tuple[int, int], ...] = ()
    out = 0
    if share < _STRAYS and best // 3 < len(values) and ways.family_of(call.cls) is not None:
        clear = torch.ones_like(told) if noise is None or len(values) > 1 else noise[at] < _SMALL * steps(s.y, dtype)
        ups, out = _fractions(q[best // 3], clear, given, s)
    way = min(best // 3, len(values) - 1)
    found = functions.of_grid(call, role, names[way], values[way], given, s, share)
    if not passed:
        would |= _would(call, role, y, rows, dtype, judge)
    terms = _terms(call) if ways.is_product(call.cls) else 0
    return Evidence(tuple(names), _histogram(right), ups, out, (kept, flushed), found, would, terms)


def _terms(call: Call) -> int:
    x = call.maybe("input_", "x", "input", "hidden_states", "0")
    return int(x.shape[-1]) if x is not None else 0


def _spread(n: int, most: int) -> Tensor:
    return torch.arange(n) if n <= most else torch.linspace(0, n - 1, most).long()


def _subnormals(y: Tensor, mine: Tensor, dtype: str) -> tuple[int, int]:
    """(kept, flushed) of the results that no normal number is near to, and that do not round to 0 anyway."""
    least = _LEAST_NORMAL[dtype]
    size = y.abs()
    if not bool((size < least).any()):
        return 0, 0
    tiny = least * 2.0 ** -(FORMATS[dtype][0] - 2)
    seen = (size < least * (1 - 2.0**-8)) & (size >= tiny) & torch.isfinite(mine)
    flushed = int((seen & (mine == 0)).sum())
    return int(seen.sum()) - flushed, flushed


def _predicted(values: Tensor, given: Tensor, s: SampledRows) -> tuple[Tensor, Tensor, Tensor]:
    """(which candidates are right: bool [ways * 3, numbers]; values in steps, [ways, rows, width]; which numbers are
    looked at: bool [rows, width]). Only finite normal ones, at most _NUMBERS, evenly spread."""
    step = steps(s.y, s.dtype)
    q, m = values / step, given / step
    told = torch.isfinite(values).all(0) & torch.isfinite(given) & (s.y.abs() >= _LEAST_NORMAL[s.dtype])
    index = told.flatten().nonzero().flatten()
    if len(index) > _NUMBERS:
        index = index[_spread(len(index), _NUMBERS)]
    a, b = q.flatten(1)[:, index], m.flatten()[index]
    return _directions(a, b), q, told


def _directions(q: Tensor, m: Tensor) -> Tensor:
    """Which of to nearest, toward zero and away from it gives ``m``: bool [ways * 3, numbers]."""
    size, sign = q.abs(), torch.sign(q)
    made = torch.stack((q.round(), sign * (size + _SLACK).floor(), sign * (size - _SLACK).ceil()), 1)
    return (made == m).flatten(0, 1)


def _best(right: Tensor) -> int:
    return int(right.sum(1).argmax()) if right.shape[1] else 0


def _histogram(right: Tensor) -> dict[int, int]:
    if not right.shape[1]:
        return {}
    powers = np.array([1 << k for k in range(len(right))])  # numpy's unique is ten times as fast as torch's here
    found, counts = np.unique(powers @ right.numpy(), return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _fractions(q: Tensor, clear: Tensor, given: Tensor, s: SampledRows) -> tuple[tuple[tuple[int, int], ...], int]:
    step = steps(s.y, s.dtype)
    size, m = q.abs(), (given / step) * torch.sign(q)
    keep = clear & torch.isfinite(size) & torch.isfinite(m) & (s.y.abs() >= _LEAST_NORMAL[s.dtype])
    size, m = size[keep], m[keep]
    low = size.floor()
    up = m == low + 1
    between = up | (m == low)
    bins = ((size - low) * BINS).long().clamp(max=BINS - 1)[between]
    n, ups = torch.bincount(bins, minlength=BINS), torch.bincount(bins[up[between]], minlength=BINS)
    return tuple(zip(n.tolist(), ups.tolist(), strict=True)), int((~between).sum())


def _low(call: Call, s: SampledRows, given: Tensor) -> tuple[list[str], Tensor]:
    """(names, which candidates are right) of sums in fewer bits beside the other ways, of fewer numbers."""
    told = (torch.isfinite(given) & (s.y.abs() >= _LEAST_NORMAL[s.dtype])).nonzero()
    at = told[_spread(len(told), _LOW_NUMBERS)]
    try:
        found = dict(ways.low_sums(call, s, at))
    except (Declined, RuntimeError, ValueError, IndexError):
        return [], given
    if not found:
        return [], given
    old = torch.stack([v[at[:, 0], at[:, 1]] for v in ways.ways(call, s).values()])
    values = torch.cat((old, torch.stack(list(found.values()))))
    step = steps(s.y[at[:, 0], at[:, 1]], s.dtype)
    return list(found), _directions(values / step, given[at[:, 0], at[:, 1]] / step)


def _would(call: Call, role: str, y: Tensor, rows: Tensor, dtype: str, judge: Judge) -> dict[str, float]:
    """Habit → measured / allowed where that is what the machine does."""
    half = 0.5 * steps(torch.where(torch.isfinite(y), y, 0.0), dtype) * torch.sign(y)
    found = {"away": judge(y + half, None).severity}
    if role != "output.0" or not ways.is_product(call.cls):
        return found
    try:
        x = call.wide("input_", "x", "input", "hidden_states", "0", "1")
        weight = weight_of(call)
        x = x.reshape(-1, x.shape[-1])[rows]
        squares = torch.cat([(x * x) @ (part * part).T for _, part in widened(weight)], 1)
    except (Declined, RuntimeError, ValueError):
        return found
    if squares.shape != y.shape:
        return found
    n, once = weight.shape[1], _ROUNDED * half_step(dtype)
    blocks = [b for b in ways.BLOCKS if b < n]
    for block, sizes in zip(blocks, _partial_sums(x, weight, y, squares, blocks), strict=True):
        found[ways.low_name(block, False)] = judge(y, once * (sizes + y * y).sqrt()).severity
    for k in (k for k in ways.SPLITS if n % k == 0 and n > k):
        found[ways.split_name(k)] = judge(y, once * (squares + y * y / k).sqrt()).severity
    return found


def _partial_sums(x: Tensor, weight: Tensor, y: Tensor, squares: Tensor, blocks: list[int]) -> list[Tensor]:
    """For each block length the sum of the squares of all partial sums, in order, that end with a block: [rows, width]
    each. Of large products what it is in the mean over all orders, wandered from: the k-th of N partial sums has a mean
    square of (k y / N)**2 + k (N - k) / N**2 of the terms' squares."""
    n = weight.shape[1]
    if y.numel() * n > _TERMS:
        return [_WANDER**2 * (n / b) * (y * y / 3.0 + squares / 6.0) for b in blocks]
    found: list[list[Tensor]] = [[] for _ in blocks]
    for row in x.float():
        partial = (row * weight.float()).cumsum(1).square_()
        for kept, block in zip(found, blocks, strict=True):
            kept.append(partial[:, block - 1 :: block].sum(1))
    return [torch.stack(kept).double() for kept in found]
