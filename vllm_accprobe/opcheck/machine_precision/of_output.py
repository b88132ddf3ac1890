"""One output: which of the ways that a machine may compute in its numbers allow, and how far its functions are off.

The problem: the same formula gives other numbers where an intermediate result is rounded, where a sum is kept in fewer
bits, or where its parts are rounded before they are added. The idea: each way of a closed list (`ways`) is a plain
function of the call, in float64 with those roundings put in. Of a sample of numbers, every way and every direction of
the last rounding is a prediction, and the right ones are counted (decided.Evidence). Fractions show stochastic
rounding; sums in fewer bits are tried on a few numbers, where nothing else fits. Functions: in a norm all of a row is
multiplied with one number, so that each rounded result bounds it from both sides, and the intersection is narrow; an
activation's function is off by its element's relative error. An approximation errs to both sides; a wrong constant does
not.
Elsewhere: what the counts say (of_machine.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from vllm_accprobe.kernels.float_formats import FORMATS, LOW, half_step
from vllm_accprobe.opcheck.floors.rounding import steps
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.machine_precision.of_machine import BINS, Evidence
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import activations, linear, norms, rotary
from vllm_accprobe.opcheck.references.quantised import weight_of, widened

ONCE = "once"
Tensor = Any
_NORM = "normalised value"
_SUM, _AGAIN = "sum with the residual", "sum with the residual, after its norm"
_GATE, _PRODUCT, _COSINES = "activation", "product before the bias", "cosines"


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Some rows of one output. y: exact, float64 [rows, width]; rows: which of the tensor's; role: the output's."""

    y: Tensor
    rows: Tensor
    dtype: str
    role: str = "output.0"

    def round(self, x: Tensor) -> Tensor:
        return x.to(getattr(torch, self.dtype)).double()


Ways = Mapping[str, Tensor]
Family = Callable[[Call, SampledRows], Ways]


def ways(call: Call, sample: SampledRows) -> dict[str, Tensor]:
    """name → what is rounded in the end, float64 [rows, width]; ONCE first. Without those that a call does not have."""
    found: dict[str, Tensor] = {ONCE: sample.y}
    family = family_of(call)
    if family is not None and (sample.role == "output.0" or family is _rotary):
        try:
            more = family(call, sample)
        except (Declined, RuntimeError, ValueError, KeyError, IndexError, TypeError):
            return found  # what its reference could do this cannot: it is known nothing more of
        found |= {n: v for n, v in more.items() if v.shape == sample.y.shape}
    return found


def family_of(call: Call) -> Family | None:
    """Which intermediate results an operator has, None where that is not known."""
    return _family(norms.known_as(call))


@functools.lru_cache(1024)
def _family(name: str) -> Family | None:
    return next((f for glob, f in _FAMILIES.items() if fnmatchcase(name, glob)), None)


def is_product(call: Call) -> bool:
    return family_of(call) is _linear


def is_norm(call: Call) -> bool:
    return family_of(call) is _norm


def is_gated(call: Call) -> bool:
    return family_of(call) is _gated


def _norm(call: Call, s: SampledRows) -> Ways:
    x, residual = call.tensor(*norms.INPUT)[s.rows].double(), call.maybe(*norms.RESIDUAL)
    (eps, _), weight = norms.epsilon(call), norms.weight_of(call)

    def scaled(values: Tensor, of: Tensor) -> Tensor:
        return values * torch.rsqrt((of * of).mean(-1, keepdim=True) + eps)

    sums = {"": x}
    if residual is not None:
        exact = x + residual[s.rows].double()
        rounded = s.round(exact)
        sums = {"": exact, _SUM: rounded, _AGAIN: exact}
    found: dict[str, Tensor] = {}
    for name, of in sums.items():
        y = scaled(s.round(of) if name == _AGAIN else of, of)
        if name:
            found[name] = y if weight is None else y * weight
        if weight is not None:
            found[f"{name} and {_NORM}" if name else _NORM] = s.round(y) * weight
    return found


def _gated(call: Call, s: SampledRows) -> Ways:
    gate, up, f = activations.gate_of(call)
    return {_GATE: s.round(f(gate[s.rows].double())) * up[s.rows].double()}


def _linear(call: Call, s: SampledRows) -> Ways:
    if "bias" not in call.params or call.attrs.get("skip_bias_add") or int(call.attrs.get("tp_size", 1)) > 1:
        return {}
    bias = call.param("bias")
    return {_PRODUCT: s.round(s.y - bias) + bias}


def _rotary(call: Call, s: SampledRows) -> Ways:
    neox, dim = rotary.way_of(call)
    angle, size = rotary.token_angles(call, dim)
    angle = angle[s.rows].unsqueeze(1)
    heads = next(x[s.rows].double() for roles, _, x in rotary.query_and_key(call) if s.role in roles)
    turn, rest = heads[..., :dim], heads[..., dim:]
    cos, sin = s.round(size * angle.cos()), s.round(size * angle.sin())
    none = torch.zeros_like(cos)
    a, b = (rotary.rotate(turn, c, d, neox) for c, d in ((cos, none), (none, sin)))
    return {n: torch.cat((y, rest), -1).reshape(s.y.shape)
            for n, y in ((_COSINES, a + b), (f"{_COSINES} and products", s.round(a) + s.round(b)))}  # fmt: skip


_FAMILIES: dict[str, Family] = {
    "*RotaryEmbedding": _rotary,
    "*GroupNorm": lambda call, s: {}, "*LayerNorm": lambda call, s: {}, "*RMSNormGated": lambda call, s: {},
    "*RMSNorm": _norm, "*RMSNormFused": _norm,
    "SiluAndMul": _gated, "MulAndSilu": _gated, "GeluAndMul": _gated,
    "*ParallelLinear": _linear, "*Linear": _linear, "ParallelLMHead": _linear,
}  # fmt: skip
"""Operators whose intermediate results are all known; the first that fits."""

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
SPLITS = (2, 4, 8)
_STEPS = 1 << 11
"""Chosen: additions one after the other of one way that are tried, 20 ms."""


def low_name(block: int, start: bool) -> str:
    """The name of a sum that is rounded after every ``block`` terms. start: the bias is what it begins with."""
    return f"low {block}{' bias first' if start else ''}"


def split_name(parts: int) -> str:
    return f"split {parts}"


def low_sums(call: Call, s: SampledRows, at: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Ways of a product with fewer bits, of the numbers ``at`` (int [n, 2]: row of the sample, column): [n] each.

    low b: the sum is rounded to the result's dtype after every b terms, in order. split k: k parts of the sum are
    rounded to it and then added in float32."""
    if int(call.attrs.get("tp_size", 1)) > 1 and call.attrs.get("reduce_results", True) and "Row" in call.cls:
        return  # a sum over ranks
    x = linear.input_of(call)
    weight = weight_of(call)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        return
    terms = (x[s.rows][at[:, 0]].double() * weight[at[:, 1]].double()).float()
    n, bias = terms.shape[1], None
    if "bias" in call.params and not call.attrs.get("skip_bias_add"):
        bias = call.param("bias")[at[:, 1]]
    low = getattr(torch, s.dtype)
    for block in BLOCKS:
        if block < n and -(-n // block) <= _STEPS:
            parts = [p.sum(1) for p in terms.split(block, 1)]
            yield low_name(block, False), _in_order(parts, low, bias, False)
            if bias is not None:
                yield low_name(block, True), _in_order(parts, low, bias, True)
    for k in SPLITS:
        if n % k == 0 and n > k:
            halves = terms.double().reshape(len(terms), k, n // k).sum(2).to(low).double().sum(1)
            yield split_name(k), halves if bias is None else halves + bias


def _in_order(parts: list[Tensor], low: Any, bias: Tensor | None, start: bool) -> Tensor:
    """The sum before its last rounding (before its bias, where that comes last, it has been rounded)."""
    total = torch.zeros_like(parts[0]) if bias is None or not start else bias.to(low).float()
    for part in parts[:-1]:
        total = (total + part).to(low).float()
    exact = total.double() + parts[-1].double()
    return exact.to(low).double() + bias if bias is not None and not start else exact


RSQRT, ACTIVATION, SUMS = "rsqrt", "activation", "sums"
MOST = 2.0**-10
"""Chosen: an approximation that hardware has is better (rsqrt of 11.9 bits: 2**-11.4 [Intel's manual on RSQRTPS: a
relative error of 1.5 * 2**-12]); what is further off is a wrong function."""
FLOAT32 = 2.0**-20
"""Chosen: what is off by less is float32's own rounding, some units of 2**-24 in a mean, a root and two products."""
_SMOOTH, _DEGREE = 0.5, 5
"""Chosen: of the error's variance, what a polynomial of the argument explains if it is a wrong constant's; its degree:
an approximation by octaves turns more often than that."""
_LOST = 2
"""Chosen: of 64 numbers, one that an intermediate rounding has moved across; no more than these of a row."""
Measured = tuple[float, ...]


def of_grid(
    call: Call, role: str, way: str, v: Tensor, captured: Tensor, s: SampledRows, share: float
) -> dict[str, Measured]:  # fmt: skip
    """From results that were rounded to a coarse grid; way: the one that fits best; v: what was rounded by it, float64
    [rows, width]; share: of the numbers that it predicts. Nothing where it does not fit."""
    if role != "output.0":
        return {}
    if is_norm(call) and share > _FITS / 2:
        low, high = _common(v, captured, s, 1 if way == ONCE else 1 + min(_LOST, v.shape[1] // 64))
        wide = high - low
        good = torch.isfinite(wide) & (wide > 0)
        if not bool(good.any()):
            return {}
        low, high = low[good], high[good]
        g = torch.where((low > 0) | (high < 0), (low + high) / 2.0, 0.0)
        return {RSQRT: _measured(g, float((high - low).median()))}
    if is_gated(call) and share > _FITS:
        usable = torch.isfinite(v) & (v != 0)
        coarse = float((steps(s.y, s.dtype)[usable] / v[usable].abs()).mean()) if bool(usable.any()) else 0.0
        # a number rounds otherwise with the probability of its error in steps, whatever that error's distribution
        n, size = float(usable.sum()), (1.0 - share) * coarse
        return {ACTIVATION: (n, (1.0 - share) * n, n * size * size, 0.5 * (1.0 - share) * n, coarse / max(n, 1.0))}
    return {}


def _common(v: Tensor, captured: Tensor, s: SampledRows, lost: int) -> tuple[Tensor, Tensor]:
    """For each row the interval of g in which v (1 + g) rounds to the captured numbers: [rows] each. lost: which
    number's bound counts: numbers that an intermediate rounding has moved across are left out at either end."""
    half = 0.5 * steps(captured, s.dtype)
    clear = torch.isfinite(v) & (v.abs() > 0)
    a, b = (captured - half) / v - 1.0, (captured + half) / v - 1.0
    low = torch.where(clear, torch.minimum(a, b), -1.0)
    high = torch.where(clear, torch.maximum(a, b), 1.0)
    return low.topk(lost, 1).values[:, -1], -((-high).topk(lost, 1).values[:, -1])


def _measured(g: Tensor, resolution: float) -> Measured:
    off = g.abs() > FLOAT32
    return float(len(g)), float(off.sum()), float((g * g).sum()), float((off & (g > 0)).sum()), resolution


def of_float32(call: Call, role: str, s: SampledRows, captured: Tensor, noise: Tensor | None) -> dict[str, Measured]:
    if role != "output.0":
        return {}
    if is_norm(call):
        return {RSQRT: _measured(_projected(s.y, captured), 2.0**-23)}
    if is_gated(call):
        e = _relative(s.y, captured)
        return {ACTIVATION: _measured(e, 2.0**-23)} if len(e) else {}
    if is_product(call) and noise is not None:
        floor = noise.expand(s.y.shape)
        e = torch.where(floor > 0, (captured - s.y) / floor, 0.0).flatten()
        return {SUMS: (float(len(e)), float((e.abs() > 8).sum()), float((e * e).sum()), float((e > 8).sum()), 0.0)}
    return {}


def _projected(y: Tensor, mine: Tensor) -> Tensor:
    power = (y * y).sum(1)
    return torch.where(power > 0, (y * (mine - y)).sum(1) / power, 0.0)


def _relative(y: Tensor, mine: Tensor) -> Tensor:
    clear = (y.abs() > 2.0**-100) & torch.isfinite(mine)
    return ((mine - y) / y)[clear]


def would_float32(
    call: Call, role: str, y: Tensor, mine: Tensor, rows: Tensor, judge: Callable[..., Any]
) -> dict[str, float]:  # fmt: skip
    """measured / allowed where a function of this size is the machine's; nothing where that is too far off, or has a
    plan."""
    if role != "output.0":
        return {}
    if is_norm(call):
        g = _projected(y, mine)
        if bool((g.abs() <= MOST).all()):
            return {RSQRT: judge(y * (1.0 + g[:, None]), None).severity}
    if is_gated(call):
        e = _relative(y, mine)
        if len(e) and bool((e.abs() <= MOST).all()) and not _smooth(call, y, mine, rows):
            return {ACTIVATION: judge(y, e.square().mean().sqrt() * y.abs()).severity}
    return {}


def _smooth(call: Call, y: Tensor, mine: Tensor, rows: Tensor) -> bool:
    """Whether a polynomial of the activation's argument explains the error."""
    try:
        x = activations.gate_of(call)[0][rows].double()
    except (Declined, RuntimeError, ValueError, IndexError):
        return True
    clear = (y.abs() > 2.0**-100) & torch.isfinite(mine)
    x, e = x[clear], ((mine - y) / y)[clear]
    if len(e) < 8 * _DEGREE:
        return True
    x = x / x.abs().amax().clamp(min=1e-30)
    powers = torch.stack([x**k for k in range(_DEGREE + 1)], 1)
    fit = powers @ torch.linalg.lstsq(powers, e[:, None]).solution
    left = float((e - fit[:, 0]).square().sum())
    return left < (1.0 - _SMOOTH) * float(e.square().sum())


Judge = Callable[[Tensor, "Tensor | None"], Verdict]
"""(reference, further standard error or None) → verdict of the whole output."""
_NUMBERS, _LOW_NUMBERS, _LEAST = 2048, 256, 16
"""Chosen: numbers that are examined; those of them for sums in fewer bits; below, nothing is known."""
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
    """Whether an output is examined: all that fail; of the others those of the first two steps, where prompts are, and
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
    s, captured = SampledRows(y[at], rows[at], dtype, role), mine[at]
    if dtype not in LOW:
        found = of_float32(call, role, s, captured, noise[at] if noise is not None else None)
        if not passed:
            would |= would_float32(call, role, y, mine, rows, judge)
        return Evidence(subnormals=(kept, flushed), functions=found, would=would)
    tried = ways(call, s)
    names, values = list(tried), torch.stack(list(tried.values()))
    right, q, usable = _predicted(values, captured, s)
    best = _best(right)
    share = float(right[best].double().mean()) if right.shape[1] else 1.0
    if share < _FITS and is_product(call):
        more = _low(call, s, captured)
        names, right = [*names, *more[0]], more[1] if more[0] else right
        best = _best(right)
    ups: tuple[tuple[int, int], ...] = ()
    out = 0
    if share < _STRAYS and best // 3 < len(values) and family_of(call) is not None:
        clear = torch.ones_like(usable) if noise is None or len(values) > 1 else noise[at] < _SMALL * steps(s.y, dtype)
        ups, out = _fractions(q[best // 3], clear, captured, s)
    way = min(best // 3, len(values) - 1)
    found = of_grid(call, role, names[way], values[way], captured, s, share)
    if not passed:
        would |= _would(call, role, y, rows, dtype, judge)
    x = call.maybe(*linear.INPUT) if is_product(call) else None
    terms = int(x.shape[-1]) if x is not None else 0
    return Evidence(tuple(names), _histogram(right), ups, out, (kept, flushed), found, would, terms)


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


def _predicted(values: Tensor, captured: Tensor, s: SampledRows) -> tuple[Tensor, Tensor, Tensor]:
    """(which candidates are right: bool [ways * 3, numbers]; values in steps, [ways, rows, width]; which numbers are
    examined: bool [rows, width]). Only finite normal ones, at most _NUMBERS, evenly spread."""
    step = steps(s.y, s.dtype)
    q, m = values / step, captured / step
    usable = torch.isfinite(values).all(0) & torch.isfinite(captured) & (s.y.abs() >= _LEAST_NORMAL[s.dtype])
    index = usable.flatten().nonzero().flatten()
    if len(index) > _NUMBERS:
        index = index[_spread(len(index), _NUMBERS)]
    a, b = q.flatten(1)[:, index], m.flatten()[index]
    return _directions(a, b), q, usable


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


def _fractions(q: Tensor, clear: Tensor, captured: Tensor, s: SampledRows) -> tuple[tuple[tuple[int, int], ...], int]:
    step = steps(s.y, s.dtype)
    size, m = q.abs(), (captured / step) * torch.sign(q)
    keep = clear & torch.isfinite(size) & torch.isfinite(m) & (s.y.abs() >= _LEAST_NORMAL[s.dtype])
    size, m = size[keep], m[keep]
    low = size.floor()
    up = m == low + 1
    between = up | (m == low)
    bins = ((size - low) * BINS).long().clamp(max=BINS - 1)[between]
    n, ups = torch.bincount(bins, minlength=BINS), torch.bincount(bins[up[between]], minlength=BINS)
    return tuple(zip(n.tolist(), ups.tolist(), strict=True)), int((~between).sum())


def _low(call: Call, s: SampledRows, captured: Tensor) -> tuple[list[str], Tensor]:
    """(names, which candidates are right) of sums in fewer bits and the other ways, of fewer numbers."""
    usable = (torch.isfinite(captured) & (s.y.abs() >= _LEAST_NORMAL[s.dtype])).nonzero()
    at = usable[_spread(len(usable), _LOW_NUMBERS)]
    try:
        found = dict(low_sums(call, s, at))
    except (Declined, RuntimeError, ValueError, IndexError):
        return [], captured
    if not found:
        return [], captured
    old = torch.stack([v[at[:, 0], at[:, 1]] for v in ways(call, s).values()])
    values = torch.cat((old, torch.stack(list(found.values()))))
    step = steps(s.y[at[:, 0], at[:, 1]], s.dtype)
    return list(found), _directions(values / step, captured[at[:, 0], at[:, 1]] / step)


def _would(call: Call, role: str, y: Tensor, rows: Tensor, dtype: str, judge: Judge) -> dict[str, float]:
    """Habit → measured / allowed where that is what the machine does."""
    half = 0.5 * steps(torch.where(torch.isfinite(y), y, 0.0), dtype) * torch.sign(y)
    found = {"away": judge(y + half, None).severity}
    if role != "output.0" or not is_product(call):
        return found
    try:
        x = linear.input_of(call).double()
        weight = weight_of(call)
        x = x.reshape(-1, x.shape[-1])[rows]
        squares = torch.cat([(x * x) @ (part * part).T for _, part in widened(weight)], 1)
    except (Declined, RuntimeError, ValueError):
        return found
    if squares.shape != y.shape:
        return found
    n, once = weight.shape[1], _ROUNDED * half_step(dtype)
    blocks = [b for b in BLOCKS if b < n]
    for block, sizes in zip(blocks, _partial_sums(x, weight, y, squares, blocks), strict=True):
        found[low_name(block, False)] = judge(y, once * (sizes + y * y).sqrt()).severity
    for k in (k for k in SPLITS if n % k == 0 and n > k):
        found[split_name(k)] = judge(y, once * (squares + y * y / k).sqrt()).severity
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
