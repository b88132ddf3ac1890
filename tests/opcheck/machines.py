"""Machines that compute in known ways, as dumps of four layers: what opcheck must recognise, and what it must not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from opcheck_dumps import Maker
from support.opchecked import rows_of
from support.truncated import truncated

from vllm_accprobe.opcheck.machine_precision import of_machine
from vllm_accprobe.opcheck.run.result_row import CheckResult

Tensor = Any
LAYERS, ROWS, WIDTH = 4, 24, 128


def nearest(y: Tensor) -> Tensor:
    return y.bfloat16()


def zero(y: Tensor) -> Tensor:
    return truncated(y)


def _away(y: Tensor) -> Tensor:
    low = truncated(y)
    step = torch.ldexp(torch.ones_like(y), torch.frexp(y).exponent - 8)
    return torch.where(low.double() == y, low.double(), low.double() + step * torch.sign(y)).bfloat16()


def _stochastic(y: Tensor) -> Tensor:
    step = torch.ldexp(torch.ones_like(y), torch.frexp(y).exponent - 8)
    dice = torch.rand(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (((y / step).abs() + dice).floor() * step * torch.sign(y)).bfloat16()


away, stochastic = _away, _stochastic


def flush(y: Tensor) -> Tensor:
    m = y.bfloat16()
    return torch.where(m.abs() < 2.0**-126, torch.zeros_like(m), m)


@dataclass(frozen=True)
class Machine:
    """last: how results are rounded; the others: how an operator gets what is rounded, float64. norm(x, weight, eps),
    linear(x, weight, bias), act(gate, up)."""

    last: Callable[[Tensor], Tensor] = nearest
    norm: Callable[..., Tensor] = lambda x, w, eps: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w
    linear: Callable[..., Tensor] = lambda x, w, b: x @ w.T + b
    act: Callable[..., Tensor] = lambda gate, up: gate * torch.sigmoid(gate) * up
    dtype: Any = torch.bfloat16
    size: float = 1.0


HONEST = Machine()


def low(block: int) -> Callable[..., Tensor]:
    def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(x), len(w))
        for k in range(0, x.shape[1], block):
            total = (total + (x[:, k : k + block] @ w[:, k : k + block].T).float()).bfloat16().float()
        return total.double() + b

    return linear


def split(k: int) -> Callable[..., Tensor]:
    def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        parts = zip(x.chunk(k, 1), w.chunk(k, 1), strict=True)
        return sum((p @ q.T).bfloat16().double() for p, q in parts) + b

    return linear


def twice_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)).bfloat16().double() * w


def twice_act(gate: Tensor, up: Tensor) -> Tensor:
    return (gate * torch.sigmoid(gate)).bfloat16().double() * up


def coarse(x: Tensor, bits: float) -> Tensor:
    """``x`` with a relative error of up to 2**-bits, to both sides, as a table of a function leaves it."""
    fraction = torch.frexp(x).mantissa * 2.0 ** (bits - 1)
    return torch.ldexp(fraction.floor() + 0.5, torch.frexp(x).exponent) / 2.0 ** (bits - 1)


def rsqrt_norm(bits: float) -> Callable[..., Tensor]:
    def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return x * coarse(torch.rsqrt((x * x).mean(-1, keepdim=True) + eps), bits) * w

    return norm


def exp_act(bits: float) -> Callable[..., Tensor]:
    def act(gate: Tensor, up: Tensor) -> Tensor:
        return gate / (1.0 + coarse(torch.exp(-gate), bits)) * up

    return act


def dump(
    root: Path, machines: Machine | Sequence[Machine], only: str = "norm linear act", head: Machine | None = None
) -> Path:  # fmt: skip
    """Four layers of a norm, a product and a gated activation in three steps. machines: of each layer; head: of one
    product more, of a class of its own."""
    each = [machines] * LAYERS if isinstance(machines, Machine) else list(machines)
    make = Maker(root)
    for n in range(LAYERS):
        make.module(f"layers.{n}.norm", "RMSNorm", variance_epsilon=1e-5)
        make.module(f"layers.{n}.proj", "ReplicatedLinear")
        make.module(f"layers.{n}.act", "SiluAndMul")
    g = torch.Generator().manual_seed(11)

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=g)).to(each[0].dtype)

    weights = [(drawn(WIDTH) * 0.5 + 1, drawn(WIDTH, WIDTH, size=each[n].size), drawn(WIDTH, size=each[n].size))
               for n in range(LAYERS)]  # fmt: skip
    for n, (scale, matrix, bias) in enumerate(weights):
        make.param(f"layers.{n}.norm", "RMSNorm", weight=scale)
        make.param(f"layers.{n}.proj", "ReplicatedLinear", weight=matrix, bias=bias)
    make.module("lm_head", "ParallelLMHead")
    matrix, bias = drawn(WIDTH, WIDTH), drawn(WIDTH)
    make.param("lm_head", "ParallelLMHead", weight=matrix, bias=bias)
    last = (matrix.double(), bias.double())
    make.request(0, 3 * ROWS)
    for step in range(3):
        make.step(step, [(0, ROWS * step, ROWS)])
        for n, (scale, matrix, bias) in enumerate(weights):
            m = each[n]
            x, both = drawn(ROWS, WIDTH), drawn(ROWS, 2 * WIDTH, size=2.0)
            x = x * torch.rand(ROWS, 1, generator=g).to(x.dtype)  # rows of all sizes, as activations are
            wide = x.double()
            if "norm" in only:
                y = m.norm(wide, scale.double(), 1e-5)
                make.call(f"layers.{n}.norm", "RMSNorm", {"x": x}, m.last(y) if _low(m) else y.float())
            if "linear" in only:
                y = m.linear(wide, matrix.double(), bias.double())
                make.call(f"layers.{n}.proj", "ReplicatedLinear", {"input_": x}, m.last(y) if _low(m) else y.float())
            if "act" in only:
                y = m.act(*both.double().chunk(2, -1))
                make.call(f"layers.{n}.act", "SiluAndMul", {"x": both}, m.last(y) if _low(m) else y.float())
        if head is not None:
            x = drawn(ROWS, WIDTH)
            make.call("lm_head", "ParallelLMHead", {"x": x}, head.last(head.linear(x.double(), *last)))
    return make.close()


def _low(m: Machine) -> bool:
    return m.dtype == torch.bfloat16


def one_of(odd: Machine, usual: Machine = HONEST) -> list[Machine]:
    """Layer 2 alone is odd."""
    return [odd if n == 2 else usual for n in range(LAYERS)]


def wide(m: Machine) -> Machine:
    """The same in float32."""
    return replace(m, dtype=torch.float32)


def settled(path: Path) -> tuple[list[CheckResult], of_machine.MachineHabits]:
    return of_machine.settle(rows_of(path))


def said(found: of_machine.MachineHabits, operator: str) -> list[str]:
    return sorted(h.words for h in found.habits if h.operator == operator)
