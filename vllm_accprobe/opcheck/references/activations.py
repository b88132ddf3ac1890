"""Activations, alone and with the gate that is multiplied in.

Formulas: SiLU [Elfwing et al., arXiv 1702.03118]; GELU, exact and by tanh, and quick GELU x * sigmoid(1.702 x)
[Hendrycks and Gimpel, arXiv 1606.08415]; Mish [D. Misra, arXiv 1908.08681]; gated units [Shazeer, arXiv 2002.05202];
ReLU² [So et al., arXiv 2109.08668]; the clamped SwiGLU of gpt-oss (alpha 1.702, limit 7, gate and up interleaved) as
its published code has it; soft capping [Gemma 2, arXiv 2408.00118]. The gate is the first half, except in MulAndSilu.
Bound: an activation that is rounded before it is multiplied, and an exponential, tanh or erf off by APPROXIMATE: x *
sigmoid(x) hands that on at most [d log sigmoid = 1 - sigmoid]; 1 + erf and 1 + tanh cancel for negative x, and are off
by that much of x / 2, and by float32's own rounding of it. Alone, an activation is also computed in operators of the
dtype (vLLM's QuickGELU, its CUDA kernels of gelu_new and gelu_fast): the argument of sigmoid, erf or tanh is rounded as
well, which x phi(z) hands on as x phi'(z) z: for x = -10, 17 units of quick GELU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Expected, combined, decline_if, device_kernel, reference
from vllm_accprobe.opcheck.references.parts import Arguments, vendor
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, once, subnormal

INPUT = ("x", "input_", "input", "hidden_states", "0")
_TANH = ("tanh", "gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast")
"""Spellings of GELU by tanh."""
_CANCELS = 2.0**-22
"""Standard error of 1 + erf and 1 + tanh, absolute: two roundings of float32, and a function that is off by as much."""


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


def mish(x: Any) -> Any:
    return x * torch.tanh(F.softplus(x, threshold=1e9))


def soft_cap(x: Any, cap: float) -> Any:
    return cap * torch.tanh(x / cap)


def gated(x: Any, f: Callable[[Any], Any], unit: float, gate_first: bool = True) -> Expected:
    """f(gate) * up of the halves of x, with f rounded. 1 + erf and 1 + tanh in f cancel."""
    a, b = x.chunk(2, -1)
    gate, up = (a, b) if gate_first else (b, a)
    y, size = f(gate) * up, up.abs()
    most = unit * y.abs() + subnormal(unit, size)
    noise, bound = ROUNDED * most, most + APPROXIMATE * y.abs()
    if f in (gelu, gelu_tanh):
        half = 0.5 * gate.abs() * size
        noise, bound = noise + _CANCELS * half, bound + APPROXIMATE * half
    return Expected(y, noise, bound=bound)


def gated_along(x: Any, dim: int, f: Callable[[Any], Any], unit: float, gate_first: bool = True) -> Expected:
    """`gated` of the halves along another dimension than the last. Raises Declined."""
    decline_if(not -x.dim() <= dim < x.dim() or x.shape[dim] % 2, f"dim {dim} of {list(x.shape)} has no halves")
    return gated(x.movedim(dim, -1), f, unit, gate_first).map(lambda t: t.movedim(-1, dim))


def sigmoid_argument(x: Any, alpha: float = 1.0) -> Any:
    """|x phi'(z) z| of phi = sigmoid and z = alpha x: what one unit of the argument is in x phi(z)."""
    s = torch.sigmoid(alpha * x)
    return alpha * x * x * s * (1.0 - s)


def _of_argument(f: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    """In units, what roundings of phi's argument leave in x phi(z): (at most, square of the standard error by
    ROUNDED)."""
    if f is quick_gelu:  # 1.702 x
        most = sigmoid_argument(x, 1.702)
        return most, most * most
    if f is gelu:  # x / sqrt(2)
        most = x * x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return most, most * most
    if f is gelu_tanh:  # x x, x**3 and its product are three roundings of the cube, the sum and its product two of all
        cube = math.sqrt(2.0 / math.pi) * 0.044715 * x.abs() ** 3
        z = math.sqrt(2.0 / math.pi) * x.abs() + cube
        slope = 0.5 * x.abs() / torch.cosh(z).square()
        return slope * (2.0 * z + 3.0 * cube), slope * slope * (2.0 * z * z + 3.0 * cube * cube)
    return 0.0, 0.0


def alone(x: Any, f: Callable[[Any], Any], unit: float) -> Expected:
    """f(x) = x * phi(z) in several roundings: of z, of phi, and of the size of 1 + erf and 1 + tanh, which cancel."""
    y, half = f(x), 0.5 * x.abs()
    size = half if f in (gelu, gelu_tanh) else y.abs()
    most, square = _of_argument(f, x)
    early = once(size, unit) if f in (gelu, gelu_tanh, relu2) else unit * size + subnormal(unit, x.abs())
    noise = ROUNDED * (early * early + unit * unit * square).sqrt()
    bound = early + unit * (y.abs() + most) + APPROXIMATE * (size + y.abs())
    # softplus may be subnormal as well as its tanh
    return Expected(y, noise, bound=bound + subnormal(unit, x.abs()) if f is mish else bound)


_GATED = {"SiluAndMul": "silu_and_mul", "MulAndSilu": "mul_and_silu", "GeluAndMul": "gelu_and_mul"}
"""By class, vLLM's operator; GeluAndMul's is gelu_tanh_and_mul where its GELU is by tanh."""
_OPERATORS: dict[str, Callable[[Any], Any]] = {
    "silu_and_mul": silu, "mul_and_silu": silu, "gelu_and_mul": gelu, "gelu_tanh_and_mul": gelu_tanh,
    "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh, "gelu_quick": quick_gelu,
}  # fmt: skip
"""By vLLM's operator, the formula; those that end with mul or begin with it are gated."""


def _gated_operator(call: Call) -> str:
    """GeluAndMul's GELU as it was recorded, else by config.json's hidden_act. Raises Declined."""
    if call.cls != "GeluAndMul":
        return _GATED[call.cls]
    kind = call.attrs.get("approximate") or call.config.get("hidden_activation") or call.config.get("hidden_act")
    decline_if(kind not in (*_TANH, "none", "gelu", "geglu"), "attribute approximate was not recorded")
    return "gelu_tanh_and_mul" if kind in _TANH else "gelu_and_mul"


def gate_of(call: Call) -> tuple[Any, Any, Callable[[Any], Any]]:
    """(gate, up, what activates the gate) of a module, its input's dtype. Raises Declined."""
    name, (a, b) = _gated_operator(call), call.tensor(*INPUT).chunk(2, -1)
    return (b, a, silu) if name == "mul_and_silu" else (a, b, _OPERATORS[name])


@reference(*_GATED, by_rows=True)
def gated_module(call: Call) -> Expected:
    name = _gated_operator(call)
    return gated(call.wide(*INPUT), _OPERATORS[name], call.unit, gate_first=name != "mul_and_silu")


@reference(*(f"torch.ops._C.{name}" for name in _OPERATORS))
def operator(call: Call) -> dict[str, Expected]:
    """(out, input)"""
    name, (x,) = call.cls.removeprefix("torch.ops.").split(".")[1], Arguments(call, "out input").wide("input")
    if "mul" not in name:
        return {"inplace.input.0": alone(x, _OPERATORS[name], call.unit)}
    return {"inplace.input.0": gated(x, _OPERATORS[name], call.unit, gate_first=name != "mul_and_silu")}


@reference("SwigluOAIAndMul", by_rows=True)
def swiglu_oai(call: Call) -> Expected:
    x = call.wide(*INPUT)
    alpha, limit = float(call.attr("alpha", default=1.702)), float(call.attr("limit", default=7.0))
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    glu, size = gate * torch.sigmoid(alpha * gate), (up + 1.0).abs()
    y = glu * (up + 1.0)
    # the sigmoid, its argument and product, and up + 1, each as operators of the dtype
    most = sigmoid_argument(gate, alpha) * size
    early = subnormal(call.unit, (1.0 + gate.abs()) * size)
    noise = combined(ROUNDED * call.unit * (3.0 * y.square() + most.square()).sqrt(), ROUNDED * early)
    return Expected(y, noise, bound=(3.0 * call.unit + APPROXIMATE) * y.abs() + call.unit * most + early)


ALONE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), silu),
    **dict.fromkeys(("GELU", "GELUActivation"), gelu),
    **dict.fromkeys(("GELUTanh", "NewGELU", "NewGELUActivation", "FastGELU", "FastGELUActivation", "PytorchGELUTanh"),
                    gelu_tanh),
    **dict.fromkeys(("QuickGELU", "QuickGELUActivation"), quick_gelu),
    "ReLUSquaredActivation": relu2,
}  # fmt: skip
_AT_ONCE: dict[str, Callable[[Any], Any]] = {"ReLU": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
"""What is one function of the device: nothing is rounded on the way."""


def formula_of(call: Call) -> Callable[[Any], Any]:
    f = ALONE[call.cls]
    return gelu_tanh if f is gelu and call.attrs.get("approximate") == "tanh" else f


@reference(*ALONE, by_rows=True)
def by_itself(call: Call) -> Expected:
    return alone(call.wide(*INPUT), formula_of(call), call.unit)


@reference(*_AT_ONCE, by_rows=True)
def at_once(call: Call) -> Expected:
    y = _AT_ONCE[call.cls](call.wide(*INPUT))
    return Expected(y, bound=torch.zeros((), dtype=torch.float64) if call.cls == "ReLU" else APPROXIMATE * y.abs())


_HERE: dict[Callable[[Any], Any], Callable[[Any], Any]] = {
    silu: F.silu, gelu: F.gelu, gelu_tanh: lambda x: F.gelu(x, approximate="tanh"), quick_gelu: quick_gelu,
    relu2: lambda x: F.relu(x).square(),
}  # fmt: skip
"""By formula, what torch has for it."""


@device_kernel(*_GATED)
def gated_kernel(call: Call) -> Any:
    x, name = call.tensor(*INPUT), _gated_operator(call)
    kernel = vendor(name)
    if kernel is not None and x.device.type != "cpu":
        out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        kernel(out, x.contiguous())
        return out
    gate, up, f = gate_of(call)
    return _HERE[f](gate) * up


@device_kernel(*ALONE)
def by_itself_kernel(call: Call) -> Any:
    return _HERE[formula_of(call)](call.tensor(*INPUT))


@device_kernel(*_AT_ONCE)
def at_once_kernel(call: Call) -> Any:
    return _AT_ONCE[call.cls](call.tensor(*INPUT))
