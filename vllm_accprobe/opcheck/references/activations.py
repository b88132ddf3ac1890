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

_X = ("x", "input_", "input", "hidden_states", "0")
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


def gated(x: Any, f: Callable[[Any], Any], unit: float, gate_first: bool = True) -> Expected:
    """f(gate) * up of the halves of x, with f rounded. 1 + erf and 1 + tanh in f cancel."""
    a, b = x.chunk(2, -1)
    gate, up = (a, b) if gate_first else (b, a)
    y = f(gate) * up
    bound = (unit + APPROXIMATE) * y.abs()
    if f in (gelu, gelu_tanh):
        bound = bound + 0.5 * APPROXIMATE * (gate * up).abs()
    return Expected(y, ROUNDED * unit * y.abs(), bound=bound)


def alone(x: Any, f: Callable[[Any], Any], unit: float) -> Expected:
    """f(x) = x * phi(x) in several roundings: one more of the size of the result, or, of 1 + erf and 1 + tanh, which
    cancel, of the size before they do."""
    y = f(x)
    size = 0.5 * x.abs() if f in (gelu, gelu_tanh) else y.abs()
    return Expected(y, ROUNDED * unit * size, bound=(unit + APPROXIMATE) * (size + y.abs()))


@reference("SiluAndMul", by_rows=True)
def silu_and_mul(call: Call) -> Expected:
    return gated(call.wide(*_X), silu, call.unit)


@reference("MulAndSilu", by_rows=True)
def mul_and_silu(call: Call) -> Expected:
    return gated(call.wide(*_X), silu, call.unit, gate_first=False)


def by_tanh(call: Call) -> bool:
    """Which GELU a GeluAndMul has. Raises Declined."""
    kind = call.attrs.get("approximate") or call.config.get("hidden_activation") or call.config.get("hidden_act")
    if kind not in (*_TANH, "none", "gelu", "geglu"):
        raise Declined("attribute approximate was not recorded")
    return kind in _TANH


@reference("GeluAndMul", by_rows=True)
def gelu_and_mul(call: Call) -> Expected:
    return gated(call.wide(*_X), gelu_tanh if by_tanh(call) else gelu, call.unit)


@reference("SwigluOAIAndMul", by_rows=True)
def swiglu_oai(call: Call) -> Expected:
    x = call.wide(*_X)
    alpha, limit = float(call.attr("alpha", default=1.702)), float(call.attr("limit", default=7.0))
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    y = gate * torch.sigmoid(alpha * gate) * (up + 1.0)
    # the sigmoid, its product and up + 1, which cancels near -1 and is rounded to the unit of the sum
    noise = ROUNDED * call.unit * (2.0 * y.square() + (gate * torch.sigmoid(alpha * gate)).square()).sqrt()
    return Expected(y, noise, bound=(3.0 * call.unit + APPROXIMATE) * y.abs())


_ALONE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), silu),
    **dict.fromkeys(("GELU", "GELUActivation"), gelu),
    **dict.fromkeys(("GELUTanh", "NewGELU", "NewGELUActivation", "FastGELU", "FastGELUActivation", "PytorchGELUTanh"),
                    gelu_tanh),
    **dict.fromkeys(("QuickGELU", "QuickGELUActivation"), quick_gelu),
    "ReLUSquaredActivation": relu2,
}  # fmt: skip
_AT_ONCE: dict[str, Callable[[Any], Any]] = {"ReLU": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
"""What is one function of the device: nothing is rounded on the way."""


def _formula(call: Call) -> Callable[[Any], Any]:
    f = _ALONE[call.cls]
    return gelu_tanh if f is gelu and call.attrs.get("approximate") == "tanh" else f


@reference(*_ALONE, by_rows=True)
def by_itself(call: Call) -> Expected:
    return alone(call.wide(*_X), _formula(call), call.unit)


@reference(*_AT_ONCE, by_rows=True)
def at_once(call: Call) -> Expected:
    y = _AT_ONCE[call.cls](call.wide(*_X))
    return Expected(y, bound=torch.zeros((), dtype=torch.float64) if call.cls == "ReLU" else APPROXIMATE * y.abs())


# --- on a device --------------------------------------------------------------------------------------------------

_HERE: dict[Callable[[Any], Any], Callable[[Any], Any]] = {
    silu: F.silu, gelu: F.gelu, gelu_tanh: lambda x: F.gelu(x, approximate="tanh"), quick_gelu: quick_gelu,
    relu2: lambda x: F.relu(x).square(),
}  # fmt: skip
"""By formula, what torch has for it."""


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
    tanh = by_tanh(call)
    return _gated_here(call, "gelu_tanh_and_mul" if tanh else "gelu_and_mul", _HERE[gelu_tanh if tanh else gelu])


@device_kernel(*_ALONE)
def by_itself_kernel(call: Call) -> Any:
    return _HERE[_formula(call)](call.tensor(*_X))


@device_kernel(*_AT_ONCE)
def at_once_kernel(call: Call) -> Any:
    return _AT_ONCE[call.cls](call.tensor(*_X))
