"""API calls as msprobe records them: functions of torch and of MindSpore's mint by name.

The problem: ``Functional.linear``, ``Torch.rsqrt`` and ``Tensor.__mul__`` are Python functions and no operators of
torch.ops, and a name in a dump may mean anything. The idea: only functions that torch itself lists as functions on
tensors (torch.overrides) can be meant, of methods only those that compute; they run on the CPU in float64 like an
operator (aten.py). MindSpore's ``mint`` takes the arguments of torch's functions of the same name and is documented to
compute the same [MindSpore's API mapping], so that torch's is its reference. Where MindSpore is installed (an extra, in
an environment of its own: it wants an older numpy), mint's function runs, too: tensors go over by way of numpy,
bfloat16 by way of float32. Only public functions of ``mint``, and arithmetic of tensors, can be named by a dump.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.case import mapped
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if, device_kernel, reference, required
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.references.aten import each, in_float64, outputs_by_role

TORCH_HEADS = {
    "Functional": "nn.functional", "Torch": "", "Tensor": "Tensor", "Mint": "", "MintFunctional": "nn.functional",
    "mindspore.Tensor": "Tensor", "VF": "",
}  # fmt: skip
"""Of a name: where torch has the function."""
_ARITHMETIC = (
    "add", "sub", "mul", "matmul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
DUNDER = {
    *(f"__{p}{n}__" for n in _ARITHMETIC for p in ("", "r", "i")),
    *(f"__{n}__" for n in ("neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem")),
}
_RANDOM = {
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "fractional_max_pool2d", "fractional_max_pool3d",
    "geometric_", "gumbel_softmax", "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand_like",
    "randint_like", "randn_like", "random_", "rrelu", "uniform_",
}  # fmt: skip
_DROPOUT = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_UNDEFINED = {"empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_"}
_CASTS = {"to", "type", "type_as", "half", "bfloat16", "float", "double", "copy_"}
_PLACES = {"cuda", "npu", "xpu", "cpu"}
_MINDSPORES_OWN = "mindspore.Tensor"


@functools.cache
def _functions() -> Mapping[str, Mapping[str, Any]]:
    """By place and name, what torch lists as functions on tensors."""
    listed = torch.overrides.get_overridable_functions()
    found: dict[str, dict[str, Any]] = {}
    for place, owner in (("", torch), ("nn.functional", torch.nn.functional), ("Tensor", torch.Tensor)):
        known = {id(f) for f in (*listed.get(owner, ()), *(listed.get(torch.functional, ()) if owner is torch else ()))}
        names = [n for n in dir(owner) if n in DUNDER or not n.startswith("_")]
        found[place] = {n: getattr(owner, n) for n in names if id(getattr(owner, n, None)) in known}
    return found


def split(name: str) -> tuple[str, str]:
    """(head, function) of ``Functional.linear``, ``mindspore.Tensor.__mul__``. Raises Declined."""
    head, _, function = name.rpartition(".")
    decline_if(head not in TORCH_HEADS, f"no reference for {name}")
    return head, function


def torch_function(name: str) -> Any:
    """torch's function for an API's name. Raises Declined."""
    head, function = split(name)
    if head == _MINDSPORES_OWN and function not in DUNDER:
        raise Declined("a method of MindSpore's tensors: torch's of the same name may be another")
    return required(_functions()[TORCH_HEADS[head]].get(function), f"torch has no function on tensors for {name}")


def ready(call: Call) -> Call:
    """``call`` with its arguments as a function takes them: an index is a tuple, a device the CPU."""

    def plain(value: Any) -> Any:
        is_device = isinstance(value, str) and value.partition(":")[0].lower() in _PLACES
        return torch.device("cpu") if is_device else value

    args = [plain(a) for a in call.args]
    if call.cls.endswith(".__getitem__") and len(args) > 1 and isinstance(args[1], list):
        args[1] = tuple(args[1])
    return replace(call, args=tuple(args), kwargs={k: plain(v) for k, v in call.kwargs.items()})


@reference("Functional.*", "Torch.*", "Tensor.*", "VF.*")
def function(call: Call) -> dict[str, Expected]:
    _, name = split(call.cls)
    if name in _RANDOM or (name.rstrip("_") in _DROPOUT and call.kwargs.get("training", True) is not False):
        raise Declined("an operator that draws random numbers")
    decline_if(name in _UNDEFINED, "an operator whose result has no defined values")
    return in_float64(ready(call), torch_function(call.cls), name in _CASTS)


@device_kernel("Functional.*", "Torch.*", "Tensor.*", "VF.*")
def api_kernel(call: Call) -> dict[str, Any]:
    """The function itself, where its tensors lie."""
    call = ready(mapped(call, lambda t: t.clone()))
    result = torch_function(call.cls)(*call.args, **call.kwargs)
    return outputs_by_role(result, call.args, call.kwargs)


MINDSPORE_HEADS = ("Mint", "MintFunctional", "mindspore.Tensor")
MISSING = "MindSpore is not installed"
_NAMES = tuple(f"{head}.*" for head in MINDSPORE_HEADS)


def is_mint(name: str) -> bool:
    """Whether an API's name is one of MindSpore's that can be run here: ``Mint.add``, ``MintFunctional.silu``."""
    return name.rpartition(".")[0] in MINDSPORE_HEADS


def installed() -> bool:
    return importlib.util.find_spec("mindspore") is not None


@functools.cache
def _mindspore() -> Any:
    decline_if(not installed(), MISSING)
    try:
        import mindspore
    except Exception as error:  # a build for a device whose driver is missing raises whatever it likes
        raise Declined(f"MindSpore cannot be imported: {_line(error)}") from None
    return mindspore


def described() -> str:
    """``MindSpore 2.7.1 on CPU``. Raises Declined."""
    ms = _mindspore()
    return f"MindSpore {ms.__version__} on {ms.get_context('device_target')}"


def _function(name: str) -> Any:
    head, function = split(name)
    ms = _mindspore()
    if head == "mindspore.Tensor":
        found = getattr(ms.Tensor, function, None) if function in DUNDER else None
    else:
        module = ms.mint if head == "Mint" else ms.mint.nn.functional
        found = None if function.startswith("_") or function not in dir(module) else getattr(module, function)
    decline_if(not callable(found) or isinstance(found, type), f"this MindSpore has no function {name}")
    return found


@reference(*_NAMES)
def by_torch(call: Call) -> Any:
    """torch's function of the same name."""
    return api.function(call)


@device_kernel(*_NAMES)
def run(call: Call) -> dict[str, Any]:
    """What MindSpore gives for the call's arguments, torch tensors by role (``output.0``); where it is not installed,
    what torch's function of the same name gives where the tensors lie. Raises Declined."""
    if not installed():
        return dict(api.api_kernel(call))
    function = _function(call.cls)
    try:
        args, kwargs = each(list(call.args), _over), {k: each(v, _over) for k, v in call.kwargs.items()}
        result = _back(function(*args, **kwargs))
    except Exception as error:  # kernels that a device does not have are found out by calling them
        raise Declined(f"MindSpore refuses {call.cls}: {_line(error)}") from None
    return outputs_by_role(result, (), {})


def _over(value: Any) -> Any:
    ms = _mindspore()
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return ms.Tensor(value.detach().float().numpy()).astype(ms.bfloat16)
        return ms.Tensor(value.detach().contiguous().numpy())
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        return getattr(ms, "bool_" if name == "bool" else name)
    return value


def _back(value: Any) -> Any:
    ms = _mindspore()
    if isinstance(value, ms.Tensor):
        if value.dtype == ms.bfloat16:
            return torch.from_numpy(value.astype(ms.float32).asnumpy().copy()).bfloat16()
        return torch.from_numpy(value.asnumpy().copy())
    if isinstance(value, (list, tuple)):
        return type(value)(_back(v) for v in value) if type(value) in (list, tuple) else tuple(_back(v) for v in value)
    return value


def _line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text[:100]}"


def note(names: Mapping[str, Any] | set[str]) -> str:
    """What to say about the dump's mint calls before any number; "" where it has none."""
    count = sum(is_mint(n) for n in names)
    if not count:
        return ""
    what = f"{count} API{'s' if count > 1 else ''} of MindSpore"
    try:
        return f"{what} also run here and now, by {described()}: rows mindspore.output.k"
    except Declined as why:
        by = "torch's functions of the same names stand in where a call is run here"
        return f"{what}: {why.reason}; {by}"
