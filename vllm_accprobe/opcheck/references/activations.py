"""Activations, alone and with the gate that is multiplied in.

Formulas: SiLU [Elfwing et al., arXiv 1702.03118]; GELU, exact and by tanh, and quick GELU x * sigmoid(1.702 x)
[Hendrycks and Gimpel, arXiv 1606.08415]; gated units GLU, GEGLU, SwiGLU [Shazeer, arXiv 2002.05202]; ReLU²
[So et al., arXiv 2109.08668]; the clamped SwiGLU of gpt-oss (alpha 1.702, limit 7, gate and up interleaved) as its
published code has it; soft capping [Gemma 2, arXiv 2408.00118].
Which half is the gate: the first, except MulAndSilu. Noise: kernels may round the activation before they multiply.
Bound: that rounding, and an exponential, tanh or erf that is off by APPROXIMATE: x * sigmoid(x) hands that on at most
[d log sigmoid = 1 - sigmoid]; 1 + erf and 1 + tanh cancel for negative x, and are off by that much of x / 2.
Not here: what a recorded dump does not tell (GeluAndMul's approximation is taken from config.json's hidden_act).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import APPROXIMATE, ROUNDED, Call, Declined, Expected, device_kernel, reference
from vllm_accprobe.opcheck.references.kernels_common import vendor

_TANH = ("tanh", "gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast")
"""Spellings of GELU by tanh."""


def silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Any) -> Any:
    return torch.relu(x) ** 2


def soft_cap(x: Any, cap: float) -> Any:
    return cap * torch.tanh(x / cap)


def _x(call: Call) -> Any:
    return call.wide("x", "input", "hidden_states", "0")


def _gated(call: Call, f: Callable[[Any], Any], gate_first: bool = True) -> Expected:
    x = _x(call)
    a, b = x.chunk(2, -1)
    gate, up = (a, b) if gate_first else (b, a)
    y = f(gate) * up
    return gated(y, gate, up, call.unit, f in (gelu, gelu_tanh))


def gated(y: Any, gate: Any, up: Any, unit: float, cancels: bool) -> Expected:
    """y = f(gate) * up with f rounded; cancels: 1 + erf or 1 + tanh in f."""
    size = y.abs()
    bound = (unit + APPROXIMATE) * size
    if cancels:
        return Expected(y, ROUNDED * unit * size, bound=bound + 0.5 * APPROXIMATE * (gate * up).abs())
    return Expected(y, ROUNDED * unit * size, bound=bound)


def alone(y: Any, x: Any, unit: float, cancels: bool) -> Expected:
    """y = x * phi(x), where phi may be rounded; cancels: 1 + erf or 1 + tanh in it, rounded before it is added."""
    size = 0.5 * x.abs() if cancels else y.abs()
    return Expected(y, ROUNDED * unit * size, bound=(unit + APPROXIMATE) * (size + y.abs()))


def _alone(call: Call, f: Callable[[Any], Any]) -> Expected:
    """An activation in several roundings, x * phi(x): one more of the size of the result."""
    x = _x(call)
    return alone(f(x), x, call.unit, f in (gelu, gelu_tanh))


@reference("SiluAndMul", by_rows=True)
def silu_and_mul(call: Call) -> Expected:
    return _gated(call, silu)


@reference("MulAndSilu", by_rows=True)
def mul_and_silu(call: Call) -> Expected:
    return _gated(call, silu, gate_first=False)


@reference("GeluAndMul", by_rows=True)
def gelu_and_mul(call: Call) -> Expected:
    kind = call.attrs.get("approximate") or call.config.get("hidden_activation") or call.config.get("hidden_act")
    if kind in _TANH:
        return _gated(call, gelu_tanh)
    if kind in ("none", "gelu", "geglu"):
        return _gated(call, gelu)
    raise Declined("attribute approximate was not recorded")


@reference("SwigluOAIAndMul", by_rows=True)
def swiglu_oai(call: Call) -> Expected:
    x = _x(call)
    alpha, limit = float(call.attr("alpha", default=1.702)), float(call.attr("limit", default=7.0))
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    y = gate * torch.sigmoid(alpha * gate) * (up + 1.0)
    # the sigmoid, its product and up + 1, which cancels near -1 and is rounded to the unit of the sum
    noise = ROUNDED * call.unit * (2.0 * y.square() + (gate * torch.sigmoid(alpha * gate)).square()).sqrt()
    return Expected(y, noise, bound=(3.0 * call.unit + APPROXIMATE) * y.abs())


@reference("SiLU", "SiLUActivation", by_rows=True)
def only_silu(call: Call) -> Expected:
    return _alone(call, silu)


@reference("GELU", "GELUActivation", by_rows=True)
def only_gelu(call: Call) -> Expected:
    kind = call.attrs.get("approximate", "none")
    return _alone(call, gelu_tanh if kind == "tanh" else gelu)


@reference(
    "GELUTanh", "NewGELU", "NewGELUActivation", "FastGELU", "FastGELUActivation", "PytorchGELUTanh", by_rows=True
)
def only_gelu_tanh(call: Call) -> Expected:
    x = _x(call)
    return alone(gelu_tanh(x), x, call.unit, True)


@reference("QuickGELU", "QuickGELUActivation", by_rows=True)
def only_quick_gelu(call: Call) -> Expected:
    return _alone(call, quick_gelu)


@reference("ReLUSquaredActivation", by_rows=True)
def only_relu2(call: Call) -> Expected:
    return _alone(call, relu2)


@reference("ReLU", by_rows=True)
def only_relu(call: Call) -> Expected:
    y = torch.relu(_x(call))
    return Expected(y, bound=torch.zeros((), dtype=torch.float64))


@reference("Sigmoid", by_rows=True)
def only_sigmoid(call: Call) -> Expected:
    y = torch.sigmoid(_x(call))
    return Expected(y, bound=APPROXIMATE * y)


@reference("Tanh", by_rows=True)
def only_tanh(call: Call) -> Expected:
    y = torch.tanh(_x(call))
    return Expected(y, bound=APPROXIMATE * y.abs())


# --- on a device --------------------------------------------------------------------------------------------------

_X = ("x", "input_", "input", "hidden_states", "0")


def _gated_here(call: Call, name: str, act: Any, first: bool = True) -> Any:
    x = call.tensor(*_X)
    kernel = vendor(name)
    if kernel is not None and x.device.type != "cpu":
        out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        kernel(out, x.contiguous())
        return out
    a, b = x.chunk(2, -1)
    return act(a) * b if first else a * act(b)


@device_kernel("SiluAndMul")
def silu_and_mul_kernel(call: Call) -> Any:
    return _gated_here(call, "silu_and_mul", F.silu)


@device_kernel("MulAndSilu")
def mul_and_silu_kernel(call: Call) -> Any:
    return _gated_here(call, "mul_and_silu", F.silu, first=False)


@device_kernel("GeluAndMul")
def gelu_and_mul_kernel(call: Call) -> Any:
    kind = call.attrs.get("approximate") or call.config.get("hidden_activation") or call.config.get("hidden_act")
    if kind is None:
        raise Declined("attribute approximate was not recorded")
    tanh = kind in _TANH
    name = "gelu_tanh_and_mul" if tanh else "gelu_and_mul"
    return _gated_here(call, name, lambda x: F.gelu(x, approximate="tanh" if tanh else "none"))


@device_kernel("SiLU", "SiLUActivation")
def silu_kernel(call: Call) -> Any:
    return F.silu(call.tensor(*_X))


@device_kernel("GELU", "GELUActivation")
def gelu_kernel(call: Call) -> Any:
    return F.gelu(call.tensor(*_X), approximate="tanh" if call.attrs.get("approximate") == "tanh" else "none")


@device_kernel("GELUTanh", "NewGELU", "NewGELUActivation", "FastGELU", "FastGELUActivation", "PytorchGELUTanh")
def gelu_tanh_kernel(call: Call) -> Any:
    return F.gelu(call.tensor(*_X), approximate="tanh")


@device_kernel("QuickGELU", "QuickGELUActivation")
def quick_gelu_kernel(call: Call) -> Any:
    x = call.tensor(*_X)
    return x * torch.sigmoid(1.702 * x)


@device_kernel("ReLUSquaredActivation")
def relu2_kernel(call: Call) -> Any:
    return F.relu(call.tensor(*_X)).square()


@device_kernel("ReLU")
def relu_kernel(call: Call) -> Any:
    return F.relu(call.tensor(*_X))


@device_kernel("Sigmoid")
def sigmoid_kernel(call: Call) -> Any:
    return torch.sigmoid(call.tensor(*_X))


@device_kernel("Tanh")
def tanh_kernel(call: Call) -> Any:
    return torch.tanh(call.tensor(*_X))
