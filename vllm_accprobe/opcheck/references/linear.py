"""Weight matrices: products with them, with and without LoRA adapters, and rows looked up in them.

Formula: y = x Wᵀ + b, whatever vLLM calls the module; with an adapter y = x Wᵀ + b + s (x Aᵀ) Bᵀ, A, B and s those of
each row's request [Hu et al., arXiv 2106.09685, section 4.1]. Noise: float32 sums of K products, sqrt(K) roundings of
size 2**-24 of |x| |W| [Higham and Mary, SIAM J. Sci. Comput. 41 (2019) A2815, theorem 2.4; a partial sum is at most |x|
|W|, so that this is the standard error at most]. Bound: gamma_K |x| |W| [Higham, ASNA, (3.5)]. A row-parallel module
whose ranks' partial sums are added afterwards gets them from all ranks (``extra["ranks"]``). A rank of a sharded table
gives zeros for tokens that are not its own, and the ranks' results are added.
Elsewhere: quantised weights (quantised.py), which row has which adapter (calls/neighbours.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, device_kernel, reference
from vllm_accprobe.opcheck.references.activations import soft_cap
from vllm_accprobe.opcheck.references.parts import Arguments, param_if, ranks_of, reshaped, weight_here
from vllm_accprobe.opcheck.references.quantised import activation_noise, activation_step, cut_off, weight_of, widened
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, SUM, added, gamma, rounded, subnormal, summed

INPUT = ("input_", "x", "input", "hidden_states", "0")
_BLOCK = 8
"""Chosen: rows of whole blocks. Measured: MKL on AVX-512 takes 4 at a time, of float64 and of float32."""
_COARSE = 2.0**-12
"""Units of 16-bit outputs lie above this, that of float32 below."""
_TINY = 2.0**-126
"""Least normal number of float32: a row of zeros has codes of zero."""


def input_of(call: Call) -> Any:
    """What is multiplied, in its own dtype. Raises Declined."""
    return call.tensor(*INPUT, *(["1"] if call.cls == "ParallelLMHead" else []))  # apply(layer, x)


def product(x: Any, weight: Any, x_noise: Any | None = None, sizes: Any | None = None) -> Expected:
    """x @ weight.T in float64 with the noise of a float32 sum and of x; sizes: float32, |weight|, where known."""
    sizes = weight.abs().float() if sizes is None else sizes
    size = in_blocks(x.abs().float(), sizes.T).double()  # how large an error may be need not be known exactly
    if not bool(torch.isfinite(size).all()):
        size = x.abs() @ weight.abs().T
    if x_noise is not None:  # a step's size follows from the kernel's own scale: no bound
        noise = SUM * x.shape[-1] ** 0.5 * size
        return Expected(x @ weight.T, combined(noise, ((x_noise * x_noise) @ (weight * weight).T).sqrt()))
    return _summed(in_blocks(x, weight.T), size, x.shape[-1])


def by_batch(left: Any, right: Any) -> Expected:
    """A B of each batch: [batch, m, k] and [batch, k, n], float64."""
    parts = [product(a, b.T) for a, b in zip(left, right, strict=True)]
    value, noise, bound = (torch.stack([getattr(p, n) for p in parts]) for n in ("value", "noise", "bound"))
    return Expected(value, noise, bound=bound)


def _summed(value: Any, size: Any, terms: int) -> Expected:
    return Expected(value, SUM * terms**0.5 * size, bound=gamma(terms + 1) * size)


def by_columns(x: Any, weight: Any, unit: float) -> Expected:
    """`product` with a weight that is too large to be widened whole (quantised.WIDE). unit: of the output. Where that
    is one of 16 bits, |x| |W| is taken to be as large as the norms' product [Cauchy and Schwarz], 1.6 times too large
    for normal numbers: what sums leave is far below the last rounding, and a third of the time is saved."""
    flat = x.reshape(-1, x.shape[-1])
    rest = -len(flat) % _BLOCK
    flat = torch.cat((flat, flat.new_zeros(rest, flat.shape[1]))) if rest else flat
    coarse = unit >= _COARSE
    norms, right = flat.norm(dim=1), flat.T.contiguous()
    sizes = right.abs().float()
    value, size = (torch.empty(len(weight), len(flat), dtype=torch.float64) for _ in range(2))
    for some, part in widened(weight):  # on the left: twice as fast as on the right of a few rows
        torch.mm(part, right, out=value[some])
        size[some] = torch.outer(part.norm(dim=1), norms) if coarse else part.abs_().float() @ sizes
    if not bool(torch.isfinite(size).all()):
        return product(x, weight.double())
    shape = *x.shape[:-1], len(weight)
    value, size = (t.T[: len(flat) - rest].reshape(shape) for t in (value, size))
    return _summed(value, size, x.shape[-1])


def in_blocks(x: Any, right: Any) -> Any:
    """x @ right, whose rows come out the same to the bit whoever else is in the batch, where x is filled up with rows
    of zeros to what a library multiplies at a time: the rest would be added up in another order."""
    rest = -math.prod(x.shape[:-1]) % _BLOCK
    if not rest or x.dim() < 2 or right.dim() != 2:
        return x @ right
    flat = x.reshape(-1, x.shape[-1])
    y = torch.cat((flat, flat.new_zeros(rest, flat.shape[1]))) @ right
    return y[: len(flat)].reshape(*x.shape[:-1], right.shape[1])


def partial(call: Call) -> Expected:
    """This rank's product, without a bias."""
    x, weight = input_of(call).double(), weight_of(call)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Declined(f"weight {list(weight.shape)} does not fit an input of width {x.shape[-1]}")
    if weight.dtype != torch.float64:
        return by_columns(x, weight, call.unit)
    return product(x, weight, activation_noise(call, x), call.once(product, lambda: weight.abs().float()))


def _with_cause(call: Call, y: Expected) -> Expected:
    """y with what there is to say of a W8A8 product that ends in 16 bits: the kernel turned x into codes itself, each
    row by its largest number, or all by ``input_scale``; another way is not recognised."""
    weight, scale = call.params.get("weight"), param_if(call, "weight_scale")
    mine = call.outputs.get("output.0")
    if mine is None or weight is None or weight.dtype != torch.int8 or scale is None:
        return y
    x = input_of(call).double().reshape(-1, weight.shape[1])
    if scale.numel() not in (1, len(weight)) or y.value.shape[-1] != len(weight):
        return y
    step = activation_step(call, x).expand(len(x), 1).reshape(-1)
    codes = (x / step.clamp(min=_TINY).unsqueeze(1)).round().clamp(-128, 127)
    right = scale.reshape(-1).expand(len(weight))
    coded = y.value.reshape(len(x), -1) + (codes * step.unsqueeze(1) - x) @ (weight.double() * right.unsqueeze(1)).T
    note = cut_off(codes.to(torch.int8), weight.T, step, right, coded, mine.reshape(len(x), -1))
    return replace(y, note=note) if note else y


def _bias(call: Call) -> Any | None:
    return None if call.attr("skip_bias_add", default=False) else param_if(call, "bias")


def biased(y: Expected, bias: Any | None, unit: float | None = None) -> Expected:
    """y + bias, with y rounded before to ``unit``, None for not at all; None: y."""
    if bias is None:
        return y
    return replace(y if unit is None else rounded(y, unit), value=y.value + bias)


@reference(
    "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "GateLinear",
    "MergedReplicatedLinear", "QKVCrossParallelLinear", "*ParallelLinear", "Linear", "*Linear", "ParallelLMHead",
    by_rows=True,
)  # fmt: skip
def column(call: Call) -> dict[str, Expected]:
    """Its columns, on this rank. Some kernels round before they add the bias, so noise allows it."""
    if call.attr("gather_output", default=False) and int(call.attr("tp_size", default=1)) > 1:
        raise Declined("gathers its output over ranks")
    found = {"output.0": _with_cause(call, biased(partial(call), _bias(call), call.unit))}
    if call.attr("skip_bias_add", default=False) and "bias" in call.params:
        found["output.1"] = Expected(call.param("bias"))
    return found


@reference("RowParallelLinear", by_rows=True)
def row(call: Call) -> dict[str, Expected]:
    """This rank's partial sum, or with reduce_results the sum over the ranks (`summed`)."""
    decline_if(call.extra.get("apart"), "whether it adds up over ranks was not recorded")
    size = int(call.attr("tp_size", default=1))
    if size == 1 or not call.attr("reduce_results", default=True):
        bias = _bias(call) if int(call.attr("tp_rank", default=0)) == 0 else None
        return {"output.0": _with_cause(call, biased(partial(call), bias, call.unit))}
    parts = (biased(partial(r), _bias(r) if r.attr("tp_rank", default=0) == 0 else None) for r in ranks_of(call, size))
    return {"output.0": summed(parts, call.unit)}


@reference("torch.ops._C.onednn_mm", "torch.ops._C.weight_packed_linear")
def packed_product(call: Call) -> dict[str, Expected]:
    """onednn_mm (out, input, bias, handle), weight_packed_linear (out, input, packed, bias, ...): a module's weight."""
    f = Arguments(call, "out input bias" if "onednn" in call.cls else "out input packed bias")
    (x,), weight = f.wide("input"), weight_of(call).double()
    why = "the weight of the module that called it does not fit"
    decline_if(weight.dim() != 2 or weight.shape[1] != x.shape[-1], why)
    y = biased(product(x, weight), f.wide_or_none("bias"), call.unit)
    decline_if(y.value.numel() != f["out"].numel(), why)
    return {"inplace.input.0": reshaped(y, f["out"].shape)}


@reference("LogitsProcessor")
def logits(call: Call) -> Expected:
    """lm_head's own output: scale * z, or cap * tanh(scale * z / cap) [Gemma 2, arXiv 2408.00118]."""
    z = call.extra.get("lm_head")
    if z is None:
        raise Declined("the output of lm_head was not captured beside it")
    z = z.double()
    out = call.outputs["output.0"]
    decline_if(z.shape[-1] < out.shape[-1] or z.shape[0] != out.shape[0], "the output of lm_head has another shape")
    z = z[..., : out.shape[-1]]
    cap = float(call.attrs.get("soft_cap") or call.config.get("final_logit_softcapping") or 0.0)
    scale = float(call.attr("scale", default=1.0))
    z = scale * (soft_cap(z, cap) if cap else z)
    size = z.abs()
    if not cap:
        return Expected(z, bound=gamma(2) * size)
    # z / cap, which tanh hands on at most, and tanh itself; with a scale their product with the cap as well
    more, least = float(scale != 1.0), subnormal(call.unit, (2.0 * cap + 1.0) * abs(scale))
    noise = ROUNDED * (2.0 + more) ** 0.5 * call.unit * size + ROUNDED * least
    return Expected(z, noise, bound=(2.0 + more) * call.unit * size + 2.0 * APPROXIMATE * size + least)


NO_ADAPTER_KNOWN = "which adapter its rows have was not recorded"
NOT_HERE = "its adapter's weights are not in the dump"
RELOADED = "its adapter was loaded again with other weights than the dump's"
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parts of packed layers, as adapters call them and in the order in which vLLM packs them."""


@dataclass(frozen=True)
class RowAdapters:
    """``Call.extra["adapters"]``. of_row: the name of each row's adapter, "" for none, None where it is not known;
    weights: by name and part ("" where the layer is one) lora_a [r, inputs], lora_b [outputs, r] and scaling; no part
    where the adapter has nothing for this layer; reloaded: names of those that were loaded again with other weights."""

    of_row: tuple[str | None, ...]
    weights: Mapping[str, Mapping[str, Mapping[str, Any]]]
    reloaded: frozenset[str] = frozenset()


@reference("*LinearWithLoRA", "*LinearWithShardedLoRA")
def linear_with_adapters(call: Call) -> dict[str, Expected]:
    """All rows, those without an adapter too. x: [rows, inputs]."""
    decline_if(int(call.attr("tp_size", default=1)) > 1, "an adapter that is cut over ranks")
    rows: RowAdapters | None = call.extra.get("adapters")
    y = biased(partial(call), _bias(call), call.unit)
    x = input_of(call).double()
    if rows is None or x.dim() != 2 or len(rows.of_row) != len(x):
        raise Declined(NO_ADAPTER_KNOWN)
    value, noise, bound = (torch.zeros_like(y.value) for _ in range(3))
    known = torch.ones(len(x), dtype=torch.bool)
    reasons = []
    for name in dict.fromkeys(rows.of_row):
        here = torch.tensor([n == name for n in rows.of_row])
        if name == "":
            continue
        why = "" if name in rows.weights else NOT_HERE
        why = NO_ADAPTER_KNOWN if name is None else RELOADED if name in rows.reloaded else why
        if why or name is None:
            known &= ~here
            reasons.append(why)
            continue
        for part, found in rows.weights[name].items():
            decline_if(len(found) < 3, NOT_HERE)
            columns = _columns(call, part, len(found["lora_b"]), y.value.shape[-1])
            delta = _delta(x[here], found, call.unit)
            place = here.nonzero(), columns.unsqueeze(0)
            value[place] = delta.value
            noise[place], bound[place] = delta.noise, delta.bound
    if not bool(known.any()):
        raise Declined(reasons[0])
    whole = added(rounded(y, call.unit), Expected(value, noise, bound=bound))
    return {"output.0": whole if bool(known.all()) else replace(whole, rows=known, reason=reasons[0])}


def _columns(call: Call, part: str, size: int, width: int) -> Any:
    """Where a part's outputs lie among ``width``: the first from the left, the last from the right, and the one between
    before a last of its own size (keys and values are of one width)."""
    names = PACKED.get(call.name.rpartition(".")[2], ())
    if not part:
        start = 0
    elif part in names:
        start = (0, width - size)[names.index(part)] if len(names) == 2 else (0, width - 2 * size, width - size)[
            names.index(part)]  # fmt: skip
    else:
        raise Declined(f"where an adapter's {part} lies in it is not known")
    if start < 0 or start + size > width or (not part and size != width):
        raise Declined(f"an adapter of {size} outputs does not fit {width}")
    return torch.arange(start, start + size)


def _delta(x: Any, found: Mapping[str, Any], unit: float) -> Expected:
    """What the adapter adds to rows ``x`` [n, inputs]: [n, outputs]."""
    a, b, scaling = found["lora_a"].double(), found["lora_b"].double(), float(found["scaling"])
    if a.shape[1] != x.shape[-1] or a.shape[0] != b.shape[1]:
        raise Declined(f"an adapter's weights {list(a.shape)} and {list(b.shape)} do not fit")
    scaled, r = b * scaling, b.shape[1]
    exact = scaling == 0 or math.frexp(abs(scaling))[0] == 0.5
    step = 0.0 if exact else unit  # B is scaled once, in its own dtype
    inner = rounded(product(x, a), unit)
    assert inner.noise is not None
    assert inner.bound is not None
    y, size, at_most = inner.value @ scaled.T, inner.value.abs(), scaled.abs().T
    outer, spread = size @ at_most, (inner.value**2) @ (scaled**2).T
    # a subnormal number of s B, and of what it gives
    least = subnormal(step, size.sum(-1, keepdim=True)) + subnormal(unit)
    noise = combined(((inner.noise**2) @ (scaled**2).T + (ROUNDED * step) ** 2 * spread).sqrt(), SUM * r**0.5 * outer,
                     ROUNDED * (unit * y.abs() + least))  # fmt: skip
    bound = (1 + step) * (1 + unit) * (1 + gamma(r + 1)) * (inner.bound @ at_most)
    return Expected(y, noise, bound=bound + (step + unit + gamma(r + 1)) * (1 + unit) ** 2 * outer + least)


_IDS = ("input_", "input", "input_ids", "position_ids", "0")


def looked_up(ids: Any, table: Any, first: int = 0) -> Any:
    """table[ids - first] in float64, zeros for ids outside; ids int [...], table [n, width]."""
    local = ids.long() - first
    inside = (local >= 0) & (local < table.shape[0])
    table = table if table.element_size() > 1 else table.double()  # torch picks no rows of 8-bit floats
    return table[local.clamp(0, table.shape[0] - 1)].double() * inside.unsqueeze(-1)


@reference("OPTLearnedPositionalEmbedding")
def shifted_embedding(call: Call) -> Expected:
    """The row of each position, and two behind it: OPT's tables begin with two rows of padding."""
    at = call.tensor("positions", "0").long() + int(call.attr("offset", default=2))
    table = call.stored("weight")
    decline_if(int(at.max()) >= table.shape[0] or int(at.min()) < 0, "an id lies outside its table")
    return Expected(looked_up(at, table), bound=torch.zeros((), dtype=torch.float64))


@reference("VocabParallelEmbedding", "Embedding", "*WordEmbedding", "*TextScaledWordEmbedding")
def embedding(call: Call) -> Any:
    if call.maybe(*_IDS) is None and call.maybe("x") is not None:
        return column(call)  # used as the head
    ids = call.tensor(*_IDS)
    decline_if("Scaled" in call.cls, "attribute embed_scale was not recorded")
    decline_if(call.extra.get("apart"), "whether it adds up over ranks was not recorded")
    size = int(call.attr("tp_size", default=1))
    if size == 1:
        table = call.stored("weight")
        decline_if(int(ids.max()) >= table.shape[0] or int(ids.min()) < 0, "an id lies outside its table")
        return Expected(looked_up(ids, table), bound=torch.zeros((), dtype=torch.float64))
    total = torch.zeros((), dtype=torch.float64)
    for other in ranks_of(call, size):
        table = other.stored("weight")
        total = total + looked_up(ids, table, int(other.attr("tp_rank", default=0)) * table.shape[0])
    return Expected(total, bound=torch.zeros((), dtype=torch.float64))  # every rank but one adds zeros


@reference(*(f"{head}.{name}" for head in ("torch.ops.vllm", "vllm") for name in ("all_reduce", "all_gather",
           "reduce_scatter")), "c10d_functional.all_reduce")  # fmt: skip
def collective(call: Call) -> Expected:
    raise Declined("a collective whose other ranks were not captured")


@device_kernel(
    "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "ReplicatedLinear", "GateLinear",
    "MergedReplicatedLinear", "*ParallelLinear", "Linear", "*Linear", "RowParallelLinear", "ParallelLMHead",
)  # fmt: skip
def linear_kernel(call: Call) -> dict[str, Any]:
    size = int(call.attr("tp_size", default=1))
    if size > 1 and (call.attrs.get("reduce_results") or call.attrs.get("gather_output")):
        raise Declined("adds up or gathers over ranks")
    skipped = bool(call.attr("skip_bias_add", default=False))
    bias = call.params.get("bias") if int(call.attr("tp_rank", default=0)) == 0 or call.cls[:3] != "Row" else None
    y = F.linear(input_of(call), weight_here(call), None if skipped else bias)
    found = {"output.0": y.to(call.outputs["output.0"].dtype)}
    return found | ({"output.1": bias} if skipped and bias is not None else {})


@device_kernel("VocabParallelEmbedding", "Embedding", "*WordEmbedding")
def embedding_kernel(call: Call) -> Any:
    decline_if(int(call.attr("tp_size", default=1)) > 1, "adds up or gathers over ranks")
    return F.embedding(call.tensor(*_IDS).long(), weight_here(call))
