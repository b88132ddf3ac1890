"""API calls as msprobe records them: functions of torch by name.

The problem: ``Functional.linear``, ``Torch.rsqrt`` and ``Tensor.__mul__`` are Python functions and no operators of
torch.ops, and a name in a dump may mean anything. The idea: only functions that torch itself lists as functions on
tensors (torch.overrides, the list that tensor subclasses rely on) can be meant, of methods only those that compute;
they run on the CPU in float64 like an operator (aten.py); ``VF.lstm`` is torch.lstm. MindSpore's ``mint`` is named
after them, and its names are understood here. Not here: MindSpore's own functions (mindspore_api.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.case import mapped
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel, reference
from vllm_accprobe.opcheck.references.aten import in_float64, outputs_by_role

HEADS = {
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
    if head not in HEADS:
        raise Declined(f"no reference for {name}")
    return head, function


def torch_function(name: str) -> Any:
    """torch's function for an API's name. Raises Declined."""
    head, function = split(name)
    if head == _MINDSPORES_OWN and function not in DUNDER:
        raise Declined("a method of MindSpore's tensors: torch's of the same name may be another")
    found = _functions()[HEADS[head]].get(function)
    if found is None:
        raise Declined(f"torch has no function on tensors for {name}")
    return found


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
    if name in _UNDEFINED:
        raise Declined("an operator whose result has no defined values")
    return in_float64(ready(call), torch_function(call.cls), name in _CASTS)


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel("Functional.*", "Torch.*", "Tensor.*", "VF.*")
def api_kernel(call: Call) -> dict[str, Any]:
    """The function itself, where its tensors lie."""
    call = ready(mapped(call, lambda t: t.clone()))
    result = torch_function(call.cls)(*call.args, **call.kwargs)
    return outputs_by_role(result, call.args, call.kwargs)
