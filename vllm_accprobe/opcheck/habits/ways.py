"""The ways in which a machine may compute an output: what each would have before its last rounding.

The problem: the same formula gives other numbers where an intermediate result is rounded, where a sum is kept in fewer
bits, or where its parts are rounded before they are added. The idea: each way of a closed list is written down as a
plain function of the call, in float64 with those roundings put in, and gives the number that its last rounding meets.
Which one a machine goes is then read from its results (look.py). ONCE is the exact result. Sums in fewer bits
take as many steps as they have terms, so that they are tried on a few numbers, and only where nothing else fits.
Not here: how a result is rounded in the end, what follows from a way (decided.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import activations, rotary
from vllm_accprobe.opcheck.references.norms import epsilon
from vllm_accprobe.opcheck.references.quantised import weight_of

ONCE = "once"
Tensor = Any
_NORM = "normalised value"
_SUM, _AGAIN = "sum with the residual", "sum with the residual, after its norm"
_GATE, _PRODUCT, _COSINES = "activation", "product before the bias", "cosines"
_INPUT = ("input_", "x", "input", "hidden_states", "0")


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
    family = family_of(call.cls)
    if family is not None and (sample.role == "output.0" or family is _rotary):
        try:
            more = family(call, sample)
        except (Declined, RuntimeError, ValueError, KeyError, IndexError, TypeError):
            return found  # what its reference could do this cannot: it is told nothing more of
        found |= {n: v for n, v in more.items() if v.shape == sample.y.shape}
    return found


def family_of(cls: str) -> Family | None:
    """Which intermediate results an operator has, None where that is not known."""
    return next((f for glob, f in _FAMILIES.items() if fnmatchcase(cls, glob)), None)


def is_product(cls: str) -> bool:
    return family_of(cls) is _linear


def is_norm(cls: str) -> bool:
    return family_of(cls) is _norm


def is_gated(cls: str) -> bool:
    return family_of(cls) is _gated


def _norm(call: Call, s: SampledRows) -> Ways:
    x = call.tensor("x", "hidden_states", "input", "0")[s.rows].double()
    residual = call.maybe("residual", "1")
    eps, _ = epsilon(call)
    weight: Any = call.param("weight") if "weight" in call.params else 1.0
    if _one_more(call.cls):
        weight = weight + 1.0

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
            found[name] = y * weight
        if isinstance(weight, torch.Tensor):
            found[f"{name} and {_NORM}" if name else _NORM] = s.round(y) * weight
    return found


def _one_more(cls: str) -> bool:
    gemma = cls.startswith("Gemma") or cls == "Qwen3NextRMSNorm"
    return gemma and not cls.startswith(("Gemma3n", "Gemma4"))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"SiluAndMul": activations.silu, "MulAndSilu": activations.silu}


def gate_of(call: Call) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """(gate, up, activation) of a gated activation. Raises Declined."""
    x = call.tensor("x", "input", "hidden_states", "0")
    a, b = x.chunk(2, -1)
    if call.cls == "MulAndSilu":
        a, b = b, a
    f = _ACTIVATIONS.get(call.cls)
    if f is None:
        kind = call.attrs.get("approximate") or call.config.get("hidden_activation") or call.config.get("hidden_act")
        f = activations.gelu if kind in ("none", "gelu", "geglu") else activations.gelu_tanh
    return a, b, f


def _gated(call: Call, s: SampledRows) -> Ways:
    gate, up, f = gate_of(call)
    return {_GATE: s.round(f(gate[s.rows].double())) * up[s.rows].double()}


def _linear(call: Call, s: SampledRows) -> Ways:
    if "bias" not in call.params or call.attrs.get("skip_bias_add") or int(call.attrs.get("tp_size", 1)) > 1:
        return {}
    bias = call.param("bias")
    return {_PRODUCT: s.round(s.y - bias) + bias}


def _rotary(call: Call, s: SampledRows) -> Ways:
    name, place = ("key", "2") if s.role in ("output.1", "inplace.key", "inplace.2") else ("query", "1")
    head, neox = int(call.attr("head_size")), bool(call.attr("is_neox_style", default=True))
    dim = int(call.attr("rotary_dim", default=head))
    angle, size = rotary.token_angles(call, dim)
    angle = angle[s.rows].unsqueeze(1)
    x = call.tensor(name, place)[s.rows].double()
    heads = x.reshape(len(x), -1, head)
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
    x = call.tensor(*_INPUT, *(["1"] if call.cls == "ParallelLMHead" else []))
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
