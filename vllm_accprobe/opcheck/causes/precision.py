"""Causes of rounding: an input, a weight, a table, probabilities, a sum or an output in fewer bits, and where.

The problem: many grids may be meant (so many bits, rounded or cut off, an 8-bit format, integers with a scale of a row
or of a block), and each is one number more that was tried. The idea: a grid is a function with a name. All of them are
tried on a few rows and columns (`_best`), the best ones in full, and each of these costs as many choices as there were.
What was rounded before a coarse rounding may have gone either way near the middle of two numbers: such elements have
that step as noise (`_coarse`), so that they prove nothing and cost nothing.

Not here: whether a kernel's rounding is allowed (floors/), how operators round in general (habits/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.kernels.float_formats import FORMATS
from vllm_accprobe.opcheck.causes.activations_causes import GATED, parts
from vllm_accprobe.opcheck.causes.api import (
    PRECISION,
    CauseRow,
    Change,
    Guess,
    Trial,
    Values,
    among,
    edited,
    outputs_of,
)
from vllm_accprobe.opcheck.causes.attention_causes import CACHED, Past, by_requests, sizes, with_past
from vllm_accprobe.opcheck.causes.factors import ANY
from vllm_accprobe.opcheck.causes.linear_causes import LINEAR, linear_input
from vllm_accprobe.opcheck.causes.norms_causes import RMS, by_root, normed_input, own_epsilon
from vllm_accprobe.opcheck.causes.rotary_causes import ROTARY, at, by_table
from vllm_accprobe.opcheck.causes.routing_causes import EXPERTS
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if
from vllm_accprobe.opcheck.references import attention
from vllm_accprobe.opcheck.references.quantised import weight_of

Tensor = Any
_COLUMNS = 64
"""Chosen: columns on which grids are compared, in a few rows."""
_KEPT, _LEFT = 2, 0.5
"""Chosen: grids that are tried in full, and the part of the error's square that one may leave to be so."""
_SAME = 1e-6
"""Chosen: relative difference of what two parameters leave below which they give the same output."""
_LARGE = 1 << 20
"""Chosen: elements of a tensor from which on it is not rounded to each grid in turn."""
_WORK = 1 << 28
"""Chosen: sums in full that are worked on, a second's."""
_UNSURE = 0.5
"""Chosen: share of elements whose coarse rounding may go either way from which on it says nothing."""


def _bits(n: int, turn: Callable[[Tensor], Tensor] = torch.round) -> Callable[[Tensor], Tensor]:
    """To n significant bits, the leading one counted."""

    def to(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp(turn(mantissa * 2.0**n) / 2.0**n, exponent)

    return to


def _format(name: str) -> Callable[[Tensor], Tensor]:
    dtype = getattr(torch, name)
    most = torch.finfo(dtype).max
    return lambda x: x.double().clamp(-most, most).to(dtype).double()


def _flushed(name: str) -> Callable[[Tensor], Tensor]:
    """Numbers below the normal ones of a format become 0."""
    least = 2.0 ** FORMATS[name][1]
    return lambda x: torch.where(x.double().abs() < least, 0.0, x.double())


def _scaled(most: float, code: Callable[[Tensor], Tensor], size: int | None, own: bool) -> Callable[[Tensor], Tensor]:
    """Codes up to ``most`` with a scale for each ``size`` numbers of a row (0: of the row, None: of the tensor). own:
    the numbers that they stand for are rounded to the tensor's dtype."""

    def to(x: Tensor) -> Tensor:
        decline_if(size and (x.shape[-1] % size or x.shape[-1] == size), "no whole blocks")
        y = x.float().unflatten(-1, (-1, size)) if size else x.float()  # as kernels do: half codes are frequent
        top = y.abs().amax() if size is None else y.abs().amax(-1, keepdim=True)
        step = top.clamp(min=1e-30) / most
        back = (code(y / step).float() * step).reshape(x.shape).double()
        return back.to(x.dtype).double() if own else back

    return to


_EIGHT = {
    f"{name} with a scale for each {of}{', then its dtype' if own else ''}": _scaled(most, code, size, own)
    for own in (False, True)
    for name, most, code in (
        ("int8", 127.0, torch.round), ("float8_e4m3fn", 448.0, _format("float8_e4m3fn")),
        ("whole numbers up to 63", 63.0, torch.round), ("int4", 7.0, torch.round),
    ) for of, size in (("row", 0), ("tensor", None), ("block of 32", 32), ("block of 64", 64), ("block of 128", 128))
}  # fmt: skip
_PLAIN = {
    **{n: _format(n) for n in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")},
    **{f"{n} bits of mantissa": _bits(n) for n in (7, 6, 5, 4, 3, 2)},
    **{f"{n} bits of mantissa, cut off": _bits(n, torch.trunc) for n in (8, 7, 6, 5, 4, 3)},
    "float16 without subnormal numbers": _flushed("float16"),
    "bfloat16 without subnormal numbers": _flushed("bfloat16"),
}
GRIDS: dict[str, Callable[[Tensor], Tensor]] = {**_PLAIN, **_EIGHT}


def _left(change: Change, trial: Trial, value: Any) -> float:
    """The square of what an edit leaves of mine's error, over that error's; inf where it does not apply, and where it
    changes nothing."""
    try:
        found = outputs_of(trial, change(trial, value))
    except (Declined, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return math.inf
    left = before = 0.0
    for role in trial.roles():
        plain = trial.plain[role]
        if found[role] is plain or not trial.mine(role).is_floating_point():
            continue
        mine, weight = trial.mine(role).double(), trial.weight(role)
        if plain.rows is not None:
            weight = weight * plain.rows.double().reshape(-1, *[1] * (mine.dim() - 1))
        size = plain.value.square().mean().clamp(min=1e-300)
        left += float((weight * (found[role].value.reshape(mine.shape) - mine)).square().sum() / size)
        before += float((weight * (plain.value.reshape(mine.shape) - mine)).square().sum() / size)
    return left / before if before else math.inf


def _best(change: Change, trial: Trial, values: Sequence[Any]) -> Iterator[Guess]:
    """Of these parameters, those after which least is left, and what leaves as little: none of equals is preferred."""
    few = trial.few
    found = sorted((_left(change, few, value), k) for k, value in enumerate(values))
    most = min(_LEFT, (1.0 + _SAME) * found[min(_KEPT, len(found)) - 1][0]) if found else 0.0
    yield from (Guess(values[k], choices=float(len(values))) for left, k in found if left <= most)


def _best_of(change: Change, values: Callable[[Trial], Sequence[Any]] | Sequence[Any]) -> Values:
    """``values`` of a cause whose parameter is the best of these."""
    return lambda trial: _best(change, trial, values(trial) if callable(values) else values)


def _on_grid(x: Tensor, grid: str) -> Tensor:
    y = GRIDS[grid](x)
    decline_if(bool((y == x.double()).all()), "it is on that grid")
    return y


def _coarse_input(trial: Trial, parameter: tuple[str, str]) -> Call:
    name, grid = parameter
    return edited(trial.call, inputs={name: _on_grid(trial.call.inputs[name], grid)})


def _inputs(trial: Trial) -> Iterator[Guess]:
    names = [n for n, t in trial.call.inputs.items() if t.is_floating_point() and t.dim() > 1 and n not in _FROM_CACHE]
    large = not trial.references.by_rows(trial.call.cls) and trial.mine().numel() > _LARGE // 8
    for name in names[:3]:
        yield from _best(_coarse_input, trial, [(name, g) for g in (_PLAIN if large else GRIDS)])


_FROM_CACHE = ("key", "value", "kv_c_normed", "k_pe")
"""Inputs that attention reads from its cache."""


def _coarse_weight(trial: Trial, grid: str) -> Call:
    return edited(trial.call, params={"weight": _on_grid(trial.call.stored("weight"), grid)})


def _weights(trial: Trial) -> Iterator[Guess]:
    """On some columns of the output, of a large weight."""
    call, few = trial.call, trial.few
    stored = call.stored("weight")
    weight = weight_of(call) if stored.dim() == 2 else stored
    x = few.call.inputs[linear_input(few.call)[0]].double().reshape(-1, weight.shape[1]) if weight.dim() == 2 else None
    if x is None or not stored.is_floating_point() or trial.call.attrs.get("tp_size", 1) != 1:
        yield from _best(_coarse_weight, trial, list(GRIDS) if weight.numel() < _LARGE else [])
        return
    off = few.mine().double().reshape(len(x), -1) - few.plain["output.0"].value.reshape(len(x), -1)
    columns = off.abs().sum(0).topk(min(_COLUMNS, len(weight))).indices
    off, some, found = off[:, columns], weight[columns].to(stored.dtype), []
    for name, grid in GRIDS.items():
        whole = "tensor" in name
        if (whole and weight.numel() > _LARGE) or ("block" in name and _no_blocks(name, weight.shape[1])):
            continue
        y = grid(stored)[columns] if whole else grid(some)
        found.append((float((off - x @ (y - some.double()).T).square().sum() / off.square().sum()), name))
    yield from (Guess(n, choices=float(len(GRIDS))) for left, n in sorted(found)[:_KEPT] if left < _LEFT)


def _no_blocks(name: str, width: int) -> bool:
    size = int(name.partition("block of ")[2].partition(",")[0])
    return bool(width % size) or width == size


def _scales(trial: Trial) -> list[Guess]:
    names = [n for n, t in trial.call.params.items() if "scale" in n and t.numel() > 1]
    return among((n, d, k) for n in names for d in range(trial.call.params[n].dim()) for k in (1, -1, 0))


def _scale_of_another(trial: Trial, parameter: tuple[str, int, int]) -> Call:
    name, dim, by = parameter
    scale = trial.call.stored(name)
    return edited(trial.call, params={name: scale.roll(by, dim) if by else scale.narrow(dim, 0, 1).expand_as(scale)})


def _other_scales(trial: Trial) -> list[Guess]:
    """(a weight's scale, the tensor whose scale is taken)."""
    scales = {n: t for n, t in trial.call.params.items() if "scale" in n and t.numel()}
    own = [n for n in scales if n.startswith("weight")]
    return among((n, m, how) for n in own for m in scales for how in ("", "the largest of ", "one over ")
                 if n != m or how == "one over " or (how and scales[m].numel() > 1))


def _scale_of_other_tensor(trial: Trial, parameter: tuple[str, str, str]) -> Call:
    name, other, how = parameter
    own, found = trial.call.stored(name), trial.call.stored(other).double()
    found = found.amax() if how.startswith("the") else 1.0 / found if how else found
    decline_if(found.numel() not in (1, own.numel()), "it is of another form")
    return edited(trial.call, params={name: (found.expand if found.numel() == 1 else found.reshape)(own.shape)})


def _coarse(trial: Trial, role: str, to: Callable[[Tensor], Tensor]) -> Expected:
    """An output rounded to its dtype, and then by ``to``; what may go either way has that step as noise."""
    e, dtype = trial.plain[role], trial.mine(role).dtype
    noise = torch.zeros_like(e.value) if e.noise is None else e.noise.expand(e.value.shape)
    slack = 2.0 * noise + 2.0**-22 * e.value.abs()
    before = [(e.value + k * slack).to(dtype) for k in (-1.0, 0.0, 1.0)]
    low, value, high = (to(x).double() for x in before)
    width = (high - low).abs()  # more than the step that it may be off in any case
    width = torch.where(width > 1.5 * (before[2].double() - before[0].double()).abs(), width, 0.0)
    decline_if(float((width > 0).double().mean()) > _UNSURE, "where it was rounded to is not known")
    bound = None if e.bound is None else e.bound + width
    return replace(e, value=value, noise=combined(e.noise, width), bound=bound, exact=None)


def _coarse_output(trial: Trial, parameter: tuple[str, str]) -> dict[str, Expected]:
    grid, role = parameter
    return {role: _coarse(trial, role, GRIDS[grid])}


def _outputs(trial: Trial) -> Iterator[Guess]:
    for role in trial.roles():
        if trial.mine(role).is_floating_point():
            yield from _best(_coarse_output, trial, [(g, role) for g in GRIDS])


def _limits(trial: Trial) -> Iterator[Guess]:
    """The largest number of mine's, where the reference has larger ones."""
    y, mine = trial.plain["output.0"].value.double().flatten(), trial.mine().double().flatten()
    for way, top, most in (("both sides", mine.abs().amax(), y.abs().amax()), ("above", mine.amax(), y.amax()),
                           ("below", -mine.amin(), -y.amin())):  # fmt: skip
        if torch.isfinite(top) and float(most) > 1.01 * float(top):
            known = float(top) in (127.0, 240.0, 448.0, 57344.0, 65504.0)
            yield Guess((float(top), way), fitted=0 if known else 1, choices=15.0 if known else 3.0)


def _clamped(trial: Trial, parameter: tuple[float, str]) -> Any:
    top, way = parameter
    value = trial.plain["output.0"].value
    return value.clamp(-top if way != "above" else None, top if way != "below" else None)


def _wraps(trial: Trial) -> list[Guess]:
    top = float(trial.mine().double().abs().amax())
    if not math.isfinite(top) or not float(trial.plain["output.0"].value.abs().amax()) > top > 0:
        raise Declined("none is beyond it")
    return among((2.0 ** (math.ceil(math.log2(top)) + k) for k in (0, 1)), 4.0)


def _wrapped(trial: Trial, top: float) -> Any:
    value = trial.plain["output.0"].value
    return value - 2.0 * top * torch.floor((value + top) / (2.0 * top))


_RUNNING, _BIASED, _PARTS = "rounded after each", "from the bias on, rounded after each", "each part rounded"


def _sum(x: Tensor, w: Tensor, bias: Tensor | None, block: int, how: str, dtype: Any) -> Tensor:
    """x wᵀ by blocks of inputs, in float32 with the roundings of ``how``."""
    x, w = x.float(), w.float()
    total = torch.zeros(len(x), len(w)) if how != _BIASED or bias is None else bias.to(dtype).float().expand(len(x), -1)
    for k in range(0, x.shape[1], block):
        part = x[:, k : k + block] @ w[:, k : k + block].T
        total = total + part.to(dtype).float() if how == _PARTS else (total + part).to(dtype).float()
    return total.double() if how == _BIASED or bias is None else total.double() + bias.double()


def _sums(trial: Trial) -> Iterator[Guess]:
    call, few = trial.call, trial.few
    weight, bias = weight_of(call), call.params.get("bias")
    x, dtype = linear_input(few.call)[1].double().reshape(-1, weight.shape[1]), trial.mine().dtype
    if int(call.attrs.get("tp_size", 1)) > 1 or call.attrs.get("skip_bias_add"):
        raise Declined("a sum over ranks, or a bias that is added later")
    mine, y = few.mine().double().reshape(len(x), -1), few.plain["output.0"].value.reshape(len(x), -1)
    columns = (mine - y).abs().sum(0).topk(min(_COLUMNS, len(weight))).indices
    mine, before, width = mine[:, columns], float((mine - y)[:, columns].square().sum()), weight.shape[1]
    sizes = {*(2**k for k in range(10)), *(-(-width // k) for k in (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64))}
    ways = [(b, h) for b in sizes if b < width for h in (_RUNNING, _BIASED, _PARTS) if h != _BIASED or bias is not None]
    bias = None if bias is None else bias[columns]
    found = [(float((_sum(x, weight[columns], bias, *way, dtype).to(dtype).double() - mine).square().sum()), way)
             for way in ways]  # fmt: skip
    yield from among((w for left, w in sorted(found)[:_KEPT] if left < _LEFT * before), float(len(ways)))


def _low_sum(trial: Trial, parameter: tuple[int, str]) -> Any:
    weight, bias = weight_of(trial.call), trial.call.params.get("bias")
    x = linear_input(trial.call)[1]
    x = x.reshape(-1, x.shape[-1])
    decline_if(len(x) * len(weight) * (x.shape[1] // parameter[0]) > _WORK, "too many sums")
    return _sum(x, weight, bias, *parameter, trial.mine().dtype)


_SQUARES = ("of rounded squares", "rounded at its end", "whose root is rounded")


def _variances(trial: Trial) -> list[tuple[str, int, str]]:
    width = normed_input(trial.call).shape[-1]
    blocks = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if width % b == 0 and b < width]
    ways = [(f"added up in {n} by {b}", b, n) for n in ("bfloat16", "float16") for b in blocks]
    return ways + [(f"{w} to {n}", _SQUARES.index(w) - 3, n) for w in _SQUARES for n in ("bfloat16", "float16")]


def _low_variance(trial: Trial, parameter: tuple[str, int, str]) -> Any:
    _, block, name = parameter
    x, to = normed_input(trial.call), _format(name)
    squares = to(x * x) if block == -3 else x * x
    if block < 0:
        mean = squares.mean(-1, keepdim=True)
        mean = to(mean) if block == -2 else mean
        root = (mean + own_epsilon(trial)).sqrt()
        return by_root(trial, 1.0 / to(1.0 / root) if block == -1 else root)
    total = torch.zeros_like(x[..., :1])
    for part in squares.unflatten(-1, (-1, block)).sum(-1).split(1, -1):
        total = to(total + part)
    return by_root(trial, (total / x.shape[-1] + own_epsilon(trial)).sqrt())


def _coarse_table(trial: Trial, grid: str) -> dict[str, Expected]:
    cache = trial.call.params.get("cos_sin_cache")
    return by_table(trial, lambda cos, sin, own: tuple(
        GRIDS[grid](t.to(own if cache is None else cache.dtype)) for t in (cos, sin)))  # fmt: skip


def _coarse_positions(trial: Trial, grid: str) -> Call:
    return at(trial, GRIDS[grid])


def _coarse_experts(trial: Trial, grid: str) -> Call:
    return edited(trial.call, params={n: GRIDS[grid](trial.call.stored(n)) for n in ("w13_weight", "w2_weight")})


_POINTS = [(n, r, how) for n in (9, 13, 17, 25, 33, 65, 129, 257) for r in (4.0, 6.0, 8.0, 10.0, 16.0)
           for how in ("straight lines between them", "the nearest one")]  # fmt: skip


def _sigmoid_table(trial: Trial, parameter: tuple[int, float, str]) -> Any:
    n, ends, how = parameter
    gate, up, _ = parts(trial)
    table = torch.linspace(-ends, ends, n, dtype=torch.float64).sigmoid()
    at = ((gate + ends) * ((n - 1) / (2.0 * ends))).clamp(0, n - 1)
    below = at.floor().clamp(max=n - 2).long()
    s = table[at.round().long()] if how.startswith("the") else torch.lerp(table[below], table[below + 1], at - below)
    return gate * s * up


def _coarse_sigmoid(trial: Trial, grid: str) -> Any:
    gate, up, _ = parts(trial)
    return gate * GRIDS[grid](torch.sigmoid(gate)) * up


def _coarse_gate(trial: Trial, parameter: tuple[str, str]) -> Any:
    part, grid = parameter
    dtype, to = trial.mine().dtype, GRIDS[grid]
    gate, up, f = parts(trial)
    gate, up = to(gate.to(dtype)) if part == "gate" else gate, to(up.to(dtype)) if part == "up" else up
    return (to(f(gate).to(dtype)) if part == "activated gate" else f(gate)) * up


def _coarse_cache(trial: Trial, parameter: tuple[str, str]) -> Call:
    (which, grid), kv = parameter, sizes(trial.call)[1]

    def change(_: Any, past: Past) -> Past:
        return {n: GRIDS[grid](t.reshape(len(t), kv, -1)).reshape(t.shape) if n in ("key", "value") and n in which
                else t for n, t in past.items()}  # fmt: skip

    return with_past(trial, change)


def _caches(trial: Trial) -> list[tuple[str, str]]:
    ways = [(n, g) for n in ("keys and values", "values", "keys") for g in GRIDS if "block" not in g]
    return ways if trial.mine().numel() < _LARGE // 8 else ways[: len(ways) // 3]


_PLACES = ("scores", "exponentials", "probabilities")


def _coarse_softmax(trial: Trial, parameter: tuple[str, str]) -> Expected:
    where, grid = parameter
    decline_if(trial.mine().numel() > _LARGE, "too large")
    to = {place: GRIDS[grid] if place == where else lambda x: x for place in _PLACES}

    def y(q: Any, k: Any, v: Any, positions: Any, how: dict[str, Any]) -> Any:
        how = {n: x for n, x in how.items() if n != "step"}
        decline_if(how.pop("sinks") is not None, "a softmax without sinks")
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        s = to["scores"](attention.scores(q, k, positions=positions, **how)).nan_to_num(-math.inf)
        e = torch.exp(s - s.amax(-1, keepdim=True))
        p = to["probabilities"](to["exponentials"](e) / e.sum(-1, keepdim=True))
        return torch.einsum("hnm,mhe->nhe", p, v)

    return by_requests(trial, y)


CAUSES = (
    CauseRow("coarse_input", PRECISION, ANY, "with its input {0} in {1}", _coarse_input, _inputs, whole=True),
    CauseRow("coarse_weight", PRECISION, (*LINEAR, *RMS), "with its weight in {0}", _coarse_weight, _weights),
    CauseRow("scale_of_another", PRECISION, LINEAR,
             "with {0} of another place along its dimension {1} (shifted by {2}; 0: the first one's in all)",
             _scale_of_another, _scales),
    CauseRow("scale_of_other_tensor", PRECISION, LINEAR, "with {2}{1} in place of {0}", _scale_of_other_tensor,
             _other_scales),
    CauseRow("coarse_output", PRECISION, ANY, "with its result in {0}", _coarse_output, _outputs, whole=True),
    CauseRow("result_clamped", PRECISION, ANY, "with its result cut at {0:.5g} ({1})", _clamped, _limits),
    CauseRow("result_wrapped", PRECISION, ANY, "with its result wrapped at {0:g} (the highest bits lost)", _wrapped,
             _wraps),
    CauseRow("low_sum", PRECISION, LINEAR, "with its sums over {0} inputs at a time in the result's dtype ({1})",
             _low_sum, _sums),
    CauseRow("low_variance", PRECISION, RMS, "with the sum of its squares {0}", _low_variance,
             _best_of(_low_variance, _variances)),
    CauseRow("coarse_table", PRECISION, ("*RotaryEmbedding",), "with its table of cosines and sines in {0}",
             _coarse_table, _best_of(_coarse_table, list(_PLAIN))),
    CauseRow("coarse_positions", PRECISION, ROTARY, "with its positions in {0}", _coarse_positions,
             _best_of(_coarse_positions, list(_PLAIN))),
    CauseRow("coarse_experts", PRECISION, EXPERTS, "with its experts' weights in {0}", _coarse_experts, _best_of(
        _coarse_experts, lambda t: list(GRIDS) if t.call.stored("w13_weight").numel() <= _LARGE else [])),
    CauseRow("sigmoid_table", PRECISION, GATED[:2], "with a sigmoid from a table of {0} points over -{1:g} to {1:g} "
             "({2})", _sigmoid_table, _best_of(_sigmoid_table, _POINTS)),
    CauseRow("coarse_sigmoid", PRECISION, GATED[:2], "with its sigmoid in {0}", _coarse_sigmoid,
             _best_of(_coarse_sigmoid, list(_PLAIN))),
    CauseRow("coarse_gate", PRECISION, GATED, "with its {0} in {1}", _coarse_gate, _best_of(
        _coarse_gate, [(part, g) for part in ("gate", "up", "activated gate") for g in GRIDS]), whole=True),
    CauseRow("coarse_cache", PRECISION, CACHED, "with {0} of its cache in {1} (of each head)", _coarse_cache,
             _best_of(_coarse_cache, _caches)),
    CauseRow("coarse_softmax", PRECISION, CACHED, "with its {0} in {1}", _coarse_softmax,
             _best_of(_coarse_softmax, [(where, g) for g in _PLAIN for where in _PLACES])),
)  # fmt: skip
