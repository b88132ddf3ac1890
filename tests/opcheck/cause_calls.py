"""Calls of operators whose outputs are made wrong by torch itself, for causes to be found in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opcheck.samples.definitions import attend, lower
from opcheck.samples.sample import wide

from vllm_accprobe.dump.schema import REPLICATED, Record, RowSpace, Segment
from vllm_accprobe.opcheck.calls.neighbours import Past
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.causes.examine import Causes
from vllm_accprobe.opcheck.causes.search import Explanation
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.registry import default_references

Tensor = Any
TABLE = default_references()
ROWS, WIDTH = 24, 64
HEADS, KV, HEAD = 8, 2, 16


def drawn(seed: int, *shape: int, scale: float = 1.0, dtype: Any = torch.bfloat16) -> Tensor:
    """Normal numbers as ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def captured(call: Call, step: int = 0) -> Captured:
    """``call`` as it stands in a dump: its first dimension is the rows'."""
    tensors = {f"input.{n}": t for n, t in call.inputs.items()} | dict(call.outputs)
    records = {
        role: Record(0, step, call.name, call.cls, role, 0, k, str(t.dtype).removeprefix("torch."), tuple(t.shape),
                     "tokens", 0, None, None, REPLICATED, None, stride=None if t.is_contiguous() else t.stride())
        for k, (role, t) in enumerate(tensors.items())
    }  # fmt: skip
    return Captured(call.name, 0, step, 0, call, records)


def with_output(call: Call, *outputs: Tensor, dtype: Any = torch.bfloat16) -> Call:
    """``call`` as if it had given these, rounded to ``dtype``."""
    return replace(call, outputs={f"output.{k}": t.to(dtype) for k, t in enumerate(outputs)})


def given(
    call: Call, y: Callable[..., Any], *of: str, kind: Any = torch.float64, dtype: Any = torch.bfloat16
) -> Call:  # fmt: skip
    """``call`` as if it had given ``y`` of these of its inputs and parameters, computed in ``kind``."""
    known = {**call.inputs, **call.params}
    found = y(*(known[n].to(kind) for n in of))
    return with_output(call, *(found if isinstance(found, tuple) else (found,)), dtype=dtype)


def product(y: Callable[..., Any], call: Call | None = None, **how: Any) -> Call:
    """A linear layer that gives ``y(x, weight, bias)``."""
    return given(linear() if call is None else call, y, "input_", "weight", "bias", **how)


def gate(y: Callable[..., Any], cls: str = "SiluAndMul", **how: Any) -> Call:
    """A gated activation that gives ``y`` of both halves."""
    return given(gated(cls), lambda x: y(*x.chunk(2, -1)), "x", **how)


def honest(call: Call, *shapes: Sequence[int], dtype: Any = torch.bfloat16) -> Call:
    """``call`` with its reference's outputs, rounded. shapes: of its outputs."""
    empty = {f"output.{k}": torch.zeros(*shape, dtype=dtype) for k, shape in enumerate(shapes)}
    found = TABLE.evaluate(replace(call, outputs=empty))
    assert isinstance(found, dict), found
    return replace(call, outputs={role: found[role].value.to(dtype) for role in empty})


def explained(*calls: Call, golden: dict[str, Any] | None = None, **more: Any) -> Explanation | None:
    """What is said of the operator of these calls, the first of which is wrong."""
    causes = Causes(TABLE, {calls[0].name: golden or {}}, seconds=None, **more)
    found = causes.of_calls([captured(c, k) for k, c in enumerate(calls)])
    assert not causes.problems(), causes.problems()
    return found


def names(found: Explanation | None) -> set[str]:
    return set() if found is None else {f.what.name for f in found.found}


# --- operators -------------------------------------------------------------------------------------------------------


def norm(seed: int = 0, residual: bool = True, cls: str = "RMSNorm", rows: int = ROWS, size: float = 0.05) -> Call:
    """Rows small enough for the epsilon, 1e-5, to matter."""
    sizes = torch.logspace(-2.5, 1.0, rows, dtype=torch.float64).unsqueeze(1)
    inputs = {"x": (drawn(seed, rows, WIDTH).double() * size * sizes).bfloat16()}
    if residual:
        inputs["residual"] = (drawn(seed + 1, rows, WIDTH).double() * size * sizes).bfloat16()
    return Call("layers.0.norm", cls, inputs, attrs={"variance_epsilon": 1e-5},
                params={"weight": drawn(seed + 2, WIDTH, scale=0.3) + 1.0})  # fmt: skip


def layer_norm(seed: int = 0, rows: int = ROWS) -> Call:
    x = (drawn(seed, rows, WIDTH) * 0.02 + 0.03).bfloat16()
    return Call("layers.0.norm", "LayerNorm", {"input": x}, attrs={"eps": 1e-5, "normalized_shape": [WIDTH]},
                params={"weight": drawn(seed + 1, WIDTH), "bias": drawn(seed + 2, WIDTH)})  # fmt: skip


def gated(cls: str = "SiluAndMul", seed: int = 0, rows: int = ROWS, scale: float = 2.0) -> Call:
    return Call("layers.0.act", cls, {"x": drawn(seed, rows, 2 * WIDTH, scale=scale)},
                attrs={"approximate": "tanh"} if cls == "GeluAndMul" else {})  # fmt: skip


def linear(seed: int = 0, rows: int = ROWS, bias: bool = True, cls: str = "ColumnParallelLinear") -> Call:
    params = {"weight": drawn(seed + 1, 48, WIDTH, scale=0.2)}
    return Call("layers.0.proj", cls, {"input_": drawn(seed, rows, WIDTH)}, attrs={"tp_size": 1},
                params=params | ({"bias": drawn(seed + 2, 48)} if bias else {}))  # fmt: skip


def rotary(seed: int = 0, rows: int = ROWS, at: Tensor | None = None) -> Call:
    """Rows of two requests. at: their positions, otherwise."""
    if at is None:
        at = torch.cat((torch.arange(30, 30 + rows // 2), torch.arange(7, 7 + rows - rows // 2)))
    rows = len(at)
    inputs = {"positions": at, "query": drawn(seed, rows, HEADS * HEAD), "key": drawn(seed + 1, rows, KV * HEAD)}
    return Call("layers.0.rope", "RotaryEmbedding", inputs,
                attrs={"base": 10000.0, "head_size": HEAD, "rotary_dim": HEAD, "is_neox_style": True})  # fmt: skip


def turned(
    x: Tensor, angle: Tensor, dim: int = HEAD, neighbours: bool = False, table: Callable[[Tensor], Tensor] | None = None
) -> Tensor:  # fmt: skip
    """Heads side by side, turned by complex numbers of these angles [rows, dim / 2], in float64."""
    cos, sin = (t if table is None else table(t) for t in (angle.cos(), angle.sin()))
    x, unit = x.double().unflatten(1, (-1, HEAD)), torch.complex(cos.double(), sin.double())[:, None]
    turn = x[..., :dim]
    if neighbours:
        y = torch.view_as_real(torch.view_as_complex(turn.unflatten(-1, (-1, 2)).contiguous()) * unit).flatten(-2)
    else:
        z = torch.complex(*turn.chunk(2, -1)) * unit
        y = torch.cat((z.real, z.imag), -1)
    return torch.cat((y, x[..., dim:]), -1).flatten(1)


def wrong_rotary(
    at: Tensor | None = None, base: float = 10000.0, dim: int = HEAD, neighbours: bool = False,
    positions: Callable[[Tensor], Tensor] = lambda p: p, key: Callable[[Tensor], Tensor] | None = None,
    table: Callable[[Tensor], Tensor] | None = None,
) -> Call:  # fmt: skip
    """key: positions of the key, where its own."""
    call = rotary(at=at)
    f = torch.tensor([base ** (-2.0 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    return given(call, lambda p, q, k: tuple(turned(x, used(p).double()[:, None] * f, dim, neighbours, table)
                                             for x, used in ((q, positions), (k, key or positions))),
                 "positions", "query", "key")  # fmt: skip


def experts(seed: int = 0, rows: int = ROWS, n: int = 6, inner: int = 32) -> Call:
    """Two of six experts a row, with weights that are what their router should have said."""
    logits = drawn(seed + 3, rows, n)
    weights, ids = torch.softmax(logits.double(), -1).topk(2, -1)
    inputs = {"x": drawn(seed, rows, WIDTH), "topk_weights": (weights / weights.sum(-1, keepdim=True)).float(),
              "topk_ids": ids}  # fmt: skip
    params = {"w13_weight": drawn(seed + 1, n, 2 * inner, WIDTH, scale=0.2),
              "w2_weight": drawn(seed + 2, n, WIDTH, inner, scale=0.2)}  # fmt: skip
    return Call("layers.0.experts", "UnquantizedFusedMoEMethod", inputs, params=params,
                parent={"activation": "silu", "renormalize": True, "scoring_func": "softmax", "top_k": 2},
                extra={"router_logits": logits})  # fmt: skip


def wrong_experts(
    ids: Callable[[Tensor], Tensor] = lambda i: i, act: Callable[[Tensor], Tensor] = F.silu, exchanged: bool = False,
    on_input: bool = False, fewer: int = 0, weights: Callable[[Tensor], Tensor] = lambda w: w, missing: int = -1,
    matrices: Callable[[Tensor], Tensor] = lambda w: w,
) -> Call:  # fmt: skip
    """Experts by a loop over rows."""
    call = experts()

    def looped(x: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        w, w13, w2, chosen, out = weights(w), matrices(w13), matrices(w2), ids(call.inputs["topk_ids"]), x * 0.0
        for n in range(len(x)):
            for k in range(fewer or chosen.shape[1]):
                e = int(chosen[n, k])
                if e != missing:
                    gate, up = (w13[e] @ (x[n] * w[n, k] if on_input else x[n])).chunk(2)
                    y = w2[e] @ (act(up) * gate if exchanged else act(gate) * up)
                    out[n] += y if on_input else w[n, k] * y
        return out

    return given(call, looped, "x", "topk_weights", "w13_weight", "w2_weight")


def attention(
    seed: int = 0, *, first: int = 40, rows: int = 12, cap: float = 0.0, window: int = 0, sinks: bool = False,
    spread: float = 1.0, scale: float = 0.2, past: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    used: dict[str, Any] | None = None, eight: bool = False, slopes: Sequence[float] | None = None,
    other: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda k, v: (k, v),
    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, int]] | None = None,
    rounded: Callable[[Tensor], Tensor] = torch.Tensor.bfloat16,
) -> Call:  # fmt: skip
    """The rows of a request at positions from ``first`` on, beside the whole prompt of another one. used: what the
    kernel took instead of scale, cap, window and sinks; past, other: what it found as keys and values of each; read:
    which of them it read, and the first row's position among these; eight: its cache holds 8 bits; slopes: of ALiBi, as
    built in a BLOOM."""
    q, k, v = (drawn(seed + n, first + rows, h * HEAD, scale=spread) for n, h in enumerate((HEADS, KV, KV)))
    short = 10
    cache = Past(("key", "value"))
    cache.write(RowSpace(0, "tokens", 0, (Segment(0, 0, first, 0),)), {"key": k[:first], "value": v[:first]})
    here = RowSpace(1, "tokens", 0, (Segment(1, 0, short, 0), Segment(0, first, rows, 0)))
    inputs = {n: torch.cat((t[:short], t[first:])) for n, t in (("query", q), ("key", k), ("value", v))}
    cache.write(here, {n: inputs[n] for n in ("key", "value")})
    attrs: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV, "head_size": HEAD}
    if eight:
        attrs |= {"kv_cache_dtype": "fp8", "_k_scale_float": 1.0, "_v_scale_float": 1.0}
        k, v = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (k, v))
    attrs |= {"logits_soft_cap": cap} if cap else {}
    attrs |= {"sliding_window": window} if window else {}
    attrs |= {"impl.alibi_slopes": list(slopes)} if slopes else {}
    params = {"sinks": drawn(seed + 9, HEADS)} if sinks else {}
    how = {"scale": scale, "cap": cap, "window": window, "sinks": params.get("sinks"), "slopes": slopes} | (used or {})
    beside = softmax(q[:short], *other(k[:short].clone(), v[:short].clone()), 0, **how)
    k2, v2 = (k, v) if past is None else past(k.clone(), v.clone())
    out = torch.cat((beside, softmax(q[first:], *((k2, v2, first) if read is None else read(k2, v2)), **how)))
    call = Call("layers.0.attn", "Attention", inputs, attrs=attrs, parent={"scaling": scale}, params=params,
                config={"model_type": "bloom"} if slopes else {}, extra={"cache": cache.view(here)})  # fmt: skip
    return with_output(call, rounded(out))


def softmax(
    q: Tensor, k: Tensor, v: Tensor, first: int, *, scale: float, cap: float = 0.0, window: int = 0,
    sinks: Tensor | None = None, order: Sequence[int] | None = None, slopes: Sequence[float] | None = None,
) -> Tensor:  # fmt: skip
    """order: the key head of each query head."""
    q, k, v = (wide(t).reshape(len(t), -1, HEAD) for t in (q, k, v))
    k, v = (x if order is None else x[:, order] for x in (k, v))
    added = lower(len(q), first + len(q), window=window)
    added = added if slopes is None else added + np.array(slopes)[:, None, None] * np.arange(len(k))
    y = attend(q, k, v, scale, added, cap=cap, sinks=None if sinks is None else wide(sinks))
    return torch.from_numpy(y).flatten(1)
