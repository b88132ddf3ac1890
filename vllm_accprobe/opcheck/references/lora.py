"""Linear layers with LoRA adapters: y = x Wᵀ + b + s (x Aᵀ) Bᵀ, A, B and s those of the adapter of each row's request.

Formula: Hu et al., arXiv 2106.09685, section 4.1. The problem: a batch holds rows of several adapters and of none, and
a kernel that takes the wrong slot for some of them is a plausible model. The idea: adapters' weights are in the dump as
their files have them, and which request a row belongs to is, too; a packed layer (qkv, gate and up) has an adapter's
parts side by side. Noise: the base product is rounded before the rest is added; x Aᵀ is a float32 sum that is cast to
the model's dtype, s B is rounded where s is no power of two, and so is what they give, as vLLM's kernels do [vLLM,
lora/ops/torch_ops/lora_ops.py and lora/ops/triton_ops]; sums as in linear.py. Adapters that are cut over ranks are
declined. Not here: experts' and embeddings' adapters, which row has which adapter (calls/neighbours.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import ROUNDED, SUM, Call, Declined, Expected, gamma, reference
from vllm_accprobe.opcheck.references.linear import added, biased, partial, rounded
from vllm_accprobe.opcheck.references.parts import once, param_if, subnormal

UNTOLD = "which adapter its rows have was not recorded"
NOT_HERE = "its adapter's weights are not in the dump"
ANEW = "its adapter was loaded again with other weights than the dump's"
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parts of packed layers, as adapters call them and in the order in which vLLM packs them."""


@dataclass(frozen=True)
class RowAdapters:
    """``Call.extra["adapters"]``. of_row: the name of each row's adapter, "" for none, None where nobody knows;
    weights: by name and part ("" where the layer is one) lora_a [r, inputs], lora_b [outputs, r] and scaling; no part
    where the adapter has nothing for this layer; anew: names of those that were loaded again otherwise."""

    of_row: tuple[str | None, ...]
    weights: Mapping[str, Mapping[str, Mapping[str, Any]]]
    anew: frozenset[str] = frozenset()


@reference("*LinearWithLoRA", "*LinearWithShardedLoRA")
def linear_with_adapters(call: Call) -> dict[str, Expected]:
    """All rows, those without an adapter too. x: [rows, inputs]."""
    if int(call.attr("tp_size", default=1)) > 1:
        raise Declined("an adapter that is cut over ranks")
    rows: RowAdapters | None = call.extra.get("adapters")
    base = partial(call)
    bias = None if call.attr("skip_bias_add", default=False) else param_if(call, "bias")
    y = biased(base, bias, call.unit)
    x = call.wide("input_", "x", "input", "hidden_states", "0")
    if rows is None or x.dim() != 2 or len(rows.of_row) != len(x):
        raise Declined(UNTOLD)
    value, noise, bound = (torch.zeros_like(y.value) for _ in range(3))
    known = torch.ones(len(x), dtype=torch.bool)
    reasons = []
    for name in dict.fromkeys(rows.of_row):
        here = torch.tensor([n == name for n in rows.of_row])
        if name == "":
            continue
        why = UNTOLD if name is None else ANEW if name in rows.anew else "" if name in rows.weights else NOT_HERE
        if why or name is None:
            known &= ~here
            reasons.append(why)
            continue
        for part, found in rows.weights[name].items():
            if len(found) < 3:
                raise Declined(NOT_HERE)
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
    scaled = b * scaling
    exact = scaling == 0 or math.frexp(abs(scaling))[0] == 0.5
    step = 0.0 if exact else unit  # B is scaled once, in its own dtype
    inner, size = x @ a.T, x.abs() @ a.abs().T
    n, r = a.shape[1], a.shape[0]
    early = once(inner.abs(), unit)
    inner_noise = ((SUM * n**0.5 * size) ** 2 + (ROUNDED * early) ** 2).sqrt()
    inner_bound = gamma(n + 1) * size + early
    y, outer = inner @ scaled.T, inner.abs() @ scaled.abs().T
    # a subnormal number of s B, and of what it gives
    least = subnormal(step, inner.abs().sum(-1, keepdim=True)) + subnormal(unit)
    squares = (
        (inner_noise**2) @ (scaled**2).T + (ROUNDED * step) ** 2 * ((inner**2) @ (scaled**2).T)
        + (SUM * r**0.5 * outer) ** 2 + (ROUNDED * (unit * y.abs() + least)) ** 2
    )  # fmt: skip
    bound = (1 + step) * (1 + unit) * (1 + gamma(r + 1)) * (inner_bound @ scaled.abs().T) + (
        step + unit + gamma(r + 1)
    ) * (1 + unit) ** 2 * outer + least
    return Expected(y, squares.sqrt(), bound=bound)
