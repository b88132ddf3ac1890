"""Planted faults of rounding: torch computes with fewer bits somewhere, in float32 and in its own order. See
causes/test_planted.py."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opcheck import cause_calls
from opcheck.cause_calls import (
    HEAD,
    KV,
    WIDTH,
    attention,
    drawn,
    linear,
    with_output,
    wrong_experts,
    wrong_rotary,
)  # fmt: skip
from opcheck.planted_addresses import CHUNKS, by_probabilities

from vllm_accprobe.opcheck.reference import Call

product, gate = (partial(of, kind=torch.float32) for of in (cause_calls.product, cause_calls.gate))


def bits(t: Any, n: int, turn: Callable[[Any], Any] = torch.round) -> Any:
    mantissa, exponent = torch.frexp(t.float())
    return torch.ldexp(turn(mantissa * 2.0**n) / 2.0**n, exponent)


def codes(t: Any, most: float = 127.0) -> Any:
    """A scale for each row."""
    step = t.float().abs().amax(-1, keepdim=True) / most
    return (t.float() / step).round() * step


def low_sum(x: Any, w: Any, b: Any, size: int) -> Any:
    total = b.expand(len(x), -1)
    for k in range(0, w.shape[1], size):
        total = (total + x[:, k : k + size] @ w[:, k : k + size].T).bfloat16().float()
    return total


def of_result(change: Callable[[Any], Any]) -> Call:
    return product(lambda x, w, b: change((x @ w.T + b).bfloat16().float()))


def from_table(x: Any, points: int) -> Any:
    table, at = torch.linspace(-8.0, 8.0, points).sigmoid(), ((x + 8) * ((points - 1) / 16)).clamp(0, points - 1)
    low = at.floor().clamp(max=points - 2).long()
    return torch.lerp(table[low], table[low + 1], at - low)


def nearest(x: Any, points: int) -> Any:
    """Over -8 to 8: as good as any table of this spacing over what its argument reaches."""
    table = torch.linspace(-8.0, 8.0, points).sigmoid()
    return table[((x + 8.0) * ((points - 1) / 16.0)).round().clamp(0, points - 1).long()]


def wide_norm(variance: Callable[[Any], Any]) -> Call:
    x, weight = drawn(1, 24, 512), drawn(2, 512, scale=0.3) + 1.0
    call = Call("layers.0.norm", "RMSNorm", {"x": x}, attrs={"variance_epsilon": 1e-5}, params={"weight": weight})
    return with_output(call, x.float() / (variance(x.float()) + 1e-5).sqrt().unsqueeze(-1) * weight.float())


def added_up(x: Any, size: int) -> Any:
    total = torch.zeros(len(x))
    for part in x.square().unflatten(-1, (-1, size)).sum(-1).unbind(-1):
        total = (total + part).bfloat16().float()
    return total / x.shape[-1]


def coarse_turn(n: int) -> Call:
    return wrong_rotary(CHUNKS, table=lambda t: bits(t.bfloat16(), n))


def by_heads(t: Any, change: Callable[[Any], Any]) -> Any:
    return change(t.unflatten(1, (KV, HEAD))).flatten(1).bfloat16()


def eight_bits(scales: Callable[[Any], Any]) -> Call:
    """A product with a weight in int8, a scale for each of its rows. scales: those that the kernel takes."""
    call = linear()
    code = torch.randint(-127, 128, (48, WIDTH), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale = 0.002 * torch.linspace(1.0, 3.0, 48).unsqueeze(1)
    call = replace(call, params={"weight": code, "weight_scale": scale, "bias": call.params["bias"]})
    return product(lambda x, w, b: x @ (w * scales(scale)).T + b, call)


PLANTED: dict[str, tuple[Callable[[], Call], str, str]] = {
    "experts": (
        lambda: wrong_experts(matrices=lambda w: codes(w).double()), "coarse_experts", "int8 with a scale for each row",
    ),
    "positions": (
        lambda: wrong_rotary(CHUNKS + 300, positions=torch.Tensor.bfloat16), "coarse_positions", "bfloat16",
    ),
    "one of equal tables": (lambda: gate(lambda a, b: a * nearest(a, 33) * b), "sigmoid_table", "33 8.0 the nearest"),
    "input": (lambda: product(lambda x, w, b: bits(x, 5) @ w.T + b), "coarse_input", "5 bits of mantissa"),
    "input cut off": (
        lambda: product(lambda x, w, b: bits(x, 6, torch.trunc) @ w.T + b), "coarse_input",
        "6 bits of mantissa, cut off",
    ),
    "input in int8": (
        lambda: product(lambda x, w, b: codes(x) @ w.T + b), "coarse_input", "int8 with a scale for each row",
    ),
    "weight": (lambda: product(lambda x, w, b: x @ bits(w, 4).T + b), "coarse_weight", "4 bits of mantissa"),
    "weight in int8": (
        lambda: product(lambda x, w, b: x @ codes(w).T + b), "coarse_weight", "int8 with a scale for each row",
    ),
    "weight in int4 blocks": (
        lambda: product(lambda x, w, b: x @ codes(w.unflatten(1, (2, 32)), 7.0).flatten(1).T + b), "coarse_weight",
        "int4 with a scale for each block of 32",
    ),
    "accumulator": (lambda: product(lambda x, w, b: low_sum(x, w, b, 1)), "low_sum", "1"),
    "blocks of inputs": (lambda: product(lambda x, w, b: low_sum(x, w, b, 16)), "low_sum", "16"),
    "split in four": (
        lambda: product(lambda x, w, b: b + sum(
            (x[:, k : k + 16] @ w[:, k : k + 16].T).bfloat16().float() for k in range(0, WIDTH, 16))), "low_sum", "16",
    ),
    "result": (lambda: of_result(lambda y: bits(y, 6)), "coarse_output", "6 bits of mantissa"),
    "result cut off": (
        lambda: of_result(lambda y: bits(y, 5, torch.trunc)), "coarse_output", "5 bits of mantissa, cut off",
    ),
    "result clamped": (lambda: of_result(lambda y: y.clamp(-3.0, 3.0)), "result_clamped", "3.0"),
    "result wrapped": (lambda: of_result(lambda y: (y + 4.0) % 8.0 - 4.0), "result_wrapped", "4.0"),
    "subnormals flushed": (
        lambda: product(lambda x, w, b: (lambda y: torch.where(y.abs() < 2.0**-14, 0.0, y))(x @ w.T),
                        replace(c := linear(bias=False), params={"weight": (c.params["weight"] * 1e-4).half(),
                                                                 "bias": torch.zeros(48).half()},
                                inputs={"input_": c.inputs["input_"].half()}), dtype=torch.float16),
        "coarse_output", "float16 without subnormal numbers",
    ),
    "sigmoid's table": (lambda: gate(lambda a, b: a * from_table(a, 17) * b), "sigmoid_table", "17"),
    "gate": (lambda: gate(lambda a, b: F.silu(bits(a, 5)) * b), "coarse_gate", "gate 5 bits of mantissa"),
    "activated gate": (
        lambda: gate(lambda a, b: bits(F.silu(a).bfloat16(), 5) * b), "coarse_gate",
        "activated gate 5 bits of mantissa",
    ),
    "sigmoid": (lambda: gate(lambda a, b: a * bits(torch.sigmoid(a), 5) * b), "coarse_sigmoid", "5 bits of mantissa"),
    "squares": (lambda: wide_norm(lambda x: added_up(x, 4)), "low_variance", "added up in bfloat16 by 4"),
    "one square after another": (
        lambda: wide_norm(lambda x: added_up(x, 1)), "low_variance", "added up in bfloat16 by 1",
    ),
    "rotary table": (lambda: coarse_turn(5), "coarse_table", "5 bits of mantissa"),
    "values in the cache": (
        lambda: attention(past=lambda k, v: (k, by_heads(v, codes))), "coarse_cache",
        "values int8 with a scale for each row",
    ),
    "keys in the cache": (
        lambda: attention(past=lambda k, v: (by_heads(k, lambda t: bits(t, 4)), v)), "coarse_cache",
        "keys 4 bits of mantissa",
    ),
    "probabilities": (
        lambda: by_probabilities(lambda s, _: bits(torch.softmax(s, -1), 4).double()), "coarse_softmax",
        "probabilities 4 bits of mantissa",
    ),
    "scores": (
        lambda: by_probabilities(lambda s, _: torch.softmax(bits(s, 5).double(), -1)), "coarse_softmax",
        "scores 5 bits of mantissa",
    ),
    "scales of other rows": (lambda: eight_bits(lambda s: s.roll(1, 0)), "scale_of_another", "weight_scale 0 1"),
    "one scale for all": (lambda: eight_bits(lambda s: s[:1]), "scale_of_another", "weight_scale 0 0"),
}  # fmt: skip
"""Name → (a wrong call, the cause's name, what its parameter says)."""


RIGHT: tuple[Callable[[], Call], ...] = (
    lambda: product(lambda x, w, b: x @ w.T + b), lambda: gate(lambda a, b: F.silu(a) * b),
    lambda: wide_norm(lambda x: x.square().mean(-1)), lambda: coarse_turn(8), lambda: eight_bits(lambda s: s),
)  # fmt: skip
