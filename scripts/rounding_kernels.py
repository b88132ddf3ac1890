"""Kernels that are right and round wherever their reference allows it: what scripts/search_bounds.py searches over.

The problem: an error bound that was only derived has the mistakes of its derivation. The idea: each operator is written
down once more, in float64, and every place where a kernel may round asks a `Way`, which rounds there or does not, to
nearest or toward zero, adds up in float32 in one of four orders, and has exponentials and roots off by as much as
APPROXIMATE allows. A `Case` binds such a kernel to a call and to inputs of one kind.
Not here: the search (search_bounds.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vllm_accprobe.kernels.float_formats import FORMATS
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.linear import RowAdapters
from vllm_accprobe.opcheck.roundings import APPROXIMATE

Tensor = Any  # a torch.Tensor
NEAREST, ZERO = "nearest", "toward zero"
MIXED = 2.0
ORDERS = ("forward", "backward", "pairs", "blocks")
_BLOCK = 16


def on_grid(x: Tensor, dtype: str, direction: str = NEAREST) -> Tensor:
    """float64 ``x`` rounded once to ``dtype``'s numbers, subnormal ones included; overflow is left out."""
    bits, least = FORMATS[dtype]
    step = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent.clamp(min=least + 1) - bits)
    q = x / step
    return (q.round() if direction == NEAREST else q.trunc()) * step


@dataclass
class Way:
    """early: the share of the allowed roundings that take place; off: by how much functions are off, in APPROXIMATE,
    with one sign, or MIXED for either sign, or None for 2**-22 (what known kernels have). cuts: how many intermediate
    results are rounded toward zero, where the last is; the others are to nearest."""

    dtype: str
    early: float = 1.0
    direction: str = NEAREST
    order: str = "forward"
    off: float | None = None
    cuts: int = 1 << 30
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def coin(self, share: float = 0.5) -> bool:
        return float(torch.rand((), generator=self.generator)) < share

    def may(self, x: Tensor) -> Tensor:
        """``x`` where a kernel may round it to the dtype."""
        if not self.coin(self.early):
            return single(x)
        self.cuts -= 1
        return on_grid(x, self.dtype, self.direction if self.cuts >= 0 else NEAREST)

    def last(self, x: Tensor) -> Tensor:
        return on_grid(x, self.dtype, self.direction)

    def fn(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = f(x)
        if self.off is None:
            return single(y * (1.0 + 2.0**-22 * (2.0 * torch.rand(y.shape, generator=self.generator) - 1.0)))
        signs = 2.0 * torch.randint(0, 2, y.shape, generator=self.generator) - 1.0 if self.off == MIXED else self.off
        return y * (1.0 + APPROXIMATE * signs)

    def total(self, terms: Tensor, dim: int = -1) -> Tensor:
        """The sum in float32."""
        t = terms.float().movedim(dim, -1)
        if self.order == "backward":
            t = t.flip(-1)
        if self.order == "pairs":
            while t.shape[-1] > 1:
                if t.shape[-1] % 2:
                    t = F.pad(t, (0, 1))
                t = t[..., ::2] + t[..., 1::2]
            return t[..., 0].double()
        if self.order == "blocks":
            t = F.pad(t, (0, -t.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
            t = _forward(t)
        return _forward(t).double()

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """a [..., n, k] times b [..., m, k] transposed."""
        return self.total(a.unsqueeze(-2) * b.unsqueeze(-3))


def single(x: Tensor) -> Tensor:
    return x.float().double()


def _forward(t: Tensor) -> Tensor:
    """One after the other in float32; numpy's accumulate rounds each sum, torch's cumsum does not."""
    if not t.shape[-1]:
        return t.sum(-1)
    return torch.from_numpy(np.ascontiguousarray(np.add.accumulate(t.numpy(), axis=-1)[..., -1]))


# --- inputs -------------------------------------------------------------------------------------------------------

KINDS = ("normal", "heavy", "offset", "cancelling", "tiny", "powers", "few", "edges")


def draw(g: torch.Generator, kind: str, dtype: str, *shape: int) -> Tensor:
    """float64 numbers of ``dtype``'s grid."""
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    u = 2.0 ** (1 - FORMATS[dtype][0])
    pick = torch.rand(shape, generator=g, dtype=torch.float64)
    if kind == "heavy":
        x = x * torch.exp(1.5 * torch.randn(*shape, generator=g, dtype=torch.float64))
    elif kind == "offset":
        x = 20.0 + x
    elif kind == "cancelling" and x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x[..., half : 2 * half] = -x[..., :half] * (1.0 + u * torch.round(2.0 * pick[..., :half]))
    elif kind == "tiny":
        x = x * (2.0**-14 if dtype == "float16" else 2.0**-20)
        x[..., 0] *= 2.0**14
    elif kind == "powers":  # just above and below powers of two, where one rounding is largest
        x = torch.exp2(torch.randint(-3, 3, shape, generator=g).double()) * (1.0 + u * (3.0 * pick).floor())
        x = torch.where(pick > 0.8, -x, x)
    elif kind == "few":  # two or three values in a row: errors that do not average out
        values = torch.randn(*shape[:-1], 3, generator=g, dtype=torch.float64)
        share = torch.rand(*shape[:-1], 1, generator=g, dtype=torch.float64)
        at = (pick > share).long() + (pick > 0.5 + 0.5 * share).long()
        x = values.gather(-1, at)
    elif kind == "edges":  # sums and products of few bits, which lie in the middle of two numbers
        x = torch.randint(-64, 65, shape, generator=g).double() / 32.0
    return on_grid(x, dtype)


def as_type(x: Tensor, dtype: str) -> Tensor:
    return x.to(getattr(torch, dtype))


# --- kernels ------------------------------------------------------------------------------------------------------

Inputs = dict[str, Tensor]
Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """name: of the reference; shapes: of the inputs, drawn by kind, and ``weights``, drawn as normal numbers or kinds
    in turn; call: the call of these inputs, in their dtype; kernel: its outputs by role. by_rows: inputs of which row i
    alone decides row i of the outputs."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    call: Callable[[Mapping[str, Tensor], str], Call]
    kernel: Callable[[Way, Inputs], Outputs]
    by_rows: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    scale: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of outputs that are not the inputs'."""

    def inputs(self, g: torch.Generator, kind: str, dtype: str) -> Inputs:
        found = {}
        for name, shape in self.shapes.items():
            shared = bool(self.by_rows) and name not in self.by_rows
            own = "normal" if shared and float(torch.rand((), generator=g)) < 0.5 else kind
            found[name] = on_grid(draw(g, own, dtype, *shape) * self.scale.get(name, 1.0), dtype)
        return found


def sigmoid(way: Way, z: Tensor) -> Tensor:
    """1 / (1 + exp(-z)) with an exponential that is off."""
    return 1.0 / (1.0 + way.fn(torch.exp, -z))


def silu(way: Way, x: Tensor) -> Tensor:
    return x * sigmoid(way, x)


def rms(way: Way, x: Tensor, w: Tensor, eps: float, residual: Tensor | None = None) -> Outputs:
    t = x if residual is None else way.may(x + residual)
    root = way.fn(torch.rsqrt, way.total(t * t).unsqueeze(-1) / t.shape[-1] + eps)
    found = {"output.0": way.last(way.may(t * root) * w)}
    return found if residual is None else {**found, "output.1": way.last(single(x + residual))}


def layer_norm(way: Way, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Outputs:
    n = x.shape[-1]
    centred = single(x - way.total(x).unsqueeze(-1) / n)
    root = way.fn(torch.rsqrt, way.total(centred * centred).unsqueeze(-1) / n + eps)
    return {"output.0": way.last(way.may(centred * root) * w + b)}


def gated_rms(way: Way, x: Tensor, z: Tensor, w: Tensor, eps: float, first: bool) -> Outputs:
    gate = way.may(silu(way, z))
    if first:
        return {"output.0": way.last(way.may(rms_of(way, x, eps, w)) * gate)}
    return {"output.0": way.last(rms_of(way, way.may(x * gate), eps, w))}


def rms_of(way: Way, t: Tensor, eps: float, w: Tensor) -> Tensor:
    root = way.fn(torch.rsqrt, way.total(t * t).unsqueeze(-1) / t.shape[-1] + eps)
    return way.may(t * root) * w


def gelu(way: Way, x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + way.fn(torch.erf, x / math.sqrt(2.0)))


def gelu_tanh(way: Way, x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + way.fn(torch.tanh, math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def in_steps(way: Way, name: str, x: Tensor) -> Tensor:
    """An activation in operators of the dtype, as vLLM's and transformers' own modules have it."""
    may = way.may
    if name == "SiLU":
        return way.last(x * may(sigmoid(way, x)))
    if name == "QuickGELU":
        return way.last(x * may(sigmoid(way, may(1.702 * x))))
    if name == "GELU":
        z = may(x / math.sqrt(2.0))
        return way.last(0.5 * x * may(1.0 + may(way.fn(torch.erf, z))))
    if name == "NewGELU":
        cube = may(0.044715 * may(may(x * x) * x))
        z = may(math.sqrt(2.0 / math.pi) * may(x + cube))
        return way.last(0.5 * x * may(1.0 + may(way.fn(torch.tanh, z))))
    return way.last(torch.relu(x) ** 2)


def gated(way: Way, f: Callable[[Way, Tensor], Tensor], x: Tensor) -> Outputs:
    a, b = x.chunk(2, -1)
    return {"output.0": way.last(way.may(f(way, a)) * b)}


def swiglu_oai(way: Way, x: Tensor) -> Outputs:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    glu = way.may(gate * way.may(sigmoid(way, way.may(gate * 1.702))))
    return {"output.0": way.last(way.may(up + 1.0) * glu)}


def attention(
    way: Way, q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None, cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [n, heads, d], k, v [m, heads, d] -> [n, heads, d] before the last rounding."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    s = single(way.mm(q, k) * scale)
    if cap:
        s = single(cap * way.fn(torch.tanh, s / cap))
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.reshape(-1, 1, 1))
    p = way.fn(torch.exp, single(s - top))
    more = 0.0 if sinks is None else way.fn(torch.exp, single(sinks.reshape(-1, 1, 1) - top))
    if way.coin():  # rounded where it meets the values, and divided by the sum of what was not rounded
        norm = way.total(p).unsqueeze(-1) + more
        p = way.may(p)
    elif way.coin():
        p = way.may(p)
        norm = way.total(p).unsqueeze(-1) + more
    else:
        p = way.may(p / (way.total(p).unsqueeze(-1) + more))
        norm = torch.ones(())
    return (way.mm(p, v.transpose(-1, -2)) / norm).transpose(0, 1)


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def latent(way: Way, i: Inputs, nope: int, scale: float) -> Outputs:
    q, c, pe, up_k, up_v = i["q"], i["c"], i["pe"], i["up_k"], i["up_v"]
    n, heads = q.shape[:2]
    if way.coin():
        k = way.may(way.total(c[:, None, None, :] * up_k[None], -1))
        v = way.may(way.total(c[:, None, None, :] * up_v[None], -1))
        keys = torch.cat((k, pe.unsqueeze(1).expand(-1, heads, -1)), -1)
        return {"output.0": way.last(attention(way, q, keys, v, scale, causal(n))).reshape(n, -1)}
    moved = way.may(way.total(q[:, :, :nope, None] * up_k[None], 2))
    queries = torch.cat((moved, q[:, :, nope:]), -1)
    keys = torch.cat((c, pe), -1).unsqueeze(1).expand(-1, heads, -1)
    mixed = way.may(attention(way, queries, keys, c.unsqueeze(1).expand(-1, heads, -1), scale, causal(n)))
    return {"output.0": way.last(way.total(mixed[:, :, None, :] * up_v[None], -1)).reshape(n, -1)}


def experts(way: Way, x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, apart: bool) -> Tensor:
    parts = torch.zeros(len(x), ids.shape[1], w2.shape[1], dtype=torch.float64)
    for e in range(len(w13)):
        row, place = (ids == e).nonzero(as_tuple=True)
        if not len(row):
            continue
        gate, up = way.may(way.mm(x[row], w13[e])).chunk(2, -1)
        act = silu(way, gate)
        hidden = way.may((way.may(act) if apart else act) * up)
        y = way.may(way.mm(hidden, w2[e]))
        y = y * weights[row, place].unsqueeze(-1)
        parts[row, place] = way.may(y) if apart else single(y)
    if not apart:
        return way.last(way.may(way.total(parts, 1)))
    total = parts[:, 0]
    for n in range(1, parts.shape[1]):
        total = way.may(total + parts[:, n]) if n < parts.shape[1] - 1 else total + parts[:, n]
    return way.last(total)


def rotated(way: Way, x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    cos, sin = way.may(cos), way.may(sin)
    a, b = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
    one = way.may(a * cos) - way.may(b * sin)
    two = way.may(b * cos) + way.may(a * sin)
    y = torch.cat((one, two), -1) if neox else torch.stack((one, two), -1).flatten(-2)
    return way.last(y)


def angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """As engines have them, in float32."""
    share = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return (positions.float().unsqueeze(-1) * (1.0 / (base**share))).double()


def softmax_of(way: Way, x: Tensor) -> Tensor:
    e = way.may(way.fn(torch.exp, single(x - x.amax(-1, keepdim=True))))
    return e / way.total(e).unsqueeze(-1)


# --- cases --------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 16, 32


def module(cls: str, *names: str, params: tuple[str, ...] = (), attrs: Any = None, out: Any = None, **more: Any) -> Any:
    """A call of a module: inputs and params by name, outputs shaped like the first input, or as ``out`` says."""

    def make(t: Mapping[str, Tensor], dtype: str) -> Call:
        shapes = {"output.0": tuple(t[names[0]].shape)} if out is None else out
        outputs = {r: torch.zeros(s, dtype=getattr(torch, dtype)) for r, s in shapes.items()}
        return Call("layer", cls, {n: t[n] for n in names}, params={n: t[n] for n in params}, attrs=attrs or {},
                    outputs=outputs, **more)  # fmt: skip

    return make


def numbered(cls: str, *names: str, param: Any = None, out: Any = None) -> Any:
    """A call of one of ATB's operators."""

    def make(t: Mapping[str, Tensor], dtype: str) -> Call:
        shapes = {"output.0": tuple(t[names[0]].shape)} if out is None else out
        outputs = {r: torch.zeros(s, dtype=getattr(torch, dtype)) for r, s in shapes.items()}
        inputs = {str(k): t[n] for k, n in enumerate(names)}
        return Call("layer", cls, inputs, attrs={"param": param or {}}, outputs=outputs)

    return make


def operator(cls: str, *names: str, out: Any = None, **kwargs: Any) -> Any:
    def make(t: Mapping[str, Tensor], dtype: str) -> Call:
        shapes = {"output.0": tuple(t[names[0]].shape)} if out is None else out
        outputs = {r: torch.zeros(s, dtype=getattr(torch, dtype)) for r, s in shapes.items()}
        return Call(cls, cls, args=tuple(t[n] for n in names), kwargs=kwargs, outputs=outputs)

    return make


def cache(t: Mapping[str, Tensor], *names: str) -> Any:
    """One request, whose keys are all of ``t``: keys of it and the cache's names for them, in turn."""
    n = len(t[names[0]])
    one = (torch.arange(n), torch.arange(n), {name: t[key] for name, key in zip(names[1::2], names[::2], strict=True)})
    return SimpleNamespace(requests=lambda causal=True: [one], why="")


def _attention_call(cls: str, attrs: Any, params: tuple[str, ...] = ()) -> Any:
    def make(t: Mapping[str, Tensor], dtype: str) -> Call:
        n, heads, d = t["q"].shape
        out = {"output.0": torch.zeros(n, heads * d, dtype=getattr(torch, dtype))}
        more = {"num_heads": heads, "num_kv_heads": heads, "head_size": d, "scale": d**-0.5}
        return Call("attn", cls, {"query": t["q"], "key": t["k"], "value": t["v"]}, attrs=more | attrs, outputs=out,
                    params={n: t[n] for n in params},
                    extra={"cache": cache(t, "k", "key", "v", "value")})  # fmt: skip

    return make


def _eight_bit_kernel(way: Way, i: Inputs) -> Outputs:
    """Keys and values as codes of a cache with a scale of 0.3, divided or multiplied by its inverse in the dtype."""
    inverse = way.may(torch.tensor(1.0 / 0.3, dtype=torch.float64))
    k, v = ((x * inverse).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * 0.3 for x in (i["k"], i["v"]))
    return _attention_kernel()(way, {**i, "k": k, "v": v})


def _attention_kernel(cap: float = 0.0, sinks: bool = False) -> Any:
    def kernel(way: Way, i: Inputs) -> Outputs:
        q = i["q"]
        y = attention(way, q, i["k"], i["v"], q.shape[-1] ** -0.5, causal(len(q)), cap, i["sinks"] if sinks else None)
        return {"output.0": way.last(y).reshape(len(q), -1)}

    return kernel


def _mla_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    n, heads = t["q"].shape[:2]
    out = {"output.0": torch.zeros(n, heads * t["up_v"].shape[1], dtype=getattr(torch, dtype))}
    return Call("attn", "MLAAttention", {"q": t["q"], "kv_c_normed": t["c"], "k_pe": t["pe"].unsqueeze(1)},
                params={"W_UK_T": t["up_k"], "W_UV": t["up_v"].transpose(1, 2)}, outputs=out,
                attrs={"num_heads": heads, "scale": 0.2},
                extra={"cache": cache(t, "c", "kv_c_normed", "pe", "k_pe")})  # fmt: skip


_EXPERTS, _TOP = 4, 3


def _ids(n: int) -> Tensor:
    return torch.stack([torch.arange(n) + k for k in range(_TOP)], 1) % _EXPERTS


def _gates(t: Tensor) -> Tensor:
    """Weights of a token's experts, positive."""
    return (0.1 + t.abs()).clamp(max=4.0)


def _moe_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    inputs = {"x": t["x"], "topk_ids": _ids(len(t["x"])), "topk_weights": _gates(t["w"].double()).float()}
    return Call("experts", "UnquantizedFusedMoEMethod", inputs, params={"w13_weight": t["w13"], "w2_weight": t["w2"]},
                outputs={"output.0": torch.zeros_like(t["x"])}, config={"hidden_act": "silu"})  # fmt: skip


def _moe_kernel(way: Way, i: Inputs) -> Outputs:
    gates = _gates(i["w"]).float().double()
    return {"output.0": experts(way, i["x"], gates, _ids(len(i["x"])), i["w13"], i["w2"], False)}


def _hf_moe_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    weights = as_type(on_grid(_gates(t["w"].double()), dtype), dtype)
    inputs = {"hidden_states": t["x"], "top_k_index": _ids(len(t["x"])), "top_k_weights": weights}
    return Call("experts", "Qwen3MoeExperts", inputs, params={"gate_up_proj": t["w13"], "down_proj": t["w2"]},
                outputs={"output.0": torch.zeros_like(t["x"])}, config={"hidden_act": "silu"})  # fmt: skip


def _hf_moe_kernel(way: Way, i: Inputs) -> Outputs:
    gates = on_grid(_gates(i["w"]), way.dtype)
    return {"output.0": experts(way, i["x"], gates, _ids(len(i["x"])), i["w13"], i["w2"], True)}


def _routing_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    logits = t["logits"].double()
    ids = logits.topk(_TOP).indices
    inputs = {"x": torch.zeros(len(ids), 4, dtype=getattr(torch, dtype)), "topk_ids": ids,
              "topk_weights": torch.zeros(len(ids), _TOP)}  # fmt: skip
    n = logits.shape[1]
    params = {"w13_weight": torch.zeros(n, 4, 4), "w2_weight": torch.zeros(n, 4, 2)}
    return Call("experts", "UnquantizedFusedMoEMethod", inputs, params=params,
                outputs={"input.topk_weights": torch.zeros(len(ids), _TOP)},
                config={"norm_topk_prob": True, "scoring_func": "softmax", "hidden_act": "silu"},
                extra={"router_logits": t["logits"]})  # fmt: skip


def _routing_kernel(way: Way, i: Inputs) -> Outputs:
    logits = i["logits"]
    e = way.fn(torch.exp, single(logits - logits.amax(-1, keepdim=True)))
    p = way.may(e / way.total(e).unsqueeze(-1)).gather(1, logits.topk(_TOP).indices)
    return {"input.topk_weights": way.last(p / way.may(way.total(p).unsqueeze(-1)))}


def _rope_call(t: Mapping[str, Tensor], dtype: str, neox: bool = True) -> Call:
    n, width = t["x"].shape
    attrs = {"base": 1e6, "head_size": width, "rotary_dim": width, "is_neox_style": neox}
    cache = torch.zeros(1, 1, dtype=getattr(torch, dtype))
    return Call("rope", "RotaryEmbedding", {"positions": _positions(n), "query": t["x"]}, attrs=attrs,
                params={"cos_sin_cache": cache}, outputs={"output.0": t["x"]})  # fmt: skip


def _positions(n: int) -> Tensor:
    return torch.arange(n) ** 4 + 3  # up to 50,000


def _rope_kernel(neox: bool) -> Any:
    def kernel(way: Way, i: Inputs) -> Outputs:
        x = i["x"]
        angle = angles(_positions(len(x)), x.shape[1], 1e6)
        return {"output.0": rotated(way, x, single(angle.cos()), single(angle.sin()), neox)}

    return kernel


def _lora_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    found = {"lora_a": t["a"], "lora_b": t["b"], "scaling": torch.tensor(0.3)}
    rows = RowAdapters(("a",) * len(t["x"]), {"a": {"": found}})
    return Call("model.down_proj", "RowParallelLinearWithLoRA", {"input_": t["x"]}, params={"weight": t["weight"]},
                attrs={"tp_size": 1}, outputs={"output.0": torch.zeros(len(t["x"]), len(t["weight"]),
                                                                       dtype=getattr(torch, dtype))},
                extra={"adapters": rows})  # fmt: skip


def _lora_kernel(way: Way, i: Inputs) -> Outputs:
    base = way.may(way.mm(i["x"], i["weight"]))
    inner = way.may(way.mm(i["x"], i["a"]))
    delta = way.may(way.mm(inner, way.may(i["b"] * float(torch.tensor(0.3)))))
    return {"output.0": way.last(base + delta)}


def _row_parallel_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    out = {"output.0": torch.zeros(len(t["x"]), len(t["w0"]), dtype=getattr(torch, dtype))}
    half = t["x"].shape[1] // 2
    calls = []
    for rank in range(2):
        attrs = {"tp_size": 2, "tp_rank": rank, "reduce_results": True}
        x = t["x"][:, rank * half : (rank + 1) * half]
        calls.append(Call("o", "RowParallelLinear", {"input_": x}, params={"weight": t[f"w{rank}"]}, attrs=attrs,
                          outputs=out))  # fmt: skip
    return replace(calls[0], extra={"ranks": calls})


def _row_parallel_kernel(way: Way, i: Inputs) -> Outputs:
    half = i["x"].shape[1] // 2
    one, two = (way.may(way.mm(i["x"][:, r * half : (r + 1) * half], i[f"w{r}"])) for r in range(2))
    return {"output.0": way.last(one + two)}


def _linear_kernel(way: Way, i: Inputs) -> Outputs:
    return {"output.0": way.last(way.may(way.mm(i["x"], i["weight"])) + i["bias"])}


def _logits_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    return Call("logits", "LogitsProcessor", outputs={"output.0": t["z"]}, attrs={"soft_cap": 30.0, "scale": 0.7},
                extra={"lm_head": t["z"]})  # fmt: skip


def _logits_kernel(way: Way, i: Inputs) -> Outputs:
    t = way.may(way.fn(torch.tanh, way.may(i["z"] / 30.0)))
    return {"output.0": way.last(way.may(30.0 * t) * 0.7)}


def _conv_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    names = "torch.ops.vllm.causal_conv1d_fn"
    n = t["x"].shape[0]
    starts = torch.tensor([0, n])
    return Call(names, names, args=(t["x"].T, t["weight"], t["bias"], None, starts, None, None, "silu"),
                outputs={"output.0": t["x"].T})  # fmt: skip


def _conv_kernel(way: Way, i: Inputs) -> Outputs:
    width = i["weight"].shape[1]
    whole = torch.cat((torch.zeros(width - 1, i["x"].shape[1], dtype=torch.float64), i["x"]))
    windows = whole.unfold(0, width, 1)
    bias = i["bias"].reshape(1, -1, 1).expand(len(windows), -1, 1)
    y = way.may(way.total(torch.cat((windows * i["weight"], bias), -1)))
    return {"output.0": way.last(silu(way, y)).T}


def _gating_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    name = "torch.ops._C.fused_gdn_gating_cpu"
    return Call(name, name, args=(t["a_log"].float(), t["a"], t["b"], t["bias"].float()),
                outputs={"output.0": torch.zeros(t["a"].shape), "output.1": torch.zeros_like(t["b"])})  # fmt: skip


def _gating_kernel(way: Way, i: Inputs) -> Outputs:
    z = single(i["a"] + i["bias"])
    e = way.fn(torch.exp, z)
    if way.off is None:
        plus = torch.where(z > 20.0, z, way.fn(torch.log, single(1.0 + e)))
    else:
        plus = torch.where(z > 20.0, z, way.fn(torch.log1p, e))
    g = -way.fn(torch.exp, i["a_log"]) * plus
    e = way.may(way.fn(torch.exp, -i["b"]))
    return {"output.0": single(g), "output.1": way.last(1.0 / way.may(1.0 + e))}


def _norm_backward_kernel(way: Way, i: Inputs) -> Outputs:
    dy, x, w, r = i["dy"], i["x"], i["w"], i["r"].reshape(-1, 1).abs()
    g, normal = single(dy * w), single(x * r)
    mean = way.total(g * normal).unsqueeze(-1) / x.shape[-1]
    return {"output.0": way.last(single(way.may(g - normal * mean) * r)),
            "output.1": way.last(way.total(way.may(dy * normal), 0))}  # fmt: skip


def _masked_softmax_backward_kernel(way: Way, i: Inputs) -> Outputs:
    y, up = i["y"].sigmoid().float().double(), i["up"]
    y = as_type(y, way.dtype).double()
    total = way.total(single(up * y)).unsqueeze(-1)
    return {"output.0": way.last(single(way.may(single(up - total) * y) * 0.5))}


def _deep_norm_kernel(way: Way, i: Inputs) -> Outputs:
    x = single(0.3 * i["x"] + i["gx"])
    n = x.shape[-1]
    mean = way.total(x).unsqueeze(-1) / n
    centred = single(x - mean)
    root = way.fn(torch.rsqrt, way.total(centred * centred).unsqueeze(-1) / n + 1e-6)
    return {"output.0": single(mean), "output.1": single(root)}


def _add_rms_kernel(way: Way, i: Inputs) -> Outputs:
    t = way.may(i["a"] + i["b"])
    root = way.fn(torch.rsqrt, way.total(t * t).unsqueeze(-1) / t.shape[-1] + 1e-6)
    return {"output.0": way.last(way.may(t * root) * i["w"]), "output.1": single(root),
            "output.2": way.last(single(i["a"] + i["b"]))}  # fmt: skip


def _swiglu_backward_kernel(way: Way, i: Inputs) -> Outputs:
    dy, (a, b) = i["dy"], i["x"].chunk(2, -1)
    s = sigmoid(way, a)
    slope = single(s + single(a * s * single(1.0 - s)))
    return {"output.0": way.last(torch.cat((single(way.may(dy * b) * slope), single(dy * way.may(a * s))), -1))}


def _atb_attention_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    n, heads, d = t["q"].shape
    flat = {str(k): t[name].reshape(n, -1) for k, name in enumerate(("q", "k", "v"))}
    param = {"calcType": 3, "headNum": heads, "kvHeadNum": heads, "qkScale": d**-0.5, "maskType": 0, "kernelType": 0}
    return Call("layer", "SelfAttentionOperation", flat | {"3": torch.tensor([n], dtype=torch.int32)},
                attrs={"param": param}, outputs={"output.0": flat["0"]})  # fmt: skip


def _atb_attention_kernel(way: Way, i: Inputs) -> Outputs:
    q = i["q"]
    y = attention(way, q, i["k"], i["v"], q.shape[-1] ** -0.5)
    return {"output.0": way.last(y).reshape(len(q), -1)}


def _linear_activation_kernel(way: Way, i: Inputs) -> Outputs:
    y = way.may(way.mm(i["x"], i["weight"]) + i["bias"])
    return {"output.0": way.last(y * way.may(sigmoid(way, y)))}


def _npu(name: str, *names: str, out: Any = None, **kwargs: Any) -> Any:
    return operator(f"torch_npu.{name}", *names, out=out, **kwargs)


def _softmax_grad_kernel(way: Way, y: Tensor, dy: Tensor) -> Outputs:
    total = way.total(single(y * dy)).unsqueeze(-1)
    return {"output.0": way.last(way.may(y * way.may(dy - total)))}


def _fa_update_kernel(way: Way, i: Inputs) -> Outputs:
    lse = i["lse"]
    e = way.fn(torch.exp, single(lse - lse.amax(0)))
    share = e / way.total(e, 0)
    return {"output.0": way.last(way.total(share.unsqueeze(-1) * i["out"], 0))}


_PLACES = torch.arange(ROWS) % 2


def _index_add_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    return Call("layer", "IndexAddOperation", {"0": t["x"], "1": _PLACES, "2": t["more"], "3": t["alpha"]},
                attrs={"param": {"indexType": 1, "axis": 0}}, outputs={"output.0": t["x"]})  # fmt: skip


def _scatter_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    at = _PLACES.reshape(-1, 1).expand(-1, t["x"].shape[1])
    return Call("layer", "ScatterElementsV2Operation", {"0": t["x"], "1": at, "2": t["more"]},
                attrs={"param": {"axis": 0, "reduction": 1}}, outputs={"output.0": t["x"]})  # fmt: skip


def _added_up(way: Way, i: Inputs) -> Outputs:
    y, alpha = i["x"].clone(), i["alpha"].reshape(()) if "alpha" in i else 1.0
    last: dict[int, int] = {int(place): n for n, place in enumerate(_PLACES)}
    for n, place in enumerate(_PLACES.tolist()):
        one = y[place] + (way.may(i["more"][n] * alpha) if "alpha" in i else i["more"][n])
        y[place] = way.may(one) if n != last[place] else one
    return {"output.0": way.last(y)}


def _w8a16_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    out = {"output.0": torch.zeros(len(t["x"]), t["codes"].shape[1], dtype=getattr(torch, dtype))}
    codes = (t["codes"].double() * 40.0).round().clamp(-127, 127).to(torch.int8)
    return Call("layer", "W8A16Operation", {"0": t["x"], "1": codes, "2": t["scale"]}, attrs={"param": {}}, outputs=out)


def _w8a16_kernel(way: Way, i: Inputs) -> Outputs:
    codes = (i["codes"] * 40.0).round().clamp(-127, 127)
    return {"output.0": way.last(way.mm(i["x"], way.may(codes * i["scale"]).T))}


def _mqa_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    name = "torch.ops.vllm.fp8_mqa_logits"
    n, m = len(t["q"]), len(t["k"])
    return Call(name, name, args=(t["q"], t["k"], torch.ones(m), t["w"].float(), torch.zeros(n, dtype=torch.int32),
                                  torch.full((n,), m)), outputs={"output.0": torch.zeros(n, m)})  # fmt: skip


def _mqa_kernel(way: Way, i: Inputs) -> Outputs:
    s = way.mm(i["q"].transpose(0, 1), i["k"].unsqueeze(0)).clamp(min=0.0)
    return {"output.0": way.total(s * i["w"].T.unsqueeze(-1), 0)}


def _scaled_call(t: Mapping[str, Tensor], dtype: str) -> Call:
    name = "torch.ops._C.cutlass_scaled_mm"
    a, b = (t[n].double().clamp(-448, 448).float().to(torch.float8_e4m3fn) for n in ("a", "b"))
    out = torch.zeros(len(a), len(b), dtype=getattr(torch, dtype))
    return Call(name, name, args=(out, a, b.T, t["sa"].float().abs() + 0.01, t["sb"].float().abs() + 0.01, t["bias"]),
                outputs={"inplace.input.0": out})  # fmt: skip


def _scaled_kernel(way: Way, i: Inputs) -> Outputs:
    a, b = (i[n].clamp(-448, 448).float().to(torch.float8_e4m3fn).double() for n in ("a", "b"))
    sa, sb = ((i[n].float().abs() + 0.01).double() for n in ("sa", "sb"))
    y = single(single(way.mm(a, b) * sa.reshape(-1, 1)) * sb.reshape(1, -1))
    return {"inplace.input.0": way.last(way.may(y) + i["bias"])}


def cases() -> list[Case]:
    rows, w = (ROWS, WIDTH), (WIDTH,)
    two = (ROWS, 2 * WIDTH)
    attrs = {"variance_epsilon": 1e-6}
    x, xw = {"x": rows}, {"x": rows, "weight": w}
    att = {"q": (12, 2, 16), "k": (12, 2, 16), "v": (12, 2, 16)}
    both = {"output.0": rows, "output.1": rows}

    def halves(name: str, cls: str, f: Any, call: Any = None) -> Case:
        return Case(name, {"x": two}, call or module(cls, "x", out={"output.0": rows}),
                    lambda way, i: gated(way, f, i["x"]), ("x",))  # fmt: skip

    def alone(cls: str, how: str) -> Case:
        return Case(cls, x, module(cls, "x"), lambda way, i: {"output.0": in_steps(way, how, i["x"])}, ("x",),
                    scale={"x": 2.0})  # fmt: skip

    found = [
        Case("RMSNorm", xw, module("RMSNorm", "x", params=("weight",), attrs=attrs),
             lambda way, i: rms(way, i["x"], i["weight"], 1e-6), ("x",)),
        Case("RMSNorm, with a residual", {"x": rows, "residual": rows, "weight": w},
             module("RMSNorm", "x", "residual", params=("weight",), attrs=attrs, out=both),
             lambda way, i: rms(way, i["x"], i["weight"], 1e-6, i["residual"]), ("x", "residual")),
        Case("GemmaRMSNorm", xw, module("GemmaRMSNorm", "x", params=("weight",), attrs=attrs),
             lambda way, i: rms(way, i["x"], 1.0 + i["weight"], 1e-6), ("x",)),
        Case("RMSNormGated, norm first", {"x": rows, "z": rows, "weight": w},
             module("RMSNormGated", "x", "z", params=("weight",), attrs=attrs | {"norm_before_gate": True}),
             lambda way, i: gated_rms(way, i["x"], i["z"], i["weight"], 1e-6, True), ("x", "z")),
        Case("RMSNormGated, gate first", {"x": rows, "z": rows, "weight": w},
             module("RMSNormGated", "x", "z", params=("weight",), attrs=attrs | {"norm_before_gate": False}),
             lambda way, i: gated_rms(way, i["x"], i["z"], i["weight"], 1e-6, False), ("x", "z")),
        Case("Mixer2RMSNormGated", {"x": rows, "gate": rows, "weight": w},
             module("Mixer2RMSNormGated", "x", "gate", params=("weight",), attrs=attrs, config={"n_groups": 1}),
             lambda way, i: gated_rms(way, i["x"], i["gate"], i["weight"], 1e-6, False), ("x", "gate")),
        Case("LayerNorm", {"x": rows, "weight": w, "bias": w},
             module("LayerNorm", "x", params=("weight", "bias"), attrs={"eps": 1e-5}),
             lambda way, i: layer_norm(way, i["x"], i["weight"], i["bias"], 1e-5), ("x",)),
        halves("SiluAndMul", "SiluAndMul", silu),
        Case("GeluAndMul", {"x": two},
             module("GeluAndMul", "x", out={"output.0": rows}, attrs={"approximate": "none"}),
             lambda way, i: gated(way, gelu, i["x"]), ("x",), scale={"x": 2.0}),
        Case("GeluAndMul, by tanh", {"x": two},
             module("GeluAndMul", "x", out={"output.0": rows}, attrs={"approximate": "tanh"}),
             lambda way, i: gated(way, gelu_tanh, i["x"]), ("x",), scale={"x": 2.0}),
        Case("SwigluOAIAndMul", {"x": two}, module("SwigluOAIAndMul", "x", out={"output.0": rows}),
             lambda way, i: swiglu_oai(way, i["x"]), ("x",), scale={"x": 2.0}),
        alone("SiLU", "SiLU"), alone("GELU", "GELU"), alone("NewGELU", "NewGELU"), alone("QuickGELU", "QuickGELU"),
        alone("ReLUSquaredActivation", "ReLU2"),
        Case("Sigmoid", x, module("Sigmoid", "x"), lambda way, i: {"output.0": way.last(sigmoid(way, i["x"]))}, ("x",)),
        Case("ColumnParallelLinear", {"x": (ROWS, 96), "weight": (16, 96), "bias": (16,)},
             module("ColumnParallelLinear", "x", params=("weight", "bias"), out={"output.0": (ROWS, 16)},
                    attrs={"tp_size": 1}), _linear_kernel, ("x",)),
        Case("RowParallelLinear, two ranks", {"x": (ROWS, 96), "w0": (16, 48), "w1": (16, 48)}, _row_parallel_call,
             _row_parallel_kernel, ("x",)),
        Case("LogitsProcessor, capped", {"z": (ROWS, WIDTH)}, _logits_call, _logits_kernel, ("z",), scale={"z": 20.0}),
        Case("LinearWithLoRA", {"x": (ROWS, 48), "weight": (16, 48), "a": (4, 48), "b": (16, 4)}, _lora_call,
             _lora_kernel, ("x",)),
        Case("Attention", att, _attention_call("Attention", {}), _attention_kernel()),
        Case("Attention, soft cap", att, _attention_call("Attention", {"logits_soft_cap": 5.0}),
             _attention_kernel(5.0), scale={"q": 3.0}),
        Case("Attention, sinks", att | {"sinks": (2,)}, _attention_call("Attention", {}, ("sinks",)),
             _attention_kernel(0.0, True)),
        Case("MLAAttention", {"q": (8, 2, 12), "c": (8, 16), "pe": (8, 4), "up_k": (2, 8, 16), "up_v": (2, 6, 16)},
             _mla_call, lambda way, i: latent(way, i, 8, 0.2), scale={"up_k": 0.3, "up_v": 0.3}),
        Case("UnquantizedFusedMoEMethod", {"x": (8, 16), "w": (8, _TOP), "w13": (_EXPERTS, 24, 16),
                                           "w2": (_EXPERTS, 16, 12)}, _moe_call, _moe_kernel, ("x", "w")),
        Case("*Experts", {"x": (8, 16), "w": (8, _TOP), "w13": (_EXPERTS, 24, 16), "w2": (_EXPERTS, 16, 12)},
             _hf_moe_call, _hf_moe_kernel, ("x", "w")),
        Case("UnquantizedFusedMoEMethod, weights", {"logits": (ROWS, 8)}, _routing_call, _routing_kernel, ("logits",),
             dtypes=("bfloat16", "float16")),
        Case("RotaryEmbedding", x, _rope_call, _rope_kernel(True), ("x",)),
        Case("RotaryEmbedding, neighbours", x, lambda t, d: _rope_call(t, d, False), _rope_kernel(False), ("x",)),
        Case("causal_conv1d_fn", {"x": rows, "weight": (WIDTH, 4), "bias": (WIDTH,)}, _conv_call, _conv_kernel),
        Case("fused_gdn_gating", {"a_log": w, "a": rows, "b": rows, "bias": w}, _gating_call, _gating_kernel,
             ("a", "b"), widths={"output.0": "float32"}, scale={"a": 3.0, "b": 3.0}),
        Case("npu_rms_norm_backward", {"dy": rows, "x": rows, "w": w, "r": (ROWS, 1)},
             lambda t, d: _npu("npu_rms_norm_backward", "dy", "x", "w", "r", out={"output.0": rows, "output.1": w})(
                 {**t, "r": t["r"].abs()}, d),
             _norm_backward_kernel),
        halves("npu_swiglu", "", silu, _npu("npu_swiglu", "x", out={"output.0": rows})),
        Case("npu_fast_gelu", x, _npu("npu_fast_gelu", "x"),
             lambda way, i: {"output.0": in_steps(way, "QuickGELU", i["x"])}, ("x",)),
        Case("npu_rotary_mul", {"x": (4, 4, 2, 16), "r1": (4, 4, 1, 16), "r2": (4, 4, 1, 16)},
             _npu("npu_rotary_mul", "x", "r1", "r2"),
             lambda way, i: {"output.0": way.last(way.may(i["x"] * i["r1"]) + way.may(
                 torch.cat((-i["x"].chunk(2, -1)[1], i["x"].chunk(2, -1)[0]), -1) * i["r2"]))}),
        Case("atb RmsNorm, residual", {"x": rows, "residual": rows, "weight": w},
             numbered("RmsNormOperation", "x", "residual", "weight", out=both,
                      param={"layerType": 2, "preNormParam": {"epsilon": 1e-6}}),
             lambda way, i: rms(way, i["x"], i["weight"], 1e-6, i["residual"]), ("x", "residual")),
        Case("atb RmsNormBackward", {"dy": rows, "x": rows, "r": (ROWS, 1), "w": w},
             lambda t, d: numbered("RmsNormBackwardOperation", "dy", "x", "r", "w",
                                   out={"output.0": rows, "output.1": w})({**t, "r": t["r"].abs()}, d),
             _norm_backward_kernel),
        Case("atb Activation swish", x, numbered("ActivationOperation", "x", param={"activationType": 4, "scale": 1.3}),
             lambda way, i: {"output.0": way.last(i["x"] * way.may(sigmoid(way, way.may(1.3 * i["x"]))))}, ("x",),
             scale={"x": 2.0}),
        Case("atb Softmax", x, numbered("SoftmaxOperation", "x", param={"axes": [-1]}),
             lambda way, i: {"output.0": way.last(softmax_of(way, i["x"]))}, ("x",)),
        Case("atb FastSoftMaxGrad", {"y": (ROWS, ROWS), "dy": (ROWS, ROWS)},
             lambda t, d: Call("l", "FastSoftMaxGradOperation",
                               {"0": torch.softmax(t["y"].double(), -1).to(t["y"].dtype), "1": t["dy"]},
                               attrs={"param": {"headNum": 1, "qSeqLen": [ROWS]}}, outputs={"output.0": t["dy"]}),
             lambda way, i: _softmax_grad_kernel(way, as_type(torch.softmax(i["y"], -1), way.dtype).double(), i["dy"])),
        Case("atb FaUpdate", {"lse": (3, ROWS), "out": (3, ROWS, WIDTH)},
             numbered("FaUpdateOperation", "lse", "out", out={"output.0": rows}), _fa_update_kernel),
        Case("atb IndexAdd", {"x": (5, WIDTH), "more": rows, "alpha": (1,)}, _index_add_call, _added_up),
        Case("atb ScatterElements", {"x": (5, WIDTH), "more": rows}, _scatter_call, _added_up),
        Case("atb W8A16", {"x": rows, "codes": (WIDTH, 16), "scale": (16,)}, _w8a16_call, _w8a16_kernel, ("x",)),
        Case("Attention, 8-bit cache", att, _attention_call("Attention", {
            "kv_cache_dtype": "fp8", "_k_scale_float": 0.3, "_v_scale_float": 0.3}), _eight_bit_kernel),
        Case("npu_mish", x, _npu("npu_mish", "x"), lambda way, i: {"output.0": way.last(i["x"] * way.may(
            way.fn(torch.tanh, way.may(way.fn(F.softplus, i["x"])))))}, ("x",)),
        Case("npu_geglu", {"x": two}, _npu("npu_geglu", "x", out=both), lambda way, i: {
            "output.0": way.last(i["x"].chunk(2, -1)[0] * way.may(gelu_tanh(way, i["x"].chunk(2, -1)[1]))),
            "output.1": way.last(gelu_tanh(way, i["x"].chunk(2, -1)[1]))}, ("x",)),
        Case("npu_add_rms_norm", {"a": rows, "b": rows, "w": w}, _npu("npu_add_rms_norm", "a", "b", "w", out={
            "output.0": rows, "output.1": (ROWS, 1), "output.2": rows}), _add_rms_kernel, ("a", "b"),
             widths={"output.1": "float32"}),
        Case("npu_deep_norm", {"x": rows, "gx": rows, "beta": w, "gamma": w}, _npu(
            "npu_deep_norm", "x", "gx", "beta", "gamma", out={"output.0": (ROWS, 1), "output.1": (ROWS, 1)}),
             _deep_norm_kernel, ("x", "gx"), widths={"output.0": "float32", "output.1": "float32"}),
        Case("npu_scaled_masked_softmax_backward", {"up": rows, "y": rows}, lambda t, d: Call(
            "n", "torch_npu.npu_scaled_masked_softmax_backward", args=(
                t["up"], t["y"].double().sigmoid().float().to(t["y"].dtype), torch.zeros(rows, dtype=torch.bool), 0.5,
                False), outputs={"output.0": t["up"]}), _masked_softmax_backward_kernel, ("up", "y")),
        Case("atb LayerNorm", {"x": rows, "weight": w, "bias": w}, numbered(
            "LayerNormOperation", "x", "weight", "bias", param={"layerType": 1, "normParam": {
                "epsilon": 1e-5, "beginNormAxis": 1}}),
             lambda way, i: layer_norm(way, i["x"], i["weight"], i["bias"], 1e-5), ("x",)),
        Case("atb LinearActivation", {"x": (ROWS, 48), "weight": (16, 48), "bias": (16,)}, numbered(
            "LinearActivationOperation", "x", "weight", "bias", out={"output.0": (ROWS, 16)},
            param={"hasBias": True, "activationFuncType": 4, "transposeB": True}),
             _linear_activation_kernel, ("x",)),
        Case("atb Swiglu backward", {"dy": rows, "x": two}, numbered(
            "ActivationOperation", "dy", "x", param={"activationType": 7, "dim": -1}, out={"output.0": two}),
             _swiglu_backward_kernel, ("dy", "x")),
        Case("atb SelfAttention", att, _atb_attention_call, _atb_attention_kernel),
        Case("atb Cumsum", x, numbered("CumsumOperation", "x", param={"axes": [1]}),
             lambda way, i: {"output.0": way.last(torch.stack(
                 [way.total(i["x"][:, : n + 1]) for n in range(WIDTH)], 1))}, ("x",)),
        Case("atb Cos", x, numbered("ElewiseOperation", "x", param={"elewiseType": 3}),
             lambda way, i: {"output.0": way.last(torch.cos(i["x"]))}, ("x",)),
        Case("atb Muls", x, numbered("ElewiseOperation", "x", param={"elewiseType": 2, "mulsParam": {"varAttr": 0.7}}),
             lambda way, i: {"output.0": way.last(i["x"] * way.may(torch.tensor(0.7, dtype=torch.float64)))}, ("x",)),
        Case("fp8_mqa_logits", {"q": (6, 2, 16), "k": (12, 16), "w": (6, 2)}, _mqa_call, _mqa_kernel,
             widths={"output.0": "float32"}),
        Case("cutlass_scaled_mm", {"a": (ROWS, 32), "b": (16, 32), "sa": (ROWS, 1), "sb": (1, 16), "bias": (16,)},
             _scaled_call, _scaled_kernel, ("a", "sa"), dtypes=("bfloat16", "float16")),
    ]  # fmt: skip
    return found

