"""Kinds of faults whose cause is known: an operator's formula, changed in one way and computed as a kernel would.

The problem: a laboratory of causes needs plants that are wrong for exactly one reason, and that owe nothing to the code
which looks for reasons. The idea: for each operator a kind (`linear_as`, `norm_as`, ...) and for each reason a
variant, ``Fault.param``, with a number in ``Fault.factor``: some arithmetic in float32 on what the module reads, with
the weights as they were loaded. The real operator runs too and its outputs are overwritten, so that memory is the same.
Attention reads a copy of keys and values by slot that is kept here, because kernels pack their caches.
``output_as`` spoils a finished output; its variants in `NO_CAUSE` are of no family.

Not here: the cases and the sentences that are right (lab/cause_cases.py), the other kinds (accprobe_fault_kinds.py).
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from accprobe_fault_rows import wrap_forward

Tensor = Any
EXPERT_WEIGHTS = ("w13_weight", "w2_weight")


def _rounded(t: Tensor, bits: float, cut: bool = False) -> Tensor:
    """``t`` with so many bits of mantissa, the leading one counted; cut: truncated."""
    import torch

    mantissa, exponent = torch.frexp(t.float())
    steps = 2.0 ** int(bits)
    return torch.ldexp((torch.trunc if cut else torch.round)(mantissa * steps) / steps, exponent)


def _fp8(t: Tensor) -> Tensor:
    """``t`` as float8_e4m3fn without a scale, saturated at 448."""
    import torch

    return t.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def _codes(t: Tensor, most: float, block: int = 0) -> Tensor:
    """``t`` as whole numbers up to ``most`` with a scale for each row, or for each ``block`` numbers of one."""
    x = t.float().unflatten(-1, (-1, block)) if block else t.float()
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
    return ((x / step).round() * step).reshape(t.shape)


def _fp8_scaled(t: Tensor) -> Tensor:
    """``t`` as float8_e4m3fn with one scale of the whole tensor."""
    step = t.float().abs().amax().clamp(min=1e-30) / 448.0
    return _fp8(t.float() / step) * step


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _put(output: Any, *new: Tensor | None) -> Any:
    """Overwrites an output, or the first ones of a tuple, where there is something new."""
    outputs = output if isinstance(output, tuple) else (output,)
    for old, value in zip(outputs, new, strict=False):
        if value is not None:
            old.copy_(value.reshape(old.shape).to(old.dtype))
    return output


def _copies(args: Any) -> list[Any]:
    import torch

    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


# --- products --------------------------------------------------------------------------------------------------------


def _parts(x: Tensor, w: Tensor, n: int, dtype: Any, running: bool) -> Tensor:
    """The product in pieces of ``n`` inputs: each rounded to ``dtype``, or the sum so far."""
    total = x.new_zeros((len(x), len(w)))
    for k in range(0, x.shape[1], n):
        part = x[:, k : k + n] @ w[:, k : k + n].T
        total = (total + part).to(dtype).float() if running else total + part.to(dtype).float()
    return total


LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor, float, Any], Tensor]] = {
    "no bias": lambda x, w, b, n, d: x @ w.T,
    "bias twice": lambda x, w, b, n, d: x @ w.T + 2.0 * b,
    "bias times": lambda x, w, b, n, d: x @ w.T + n * b,
    "tail left out": lambda x, w, b, n, d: x[:, : -int(n)] @ w[:, : -int(n)].T + b,
    "transposed": lambda x, w, b, n, d: x @ w + b,
    "memory transposed": lambda x, w, b, n, d: x @ w.reshape(w.shape[1], w.shape[0]) + b,
    "input turned": lambda x, w, b, n, d: x.roll(int(n), -1) @ w.T + b,
    "heads and channels": lambda x, w, b, n, d: (
        x.unflatten(-1, (-1, int(n))).transpose(-1, -2).reshape(x.shape) @ w.T + b
    ),
    "halves exchanged": lambda x, w, b, n, d: (x @ w.T + b).roll(len(w) // 2, -1),
    "k and v exchanged": lambda x, w, b, n, d: _k_and_v(x @ w.T + b, int(n)),
    "input in fp8": lambda x, w, b, n, d: _fp8(x) @ w.T + b,
    "input in int8": lambda x, w, b, n, d: _codes(x, 127.0) @ w.T + b,
    "input in bits": lambda x, w, b, n, d: _rounded(x, n) @ w.T + b,
    "weight in fp8": lambda x, w, b, n, d: x @ _fp8_scaled(w).T + b,
    "weight in int8": lambda x, w, b, n, d: x @ _codes(w, 127.0).T + b,
    "weight in int4": lambda x, w, b, n, d: x @ _codes(w, 7.0, int(n)).T + b,
    "weight in bits": lambda x, w, b, n, d: x @ _rounded(w, n).T + b,
    "split in k": lambda x, w, b, n, d: _parts(x, w, int(n), d, False) + b,
    "sum in bf16": lambda x, w, b, n, d: _parts(x, w, int(n), d, True) + b,
}


def _k_and_v(y: Tensor, q: int) -> Tensor:
    y[:, q:] = y[:, q:].roll((y.shape[1] - q) // 2, -1)
    return y


def linear_as(site: Any) -> None:
    """A product with another formula: a variant of `LINEAR`."""
    weight, variant, n = site.weight.float(), LINEAR[site.fault.param], site.fault.factor
    bias = getattr(site.module, "bias", None)
    bias = weight.new_zeros(()) if bias is None else bias.detach().float()

    def around(forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(x, *args, **kwargs)
        return _put(output, variant(_flat(x).float(), weight, bias, n, x.dtype))

    wrap_forward(site.module, around)


# --- norms -----------------------------------------------------------------------------------------------------------


def _low_sum(x: Tensor, block: int) -> Tensor:
    """The mean of the squares, sums of ``block`` columns added up in bfloat16."""
    parts = x.square().unflatten(-1, (-1, block)).sum(-1)
    total = parts[..., 0] * 0
    for part in parts.unbind(-1):
        total = (total + part).bfloat16().float()
    return total.unsqueeze(-1) / x.shape[-1]


def _mean(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _center(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "epsilon": lambda x, w, b, e, n: x * (_mean(x) + n).rsqrt() * w + b,
    "no weight": lambda x, w, b, e, n: x * (_mean(x) + e).rsqrt() + b,
    "weight and one": lambda x, w, b, e, n: x * (_mean(x) + e).rsqrt() * (w + 1.0) + b,
    "weight without one": lambda x, w, b, e, n: x * (_mean(x) + e).rsqrt() * (w - 1.0) + b,
    "skipped": lambda x, w, b, e, n: x * w + b,
    "divisor": lambda x, w, b, e, n: x * (_mean(x) * x.shape[-1] / n + e).rsqrt() * w + b,
    "by parts": lambda x, w, b, e, n: (
        x * (_mean(x.unflatten(-1, (int(n), -1))).expand(*x.shape[:-1], int(n), x.shape[-1] // int(n))
             .reshape(x.shape) + e).rsqrt() * w + b
    ),
    "tail left out": lambda x, w, b, e, n: (
        x * (x[..., : -int(n)].square().sum(-1, keepdim=True) / x.shape[-1] + e).rsqrt() * w + b
    ),
    "centred": lambda x, w, b, e, n: _center(x) * (_mean(_center(x)) + e).rsqrt() * w + b,
    "squares in bf16": lambda x, w, b, e, n: x * (_low_sum(x, int(n)) + e).rsqrt() * w + b,
    "weight in fp8": lambda x, w, b, e, n: x * (_mean(x) + e).rsqrt() * _fp8(w) + b,
    "weight in bits": lambda x, w, b, e, n: x * (_mean(x) + e).rsqrt() * _rounded(w, n) + b,
    "input in bits": lambda x, w, b, e, n: _rounded(x, n) * (_mean(_rounded(x, n)) + e).rsqrt() * w + b,
}  # fmt: skip
LAYER_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "not centred": lambda x, w, b, e, n: x * (_mean(x) + e).rsqrt() * w + b,
    "no bias": lambda x, w, b, e, n: _center(x) * (_mean(_center(x)) + e).rsqrt() * w,
    "bias twice": lambda x, w, b, e, n: _center(x) * (_mean(_center(x)) + e).rsqrt() * w + 2.0 * b,
    "epsilon": lambda x, w, b, e, n: _center(x) * (_mean(_center(x)) + n).rsqrt() * w + b,
    "no weight": lambda x, w, b, e, n: _center(x) * (_mean(_center(x)) + e).rsqrt() + b,
    "tail left out": lambda x, w, b, e, n: (
        _center(x) * (_center(x)[..., : -int(n)].square().sum(-1, keepdim=True) / x.shape[-1] + e).rsqrt() * w + b
    ),
}
RESIDUAL = {"residual left out": 0.0, "residual twice": 2.0}


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))


def norm_as(site: Any) -> None:
    """A norm with another formula: a variant of `NORM`, of `LAYER_NORM` where it takes the mean off, of `RESIDUAL`
    where it adds one, or ``view``: it reads its input without the gaps between its rows."""
    module, variant, n, eps = site.module, site.fault.param, site.fault.factor, _eps(site.module)
    weight = module.weight.detach().float() + (1.0 if "Gemma" in type(module).__name__ else 0.0)
    bias = getattr(module, "bias", None)
    bias = weight.new_zeros(()) if bias is None else bias.detach().float()
    formulas = LAYER_NORM if "LayerNorm" in type(module).__name__ else NORM

    def around(forward: Callable[..., Any], x: Tensor, residual: Tensor | None = None, *args: Any, **kw: Any) -> Any:
        if variant == "view":
            packed = x.as_strided(x.shape, x.new_empty(x.shape).stride(), x.storage_offset()).float()
            return _put(forward(x.clone()), NORM["epsilon"](packed, weight, bias, eps, eps))
        before = _copies((x, residual))
        output = forward(x, residual, *args, **kw) if residual is not None else forward(x, *args, **kw)
        if variant in RESIDUAL:
            read = (before[0].float() + RESIDUAL[variant] * before[1].float()).to(x.dtype)
            return _put(output, NORM["epsilon"](read.float(), weight, bias, eps, eps), read)
        read = output[1] if isinstance(output, tuple) and residual is not None else before[0]
        return _put(output, formulas[variant](read.float(), weight, bias, eps, n))

    wrap_forward(module, around)


# --- rotary embeddings -----------------------------------------------------------------------------------------------


def _turned(x: Tensor, cos: Tensor, sin: Tensor, dim: int, halves: bool) -> Tensor:
    """x [tokens, heads, d], of which the first ``dim`` channels turn; cos, sin [tokens, dim / 2]."""
    import torch

    cos, sin, turned = cos.unsqueeze(1), sin.unsqueeze(1), x[..., :dim]
    a, b = turned.chunk(2, -1) if halves else (turned[..., ::2], turned[..., 1::2])
    new = (a * cos - b * sin, b * cos + a * sin)
    new = torch.cat(new, -1) if halves else torch.stack(new, -1).flatten(-2)
    return torch.cat((new, x[..., dim:]), -1)


def _chunk_positions(p: Tensor) -> Tensor:
    """Positions that begin at 0 wherever a run of them begins."""
    import torch

    at = torch.arange(len(p))
    begins = torch.where(torch.nn.functional.pad(p.diff() != 1, (1, 0), value=True), at, 0).cummax(0).values
    return at - begins


POSITIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "positions further": lambda p, n: p + n, "positions of rows": lambda p, n: (p * 0 + 1).cumsum(0) - 1,
    "positions of chunks": lambda p, n: _chunk_positions(p), "positions of neighbours": lambda p, n: p.roll(1, 0),
    "backwards": lambda p, n: -p, "angles": lambda p, n: p * n, "positions in bf16": lambda p, n: p.bfloat16().float(),
}  # fmt: skip
TABLES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "table in bits": lambda t, n: _rounded(t, n),
    "table in fp8": lambda t, n: _fp8(t),
}
ROTARY = (*POSITIONS, *TABLES, "base", "pairs", "width", "unscaled", "key as it was", "query as it was", "key further")


def rotary_as(site: Any) -> None:
    """A rotary embedding with another formula, a variant of `ROTARY`: queries and keys [tokens, heads * size]."""
    import torch

    module, variant, n = site.module, site.fault.param, site.fault.factor
    size, dim, halves = int(module.head_size), int(module.rotary_dim), bool(module.is_neox_style)
    cos1, sin1 = module._compute_cos_sin_cache().float()[1].chunk(2, -1)  # the table has the model's dtype: too coarse
    own, base = torch.atan2(sin1, cos1), float(module.base)
    length = float((cos1.square() + sin1.square()).sqrt().mean())
    if variant == "width":
        dim = int(n)
    if variant in ("base", "width", "unscaled"):
        base = n if variant == "base" else base
        own = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    halves ^= variant == "pairs"

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.float().unsqueeze(-1) * own
        table = torch.cat((angle.cos(), angle.sin()), -1) * (1.0 if variant == "unscaled" else length)
        table = table.to(module.cos_sin_cache.dtype).float()
        if variant in TABLES:
            table = TABLES[variant](table, n)
        heads = x.float().reshape(len(positions), -1, size)
        return _turned(heads, *table.chunk(2, -1), dim, halves)

    def around(
        forward: Callable[..., Any], positions: Tensor, query: Tensor, key: Tensor | None = None, *a: Any, **kw: Any
    ) -> Any:
        q, k = _copies((query, key))
        output = forward(positions, query, key, *a, **kw)
        p = POSITIONS[variant](positions, n) if variant in POSITIONS else positions
        new = [rotated(x, p) for x in (q, k)]
        if variant == "key as it was":
            new[1] = k
        if variant == "query as it was":
            new[0] = q
        if variant == "key further":
            new[1] = rotated(k, positions + n)
        return _put(output, *new)

    wrap_forward(module, around)


# --- activations -----------------------------------------------------------------------------------------------------


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def _sigmoid_table(x: Tensor, points: float) -> Tensor:
    """Read from so many points over -8 to 8, the nearest."""
    import torch

    last = int(points) - 1
    table = torch.linspace(-8.0, 8.0, last + 1).sigmoid()
    return table[((x + 8.0) * (last / 16.0)).round().clamp(0, last).long()]


def _gelu(x: Tensor, how: str = "none") -> Tensor:
    import torch

    return torch.nn.functional.gelu(x, approximate=how)


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu, "gelu by tanh": lambda x: _gelu(x, "tanh"), "quick gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": lambda x: x.relu(), "sigmoid": lambda x: x.sigmoid(),
}  # fmt: skip
ACTIVATION: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    **{name: (lambda x, g, u, n, f=f: f(g) * u) for name, f in ACTS.items()},
    "exchanged": lambda x, g, u, n: _silu(u) * g,
    "interleaved": lambda x, g, u, n: _silu(x[..., ::2]) * x[..., 1::2],
    "gate left out": lambda x, g, u, n: u,
    "up left out": lambda x, g, u, n: _silu(g),
    "not activated": lambda x, g, u, n: g * u,
    "slope": lambda x, g, u, n: g * (n * g).sigmoid() * u,
    "limit": lambda x, g, u, n: _silu(g.clamp(max=n)) * u.clamp(-n, n),
    "sigmoid in bits": lambda x, g, u, n: g * _rounded(g.sigmoid(), n) * u,
    "sigmoid from a table": lambda x, g, u, n: g * _sigmoid_table(g, n) * u,
    "gate in fp8": lambda x, g, u, n: _silu(_fp8(g)) * u,
    "up in bits": lambda x, g, u, n: _silu(g) * _rounded(u, n),
}


def activation_as(site: Any) -> None:
    """silu(gate) * up with another formula, a variant of `ACTIVATION`."""
    variant, n = ACTIVATION[site.fault.param], site.fault.factor

    def around(forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        gate, up = x.float().chunk(2, -1)
        return _put(forward(x, *args, **kwargs), variant(x.float(), gate, up, n))

    wrap_forward(site.module, around)


# --- attention -------------------------------------------------------------------------------------------------------


def _zeroed(k: Tensor, v: Tensor, first: int, stop: int | None) -> tuple[Tensor, Tensor]:
    k[first:stop], v[first:stop] = 0.0, 0.0
    return k, v


PAST: dict[str, Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]] = {
    "keys and values exchanged": lambda k, v, now, n: (v, k), "keys for values": lambda k, v, now, n: (k, k),
    "one position late": lambda k, v, now, n: (k.roll(1, 0), v.roll(1, 0)),
    "step not written": lambda k, v, now, n: _zeroed(k, v, now, None),
    "earlier steps lost": lambda k, v, now, n: _zeroed(k, v, 0, now),
    "position lost": lambda k, v, now, n: _zeroed(k, v, int(n), int(n) + 1),
    "key heads further": lambda k, v, now, n: (k.roll(-int(n), 1), v.roll(-int(n), 1)),
    "last head for all": lambda k, v, now, n: (k[:, -1:].expand_as(k), v[:, -1:].expand_as(v)),
    "cache times": lambda k, v, now, n: (n * k, n * v), "cache in fp8": lambda k, v, now, n: (_fp8(k), _fp8(v)),
    "values in int8": lambda k, v, now, n: (k, _codes(v, 127.0)),
    "values in bits": lambda k, v, now, n: (k, _rounded(v, n)),
}  # fmt: skip
"""Keys and values of one request, and the first position of this step, as they are read instead."""


class Attention:
    """Attention over a copy of keys and values that this object keeps by slot, with a variant's change.

    ``past``: the keys and values [positions, kv heads, d] of one request; ``now``: the first position of this step."""

    def __init__(self, module: Any, variant: str, n: float):
        self.module, self.impl, self.variant, self.n = module, module.impl, variant, n
        self.kept: Tensor = None
        self.update = inspect.signature(module.impl.do_kv_cache_update)

    def keep(self, update: Callable[..., Any], args: Any, kwargs: Any) -> None:
        import torch

        got = self.update.bind(*args, **kwargs).arguments
        key, value, slots, cache = got["key"], got["value"], got["slot_mapping"], got["kv_cache"]
        update(*args, **kwargs)
        if self.kept is None:
            self.kept = torch.zeros(2, cache.shape[0] * cache.shape[2], *key.shape[1:])
        self.block = cache.shape[2]
        for kept, t in zip(self.kept, (key, value), strict=True):
            kept[slots] = t[: len(slots)].float()

    def past(self, table: Tensor, length: int, now: int) -> tuple[Tensor, Tensor]:
        at = _numbers(length)
        k, v = (t[table[at // self.block].long() * self.block + at % self.block].clone() for t in self.kept)
        if self.variant in PAST:
            k, v = PAST[self.variant](k, v, now, self.n)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """q [rows, heads, d] at positions ``at``; keys and values as in `past`. Returns [rows, heads, d]."""
        import torch

        impl, variant, n, heads = self.impl, self.variant, self.n, q.shape[1]
        of = _numbers(heads) // (heads // k.shape[1])
        if variant == "heads in turn":
            of = _numbers(heads) % k.shape[1]
        if variant == "query in fp8":
            q = _fp8(q)
        scale = impl.scale * (n if variant == "scale" else 1.0)
        scores = torch.einsum("rhd,phd->hrp", q, k[:, of]) * scale
        cap = n if variant == "cap" else 0.0 if variant == "no cap" else float(impl.logits_soft_cap or 0.0)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if variant == "scores in bf16":
            scores = scores.bfloat16().float()
        window = int(impl.sliding_window)
        if variant in ("window", "no window", "window off"):
            window = int(n) if variant == "window" else -1 if variant == "no window" else window + int(n)
        far = at.unsqueeze(1) - _numbers(len(k)).unsqueeze(0)
        hidden = (far < 0) | ((far >= window) if window > 0 else (far < 0))
        if variant == "tail of keys":
            whole = (at + 1) // int(n) * int(n)
            hidden |= (_numbers(len(k)).unsqueeze(0) >= whole.unsqueeze(1)) & (whole > 0).unsqueeze(1)
        scores = scores.masked_fill(hidden, -math.inf)
        sinks = None if variant == "no sinks" else impl.sinks
        top = scores.amax(-1, keepdim=True)
        e = (scores - top).exp()
        total = e.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks.float().view(-1, 1, 1) - top).exp()
        p = e / total
        if variant == "probabilities in fp8":
            p = _fp8(p)
        if variant == "probabilities in bits":
            p = _rounded(p, n)
        out = torch.einsum("hrp,phd->rhd", p, v[:, of])
        return out.roll(int(n), 1) if variant == "heads further" else out

    def forward(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        got = inspect.signature(forward).bind(*args, **kwargs).arguments
        output = forward(*args, **kwargs)
        meta, query, target = got["attn_metadata"], got["query"], got["output"]
        if meta is None or self.kept is None:
            return output
        starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        pasts = [
            self.past(meta.block_table[r], length, length - (starts[r + 1] - starts[r]))
            for r, length in enumerate(lengths)
        ]
        size = 16
        for r, length in enumerate(lengths):
            rows = slice(starts[r], starts[r + 1])
            (k, v), q = pasts[r], query[rows].float().reshape(rows.stop - rows.start, -1, pasts[r][0].shape[-1])
            other = pasts[(r + 1) % len(pasts)]
            if self.variant == "block of another" and r == 0 and min(length, len(other[0])) >= 2 * size:
                k, v = k.clone(), v.clone()
                k[size : 2 * size], v[size : 2 * size] = other[0][size : 2 * size], other[1][size : 2 * size]
            new = self.attend(q, k, v, _numbers(length)[length - len(q) :])
            target[rows] = new.reshape(target[rows].shape).to(target.dtype)
        return output


def _numbers(n: int) -> Tensor:
    import torch

    return torch.arange(n)


ATTENTION = (
    *PAST, "scale", "cap", "no cap", "window", "no window", "window off", "no sinks", "heads in turn", "heads further",
    "block of another", "tail of keys", "query in fp8", "scores in bf16", "probabilities in fp8",
    "probabilities in bits", "as it is",
)  # fmt: skip


def attention_as(site: Any) -> None:
    """Attention from the paged cache with another formula, a variant of `ATTENTION`."""
    impl = site.module.impl
    kernel = Attention(site.module, site.fault.param, site.fault.factor)
    update, forward = impl.do_kv_cache_update, impl.forward
    impl.do_kv_cache_update = lambda *args, **kwargs: kernel.keep(update, args, kwargs)
    impl.forward = lambda *args, **kwargs: kernel.forward(forward, args, kwargs)


# --- experts ---------------------------------------------------------------------------------------------------------


def _experts(x: Tensor, dense: Tensor, w13: Tensor, w2: Tensor, act: Callable[[Tensor], Tensor], before: Any) -> Tensor:
    """dense [rows, experts]: what each expert counts. before: what is done to the input of the second product."""
    out = x * 0.0
    for e in range(len(w13)):
        gate, up = (x @ w13[e].float().T).chunk(2, -1)
        out = out + dense[:, e : e + 1] * (before(act(gate) * up) @ w2[e].float().T)
    return out


COUNTED: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "counted 1": lambda w, own, n: w * 0.0 + 1.0, "weights squared": lambda w, own, n: w.square(),
    "weights reversed": lambda w, own, n: w.flip(-1),
    "first alone": lambda w, own, n: w * ((w * 0.0 + 1.0).cumsum(-1) <= n), "one left out": lambda w, own, n: w * ~own,
    "one times": lambda w, own, n: w * (1.0 + (n - 1.0) * own),
}  # fmt: skip
"""The weights [rows, chosen] as they count; own: which are those of the one expert."""
EXPERTS = (*COUNTED, "gelu", "exchanged", "weights on input", "experts further", "input in fp8", "inner in fp8",
           "weights in int8", "as it is")  # fmt: skip


def experts_as(site: Any) -> None:
    """Routed experts of silu(gate) * up with another formula, a variant of `EXPERTS`. Expert ``Fault.expert`` is the
    one that is left out or multiplied. module: that of ``topk_weights`` and ``topk_ids``."""
    variant, n, one = site.fault.param, site.fault.factor, site.fault.expert
    w13, w2 = (site.weight[name] for name in EXPERT_WEIGHTS)
    signature = inspect.signature(site.module.forward)
    if variant == "exchanged":
        w13 = w13.roll(w13.shape[1] // 2, 1)
    if variant == "weights in int8":
        w13, w2 = _codes(w13, 127.0), _codes(w2, 127.0)

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        got = {**bound, **bound.get("kwargs", {}), **kwargs}
        x, weights, ids = got["x"].float(), got["topk_weights"].float(), got["topk_ids"].long()
        output = forward(*args, **kwargs)
        if variant == "experts further":
            ids = (ids + int(n)) % len(w13)
        elif variant in COUNTED:
            weights = COUNTED[variant](weights, ids == one, n)
        act = _gelu if variant == "gelu" else _silu
        x = _fp8(x) if variant == "input in fp8" else x
        before = _fp8 if variant == "inner in fp8" else (lambda t: t.to(got["x"].dtype).float())
        if variant == "weights on input":
            new = x * 0.0
            for k in range(ids.shape[1]):
                dense = x.new_zeros(len(x), len(w13)).scatter_add_(1, ids[:, k : k + 1], weights[:, :1] * 0.0 + 1.0)
                new = new + _experts(x * weights[:, k : k + 1], dense, w13, w2, act, before)
        else:
            dense = x.new_zeros(len(x), len(w13)).scatter_add_(1, ids, weights)
            new = _experts(x, dense, w13, w2, act, before)
        return _put(output, new)

    wrap_forward(site.module, around)


ROUTER = ("other scores", "other sum", "factor left out", "factor twice", "not corrected", "numbers further")


def router_as(site: Any) -> None:
    """A router with another formula, a variant of `ROUTER`: what it chooses, or what its choice counts.

    module: one whose ``router`` chooses by ``router_logits``."""
    router, variant, n = site.module.router, site.fault.param, int(site.fault.factor)
    select = router.select_experts
    signature = inspect.signature(select)
    bias = getattr(router, "e_score_correction_bias", None)
    sigmoid = getattr(router, "scoring_func", "softmax") == "sigmoid"
    sums, factor = bool(router.renormalize), float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        logits = signature.bind(*args, **kwargs).arguments["router_logits"].float()
        if variant == "numbers further":
            return weights, (ids + n) % logits.shape[-1]
        scores = logits.sigmoid() if sigmoid != (variant == "other scores") else logits.softmax(-1)
        if variant == "not corrected" and bias is not None:
            ids = scores.topk(ids.shape[-1], -1).indices.to(ids.dtype)
        new = scores.gather(1, ids.long())
        if sums != (variant == "other sum"):
            new = new / new.sum(-1, keepdim=True)
        times = {"factor left out": 1.0, "factor twice": factor * factor}.get(variant, factor)
        return (new * times).to(weights.dtype), ids

    router.select_experts = chosen


# --- logits ----------------------------------------------------------------------------------------------------------

LOGITS = ("scale", "cap", "no cap")


def logits_as(site: Any) -> None:
    """The logits with another scale or soft cap than the module's own, whose attributes are intact between calls."""
    module, name = site.module, "scale" if site.fault.param == "scale" else "soft_cap"
    value = None if site.fault.param == "no cap" else site.fault.factor

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = getattr(module, name)
        setattr(module, name, value)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(module, name, own)

    wrap_forward(module, around)


# --- finished outputs ------------------------------------------------------------------------------------------------


class Spoiler:
    """What is done to a finished output, by variant; a seeded generator for what is random, new numbers in each call.

    site.fault.features: the columns that are meant, where some are."""

    def __init__(self, fault: Any):
        import torch

        self.n, self.columns = fault.factor, list(fault.features)
        self.random = torch.Generator().manual_seed(1234)
        self.before: Tensor = None

    def draw(self, t: Tensor, normal: bool = True) -> Tensor:
        import torch

        return (torch.randn if normal else torch.rand)(t.shape, generator=self.random)

    def some(self, t: Tensor, share: float) -> Tensor:
        """bool, a random share of the elements."""
        return self.draw(t, normal=False) < share

    def spoiled(self, t: Tensor, variant: str) -> Tensor:
        """t: float32 [rows, columns]."""
        import torch

        n, columns = self.n, self.columns
        if variant in ("columns times", "columns at 0", "columns stale"):
            y = t.clone()
            y[:, columns] = {"columns times": n * t, "columns at 0": 0.0 * t}.get(variant, t.roll(1, 0))[:, columns]
            return y
        if variant == "output of before":
            before, self.before = self.before, t.clone()
            m = 0 if before is None else min(len(before), len(t))
            return t if not m else torch.cat((before[:m], t[m:]))
        return {**WHOLE, **NO_CAUSE}[variant](self, t, n)


WHOLE: dict[str, Callable[[Spoiler, Tensor, float], Tensor]] = {
    "times": lambda s, t, n: t * n, "plus": lambda s, t, n: t + n, "never written": lambda s, t, n: t * 0.0,
    "rows further": lambda s, t, n: t.roll(int(n), 0), "rows reversed": lambda s, t, n: t.flip(0),
    "bits": lambda s, t, n: _rounded(t, n), "bits cut off": lambda s, t, n: _rounded(t, n, cut=True),
    "fp8": lambda s, t, n: _fp8(t), "int8": lambda s, t, n: _codes(t, 127.0), "cut at": lambda s, t, n: t.clamp(-n, n),
    "wrapped": lambda s, t, n: (t + n) % (2.0 * n) - n,
}  # fmt: skip
SOME = ("columns times", "columns at 0", "columns stale", "output of before")


def _permuted(s: Spoiler, t: Tensor, n: float) -> Tensor:
    """In each row, ``n`` elements at random places change places with each other, others in each row."""
    places = s.draw(t, normal=False).argsort(-1)[:, : int(n)]
    return t.scatter(1, places, t.gather(1, places.roll(1, -1)))


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    import torch

    return torch.where(mask, new, old)


def _size(t: Tensor) -> Tensor:
    """The root of a row's mean square."""
    return t.square().mean(-1, keepdim=True).sqrt()


NO_CAUSE: dict[str, Callable[[Spoiler, Tensor, float], Tensor]] = {
    "noise": lambda s, t, n: t + n * _size(t) * s.draw(t),
    "noise of each element": lambda s, t, n: t * (1.0 + n * s.draw(t)),
    "signs": lambda s, t, n: _where(s.some(t, n), -t, t),
    "random values": lambda s, t, n: _where(s.some(t, n), _size(t) * s.draw(t), t),
    "random zeros": lambda s, t, n: _where(s.some(t, n), 0.0 * t, t),
    "permuted": _permuted,
    "squashed": lambda s, t, n: (t / (n * _size(t))).tanh() * (n * _size(t)),
    "bent": lambda s, t, n: t.sign() * _size(t) * (t.abs() / _size(t)) ** n,
    "a wave": lambda s, t, n: t + n * _size(t) * (7.0 * t / _size(t)).sin(),
    "factors of rows": lambda s, t, n: t * (1.0 + n * s.draw(t[:, :1]) + 0.5 * n * s.draw(t)),
    "leaking": lambda s, t, n: t + n * t.roll(1, -1) * s.draw(t).sign(),
    "drifting": lambda s, t, n: t + n * _size(t) * s.draw(t).cumsum(-1) / t.shape[-1] ** 0.5,
}


def output_as(site: Any) -> None:
    """An output spoiled after it was computed: a variant of `WHOLE`, `SOME` or `NO_CAUSE`."""
    spoiler, variant, rows = Spoiler(site.fault), site.fault.param, site.rows()

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        outputs = list(output) if isinstance(output, tuple) else [output]
        old = outputs[site.fault.output]
        new = spoiler.spoiled(_flat(old).float(), variant).reshape(old.shape)
        if rows.tests:
            new = site.pick(old, new, rows)
        outputs[site.fault.output] = new.to(old.dtype)
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]

    wrap_forward(site.module, around)


VARIANTS: dict[str, tuple[str, ...]] = {
    "linear_as": tuple(LINEAR), "norm_as": (*NORM, *LAYER_NORM, *RESIDUAL, "view"), "rotary_as": ROTARY,
    "activation_as": tuple(ACTIVATION), "attention_as": ATTENTION, "experts_as": EXPERTS, "router_as": ROUTER,
    "logits_as": LOGITS, "output_as": (*WHOLE, *SOME, *NO_CAUSE),
}  # fmt: skip
CAUSE_KINDS: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (
        *(linear_as, norm_as, rotary_as, activation_as, attention_as),
        *(experts_as, router_as, logits_as, output_as),
    )
}
