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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.kernels.float_formats import FORMATS
from vllm_accprobe.opcheck.causes.activations_causes import GATED, _parts
from vllm_accprobe.opcheck.causes.api import PRECISION, Guess, Trial, cause, edited, outputs_of
from vllm_accprobe.opcheck.causes.attention_causes import _sizes, _with_past
from vllm_accprobe.opcheck.causes.linear_causes import LINEAR, _input
from vllm_accprobe.opcheck.causes.norms_causes import RMS, _by_root, _own
from vllm_accprobe.opcheck.causes.norms_causes import _input as _normed
from vllm_accprobe.opcheck.causes.rotary import ROTARY, _at, _by_table
from vllm_accprobe.opcheck.causes.routing_causes import EXPERTS
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined
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


# --- grids -----------------------------------------------------------------------------------------------------------


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
        if size and (x.shape[-1] % size or x.shape[-1] == size):
            raise Declined("no whole blocks")
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


def _left(change: Callable[[Trial, Any], Any], trial: Trial, value: Any) -> float:
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


def _best(change: Callable[[Trial, Any], Any], trial: Trial, values: Sequence[Any]) -> Iterator[Guess]:
    """Of these parameters, those after which least is left, and what leaves as little: none of equals is preferred."""
    few = trial.few
    found = sorted((_left(change, few, value), k) for k, value in enumerate(values))
    most = min(_LEFT, (1.0 + _SAME) * found[min(_KEPT, len(found)) - 1][0]) if found else 0.0
    yield from (Guess(values[k], choices=float(len(values))) for left, k in found if left <= most)


# --- inputs and weights ----------------------------------------------------------------------------------------------


def _coarse_input(trial: Trial, parameter: tuple[str, str]) -> Call:
    name, grid = parameter
    x = trial.call.inputs[name]
    y = GRIDS[grid](x)
    if bool((y == x.double()).all()):
        raise Declined("it is on that grid")
    return edited(trial.call, inputs={name: y})


def _inputs(trial: Trial) -> Iterator[Guess]:
    names = [n for n, t in trial.call.inputs.items() if t.is_floating_point() and t.dim() > 1 and n not in _CACHED]
    large = not trial.references.by_rows(trial.call.cls) and trial.mine().numel() > _LARGE // 8
    for name in names[:3]:
        yield from _best(_coarse_input, trial, [(name, g) for g in (_PLAIN if large else GRIDS)])


_CACHED = ("key", "value", "kv_c_normed", "k_pe")
"""Inputs that attention reads from its cache."""


@cause(PRECISION, "*", text="with its input {0} in {1}", values=_inputs, whole=True)
def coarse_input(trial: Trial, parameter: tuple[str, str]) -> Call:
    return _coarse_input(trial, parameter)


def _weights(trial: Trial) -> Iterator[Guess]:
    """On some columns of the output, of a large weight."""
    call, few = trial.call, trial.few
    stored = call.stored("weight")
    weight = weight_of(call) if stored.dim() == 2 else stored
    x = few.call.inputs[_input(few.call)[0]].double().reshape(-1, weight.shape[1]) if weight.dim() == 2 else None
    if x is None or not stored.is_floating_point() or trial.call.attrs.get("tp_size", 1) != 1:
        yield from _best(coarse_weight, trial, list(GRIDS) if weight.numel() < _LARGE else [])
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


@cause(PRECISION, *LINEAR, *RMS, text="with its weight in {0}", values=_weights)
def coarse_weight(trial: Trial, grid: str) -> Call:
    weight = trial.call.stored("weight")
    y = GRIDS[grid](weight)
    if bool((y == weight.double()).all()):
        raise Declined("it is on that grid")
    return edited(trial.call, params={"weight": y})


def _scales(trial: Trial) -> Iterator[Guess]:
    names = [n for n, t in trial.call.params.items() if "scale" in n and t.numel() > 1]
    ways = [(n, d, k) for n in names for d in range(trial.call.params[n].dim()) for k in (1, -1, 0)]
    return iter([Guess(w, choices=float(len(ways))) for w in ways])


@cause(PRECISION, *LINEAR, values=_scales, text="with {0} of another place along its dimension {1} (shifted by {2}; 0: "
       "the first one's in all)")  # fmt: skip
def scale_of_another(trial: Trial, parameter: tuple[str, int, int]) -> Call:
    name, dim, by = parameter
    scale = trial.call.stored(name)
    return edited(trial.call, params={name: scale.roll(by, dim) if by else scale.narrow(dim, 0, 1).expand_as(scale)})


def _other_scales(trial: Trial) -> list[Guess]:
    """(a weight's scale, the tensor whose scale is taken)."""
    scales = {n: t for n, t in trial.call.params.items() if "scale" in n and t.numel()}
    own = [n for n in scales if n.startswith("weight")]
    ways = [(n, m, how) for n in own for m in scales for how in ("", "the largest of ", "one over ")
            if n != m or how == "one over " or (how and scales[m].numel() > 1)]  # fmt: skip
    return [Guess(w, choices=float(len(ways))) for w in ways]


@cause(PRECISION, *LINEAR, text="with {2}{1} in place of {0}", values=_other_scales)
def scale_of_other_tensor(trial: Trial, parameter: tuple[str, str, str]) -> Call:
    name, other, how = parameter
    own, found = trial.call.stored(name), trial.call.stored(other).double()
    found = found.amax() if how.startswith("the") else 1.0 / found if how else found
    if found.numel() not in (1, own.numel()):
        raise Declined("it is of another form")
    return edited(trial.call, params={name: (found.expand if found.numel() == 1 else found.reshape)(own.shape)})


# --- outputs ---------------------------------------------------------------------------------------------------------


def _coarse(trial: Trial, role: str, to: Callable[[Tensor], Tensor]) -> Expected:
    """An output rounded to its dtype, and then by ``to``; what may go either way has that step as noise."""
    e, dtype = trial.plain[role], trial.mine(role).dtype
    noise = torch.zeros_like(e.value) if e.noise is None else e.noise.expand(e.value.shape)
    slack = 2.0 * noise + 2.0**-22 * e.value.abs()
    before = [(e.value + k * slack).to(dtype) for k in (-1.0, 0.0, 1.0)]
    low, value, high = (to(x).double() for x in before)
    width = (high - low).abs()  # more than the step that it may be off in any case
    width = torch.where(width > 1.5 * (before[2].double() - before[0].double()).abs(), width, 0.0)
    if float((width > 0).double().mean()) > _UNSURE:
        raise Declined("where it was rounded to is not known")
    bound = None if e.bound is None else e.bound + width
    return replace(e, value=value, noise=combined(e.noise, width), bound=bound, exact=None)


def _coarse_output(trial: Trial, parameter: tuple[str, str]) -> dict[str, Expected]:
    grid, role = parameter
    return {role: _coarse(trial, role, GRIDS[grid])}


def _outputs(trial: Trial) -> Iterator[Guess]:
    for role in trial.roles():
        if trial.mine(role).is_floating_point():
            yield from _best(_coarse_output, trial, [(g, role) for g in GRIDS])


@cause(PRECISION, "*", text="with its result in {0}", values=_outputs, whole=True)
def coarse_output(trial: Trial, parameter: tuple[str, str]) -> dict[str, Expected]:
    return _coarse_output(trial, parameter)


def _limits(trial: Trial) -> Iterator[Guess]:
    """The largest number of mine's, where the reference has larger ones."""
    y, mine = trial.plain["output.0"].value.double().flatten(), trial.mine().double().flatten()
    for way, top, most in (("both sides", mine.abs().amax(), y.abs().amax()), ("above", mine.amax(), y.amax()),
                           ("below", -mine.amin(), -y.amin())):  # fmt: skip
        if torch.isfinite(top) and float(most) > 1.01 * float(top):
            known = float(top) in (127.0, 240.0, 448.0, 57344.0, 65504.0)
            yield Guess((float(top), way), fitted=0 if known else 1, choices=15.0 if known else 3.0)


@cause(PRECISION, "*", text="with its result cut at {0:.5g} ({1})", values=_limits)
def result_clamped(trial: Trial, parameter: tuple[float, str]) -> Expected:
    top, way = parameter
    plain = trial.plain["output.0"]
    value = plain.value.clamp(-top if way != "above" else None, top if way != "below" else None)
    return replace(plain, value=value, exact=None)


def _wraps(trial: Trial) -> Iterator[Guess]:
    top = float(trial.mine().double().abs().amax())
    if not math.isfinite(top) or not float(trial.plain["output.0"].value.abs().amax()) > top > 0:
        raise Declined("none is beyond it")
    yield from (Guess(2.0 ** (math.ceil(math.log2(top)) + k), choices=4.0) for k in (0, 1))


@cause(PRECISION, "*", text="with its result wrapped at {0:g} (the highest bits lost)", values=_wraps)
def result_wrapped(trial: Trial, top: float) -> Expected:
    plain = trial.plain["output.0"]
    value = plain.value - 2.0 * top * torch.floor((plain.value + top) / (2.0 * top))
    return replace(plain, value=value, exact=None)


# --- sums ------------------------------------------------------------------------------------------------------------

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
    x, dtype = _input(few.call)[1].double().reshape(-1, weight.shape[1]), trial.mine().dtype
    _whole_rank(trial)
    mine, y = few.mine().double().reshape(len(x), -1), few.plain["output.0"].value.reshape(len(x), -1)
    columns = (mine - y).abs().sum(0).topk(min(_COLUMNS, len(weight))).indices
    mine, before, width = mine[:, columns], float((mine - y)[:, columns].square().sum()), weight.shape[1]
    sizes = {*(2**k for k in range(10)), *(-(-width // k) for k in (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64))}
    ways = [(b, h) for b in sizes if b < width for h in (_RUNNING, _BIASED, _PARTS) if h != _BIASED or bias is not None]
    bias = None if bias is None else bias[columns]
    found = [(float((_sum(x, weight[columns], bias, *way, dtype).to(dtype).double() - mine).square().sum()), way)
             for way in ways]  # fmt: skip
    most = _LEFT * before
    yield from (Guess(w, choices=float(len(ways))) for left, w in sorted(found)[:_KEPT] if left < most)


def _whole_rank(trial: Trial) -> None:
    if int(trial.call.attrs.get("tp_size", 1)) > 1 or trial.call.attrs.get("skip_bias_add"):
        raise Declined("a sum over ranks, or a bias that is added later")


@cause(PRECISION, *LINEAR, text="with its sums over {0} inputs at a time in the result's dtype ({1})", values=_sums)
def low_sum(trial: Trial, parameter: tuple[int, str]) -> Expected:
    weight, plain = weight_of(trial.call), trial.plain["output.0"]
    x, bias = _input(trial.call)[1], trial.call.params.get("bias")
    x = x.reshape(-1, x.shape[-1])
    if len(x) * len(weight) * (x.shape[1] // parameter[0]) > _WORK:
        raise Declined("too many sums")
    y = _sum(x, weight, bias, *parameter, trial.mine().dtype)
    return replace(plain, value=y.reshape(plain.value.shape), exact=None)


# --- norms -----------------------------------------------------------------------------------------------------------

_SQUARES = ("of rounded squares", "rounded at its end", "whose root is rounded")


def _variances(trial: Trial) -> Iterator[Guess]:
    width = _normed(trial.call).shape[-1]
    blocks = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if width % b == 0 and b < width]
    ways = [(f"added up in {n} by {b}", b, n) for n in ("bfloat16", "float16") for b in blocks]
    ways += [(f"{w} to {n}", _SQUARES.index(w) - 3, n) for w in _SQUARES for n in ("bfloat16", "float16")]
    yield from _best(low_variance, trial, ways)


@cause(PRECISION, *RMS, text="with the sum of its squares {0}", values=_variances)
def low_variance(trial: Trial, parameter: tuple[str, int, str]) -> Expected:
    _, block, name = parameter
    x, to = _normed(trial.call), _format(name)
    squares = to(x * x) if block == -3 else x * x
    if block < 0:
        mean = squares.mean(-1, keepdim=True)
        mean = to(mean) if block == -2 else mean
        root = (mean + _own(trial)).sqrt()
        return _by_root(trial, 1.0 / to(1.0 / root) if block == -1 else root)
    total = torch.zeros_like(x[..., :1])
    for part in squares.unflatten(-1, (-1, block)).sum(-1).split(1, -1):
        total = to(total + part)
    return _by_root(trial, (total / x.shape[-1] + _own(trial)).sqrt())


# --- rotary tables, sigmoids -----------------------------------------------------------------------------------------


def _tables(trial: Trial) -> Iterator[Guess]:
    yield from _best(coarse_table, trial, list(_PLAIN))


@cause(PRECISION, "*RotaryEmbedding", text="with its table of cosines and sines in {0}", values=_tables)
def coarse_table(trial: Trial, grid: str) -> dict[str, Expected]:
    cache = trial.call.params.get("cos_sin_cache")
    return _by_table(trial, lambda cos, sin, own: tuple(
        GRIDS[grid](t.to(own if cache is None else cache.dtype)) for t in (cos, sin)))  # fmt: skip


def _positions(trial: Trial) -> Iterator[Guess]:
    yield from _best(coarse_positions, trial, list(_PLAIN))


@cause(PRECISION, *ROTARY, text="with its positions in {0}", values=_positions)
def coarse_positions(trial: Trial, grid: str) -> Call:
    return _at(trial, GRIDS[grid])


# --- experts ---------------------------------------------------------------------------------------------------------


def _expert_weights(trial: Trial) -> Iterator[Guess]:
    small = trial.call.stored("w13_weight").numel() <= _LARGE
    yield from _best(coarse_experts, trial, list(GRIDS) if small else [])


@cause(PRECISION, EXPERTS, text="with its experts' weights in {0}", values=_expert_weights)
def coarse_experts(trial: Trial, grid: str) -> Call:
    return edited(trial.call, params={n: GRIDS[grid](trial.call.stored(n)) for n in ("w13_weight", "w2_weight")})


_POINTS = [(n, r, how) for n in (9, 13, 17, 25, 33, 65, 129, 257) for r in (4.0, 6.0, 8.0, 10.0, 16.0)
           for how in ("straight lines between them", "the nearest one")]  # fmt: skip


def _points(trial: Trial) -> Iterator[Guess]:
    yield from _best(sigmoid_table, trial, _POINTS)


@cause(PRECISION, "SiluAndMul", "MulAndSilu", values=_points,
       text="with a sigmoid from a table of {0} points over -{1:g} to {1:g} ({2})")  # fmt: skip
def sigmoid_table(trial: Trial, parameter: tuple[int, float, str]) -> Expected:
    n, ends, how = parameter
    gate, up, _ = _parts(trial)
    table = torch.linspace(-ends, ends, n, dtype=torch.float64).sigmoid()
    at = ((gate + ends) * ((n - 1) / (2.0 * ends))).clamp(0, n - 1)
    below = at.floor().clamp(max=n - 2).long()
    s = table[at.round().long()] if how.startswith("the") else torch.lerp(table[below], table[below + 1], at - below)
    return replace(trial.plain["output.0"], value=gate * s * up, exact=None)


def _phis(trial: Trial) -> Iterator[Guess]:
    yield from _best(coarse_sigmoid, trial, list(_PLAIN))


@cause(PRECISION, "SiluAndMul", "MulAndSilu", text="with its sigmoid in {0}", values=_phis)
def coarse_sigmoid(trial: Trial, grid: str) -> Expected:
    gate, up, _ = _parts(trial)
    return replace(trial.plain["output.0"], value=gate * GRIDS[grid](torch.sigmoid(gate)) * up, exact=None)


def _gates(trial: Trial) -> Iterator[Guess]:
    yield from _best(coarse_gate, trial, [(part, g) for part in ("gate", "up", "activated gate") for g in GRIDS])


@cause(PRECISION, *GATED, text="with its {0} in {1}", values=_gates, whole=True)
def coarse_gate(trial: Trial, parameter: tuple[str, str]) -> Expected:
    part, grid = parameter
    dtype, to = trial.mine().dtype, GRIDS[grid]
    gate, up, f = _parts(trial)
    gate, up = to(gate.to(dtype)) if part == "gate" else gate, to(up.to(dtype)) if part == "up" else up
    active = to(f(gate).to(dtype)) if part == "activated gate" else f(gate)
    return replace(trial.plain["output.0"], value=active * up, exact=None)


# --- attention -------------------------------------------------------------------------------------------------------


def _kept(trial: Trial, which: Iterable[str], to: Callable[[Tensor], Tensor]) -> Call:
    kv = _sizes(trial.call)[1]
    return _with_past(trial, lambda at, past: {
        n: to(t.reshape(len(t), kv, -1)).reshape(t.shape) if n in which else t for n, t in past.items()})  # fmt: skip


def _caches(trial: Trial) -> Iterator[Guess]:
    ways = [("keys and values", g) for g in GRIDS if "block" not in g]
    ways += [(n, g) for n in ("values", "keys") for g in GRIDS if "block" not in g]
    yield from _best(coarse_cache, trial, ways if trial.mine().numel() < _LARGE // 8 else ways[: len(ways) // 3])


@cause(PRECISION, "Attention", text="with {0} of its cache in {1} (of each head)", values=_caches)
def coarse_cache(trial: Trial, parameter: tuple[str, str]) -> Call:
    which, grid = parameter
    return _kept(trial, [n for n in ("key", "value") if n in which], GRIDS[grid])


_PLACES = ("scores", "exponentials", "probabilities")


def _softmaxes(trial: Trial) -> Iterator[Guess]:
    yield from _best(coarse_softmax, trial, [(where, g) for g in _PLAIN for where in _PLACES])


@cause(PRECISION, "Attention", text="with its {0} in {1}", values=_softmaxes)
def coarse_softmax(trial: Trial, parameter: tuple[str, str]) -> Expected:
    call, plain, (where, grid) = trial.call, trial.plain["output.0"], parameter
    heads, kv, head = _sizes(call)
    how = attention.attention_settings(call, heads, head)
    if (how.pop("sinks"), how.pop("step"))[0] is not None or trial.mine().numel() > _LARGE:
        raise Declined("a softmax without sinks, and not too large")
    to = {place: GRIDS[grid] if place == where else lambda x: x for place in _PLACES}
    q, value = call.wide("query").reshape(-1, heads, head), plain.value.reshape(-1, heads, head).clone()
    for at, positions, past in trial.extra("cache").requests(True):
        k, v = (past[n].double().reshape(len(past[n]), kv, -1).repeat_interleave(heads // kv, 1) for n in _CACHED[:2])
        s = to["scores"](attention.scores(q[at], k, positions=positions, **how)).nan_to_num(-math.inf)
        e = torch.exp(s - s.amax(-1, keepdim=True))
        p = to["probabilities"](to["exponentials"](e) / e.sum(-1, keepdim=True))
        value[at] = torch.einsum("hnm,mhe->nhe", p, v)
    return replace(plain, value=value.reshape(plain.value.shape), exact=None)
