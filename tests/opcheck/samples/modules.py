"""Samples of modules of an engine, and of its operators that compute the same: norms, products, activations, rotary
embeddings, tables, attention, experts, pictures."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from opcheck.samples.definitions import attend, gelu, gelu_tanh, lower, rms, sigmoid, silu, softmax
from opcheck.samples.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from opcheck.samples.sample import Array, Draw, Made, declined, made, sample, wide

from vllm_accprobe.opcheck.calls.case import CachedRun, StoredCache
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.linear import NO_ADAPTER_KNOWN, NOT_HERE, RELOADED, RowAdapters

# --- norms ----------------------------------------------------------------------------------------------------------


NORMS = [{"name": n, "residual": r} for n in ("RMSNorm", "GemmaRMSNorm", "op") for r in (False, True)]


@sample("the mean divides by two less than the width", variants=NORMS)
def rms_norm(d: Draw, fault: str, name: str, residual: bool) -> Made:
    x, r, w = d(12, 64), d(12, 64), d(64)
    total = wide(x) + wide(r) if residual else wide(x)
    y = rms(total, wide(w) + (name == "GemmaRMSNorm"), 1e-3, 2 * bool(fault))
    if name == "op":
        args = (x, r, w, 1e-3) if residual else (torch.zeros_like(x), x, w, 1e-3)
        outputs = {"inplace.input.0": y} | ({"inplace.input.1": total} if residual else {})
        return made(f"torch.ops._C.{'fused_add_' if residual else ''}rms_norm", *args, outputs=outputs)
    outputs = {"output.0": y} | ({"output.1": total} if residual else {})
    return made(name, inputs={"x": x} | ({"residual": r} if residual else {}), params={"weight": w},
                attrs={"variance_epsilon": 1e-3}, outputs=outputs)  # fmt: skip


@sample("the rank's own mean square", variants=[{"size": n} for n in (2, 3)])
def norm_over_ranks(d: Draw, fault: str, size: int) -> Made:
    """MiniMax-M2's norm of all heads, whose channels are distributed to ranks."""
    x, w = d(12, 64 * size), d(64)
    parts, attrs = x.chunk(size, 1), {"variance_epsilon": 1e-3, "tp_world": size}
    ranks = [Call("l", "MiniMaxText01RMSNormTP", {"x": p}, params={"weight": w}, attrs=attrs) for p in parts]
    used = wide(parts[0] if fault else x)
    y = wide(parts[0]) / np.sqrt((used**2).mean(-1, keepdims=True) + 1e-3) * wide(w)
    return made("MiniMaxText01RMSNormTP", inputs={"x": parts[0]}, params={"weight": w}, attrs=attrs,
                extra={"ranks": ranks}, outputs={"output.0": y})  # fmt: skip


@sample("the bias is left out", "another epsilon", variants=[{"groups": g} for g in (0, 3)])
def layer_or_group_norm(d: Draw, fault: str, groups: int) -> Made:
    x, w, b, eps = d(4, 6, 10, scale=0.1), d(6 if groups else 10), d(6 if groups else 10), 1e-2
    rows = wide(x).reshape(4, groups, -1) if groups else wide(x)
    rows = rows - rows.mean(-1, keepdims=True)
    y = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + (0.0 if fault == "another epsilon" else eps))
    by = (lambda t: wide(t)[:, None]) if groups else wide
    y = y.reshape(x.shape) * by(w) + (0.0 if fault == "the bias is left out" else by(b))
    attrs = {"eps": eps, **({"num_groups": groups} if groups else {"normalized_shape": [10]})}
    return made("GroupNorm" if groups else "LayerNorm", inputs={"input": x}, params={"weight": w, "bias": b},
                attrs=attrs, outputs={"output.0": y})  # fmt: skip


# --- activations ----------------------------------------------------------------------------------------------------


def _quick(x: Array) -> Array:
    return x * sigmoid(1.702 * x)


ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], dict[str, Any]]] = {
    "SiLU": (silu, {}), "GELU": (gelu, {}), "NewGELU": (gelu_tanh, {}), "FastGELU": (gelu_tanh, {}),
    "GELUTanh": (gelu_tanh, {}), "QuickGELU": (_quick, {}), "ReLU": (lambda x: np.maximum(x, 0), {}),
    "ReLUSquaredActivation": (lambda x: np.maximum(x, 0) ** 2, {}),
    "gelu_new": (gelu_tanh, {}), "gelu_fast": (gelu_tanh, {}), "gelu_quick": (_quick, {}),
    "SiluAndMul": (silu, {}), "MulAndSilu": (silu, {}), "silu_and_mul": (silu, {}), "mul_and_silu": (silu, {}),
    "gelu_and_mul": (gelu, {}), "gelu_tanh_and_mul": (gelu_tanh, {}),
    "GeluAndMul": (gelu, {"attrs": {"approximate": "none"}}),
    "GeluAndMul tanh": (gelu_tanh, {"attrs": {"approximate": "tanh"}}),
    "GeluAndMul config": (gelu, {"config": {"hidden_act": "gelu"}}),
    "GeluAndMul config tanh": (gelu_tanh, {"config": {"hidden_act": "gelu_pytorch_tanh"}}),
}  # fmt: skip


@sample("another function", variants=[{"name": n} for n in ACTIVATIONS])
def activations(d: Draw, fault: str, name: str) -> Made:
    f, more = ACTIVATIONS[name]
    f = (silu if f in (gelu, _quick) else _quick) if fault else f
    x, cls, gated = d(12, 64, scale=2), name.split()[0], "mul" in name.lower()
    a, b = np.split(wide(x), 2, -1)
    y = (a * f(b) if name.lower().startswith("mul") else f(a) * b) if gated else f(wide(x))
    if cls.islower():
        return made(f"torch.ops._C.{cls}", torch.zeros(y.shape, dtype=BRAIN), x, outputs={"inplace.input.0": y})
    return made(cls, inputs={"x": x}, outputs={"output.0": y}, **more)


@sample("limits are left out")
def clamped_swiglu(d: Draw, fault: str) -> Made:
    """gpt-oss: gate and up are cut at 7; y = gate * sigmoid(1.702 gate) * (up + 1)."""
    x, most = d(12, 64, scale=5), np.inf if fault else 7.0
    gate, up = wide(x)[:, ::2].clip(max=most), wide(x)[:, 1::2].clip(-most, most)
    return made("SwigluOAIAndMul", inputs={"x": x}, outputs={"output.0": _quick(gate) * (up + 1)})


@declined
def gelu_without_its_approximation() -> Iterator[tuple[Call, str]]:
    yield Call("a", "GeluAndMul", {"x": torch.ones(2, 4)}, outputs={"output.0": torch.ones(2, 2)}), "approximate"


# --- products and tables --------------------------------------------------------------------------------------------

PRODUCTS = ("ColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "Linear", "GateLinear", "op",
            "aten.mm.default")  # fmt: skip


@sample("the last two inputs are left out", "the bias is left out", variants=[{"name": n} for n in PRODUCTS])
def products(d: Draw, fault: str, name: str) -> Made | None:
    if name.startswith("aten") and "bias" in fault:
        return None
    x, w, b = d(12, 96), d(40, 96), d(40)
    used = slice(0, 94) if "inputs" in fault else slice(None)
    y = wide(x)[:, used] @ wide(w)[:, used].T
    if name.startswith("aten"):
        return made(name, x, w.T, outputs={"output.0": y})
    y = y if "bias" in fault else y + wide(b)
    if name == "op":
        out = torch.zeros(y.shape, dtype=BRAIN)
        return made("torch.ops._C.onednn_mm", out, x, b, 7, params={"weight": w}, outputs={"inplace.input.0": y})
    return made(name, inputs={"x": x}, params={"weight": w, "bias": b}, outputs={"output.0": y})


@sample("one rank's share is added twice", variants=[{"reduced": r} for r in (True, False)])
def row_parallel(d: Draw, fault: str, reduced: bool) -> Made:
    """Over two ranks, of which the first adds the bias; or this rank's share alone."""
    x, w, b = d(12, 32), d(24, 32), d(24)
    halves = zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
    ranks = [Call("l", "RowParallelLinear", {"input_": p}, params={"weight": q, "bias": b},
                  attrs={"tp_size": 2, "tp_rank": k}) for k, (p, q) in enumerate(halves)]  # fmt: skip
    parts = [wide(r.inputs["input_"]) @ wide(r.params["weight"]).T for r in ranks]
    y = parts[0] + parts[0 if fault else 1] + wide(b) if reduced else parts[1] * (2 if fault else 1)
    attrs = {"tp_size": 2, "tp_rank": 1 - reduced, "reduce_results": reduced}
    return made("RowParallelLinear", inputs=ranks[1 - reduced].inputs, params=ranks[1 - reduced].params, attrs=attrs,
                extra={"ranks": ranks}, outputs={"output.0": y})  # fmt: skip


@declined
def products_that_cannot_be_made() -> Iterator[tuple[Call, str]]:
    call = row_parallel(Draw(0), "", True).call
    yield replace(call, extra={"ranks": call.extra["ranks"][:1]}), "not all of them"
    yield replace(call, cls="Linear", params={"weight": torch.ones(5, 7)}, attrs={}), "does not fit"


@sample("the cap is left out", dtypes=(SINGLE,))
def logits(d: Draw, fault: str) -> Made:
    z = d(2, 70, scale=30)
    y = 0.5 * (wide(z) if fault else 30 * np.tanh(wide(z) / 30))
    return made("LogitsProcessor", attrs={"scale": 0.5}, config={"final_logit_softcapping": 30.0}, extra={"lm_head": z},
                outputs={"output.0": y}, dtype=SINGLE)  # fmt: skip


@sample("one token has the next row", variants=[{"ranks": r} for r in (1, 2)])
def embedding(d: Draw, fault: str, ranks: int) -> Made:
    table, ids = d(50, 16), torch.tensor([3, 9, 0, 44])
    calls = [Call("t", "VocabParallelEmbedding", params={"weight": t}, attrs={"tp_rank": k})
             for k, t in enumerate(table.chunk(ranks))]  # fmt: skip
    more = {"params": {"weight": table}} if ranks == 1 else {"attrs": {"tp_size": 2}, "extra": {"ranks": calls}}
    at = ids + (ids == 9) if fault else ids
    return made("VocabParallelEmbedding", inputs={"input_": ids}, outputs={"output.0": wide(table)[at]}, **more)


@sample("the rows of padding are counted")
def learned_positions(d: Draw, fault: str) -> Made:
    table, at = d(50, 16), torch.tensor([3, 9, 0, 44])
    return made("OPTLearnedPositionalEmbedding", inputs={"positions": at}, params={"weight": table},
                outputs={"output.0": wide(table)[at + (0 if fault else 2)]})  # fmt: skip


@declined
def ids_outside_of_the_table() -> Iterator[tuple[Call, str]]:
    call = embedding(Draw(0), "", 1).call
    yield replace(call, inputs={"input_": torch.tensor([50])}), "outside"


# --- adapters -------------------------------------------------------------------------------------------------------

PARTS = {"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}, "gate_up_proj": {"gate_proj": 48, "up_proj": 48},
         "down_proj": {"": 80}}  # fmt: skip


@sample("one row takes the other slot", "scaled twice", "a part left out", "no adapter", seeds=2,
        variants=[{"last": k} for k in PARTS])  # fmt: skip
def adapters(d: Draw, fault: str, last: str) -> Made:
    """Rows of two adapters, of one that has nothing for this layer, and of none: x W' + b + s (x A') B', row by row.
    The second adapter leaves the first part alone."""
    parts, weights = PARTS[last], {"a": {}, "b": {}, "elsewhere": {}}
    for name, scaling in (("a", 2.0), ("b", 0.3)):
        for k, (part, size) in enumerate(parts.items()):
            if name == "a" or k or len(parts) == 1:
                weights[name][part] = {"lora_a": d(8, 96, scale=0.1), "lora_b": d(size, 8, scale=0.3),
                                       "scaling": torch.tensor(scaling)}  # fmt: skip
    of_row = ("a", *d.rng.choice(["a", "b", "", "elsewhere"], 23).tolist())
    x, w, b = d(24, 96), d(sum(parts.values()), 96, scale=0.1), d(sum(parts.values()))
    used = ({"one row takes the other slot": "b", "no adapter": ""}.get(fault, "a"), *of_row[1:])
    y = wide(x) @ wide(w).T + wide(b)
    for i, name in enumerate(used):
        begin = 0
        for part, size in parts.items():
            f = weights[name].get(part) if name else None
            if f and not (fault == "a part left out" and name == "a" and part == list(parts)[-1]):
                s = float(f["scaling"]) * (2 if fault == "scaled twice" and name == "a" else 1)
                y[i, begin : begin + size] += s * (wide(f["lora_b"]) @ (wide(f["lora_a"]) @ wide(x)[i]))
            begin += size
    found = made("MergedQKVParallelLinearWithLoRA", inputs={"input_": x}, params={"weight": w, "bias": b},
                 attrs={"tp_size": 1}, extra={"adapters": RowAdapters(of_row, weights)},
                 outputs={"output.0": y})  # fmt: skip
    return replace(found, call=replace(found.call, name=f"model.layers.0.{last}"))


@declined
def adapters_that_are_not_known() -> Iterator[tuple[Call, str]]:
    call = adapters(Draw(3), "", "gate_up_proj").call
    weights = call.extra["adapters"].weights
    yield replace(call, extra={}), NO_ADAPTER_KNOWN
    yield replace(call, attrs={"tp_size": 2}), "cut over ranks"
    yield replace(call, extra={"adapters": RowAdapters(("a",) * 24, weights, frozenset({"a"}))}), RELOADED
    yield replace(call, extra={"adapters": RowAdapters(("never seen",) * 24, weights)}), NOT_HERE
    for change in ({"lora_b": torch.ones(200, 8)}, {"lora_a": torch.ones(8, 5)}):
        other = {"a": {**weights["a"], "up_proj": {**weights["a"]["up_proj"], **change}}}
        yield replace(call, extra={"adapters": RowAdapters(("a",) * 24, other)}), "fit"
    unknown = {"a": {"some_proj": weights["a"]["up_proj"]}}
    yield replace(call, extra={"adapters": RowAdapters(("a",) * 24, unknown)}), "some_proj"


# --- rotary embeddings ----------------------------------------------------------------------------------------------


def turned(x: Array, angle: Array, neox: bool = True) -> Array:
    """x [rows, heads, d], angle [rows, pairs]: what lies behind the pairs stays. As complex numbers."""
    n, y = 2 * angle.shape[1], x.copy()
    a, b = (slice(0, n // 2), slice(n // 2, n)) if neox else (slice(0, n, 2), slice(1, n, 2))
    z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)[:, None]
    y[..., a], y[..., b] = z.real, z.imag
    return y


@sample("the last token is at the position before", "pairs of another kind",
        variants=[{"neox": n, "part": p} for n in (True, False) for p in (16, 8)])  # fmt: skip
def rotary(d: Draw, fault: str, neox: bool, part: int) -> Made:
    at, q, k = torch.tensor([0, 1, 7, 9, 10, 30]), d(6, 2, 16), d(6, 1, 16)
    places = wide(at) - (np.arange(6) == 5) * (fault == "the last token is at the position before")
    angle = places[:, None] * 1e4 ** -(np.arange(0, part, 2) / part)
    y, z = (turned(wide(t), angle, neox != (fault == "pairs of another kind")).reshape(6, -1) for t in (q, k))
    attrs = {"head_size": 16, "rotary_dim": part, "base": 1e4, "is_neox_style": neox, "max_position_embeddings": 64}
    return made("RotaryEmbedding", inputs={"positions": at, "query": q.flatten(1), "key": k.flatten(1)}, attrs=attrs,
                outputs={"output.0": y, "output.1": z, "inplace.query": y})  # fmt: skip


@sample("another position", "a head late", "the sign is lost",
        variants=[{"name": n, "neox": x, "both": b} for n, x, b in (
            ("_C.rotary_embedding", True, True), ("_C.rotary_embedding", True, False),
            ("vllm.flashinfer_rotary_embedding", True, True), ("vllm.flashinfer_rotary_embedding", False, True),
        )])  # fmt: skip
def rotary_operator_of_whole_heads(d: Draw, fault: str, name: str, neox: bool, both: bool) -> Made | None:
    """Queries and keys in place."""
    if fault == "a head late" and not both:
        return None
    q, k, angle, places = d(3, 32), d(3, 16), d(16, 4, dtype=SINGLE), torch.tensor([0, 3, 7])
    used = wide(angle)[places.roll(1) if fault == "another position" else places] * (-1 if "sign" in fault else 1)
    y, z = (turned(wide(t).reshape(3, -1, 8), used, neox).reshape(3, -1) for t in (q, k))
    cache = torch.cat((angle.double().cos(), angle.double().sin()), 1)
    z = np.roll(z, 8, 1) if fault == "a head late" else z
    return made(f"torch.ops.{name}", places, q, k if both else None, 8, cache, neox,
                outputs={"inplace.input.1": y} | ({"inplace.input.2": z} if both else {}))  # fmt: skip


@sample("another position", variants=[{"offset": o, "inverse": i} for o, i in ((0, False), (2, False), (0, True))])
def rotary_operator(d: Draw, fault: str, offset: int, inverse: bool) -> Made:
    """Four of eight channels, from ``offset`` on, by a table of cosines and sines."""
    x, places = d(4, 8), torch.tensor([5, 0, 3, 1])
    angle = d(6, 2, dtype=SINGLE)
    cache = torch.cat((angle.cos(), angle.sin()), 1)
    used = places.roll(1) if fault else places
    cos, sin = wide(cache)[used, :2], wide(cache)[used, 2:] * (-1 if inverse else 1)
    y, (a, b) = wide(x).copy(), np.split(wide(x)[:, offset : offset + 4], 2, 1)
    y[:, offset : offset + 4] = np.concatenate((a * cos - b * sin, b * cos + a * sin), 1)
    return made("torch.ops._C.rotary_embedding", places, x, None, 8, cache, True, offset, inverse,
                outputs={"inplace.input.1": y})  # fmt: skip


@sample("the sign is lost")
def rotary_by_given_cosines(d: Draw, fault: str) -> Made:
    x, angle = d(1, 5, 2, 8), d(5, 4, dtype=DOUBLE)
    y = turned(wide(x)[0], wide(angle) * (-1 if fault else 1))[None]
    inputs = {"x": x, "cos": angle.cos(), "sin": angle.sin()}
    return made("ApplyRotaryEmb", inputs=inputs, attrs={"is_neox_style": True}, outputs={"output.0": y})


@declined
def unknown_scaling() -> Iterator[tuple[Call, str]]:
    inputs = {"positions": torch.tensor([1]), "query": torch.ones(1, 4)}
    for cls, why in (("Llama3RotaryEmbedding", "neither recorded"), ("DualChunkRotaryEmbedding", "not known")):
        yield Call("r", cls, inputs, attrs={"head_size": 4, "rotary_dim": 4, "base": 10.0}), why


# --- attention ------------------------------------------------------------------------------------------------------

ATTENTION = ("a softmax scale 2 % too large", "window off by one", "heads interleaved", "the next request's keys")


SIZES = ((4, 2, 0), (4, 4, 5), (4, 1, 0), (6, 3, 1))


@sample(*ATTENTION, variants=[*({"heads": h, "kv": k, "window": w} for h, k, w in SIZES),
                              *({"heads": 4, "kv": 2, "window": 0, "more": m} for m in ("cap", "sinks", "slopes"))])
def attention(d: Draw, fault: str, heads: int, kv: int, window: int, more: str = "") -> Made | None:
    """Two requests: positions 20 to 23 of one, and all 12 of another. more: what a module has besides."""
    if (fault == "window off by one") > (window > 0) or (fault == "heads interleaved" and kv in (1, heads)):
        return None
    if (fault == "a softmax scale 2 % too large" and window) or (fault and more):
        return None
    width, own, total = 16, (4, 12), (24, 12)
    q = d(16, heads, width, scale=3)
    sides = [[d(m, kv, width) for m in total] for _ in range(2)]
    sinks, slopes = d(heads) if more == "sinks" else None, [0.5, 0.25, 2.0, 1.0] if more == "slopes" else []
    how = {"cap": 5.0 if more == "cap" else 0.0, "sinks": None if sinks is None else wide(sinks)}
    out, runs, begin = [], [], 0
    for r, (n, m) in enumerate(zip(own, total, strict=True)):
        k, v = (wide(side[1 if fault == "the next request's keys" else r]) for side in sides)
        held = {name: side[r] for name, side in zip(("key", "value"), sides, strict=True)}
        runs.append(CachedRun(torch.arange(begin, begin + n), torch.arange(m - n, m), held))
        k, v = (t[:, np.arange(heads) % kv] for t in (k, v)) if fault == "heads interleaved" else (k, v)
        hidden = lower(n, len(k), window=window + (fault == "window off by one") if window else 0)
        hidden = hidden + np.array(slopes)[:, None, None] * np.arange(len(k)) if slopes else hidden
        scale = 0.255 if fault.startswith("a softmax") else 0.25
        out.append(attend(wide(q[begin : begin + n]), k, v, scale, hidden, **how))
        begin += n
    y = np.concatenate(out).reshape(16, -1)
    new = (torch.cat([t[m - n :] for t, n, m in zip(side, own, total, strict=True)]).flatten(1) for side in sides)
    inputs = dict(zip(("query", "key", "value"), (q.flatten(1), *new), strict=True))
    attrs = {"num_heads": heads, "num_kv_heads": kv, "head_size": width, "scale": 0.25}
    attrs |= {"sliding_window": [window - 1, -1] if kv == 4 else window} if window else {}
    attrs |= {"logits_soft_cap": 5.0} if more == "cap" else {"impl.alibi_slopes": slopes} if slopes else {}
    return made("Attention", inputs=inputs, attrs=attrs, params={} if sinks is None else {"sinks": sinks},
                extra={"cache": StoredCache(runs, "")}, outputs={"output.0": y})  # fmt: skip


@sample("runs see each other")
def encoder_attention(d: Draw, fault: str) -> Made:
    q, k, v = d(1, 7, 2, 16), d(1, 7, 2, 16), d(1, 7, 2, 16)
    runs = (slice(0, 7),) if fault else (slice(0, 3), slice(3, 7))
    y = np.concatenate([attend(*(wide(t)[0, run] for t in (q, k, v)), 0.5) for run in runs])[None]
    return made("MMEncoderAttention", inputs={"query": q, "key": k, "value": v, "cu_seqlens": torch.tensor([0, 3, 7])},
                attrs={"num_heads": 2, "num_kv_heads": 2, "head_size": 16, "scale": 0.5},
                outputs={"output.0": y})  # fmt: skip


@declined
def encoders_whose_runs_leave_rows_out() -> Iterator[tuple[Call, str]]:
    call = encoder_attention(Draw(0), "").call
    yield replace(call, inputs={**call.inputs, "cu_seqlens": torch.tensor([0, 3])}), "not all rows"


@sample("the rotated part is left out", variants=[{"absorbed": a} for a in (True, False)])
def latent_attention(d: Draw, fault: str, absorbed: bool) -> Made:
    """Explicit keys and values from kv_b_proj."""
    heads, nope, rope, latent, width, n = 2, 6, 4, 10, 5, 8
    w, q, c, pe = d(heads * (nope + width), latent), d(n, heads, nope + rope), d(n, latent), d(n, 1, rope)
    kv = (wide(c) @ wide(w).T).reshape(n, heads, nope + width)
    k = np.concatenate((kv[..., :nope], wide(pe).repeat(heads, 1) * (not fault)), -1)
    y = attend(wide(q), k, kv[..., nope:], 0.2, lower(n, n)).reshape(n, -1)
    parts, rows = w.reshape(heads, nope + width, latent), torch.arange(n)
    params = {"W_UK_T": parts[:, :nope], "W_UV": parts[:, nope:].transpose(1, 2)} if absorbed else {}
    cache = StoredCache([CachedRun(rows, rows, {"kv_c_normed": c, "k_pe": pe})], "")
    return made("MLAAttention", inputs={"q": q, "kv_c_normed": c, "k_pe": pe}, params=params,
                attrs={"num_heads": heads, "scale": 0.2}, extra={"cache": cache, "kv_b_proj": w},
                outputs={"output.0": y})  # fmt: skip


# --- experts --------------------------------------------------------------------------------------------------------


def _experts(x: Array, w13: Array, w2: Array, ids: Array, weights: Array) -> Array:
    """Token by token, as the paper writes it."""
    out, half = np.zeros(x.shape), w13.shape[1] // 2
    for t in range(len(x)):
        for w, e in zip(weights[t], ids[t], strict=True):
            out[t] += w * (w2[e] @ (silu(w13[e, :half] @ x[t]) * (w13[e, half:] @ x[t])))
    return out


def experts_call(d: Draw, **more: Any) -> Made:
    """Three experts, two of each token."""
    x, w13, w2 = d(12, 32), d(3, 48, 32), d(3, 32, 24)
    ids, weights = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1]] * 3), d(12, 2, dtype=SINGLE).abs()
    y = _experts(*(wide(t) for t in (x, w13, w2)), ids.numpy(), wide(weights))
    found = made("UnquantizedFusedMoEMethod", inputs={"x": x, "topk_weights": weights, "topk_ids": ids},
                 params={"w13_weight": w13, "w2_weight": w2}, outputs={"output.0": y},
                 **{"config": {"hidden_act": "silu"}, **more})  # fmt: skip
    return replace(found, call=replace(found.call, name="m.experts.routed_experts.quant_method"))


@sample("one expert's output is 3 % too large")
def experts(d: Draw, fault: str) -> Made:
    found = experts_call(d)
    if not fault:
        return found
    x, weights, ids = (wide(t) for t in found.call.inputs.values())
    sides = (wide(t) for t in found.call.params.values())
    y = found.exact["output.0"] + _experts(x, *sides, ids.astype(int), 0.03 * weights * (ids == 1))
    return replace(found, call=replace(found.call, outputs={"output.0": torch.from_numpy(y).bfloat16()}))


@declined
def experts_that_are_not_understood() -> Iterator[tuple[Call, str]]:
    call = experts_call(Draw(0)).call
    for config in ({}, {"hidden_act": "relu"}):
        yield replace(call, config=config), "neither recorded"
    yield replace(call, params={**call.params, "w13_bias": torch.ones(3, 48)}), "biases"
    yield replace(call, params={**call.params, "w2_weight": torch.ones(3, 24, 32)}), "unknown form"


@sample(
    "the third expert for the second", "weights of the other kind", variants=[{"renormalize": r} for r in (True, False)]
)
def experts_that_a_kernel_chooses(d: Draw, fault: str, renormalize: bool) -> Made:
    """By softmax of the router's logits; a token whose second expert is a tie has no reference."""
    x, w13, w2, z = d(12, 32), d(4, 48, 32, scale=0.2), d(4, 32, 24, scale=0.2), d(12, 4)
    z[3] = torch.tensor([2.0, 1.0, 1.0, 0.0])
    p, order = softmax(wide(z)), np.argsort(-wide(z), -1, kind="stable")
    weights = np.take_along_axis(p, order[:, :2], -1)
    ids = order[:, [0, 2 if fault == "the third expert for the second" else 1]]
    if renormalize != (fault == "weights of the other kind"):
        weights = weights / weights.sum(-1, keepdims=True)
    y = _experts(*(wide(t) for t in (x, w13, w2)), ids, weights)
    found = made("UnquantizedFusedMoEMethod", inputs={"x": x, "router_logits": z}, outputs={"output.0": y},
                 params={"w13_weight": w13, "w2_weight": w2}, config={"hidden_act": "silu", "model_type": "qwen2_moe"},
                 parent={"renormalize": renormalize, "top_k": 2, "scoring_func": "softmax",
                         "routed_scaling_factor": 1.0})  # fmt: skip
    return replace(found, call=replace(found.call, name="m.experts.quant_method"))


@declined
def choices_that_were_not_recorded() -> Iterator[tuple[Call, str]]:
    call = experts_that_a_kernel_chooses(Draw(0), "", True).call
    config = {**call.config, "num_experts_per_tok": 2}
    yield (
        replace(call, parent={"routed_scaling_factor": 2.5}, config=config),
        "where the routed scaling factor is applied",
    )
    yield replace(call, config={"hidden_act": "silu", "model_type": "unheard_of"}, parent={}), "was not recorded"
    yield replace(call, inputs={**call.inputs, "router_logits": torch.ones(12, 5)}), "was not recorded"


@sample("weights are not renormalised")
def router_weights(d: Draw, fault: str) -> Made:
    """As the model says: of mixtral softmax, the two best, renormalised."""
    z, x = d(16, 6, dtype=SINGLE), d(16, 8)
    p, ids = softmax(wide(z)), torch.topk(z, 2).indices
    weights = np.take_along_axis(p, ids.numpy(), -1)
    weights = torch.from_numpy(weights if fault else weights / weights.sum(-1, keepdims=True)).float()
    found = made("UnquantizedFusedMoEMethod", inputs={"x": x, "topk_weights": weights, "topk_ids": ids},
                 params={"w13_weight": d(6, 12, 8), "w2_weight": d(6, 8, 6)}, outputs={"input.topk_weights": weights},
                 config={"hidden_act": "silu", "model_type": "mixtral"}, extra={"router_logits": z})  # fmt: skip
    return replace(found, call=replace(found.call, name="m.experts"))


# --- pictures -------------------------------------------------------------------------------------------------------


@sample("one channel without its bias", variants=[{"dims": n} for n in (2, 3)])
def patches(d: Draw, fault: str, dims: int) -> Made:
    kernel = (2, 3, 4)[-dims:]
    x, w, b = d(5, 3, *(2 * k for k in kernel)), d(16, 3, *kernel), d(16)
    y = np.broadcast_to(wide(b).reshape(1, 16, *[1] * dims), (5, 16, *[2] * dims)).copy()
    if fault:
        y[:, 7] = 0
    for at in np.ndindex(*[2] * dims):
        block = (slice(None), slice(None), *(slice(i * k, i * k + k) for i, k in zip(at, kernel, strict=True)))
        y[(slice(None), slice(None), *at)] += wide(x)[block].reshape(5, -1) @ wide(w).reshape(16, -1).T
    return made(f"Conv{dims}dLayer", inputs={"x": x}, params={"weight": w, "bias": b}, outputs={"output.0": y})


@declined
def patches_of_another_stride() -> Iterator[tuple[Call, str]]:
    call = patches(Draw(0), "", 2).call
    yield replace(call, inputs={"x": call.inputs["x"][:, :, 1:]}), "stride"


@sample("weight and bias exchanged", dtypes=(SINGLE,))
def pixels(d: Draw, fault: str) -> Made:
    x, w, b = d.ints(0, 256, 3, 8, dtype=torch.uint8), d(2), d(2)
    w, b = (b, w) if fault else (w, b)
    y = wide(x).reshape(3, 2, 4) * wide(w)[:, None] + wide(b)[:, None]
    w, b = (b, w) if fault else (w, b)
    return made("FusedMMInputNorm", inputs={"pixel_values": x}, params={"weight": w, "bias": b},
                outputs={"output.0": y.reshape(3, 8)}, dtype=SINGLE)  # fmt: skip


# --- an engine's own bookkeeping ------------------------------------------------------------------------------------


@sample("the second best")
def greedy_choice(d: Draw, fault: str) -> Made:
    x = d(12, 64)
    best = x.topk(2).indices[:, bool(fault) * 1]
    return made("torch.ops._C.greedy_argmax", x, outputs={"output.0": best})


@sample("a slot late")
def slots_of_positions(d: Draw, fault: str) -> Made:
    table, starts = torch.tensor([[5, 7], [2, 9]], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    slots = torch.tensor([5 * 4 + 3, 7 * 4 + 0, 7 * 4 + 1 + bool(fault), 9 * 4 + 2, -1])
    return made("torch.ops._C.compute_slot_mapping_kernel_impl", starts, torch.tensor([3, 4, 5, 6]), table,
                torch.full((5,), -1), 4, outputs={"inplace.input.3": slots})  # fmt: skip


@sample("exponents of a base of 2", variants=[{"name": n} for n in ("Softmax", "LogSoftmax")], dtypes=(SINGLE,))
def probabilities(d: Draw, fault: str, name: str) -> Made:
    x = d(5, 20)
    y = softmax(wide(x) * (np.log(2) if fault else 1))
    return made(name, inputs={"input": x}, outputs={"output.0": y if name == "Softmax" else np.log(y)}, dtype=SINGLE)


GATED = [{"first": f, "groups": g, "mamba": m} for f, g, m in (
    (True, 1, False), (False, 1, False), (True, 2, True), (True, 4, False), (False, 4, False))]  # fmt: skip


@sample("the gate at the other side", "the gate is left out", variants=GATED, dtypes=(BRAIN, HALF))
def gated_norm(d: Draw, fault: str, first: bool, groups: int, mamba: bool) -> Made:
    """first: the gate, then the norm; groups: over the channels of each; mamba: Mamba 2's own."""
    x, z, w = d(12, 64), d(12, 64), d(64)
    gate = 1.0 if fault == "the gate is left out" else silu(wide(z))
    ahead = first != (fault == "the gate at the other side")
    shape = (12, groups, -1)
    y = rms((wide(x) * (gate if ahead else 1.0)).reshape(shape), 1.0, 1e-5).reshape(12, 64) * wide(w)
    y = y if ahead else y * gate
    attrs = {"variance_epsilon": 1e-5, **({} if mamba else {"norm_before_gate": not first, "eps": 1e-5})}
    attrs |= {"group_size": 64 // groups} if groups > 1 and not mamba else {}
    return made("Mixer2RMSNormGated" if mamba else "RMSNormGated", inputs={"x": x, "gate" if mamba else "z": z},
                params={"weight": w}, attrs=attrs, config={"n_groups": groups} if mamba else {},
                outputs={"output.0": y}, dtype=d.dtype)  # fmt: skip


@sample("runs see each other")
def encoder_operator(d: Draw, fault: str) -> Made:
    call = encoder_attention(d, fault)
    q, k, v, ends = call.call.inputs.values()
    outputs = {"output.0": call.exact["output.0"]}
    return made("torch.ops.vllm.torch_sdpa_wrapper", q, k, v, 0.5, ends, outputs=outputs)


@sample("one expert's output is 3 % too large")
def experts_of_the_cpu(d: Draw, fault: str) -> Made:
    call = experts(d, fault).call
    x, weights, ids = call.inputs.values()
    w13, w2 = call.params.values()
    return made("torch.ops._C.cpu_fused_moe", torch.zeros_like(x), x, w13, w2, None, None, weights, ids, False, "silu",
                params=call.params, outputs={"inplace.input.0": call.outputs["output.0"]})  # fmt: skip
